"""Speed of the pipeline beside a hand-written PyTorch loop, in one run and interleaved: tokens per second, ratios and their spread.

    python scripts/bench_pipeline.py [--rounds 7] [--microbatches 16] [--record]

(a) a hand-written loop in one process with 1 thread, (b) the same with 2 threads, (c) our ``local`` with 2 threads, (d) our ``pipeline``
on 2 ranks with 1 thread each, once for each of three manual cuts. All do the same update: a llama of about 50M parameters, the same
rows, the same microbatches, clipping, AdamW. The rounds are interleaved (a b c d1 d2 d3, a b c ...) so that a drift of the machine's
speed meets all alike; ratios are formed within a round. ``--record`` prints where a rank's time goes in the best cut.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional
from transformers import LlamaConfig

from mpfinetune.config import RunConfig, config_from_dict
from mpfinetune.data.batches import GlobalBatch
from mpfinetune.dist import DistContext, make_context
from mpfinetune.models.facts import inspect_model
from mpfinetune.models.stage import StageSpan
from mpfinetune.planning.plan import World, make_plan
from mpfinetune.strategies.build import build_stage, build_strategy
from mpfinetune.training.loss import causal_lm_loss_sum
from mpfinetune.training.optim import attach_update

ROWS_PER_MICROBATCH, TOKENS, LR, CLIP_NORM = 1, 256, 1e-4, 1.0
MODEL = {
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
# The head's logits weigh on the last stage: the even cut and two that give the first stage more.
CUTS = {"5|5": ["embed, 0-4", "5-9, head"], "6|4": ["embed, 0-5", "6-9, head"], "7|3": ["embed, 0-6", "7-9, head"]}


def hf_config() -> LlamaConfig:
    return LlamaConfig(**MODEL)


def run_config(microbatches: int, **changes: Any) -> RunConfig:
    base: dict[str, Any] = {
        "model": {"path": "in memory", "task": "causal_lm", "init": "random"},
        "data": {"path": "in memory"},
        "batch": {"global_size": microbatches * ROWS_PER_MICROBATCH, "micro_size": ROWS_PER_MICROBATCH},
        "optimizer": {"lr": LR},
        "device": "cpu",
        "train": {"clip_norm": CLIP_NORM},
        "run_dir": "unused",
    }
    return config_from_dict({**base, **changes})


def make_batch(microbatches: int) -> GlobalBatch:
    rows = microbatches * ROWS_PER_MICROBATCH
    input_ids = torch.randint(0, MODEL["vocab_size"], (rows, TOKENS), generator=torch.Generator().manual_seed(0))
    tensors = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": input_ids.clone()}
    return GlobalBatch(tensors, rows, rows * (TOKENS - 1), rows * TOKENS)


def hand_written(microbatches: int) -> Callable[[], None]:
    """(a), (b): what one would write without this project."""
    config = run_config(microbatches, strategy="local")
    facts = inspect_model(hf_config(), "causal_lm")
    stage, _ = build_stage(config, hf_config(), facts, StageSpan(0, facts.num_blocks, True, True), torch.device("cpu"), None)
    model = stage.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    batch = make_batch(microbatches)

    def update() -> None:
        for start in range(0, batch.row_count, ROWS_PER_MICROBATCH):
            part = {name: tensor[start : start + ROWS_PER_MICROBATCH] for name, tensor in batch.tensors.items()}
            logits = model(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits.float()
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), part["labels"][:, 1:].flatten(), reduction="sum") / batch.target_count
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return update


def ours(config: RunConfig, context: DistContext, world: World) -> Callable[[], None]:
    """(c), (d): one update of a strategy."""
    facts = inspect_model(hf_config(), "causal_lm")
    plan = make_plan(config, facts, world)
    strategy, _ = build_strategy(config, hf_config(), facts, plan, context, causal_lm_loss_sum, None)
    attach_update(strategy, config)
    batch = make_batch(config.batch.global_size)

    def update() -> None:
        strategy.train_step(batch, LR)

    return update


def serve(rank: int, kind: str, threads: int, port: int, microbatches: int, record: bool, pipe: Any) -> None:
    """One process: builds its variant, then runs one update per name that comes through the pipe and answers with its seconds."""
    torch.set_num_threads(threads)
    updates: dict[str, Callable[[], None]] = {}
    if kind == "pipeline":
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        for name, stages in CUTS.items():
            context = make_context(rank, 2, torch.device("cpu"), 2, timedelta(seconds=300))
            config = run_config(microbatches, strategy="pipeline", partition={"stages": stages})
            updates[name] = ours(config, context, World("cpu", 2, 2))
    elif kind == "local":
        updates[kind] = ours(run_config(microbatches, strategy="local"), DistContext(0, 1, torch.device("cpu")), World("cpu", 1, 1))
    else:
        updates[kind] = hand_written(microbatches)
    for update in updates.values():
        update()  # warm-up: allocations, the schedule's buffers
    seconds = record_actions() if record else {}
    pipe.send("ready")
    while (name := pipe.recv()) is not None:
        seconds.update(dict.fromkeys(seconds, 0.0))
        if kind == "pipeline":
            dist.barrier()
        started = time.perf_counter()
        updates[name]()
        pipe.send((time.perf_counter() - started, dict(seconds)))


def record_actions() -> dict[str, float]:
    """Seconds of an update by kind of action, filled in place: forward, backward, waiting for the other rank."""
    seconds = {"forward": 0.0, "backward": 0.0, "waiting": 0.0}

    def timed(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            seconds[kind] += time.perf_counter() - started
            return result

        return run

    PipelineStage.forward_one_chunk = timed("forward", PipelineStage.forward_one_chunk)  # type: ignore[method-assign]
    PipelineStage.backward_one_chunk = timed("backward", PipelineStage.backward_one_chunk)  # type: ignore[method-assign]
    schedules._wait_batch_p2p = timed("waiting", schedules._wait_batch_p2p)
    return seconds


class Variant:
    """One way of doing the update, in processes of its own that sleep while the others run."""

    def __init__(self, kind: str, processes: int, threads: int, microbatches: int, record: bool) -> None:
        spawn = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ends = [spawn.Pipe() for _ in range(processes)]
        self.pipes = [near for near, _ in ends]
        self.processes = [
            spawn.Process(target=serve, args=(rank, kind, threads, port, microbatches, record and kind == "pipeline", far), daemon=True)
            for rank, (_, far) in enumerate(ends)
        ]
        for process in self.processes:
            process.start()
        for pipe in self.pipes:
            assert pipe.recv() == "ready"

    def run(self, name: str) -> tuple[float, list[dict[str, float]]]:
        """Seconds of one update (of the slowest rank) and the ranks' records."""
        for pipe in self.pipes:
            pipe.send(name)
        answers = [pipe.recv() for pipe in self.pipes]
        return max(seconds for seconds, _ in answers), [record for _, record in answers]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)


def spread(values: list[float]) -> str:
    """``median (lowest - highest)``."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} - {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    variants = {
        "a": Variant("hand", 1, 1, options.microbatches, options.record),
        "b": Variant("hand", 1, 2, options.microbatches, options.record),
        "c": Variant("local", 1, 2, options.microbatches, options.record),
        "d": Variant("pipeline", 2, 1, options.microbatches, options.record),
    }
    runs = [("a", "hand"), ("b", "hand"), ("c", "local"), *(("d", cut) for cut in CUTS)]
    tokens = options.microbatches * ROWS_PER_MICROBATCH * TOKENS
    seconds: dict[tuple[str, str], list[float]] = {run: [] for run in runs}
    records: dict[str, list[list[dict[str, float]]]] = {cut: [] for cut in CUTS}
    for _ in range(options.rounds):
        for letter, name in runs:
            took, record = variants[letter].run(name)
            seconds[letter, name].append(took)
            if letter == "d":
                records[name].append(record)
    for variant in variants.values():
        variant.close()
    report(options.microbatches, tokens, seconds, records if options.record else {})


def report(microbatches: int, tokens: int, seconds: dict[tuple[str, str], list[float]], records: dict[str, list[list[dict[str, float]]]]) -> None:
    """Tokens per second of each variant, then the ratios the project promises."""
    labels = {"a": "hand-written, 1 thread", "b": "hand-written, 2 threads", "c": "local, 2 threads", "d": "pipeline, 2 ranks x 1 thread"}
    rounds = len(seconds["a", "hand"])
    print(f"{microbatches} microbatches of {ROWS_PER_MICROBATCH} x {TOKENS} tokens; median (lowest - highest) over {rounds} rounds")
    for (letter, name), values in seconds.items():
        cut = f", cut {name}" if letter == "d" else ""
        print(f"  ({letter}) {labels[letter] + cut:<42} {spread([tokens / value for value in values])} tokens/s")
    hand_1, hand_2, local = seconds["a", "hand"], seconds["b", "hand"], seconds["c", "local"]
    print(f"  c/b {spread([b / c for b, c in zip(hand_2, local, strict=True)])}   promised: 0.97")
    ideal = microbatches / (microbatches + 1)
    ratios = {cut: [a / (2 * d) for a, d in zip(hand_1, seconds["d", cut], strict=True)] for cut in CUTS}
    for cut, values in ratios.items():
        print(f"  d/(2a), cut {cut}: {spread(values)}   ideal of 1F1B {ideal:.3f}; promised for the best cut: {0.93 * ideal:.3f}")
    for cut, recorded in records.items():
        for rank in (0, 1):
            parts = {kind: statistics.median(record[rank][kind] for record in recorded) for kind in recorded[0][rank]}
            total = statistics.median(seconds["d", cut])
            shares = ", ".join(f"{kind} {value:.2f} s" for kind, value in parts.items())
            print(f"  cut {cut}, rank {rank}: {shares}, the rest (norm, update, bookkeeping) {total - sum(parts.values()):.2f} s of {total:.2f} s")


if __name__ == "__main__":
    main()
