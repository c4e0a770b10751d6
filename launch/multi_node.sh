#!/usr/bin/env bash
# Fine-tunes with processes on several machines that see each other over the network. Call it on EVERY machine, within some minutes,
# with the same arguments but for NODE_RANK; the first machine (rank 0) is the meeting point.
#
#   NODES=2 NODE_RANK=0 HEAD=192.168.0.10 launch/multi_node.sh CONFIG [key=value ...]      on the first machine
#   NODES=2 NODE_RANK=1 HEAD=192.168.0.10 launch/multi_node.sh CONFIG [key=value ...]      on the second
#
# Environment:
#   HEAD         name or address of the first machine, as the others reach it (required)
#   NODES        number of machines (default 2)
#   NODE_RANK    number of this machine, 0 to NODES-1 (required)
#   GPUS         processes per machine, one per GPU (default 1)
#   PORT         port of the meeting point on HEAD; must be open in its firewall (default 29500)
#   RUN_ID       a name that tells two runs on the same HEAD apart (default: mpfinetune)
#   NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME   the network card to use, for example eth0, where the automatic choice is wrong
#
# NODES * GPUS must be a multiple of the number of stages. The model, the data and the project must lie under the same paths on all
# machines; run_dir must be one folder that all of them share. A slow network hurts least where the fewest bytes cross: between stages.
# At the very end torchrun may print "Error waiting on exit barrier" on machines other than the first: the first was done sooner. It does
# no harm; the exit status tells whether the run succeeded.
set -euo pipefail

if (($# < 1)) || [[ "$1" == -h || "$1" == --help ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit $(($# < 1 ? 2 : 0))
fi
: "${HEAD:?set HEAD to the name or address of the first machine (see --help)}"
: "${NODE_RANK:?set NODE_RANK to the number of this machine, from 0 (see --help)}"
NODES="${NODES:-2}" GPUS="${GPUS:-1}" PORT="${PORT:-29500}" RUN_ID="${RUN_ID:-mpfinetune}"
if ! ((NODE_RANK >= 0 && NODE_RANK < NODES)); then
    echo "error: NODE_RANK=$NODE_RANK, must be 0 to $((NODES - 1)) for NODES=$NODES" >&2
    exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup.sh"

cores="$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > GPUS ? cores / GPUS : 1))}"

# After a signal the ranks finish their update and save; torchrun would kill them after 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"

# Static rendezvous: the ranks follow NODE_RANK, so the first stage is on the machine that says 0. No restarts: a run goes on from
# its checkpoints, with the same command.
exec "$PY" -m torch.distributed.run --nnodes "$NODES" --node_rank "$NODE_RANK" --nproc_per_node "$GPUS" \
    --rdzv_id "$RUN_ID" --rdzv_backend static --rdzv_endpoint "$HEAD:$PORT" --max_restarts 0 \
    -m mpfinetune train "$@"
