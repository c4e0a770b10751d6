#!/usr/bin/env bash
# Sets up .venv and runs every check that needs no GPU: ruff, mypy, pytest. Ends with pytest's closing line; non-zero if any failed.
#
#   ./scripts/test.sh                    the default tier: unit and multi-process tests
#   ./scripts/test.sh --all              the long runs with real weights and data, too
#   ./scripts/test.sh -k partition -x    other arguments go to pytest
set -euo pipefail

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

marks="not slow and not gpu"
pytest_arguments=()
for argument in "$@"; do
    if [[ "$argument" == --all ]]; then marks="not gpu"; else pytest_arguments+=("$argument"); fi
done

"$PY" scripts/get_minilm.py || echo "note: no MiniLM weights; the tests that need them are skipped"
if [[ "$marks" == "not gpu" ]]; then
    "$PY" scripts/get_smollm2.py || echo "note: no SmolLM2 weights; the tests that need them are skipped"
fi

# DeepSpeed's CPUAdam, which tests of offload need: compiled once, by one core, while ruff and mypy use the other. If it fails, those tests say why.
"$PY" -c 'from mpfinetune.strategies.deepspeed_ops import prepare_ops; prepare_ops("cpu", "none", "cpu", print)' &
build=$!

# All three are run, so that one failure does not hide the next; pytest comes last.
failed=()
echo "== ruff"
"$PY" -m ruff check . || failed+=(ruff)
echo "== mypy"
"$PY" -m mypy || failed+=(mypy)
echo "== pytest (-m \"$marks\")"
if ((${#failed[@]})); then
    echo "note: failed already: ${failed[*]} (see above)"
fi
wait "$build" || echo "note: CPUAdam could not be built (see above)"
status=0
# Tests must not wait for a model hub: what they need is made, bundled or fetched above.
HF_HUB_OFFLINE=1 "$PY" -m pytest -m "$marks" ${pytest_arguments[@]+"${pytest_arguments[@]}"} || status=$?
if ((status == 0 && ${#failed[@]})); then status=1; fi
exit "$status"
