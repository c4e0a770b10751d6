#!/usr/bin/env bash
# Fine-tunes with two processes on this machine, one per GPU (or two CPU processes where there is no GPU).
#
#   launch/two_gpus.sh CONFIG [key=value ...]
#   launch/two_gpus.sh configs/mrpc_two_cards.yaml train.epochs=1 optimizer.lr=3e-5
#
# Relative paths, in CONFIG too, are relative to the folder that you call this from. CUDA_VISIBLE_DEVICES chooses the cards.
set -euo pipefail

if (($# < 1)) || [[ "$1" == -h || "$1" == --help ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit $(($# < 1 ? 2 : 0))
fi
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup.sh"

# The two processes share the cores; without a value torchrun would set 1.
cores="$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > 2 ? cores / 2 : 1))}"

# After a signal the ranks finish their update and save; torchrun would kill them after 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"

exec "$PY" -m torch.distributed.run --standalone --nproc_per_node 2 -m mpfinetune train "$@"
