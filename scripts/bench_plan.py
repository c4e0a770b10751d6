"""Predicted against measured step time on this CPU, and what a split by measured time gains where one rank is slow.

    python scripts/bench_plan.py [--rounds 7]

Two gloo ranks with one thread each stay alive for the whole run. First, four configurations of a llama of about 50M parameters: each is
calibrated (embedding, blocks, head, update and crossing, as ``mpfinetune plan --calibrate`` does), planned, and its step measured; the rounds
are interleaved. Then rank 1 is slowed by a sleep in each of its blocks, calibrated, and ``rule: time`` is measured beside ``rule: uniform``.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from transformers import LlamaConfig

from mpfinetune.config import RunConfig, config_from_dict
from mpfinetune.data.batches import GlobalBatch
from mpfinetune.dist import make_context
from mpfinetune.models.facts import inspect_model
from mpfinetune.models.stage import StageModule
from mpfinetune.planning.plan import Plan, World, describe_span, make_plan, with_prediction
from mpfinetune.strategies.build import build_strategy
from mpfinetune.training.calibrate import calibrate
from mpfinetune.training.forecast import Forecast
from mpfinetune.training.loss import causal_lm_loss_sum
from mpfinetune.training.optim import attach_update

LR = 1e-4
MODEL = {
    "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 10, "num_attention_heads": 8,
    "num_key_value_heads": 8, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
# name -> (tokens of a row, config)
CONFIGURATIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b, even cut, 8 x 1 x 256": (256, {"batch": {"global_size": 8, "micro_size": 1}, "partition": {"rule": "uniform"}}),
    "1f1b, rule time, 12 x 2 x 128": (128, {"batch": {"global_size": 24, "micro_size": 2}, "partition": {"rule": "time"}}),
    "gpipe, cut 7|3, recompute full, 6 x 1 x 256": (
        256,
        {
            "batch": {"global_size": 6, "micro_size": 1},
            "schedule": "gpipe",
            "recompute": "full",
            "partition": {"stages": ["embed, 0-6", "7-9, head"]},
        },
    ),
    "interleaved 1f1b, 8 x 1 x 256": (
        256,
        {"batch": {"global_size": 8, "micro_size": 1}, "schedule": "interleaved_1f1b", "partition": {"rule": "time", "num_stages": 4}},
    ),
}
SLOW: dict[str, tuple[int, dict[str, Any]]] = {
    rule: (256, {"batch": {"global_size": 8, "micro_size": 1}, "partition": {"rule": rule}}) for rule in ("uniform", "time")
}
PROMISED_ERROR = 0.15


@dataclass(frozen=True)
class Built:
    """What a rank says about a configuration it has built."""

    predicted_seconds: float
    cut: str
    calibration_seconds: float


def run_config(tokens: int, changes: dict[str, Any]) -> RunConfig:
    base: dict[str, Any] = {
        "model": {"path": "in memory", "task": "causal_lm", "init": "random"},
        "data": {"path": "in memory", "max_length": tokens},
        "strategy": "pipeline",
        "optimizer": {"lr": LR},
        "device": "cpu",
        "run_dir": "unused",
    }
    return config_from_dict({**base, **changes})


def make_batch(rows: int, tokens: int) -> GlobalBatch:
    input_ids = torch.randint(0, MODEL["vocab_size"], (rows, tokens), generator=torch.Generator().manual_seed(0))
    tensors = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": input_ids.clone()}
    return GlobalBatch(tensors, rows, rows * (tokens - 1), rows * tokens)


def slow_down(stage: StageModule, seconds: float) -> None:
    """A sleep before each own block's forward pass: a card of about half the speed, whatever the machine's."""
    layers = stage.model.get_submodule("model.layers")
    for index in range(stage.span.start, stage.span.stop):
        layers[index].register_forward_pre_hook(lambda module, args: time.sleep(seconds))  # type: ignore[operator]


class Rank:
    """One process: builds configurations and runs their updates when asked."""

    def __init__(self, rank: int, port: int) -> None:
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        self.rank = rank
        self.hf_config = LlamaConfig(**MODEL)
        self.facts = inspect_model(self.hf_config, "causal_lm")
        self.updates: dict[str, Callable[[], None]] = {}

    def build(self, name: str, tokens: int, changes: dict[str, Any], sleep_seconds: float) -> Built:
        """Calibrate, plan with what was measured, build."""
        config = run_config(tokens, changes)
        context = make_context(self.rank, 2, torch.device("cpu"), 2, timedelta(seconds=300))
        forecast = Forecast(config, self.hf_config, self.facts, World("cpu", 2, 2), 1)
        is_slow = sleep_seconds > 0 and self.rank == 1

        def slow(stage: StageModule) -> None:
            if is_slow:
                slow_down(stage, sleep_seconds)

        started = time.perf_counter()
        times = calibrate(forecast, context, slow)
        took = time.perf_counter() - started
        knowledge = replace(forecast.knowledge(), times_of=lambda rows, ranks, replicas: times)
        plan = with_prediction(make_plan(config, self.facts, World("cpu", 2, 2), knowledge), config, self.facts, knowledge)
        assert plan.prediction is not None
        self.updates[name] = self._update(config, plan, context, tokens, slow)
        self.updates[name]()  # warm-up: allocations, the schedule's buffers
        return Built(plan.prediction.step_seconds, " | ".join(describe_span(span) for span in plan.spans), took)

    def _update(self, config: RunConfig, plan: Plan, context: Any, tokens: int, slow: Callable[[StageModule], None]) -> Callable[[], None]:
        strategy, _ = build_strategy(config, self.hf_config, self.facts, plan, context, causal_lm_loss_sum, None)
        for stage in strategy.stages.values():
            slow(stage)
        attach_update(strategy, config)
        batch = make_batch(config.batch.global_size, tokens)
        return lambda: (strategy.train_step(batch, LR), None)[1]

    def run(self, name: str) -> float:
        dist.barrier()
        started = time.perf_counter()
        self.updates[name]()
        return time.perf_counter() - started


def serve(rank: int, port: int, pipe: Any) -> None:
    worker = Rank(rank, port)
    while (order := pipe.recv()) is not None:
        method, arguments = order
        pipe.send(getattr(worker, method)(*arguments))


class Ranks:
    """The two processes."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ends = [spawn.Pipe() for _ in range(2)]
        self.pipes = [near for near, _ in ends]
        self.processes = [spawn.Process(target=serve, args=(rank, port, far), daemon=True) for rank, (_, far) in enumerate(ends)]
        for process in self.processes:
            process.start()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((method, arguments))
        return [pipe.recv() for pipe in self.pipes]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)


def measure(ranks: Ranks, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of the slower rank, by name; the rounds interleaved."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            seconds[name].append(max(ranks.call("run", name)))
    return seconds


def predictions(ranks: Ranks, rounds: int) -> None:
    built = {name: ranks.call("build", name, tokens, changes, 0.0)[0] for name, (tokens, changes) in CONFIGURATIONS.items()}
    measured = measure(ranks, list(CONFIGURATIONS), rounds)
    print(f"predicted against measured step, {rounds} rounds; promised: within {PROMISED_ERROR:.0%} of the median")
    for name, seconds in measured.items():
        median, predicted = statistics.median(seconds), built[name].predicted_seconds
        print(
            f"  {name:<46} predicted {predicted:.3f} s, measured {median:.3f} ({min(seconds):.3f} - {max(seconds):.3f}) s, error "
            f"{predicted / median - 1:+.1%}; cut {built[name].cut}; calibration {built[name].calibration_seconds:.1f} s"
        )


def slowed(ranks: Ranks, rounds: int, sleep_seconds: float) -> None:
    built = {name: ranks.call("build", f"slow {name}", tokens, changes, sleep_seconds)[0] for name, (tokens, changes) in SLOW.items()}
    measured = measure(ranks, [f"slow {name}" for name in SLOW], rounds)
    tokens = 8 * 256
    print(f"rank 1 slowed by a sleep of {sleep_seconds * 1e3:.0f} ms in each block; tokens/s, median (lowest - highest)")
    for name in SLOW:
        rates = [tokens / seconds for seconds in measured[f"slow {name}"]]
        print(
            f"  rule {name:<8} {statistics.median(rates):.0f} ({min(rates):.0f} - {max(rates):.0f}); predicted "
            f"{tokens / built[name].predicted_seconds:.0f}; cut {built[name].cut}"
        )
    gains = [uniform / timed for uniform, timed in zip(measured["slow uniform"], measured["slow time"], strict=True)]
    print(f"  time / uniform: {statistics.median(gains):.2f} ({min(gains):.2f} - {max(gains):.2f}); promised: more than 1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sleep", type=float, default=0.06, help="Seconds per block by which rank 1 is slowed.")
    options = parser.parse_args()
    ranks = Ranks()
    predictions(ranks, options.rounds)
    slowed(ranks, options.rounds, options.sleep)
    ranks.close()


if __name__ == "__main__":
    main()
