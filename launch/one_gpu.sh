#!/usr/bin/env bash
# Fine-tunes in one process, on one GPU (or the CPU): the unsplit reference that every split is measured against.
#
#   launch/one_gpu.sh CONFIG [key=value ...]
#   launch/one_gpu.sh configs/demo.yaml run_dir=runs/demo_one
#
# The strategy is set to `local` on one device; a map for several stages, offload and a ZeRO stage in CONFIG are dropped. The numbers are
# those of the split run, but for rounding. Relative paths, in CONFIG too, are relative to the folder that you call this from.
set -euo pipefail

if (($# < 1)) || [[ "$1" == -h || "$1" == --help ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit $(($# < 1 ? 2 : 0))
fi
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup.sh"

config="$1"
shift
exec "$PY" -m mpfinetune train "$config" strategy=local devices=1 \
    partition.rule=null partition.num_stages=null partition.stages='[]' partition.device_map='{}' partition.local_overlap=false \
    offload.optimizer=none offload.gradients=none offload.parameters=none zero.stage=2 "$@"
