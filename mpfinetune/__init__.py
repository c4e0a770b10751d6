"""mpfinetune: fine-tune Hugging Face transformers on two ordinary graphics cards, with the numbers of one big one."""

__version__ = "0.1.0"
