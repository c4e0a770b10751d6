"""What the tests of checkpoints share."""

from __future__ import annotations

from mpfinetune.strategies.base import Strategy
from mpfinetune.training.checkpoint import RankTensors, streams_of
from mpfinetune.training.tensor_files import Stream


def streams(tensors: RankTensors) -> dict[str, Stream]:
    """Tensors as ``save_checkpoint`` takes them."""
    return {"weights": tensors.weights.items(), "optimizer": tensors.states.items()}


def tensors_of(strategy: Strategy) -> RankTensors:
    """What a rank gives to a checkpoint, all at once; collective."""
    weights, states = (dict(stream) for stream in streams_of(strategy).values())
    return RankTensors(weights, states)
