"""What each way of saving memory saves: peak bytes of two ranks, largest micro-batch within a budget, samples per second.

    python scripts/bench_memory.py [--budget-mib 1600] [--then bf16] [--rows fp32,bf16] [--limit-seconds 240]

One random llama of about 103M parameters in two pipeline stages on the CPU, an update of 8 rows x 32 tokens. Each row of the table adds one
thing to the row before it, except where the config check refuses the two together (said in the row's name), and with ``--then fp32``, for
CPUs without bf16 instructions, the rows after mixed precision are in fp32 again. Every row runs in a fresh pair of processes, since a
process's peak cannot be reset: sizes of the micro-batch are tried in ascending order, an update each, until a rank's peak resident
bytes pass the budget; where the next size would take too long, the largest one is put on a line through the last two peaks and marked ~.
Weights, gradients and optimizer states are counted from the tensors themselves, what is kept for the backward pass with saved-tensor
hooks. On a CPU offloaded states are in the same memory as the rest; the column "on a card" leaves them out.

This process imports neither torch nor the package: a child's peak would begin with its parent's size.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
ROWS_PER_UPDATE, TOKENS, LR = 8, 32, 1e-4
MODEL = {
    "vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 11, "num_attention_heads": 12,
    "num_key_value_heads": 12, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
STAGES = ["embed, 0-5", "6-10, head"]
SIZES = (1, 2, 4, 8, 16, 32)
LONGEST_UPDATE_SECONDS = 90.0
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One line of the table: ``changes`` of the config, rows in a forward pass while it is timed."""

    name: str
    changes: dict[str, Any]
    micro_size: int = 1


def table_rows(then: str) -> dict[str, Row]:
    """The rows by key; ``then`` is the precision of those after mixed precision."""
    recompute: dict[str, Any] = {"precision": then, "recompute": "full"}
    offload = {**recompute, "offload": {"optimizer": "cpu"}}
    small = {"name": "adamw_8bit", "lr": LR}
    return {
        # two microbatches are the fewest that two stages take
        "fp32": Row("fp32", {}, micro_size=ROWS_PER_UPDATE // 2),
        "accumulation": Row("+ accumulation", {}),
        "bf16": Row("+ mixed precision (bf16, fp32 masters)", {"precision": "bf16"}),
        "recompute": Row("+ recompute: full" + ("" if then == "bf16" else f" ({then} again)"), recompute),
        "offload": Row("+ offload.optimizer: cpu", offload),
        "frozen": Row("+ all frozen but the last 4 blocks and the head", {**offload, "trainable": ["last_4_blocks", "head"]}),
        "8bit": Row("8-bit AdamW instead of offload and freezing", {**recompute, "optimizer": small}),
        "nf4": Row("NF4 base with LoRA instead", {**recompute, "quantize": "nf4", "adapter": {"type": "lora", "rank": 16}}),
    }


# --- one rank ---------------------------------------------------------------------------------------------------------------------


def serve(row: Row, budget_bytes: int) -> None:
    """One rank of one row: prints one JSON object."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig

    from mpfinetune.config import config_from_dict
    from mpfinetune.dist import make_context
    from mpfinetune.models.adapters import facts_with_adapters
    from mpfinetune.models.facts import inspect_model
    from mpfinetune.planning.plan import World, make_plan
    from mpfinetune.strategies.build import build_strategy
    from mpfinetune.training.loop import peak_memory_bytes
    from mpfinetune.training.loss import causal_lm_loss_sum
    from mpfinetune.training.optim import attach_update

    torch.set_num_threads(1)
    rank, cpu = int(os.environ["RANK"]), torch.device("cpu")
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    config = config_from_dict(
        {
            "model": {"path": "in memory", "task": "causal_lm", "init": "random"},
            "data": {"path": "in memory"},
            "batch": {"global_size": ROWS_PER_UPDATE, "micro_size": row.micro_size},
            "optimizer": {"lr": LR},
            "strategy": "pipeline",
            "partition": {"stages": STAGES},
            "device": "cpu",
            "run_dir": "unused",
            **row.changes,
        }
    )
    hf_config = LlamaConfig(**MODEL)
    facts = facts_with_adapters(inspect_model(hf_config, "causal_lm"), config.adapter)
    plan = make_plan(config, facts, World("cpu", 2, 2))
    context = make_context(rank, 2, cpu, plan.pipeline_ranks, timedelta(seconds=300))
    before = peak_memory_bytes(cpu)
    strategy, _ = build_strategy(config, hf_config, facts, plan, context, causal_lm_loss_sum, None)
    attach_update(strategy, config)
    result: dict[str, Any] = {"before": before, "kept": kept_for_backward(strategy, config.recompute != "none"), "fits": [], "peaks": {}}
    result["weights"] = weight_bytes(strategy)
    watch_gradients(strategy, result)
    search(strategy, row, budget_bytes, result)
    result["optimizer"] = optimizer_bytes(strategy.update)
    result["parameters"] = facts.numel(facts.parameters)
    print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def search(strategy: Any, row: Row, budget_bytes: int, result: dict[str, Any]) -> None:
    """Updates with growing micro-batches, until one passes the budget or would take too long; the timed one among them."""
    from mpfinetune.training.loop import peak_memory_bytes

    for size in SIZES:
        own = size == row.micro_size
        with_size(strategy, size, ROWS_PER_UPDATE if own else 2 * size)
        seconds = timed_updates(strategy, ROWS_PER_UPDATE if own else 2 * size, repeats=2 if own else 1)
        found = strategy.context.gather_objects((peak_memory_bytes(strategy.context.device), seconds))
        result["peaks"][size] = max(peak for peak, _ in found)
        if own:
            result["seconds"], result["peak"] = max(seconds for _, seconds in found), found[strategy.context.rank][0]
        if result["peaks"][size] <= budget_bytes:
            result["fits"].append(size)
        if strategy.context.rank == 0:
            peaks = " / ".join(f"{peak / MIB:.0f}" for peak, _ in found)
            print(f"  micro-batch {size}: peak {peaks} MiB, {found[0][1]:.1f} s an update", file=sys.stderr, flush=True)
        slowest = max(seconds for _, seconds in found) * (2 * size / ROWS_PER_UPDATE if own else 1)
        if size >= row.micro_size and (size not in result["fits"] or 2 * slowest > LONGEST_UPDATE_SECONDS):
            return


def make_batch(rows: int) -> Any:
    import torch

    from mpfinetune.data.batches import GlobalBatch

    input_ids = torch.randint(0, MODEL["vocab_size"], (rows, TOKENS), generator=torch.Generator().manual_seed(0))
    tensors = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": input_ids.clone()}
    return GlobalBatch(tensors, rows, rows * (TOKENS - 1), rows * TOKENS)


def with_size(strategy: Any, micro_size: int, rows: int) -> None:
    """The same strategy with another micro-batch; buffers of the last one are dropped."""
    from dataclasses import replace

    strategy.plan = replace(strategy.plan, micro_size=micro_size, global_size=rows, microbatches=rows // micro_size)
    strategy._schedules.clear()


def timed_updates(strategy: Any, rows: int, repeats: int) -> float:
    """Seconds of the last of the updates; the first makes buffers and states."""
    batch = make_batch(rows)
    seconds = 0.0
    for _ in range(repeats):
        strategy.context.barrier()
        started = time.perf_counter()
        strategy.train_step(batch, LR)
        seconds = time.perf_counter() - started
        if max(strategy.context.gather_objects(seconds)) > LONGEST_UPDATE_SECONDS / 3:
            break  # a warm-up is worth less than that
    return seconds


def kept_for_backward(strategy: Any, recomputed: bool) -> dict[str, int]:
    """Bytes that one row's forward pass through this rank's stage keeps for its backward pass, whole and inside the blocks.

    Storages are counted once, parameters left out. A recomputed block keeps its inputs, in no saved tensor: they are counted where it is called.
    """
    import torch

    (stage,) = strategy.stages.values()
    facts, span = strategy.facts, stage.span
    parameters = {p.untyped_storage().data_ptr() for p in stage.model.parameters()}
    kept: dict[int, tuple[bool, int, Any]] = {}  # by address: within a block, bytes, the tensor itself, so that its place is not used again
    inside: list[bool] = []
    blocks = [stage.model.get_submodule(facts.block_name(index)) for index in range(span.start, span.stop)]

    def note(tensor: Any) -> Any:
        address = tensor.untyped_storage().data_ptr()
        if address not in parameters and address not in kept:
            kept[address] = (bool(inside), tensor.untyped_storage().nbytes(), tensor)
        return tensor

    def enter(module: Any, args: Any, kwargs: Any) -> None:
        inside.append(True)
        if recomputed:
            for value in torch.utils._pytree.tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor):
                    note(value)

    handles = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
    handles += [block.register_forward_hook(lambda *_: inside.pop() and None) for block in blocks]
    batch = dict(make_batch(1).tensors)
    labels = batch.pop("labels")
    hidden = None
    if not span.has_prologue:
        dtype = torch.bfloat16 if strategy.plan.precision == "bf16" else torch.float32
        hidden = torch.randn(1, TOKENS, facts.hidden_size).to(dtype).requires_grad_()
    stage.train()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = stage(hidden, **batch)
        if span.has_epilogue:
            output = strategy.loss_sum(output, labels)
    for handle in handles:
        handle.remove()
    del output
    sizes = list(kept.values())
    return {"all": sum(size for _, size, _ in sizes), "blocks": sum(size for within, size, _ in sizes if within)}


def watch_gradients(strategy: Any, result: dict[str, Any]) -> None:
    """Note the gradients' bytes where they are all there: between the last backward pass and the update."""
    original = strategy.update.apply

    def apply(lr: float) -> Any:
        gradients = [p.grad for p in strategy.named_parameters().values() if p.grad is not None]
        result["gradients"] = sum(gradient.nbytes for gradient in gradients)
        return original(lr)

    strategy.update.apply = apply


def weight_bytes(strategy: Any) -> int:
    """Bytes of this rank's weights, with the statistics of quantised ones."""
    tensors: list[Any] = []
    for parameter in strategy.named_parameters().values():
        tensors.append(parameter.data)
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            tensors += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    return sum(tensor.nbytes for tensor in tensors)


def optimizer_bytes(update: Any) -> int:
    """Bytes of masters and states, each storage once."""
    import torch

    if hasattr(update, "zero"):
        flat = update._flat_parameters()
        tensors = [*flat, *(value for one in flat for value in update.zero.optimizer.state.get(one, {}).values())]
    else:
        optimizer = update.optimizer
        masters = [master for name, master in optimizer.masters.items() if master is not optimizer.parameters[name]]
        states = optimizer.optimizer.state if optimizer.optimizer is not None else {}
        tensors = [*masters, *(value for master in optimizer.masters.values() for value in states.get(master, {}).values())]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, torch.Tensor)}
    return sum(storages.values())


# --- the table --------------------------------------------------------------------------------------------------------------------


def run_row(key: str, then: str, budget_bytes: int, limit_seconds: float) -> list[dict[str, Any]] | str:
    """Both ranks' results, or why there are none."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    common = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, __file__, "--serve", key, "--then", then, "--budget-mib", str(budget_bytes // MIB)]
    processes = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    end = time.monotonic() + limit_seconds
    try:
        outputs = [process.communicate(timeout=max(1.0, end - time.monotonic()))[0] for process in processes]
    except subprocess.TimeoutExpired:
        return f"not done after {limit_seconds:.0f} s"
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    if any(process.returncode for process in processes):
        return f"exit codes {[process.returncode for process in processes]}"
    return [json.loads(output.strip().splitlines()[-1]) for output in outputs]


def largest_size(ranks: list[dict[str, Any]], budget_bytes: int) -> str:
    """The largest micro-batch that was seen to fit, or, where time ended the search, the one on the line through the last two peaks."""
    fits, peaks = ranks[0]["fits"], {int(size): peak for size, peak in ranks[0]["peaks"].items()}
    largest = max(fits, default=0)
    if largest == 0 or largest < max(peaks):
        return str(largest) if largest else "none"
    before = max((size for size in peaks if size < largest), default=None)
    if before is None or peaks[largest] <= peaks[before]:
        return f"{largest} or more"
    slope = (peaks[largest] - peaks[before]) / (largest - before)
    return f"~{largest + int((budget_bytes - peaks[largest]) / slope)}"


def line(row: Row, ranks: list[dict[str, Any]], budget_bytes: int) -> str:
    def both(values: list[float], digits: int = 0) -> str:
        return " / ".join(f"{value / MIB:.{digits}f}" for value in values)

    def of(key: str) -> list[float]:
        return [rank[key] for rank in ranks]

    offloaded = "offload" in row.changes
    card = [rank["weights"] + rank["gradients"] + (0 if offloaded else rank["optimizer"]) for rank in ranks]
    cells = [row.name, str(row.micro_size), both(of("weights")), both(of("gradients")), both(of("optimizer")), both(card)]
    cells += [both([rank["kept"]["all"] for rank in ranks], 1), both(of("peak")), f"{sum(of('peak')) / MIB:.0f}"]
    cells += [largest_size(ranks, budget_bytes), f"{ROWS_PER_UPDATE / ranks[0]['seconds']:.2f}"]
    return "| " + " | ".join(cells) + " |"


def saving(results: dict[str, list[dict[str, Any]]], then: str) -> list[str]:
    """What recompute saves of what is kept for the backward pass, beside the 70 % that is often claimed."""
    base = "accumulation" if then == "fp32" else "bf16"
    if not {base, "recompute"} <= results.keys():
        return []
    lines = []
    for rank, (without, with_it) in enumerate(zip(results[base], results["recompute"], strict=True)):
        parts = []
        for part, words in (("blocks", "in its blocks"), ("all", "in all")):
            before, after = without["kept"][part] / MIB, with_it["kept"][part] / MIB
            parts.append(f"{after:.2f} instead of {before:.2f} MiB a row {words} ({1 - after / before:.0%} less)")
        lines.append(f"recompute: full keeps on rank {rank} {parts[0]}, {parts[1]}; 70 % less is often claimed")
    return lines


COLUMNS = (
    "",
    "micro-batch",
    "weights MiB",
    "gradients MiB",
    "optimizer MiB",
    "on a card MiB",
    "kept for backward MiB a row",
    "peak resident MiB",
    "both ranks MiB",
    "largest micro-batch",
    "samples/s",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-mib", type=int, default=1600, help="peak resident MiB of a rank, libraries included")
    parser.add_argument("--then", choices=("bf16", "fp32"), default="bf16", help="precision of the rows after mixed precision")
    parser.add_argument("--rows", help="which rows, by key, separated by commas; default: all")
    parser.add_argument("--limit-seconds", type=float, default=240.0, help="of one row")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows = table_rows(options.then)
    budget_bytes = options.budget_mib * MIB
    if options.serve:
        serve(rows[options.serve], budget_bytes)
        return
    keys = options.rows.split(",") if options.rows else list(rows)
    unknown = [key for key in keys if key not in rows]
    if unknown:
        parser.error(f"--rows: unknown {', '.join(unknown)}; there are {', '.join(rows)}")
    if any("offload" in rows[key].changes for key in keys):
        print("preparing DeepSpeed's CPUAdam", file=sys.stderr, flush=True)
        code = "from mpfinetune.strategies.deepspeed_ops import prepare_ops; prepare_ops('cpu', 'none', 'cpu', print)"
        subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=600, stdout=subprocess.DEVNULL)
    results: dict[str, list[dict[str, Any]]] = {}
    failed: dict[str, str] = {}
    for key in keys:
        started = time.monotonic()
        print(f"{key} ...", file=sys.stderr, flush=True)
        answer = run_row(key, options.then, budget_bytes, options.limit_seconds)
        if isinstance(answer, str):
            failed[key] = answer
        else:
            results[key] = answer
        print(f"{key}: {answer if isinstance(answer, str) else 'done'}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    report(options.budget_mib, rows, results, failed)
    print("", *saving(results, options.then), sep="\n")
    if failed:
        sys.exit(1)


def report(budget_mib: int, rows: dict[str, Row], results: dict[str, list[dict[str, Any]]], failed: dict[str, str]) -> None:
    """The table in Markdown; pairs are rank 0 / rank 1."""
    for ranks in list(results.values())[:1]:
        libraries = " / ".join(f"{rank['before'] / MIB:.0f}" for rank in ranks)
        print(f"{ranks[0]['parameters']:,} parameters; {ROWS_PER_UPDATE} rows x {TOKENS} tokens an update; budget {budget_mib} MiB a rank, of which")
        print(f"{libraries} MiB (rank 0 / rank 1) are resident before a weight is made\n")
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|")
    for key, ranks in results.items():
        print(line(rows[key], ranks, budget_mib * MIB))
    for key, reason in failed.items():
        print(f"\n{rows[key].name}: {reason}")


if __name__ == "__main__":
    main()
