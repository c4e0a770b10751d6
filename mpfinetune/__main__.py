"""``python -m mpfinetune``."""

from mpfinetune.cli import main

if __name__ == "__main__":
    main()
