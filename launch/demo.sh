#!/usr/bin/env bash
# The demonstration, from nothing: sets up .venv, fetches real weights, fine-tunes them split over two processes, predicts.
#
#   ./launch/demo.sh [key=value ...]             for example train.epochs=1
set -euo pipefail

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

step() { printf '\n== %s\n' "$*"; }
run_dir=runs/demo
for override in "$@"; do
    case "$override" in run_dir=*) run_dir="${override#run_dir=}" ;; esac
done

step "weights of all-MiniLM-L6-v2"
"$PY" scripts/get_minilm.py
step "the plan: what lies where (configs/demo.yaml)"
"$PY" -m mpfinetune plan configs/demo.yaml "$@"
step "training, split over two processes"
start=$SECONDS
"$PY" -m mpfinetune train configs/demo.yaml "$@"
step "the exported model lies in $run_dir/export ($((SECONDS - start)) s of training); plain transformers loads it:"
"$PY" scripts/demo_predict.py --model "$run_dir/export"
