#!/usr/bin/env python3
"""Ask the demonstration's exported model whether two sentences say the same. Uses plain transformers, nothing of mpfinetune.

python scripts/demo_predict.py "The pilot sold lamps to the judge." "The judge bought lamps from the pilot."
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

FIRST, SECOND = "The pilot sold lamps to the judge.", "The judge bought lamps from the pilot."
LABELS = ("not a paraphrase", "a paraphrase")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", nargs="?", default=FIRST, help="default: %(default)s")
    parser.add_argument("second", nargs="?", default=SECOND, help="default: %(default)s")
    parser.add_argument("--model", type=Path, default=Path("runs/demo/export"), help="exported folder (default: %(default)s)")
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        sys.exit(f"error: {arguments.model} holds no exported model; run ./launch/demo.sh first")

    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
    model = AutoModelForSequenceClassification.from_pretrained(arguments.model, local_files_only=True).eval()
    with torch.no_grad():
        logits = model(**tokenizer(arguments.first, arguments.second, return_tensors="pt", truncation=True)).logits
    probability = logits.softmax(dim=-1)[0]  # [labels]
    best = int(probability.argmax())
    print(f"  {arguments.first}\n  {arguments.second}\n  -> {LABELS[best]} (probability {probability[best]:.3f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
