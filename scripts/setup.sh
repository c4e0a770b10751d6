#!/usr/bin/env bash
# shellcheck shell=bash
# Makes .venv and installs the project with the pinned versions of constraints.txt. Fast (well under a second) when all is up to date.
#
#   bash scripts/setup.sh            set up and stop
#   source scripts/setup.sh          the same, from another script: sets PY (the interpreter), PATH and TORCH_EXTENSIONS_DIR
#
# Environment:
#   PYTHON              the interpreter that .venv is made from (default: the first of python3, python3.12, ... that is new enough)
#   MPFINETUNE_PYTHON   use this interpreter's environment as it is; then nothing is made or installed
set -euo pipefail

MPFINETUNE_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

_say() { printf '[setup] %s\n' "$*"; }
_fail() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }

# "3.11" for an interpreter that runs, nothing for one that does not (a pyenv shim without a version, for example).
_version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

_at_least() { # _at_least VERSION MAJOR MINOR
    local major="${1%%.*}" minor="${1##*.}"
    [[ -n "$1" ]] && { ((major > $2)) || { ((major == $2)) && ((minor >= $3)); }; }
}

_find_python() {
    local candidate version minor
    if [[ -n "${PYTHON:-}" ]]; then
        version="$(_version_of "$PYTHON")"
        [[ -n "$version" ]] || _fail "PYTHON=$PYTHON does not run"
        _at_least "$version" 3 10 || _fail "PYTHON=$PYTHON is Python $version; 3.10 or newer is needed"
        printf '%s\n' "$PYTHON"
        return
    fi
    # 3.11 and newer first: 3.10 has to make do with older versions of several libraries.
    for minor in 11 10; do
        for candidate in python3 python3.12 python3.11 python3.13 python3.10 python; do
            command -v "$candidate" >/dev/null || continue
            _at_least "$(_version_of "$candidate")" 3 "$minor" || continue
            printf '%s\n' "$candidate"
            return
        done
    done
    _fail "no Python 3.10 or newer found (python3 is $(_version_of python3 | grep . || echo missing));" \
        "install one (for example: apt install python3 python3-venv) or name one: PYTHON=/path/to/python3.11 $0"
}

# What decides whether the environment is up to date: both files, the interpreter, and the folder that the editable install points to.
_fingerprint() {
    "$PY" - "$MPFINETUNE_ROOT" <<'PYTHON'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256(f"{root} {sys.version}".encode())
for name in ("pyproject.toml", "constraints.txt"):
    digest.update((root / name).read_bytes())
print(digest.hexdigest())
PYTHON
}

# Runs pip with its output in the log; a terminal shows the line it is at. On failure the log's end is shown.
_pip() {
    local line
    if ! "$PY" -m pip "$@" </dev/null 2>&1 | tee -a "$_log" | while IFS= read -r line; do
        if [[ -t 1 ]]; then printf '\r\033[K  %.76s' "$line"; fi
    done; then
        if [[ -t 1 ]]; then printf '\r\033[K'; fi
        tail -n 20 "$_log" >&2
        _fail "pip $1 failed; the whole log is $_log"
    fi
    if [[ -t 1 ]]; then printf '\r\033[K'; fi
}

_install() {
    local venv="$MPFINETUNE_ROOT/.venv" stamp="$MPFINETUNE_ROOT/.venv/.mpfinetune-stamp" python version start=$SECONDS
    [[ -f "$stamp" && -x "$PY" && "$(cat "$stamp")" == "$(_fingerprint)" ]] && return
    if [[ -x "$PY" ]] && "$PY" -m pip --version >/dev/null 2>&1; then
        version="$(_version_of "$PY")"
        _at_least "$version" 3 10 || _fail ".venv holds Python $version, 3.10 or newer is needed; remove it: rm -rf $venv"
        rm -f "$stamp"
    else
        python="$(_find_python)"
        _say "making .venv with $python (Python $(_version_of "$python"))"
        "$python" -m venv --clear "$venv" >"$_log" 2>&1 || {
            tail -n 5 "$_log" >&2
            _fail "$python cannot make a virtual environment; Debian and Ubuntu need: apt install python3-venv"
        }
    fi
    if ! command -v "${CXX:-c++}" >/dev/null && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
        _say "warning: no C++ compiler found; DeepSpeed needs one to build its CPU optimizer (for example: apt install g++)"
    fi
    : >"$_log"
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
    _pip install --upgrade pip
    # torch by itself first: where pip finds a CPU build of this version it takes it, else the registry's CUDA build.
    _say "installing torch (1 of 2)"
    _pip install --constraint "$MPFINETUNE_ROOT/constraints.txt" torch
    _say "installing the project and its libraries (2 of 2; some minutes the first time)"
    _pip install --constraint "$MPFINETUNE_ROOT/constraints.txt" --editable "${MPFINETUNE_ROOT}[dev,gguf]"
    _fingerprint >"$stamp.new"
    mv "$stamp.new" "$stamp"
    _say "ready after $((SECONDS - start)) s: $("$PY" -c 'import sys, importlib.metadata as m
print("Python %d.%d," % sys.version_info[:2], ", ".join(f"{n} {m.version(n)}" for n in ("torch", "transformers", "deepspeed")))')"
}

mkdir -p "$MPFINETUNE_ROOT/.cache"
_log="$MPFINETUNE_ROOT/.cache/setup.log"
if [[ -n "${MPFINETUNE_PYTHON:-}" ]]; then
    PY="$(command -v "$MPFINETUNE_PYTHON")" || _fail "MPFINETUNE_PYTHON=$MPFINETUNE_PYTHON does not run"
else
    PY="$MPFINETUNE_ROOT/.venv/bin/python"
    # A second set-up in the same tree waits for the first. The lock is the open file; it ends with the subshell, however that ends.
    (
        if command -v flock >/dev/null && ! flock --nonblock 9; then
            _say "another set-up is at work in this folder; waiting for it"
            flock 9
        fi
        _install
    ) 9>"$MPFINETUNE_ROOT/.cache/setup.lock"
fi
# DeepSpeed looks for ninja on the PATH, and compiles its C++ parts once into this folder, per Python and torch.
PATH="$(dirname "$PY"):$PATH"
if [[ -z "${TORCH_EXTENSIONS_DIR:-}" ]]; then
    TORCH_EXTENSIONS_DIR="$MPFINETUNE_ROOT/.cache/torch_extensions/$("$PY" -c 'import sys, importlib.metadata as m
print("py%d.%d-torch%s" % (*sys.version_info[:2], m.version("torch")))')"
fi
export PY PATH TORCH_EXTENSIONS_DIR
