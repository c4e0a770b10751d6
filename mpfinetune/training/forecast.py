"""What a plan asks about time, found when it is asked for: costs from a run with fake tensors, times from cards' figures or as measured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpfinetune.config import RunConfig
from mpfinetune.errors import ConfigError, ModelError
from mpfinetune.models.costs import CostMeter
from mpfinetune.models.facts import ModelFacts
from mpfinetune.planning.hardware import cards_of_ranks
from mpfinetune.planning.memory import card_memory
from mpfinetune.planning.micro_size import rows_to_measure
from mpfinetune.planning.plan import Plan, World, with_prediction
from mpfinetune.planning.predict import Knowledge
from mpfinetune.planning.schedule import Action
from mpfinetune.planning.tensor_bytes import learning_names
from mpfinetune.planning.timing import RankTimes, relative_times, roofline, slowest
from mpfinetune.strategies.orders import schedule_orders
from mpfinetune.training.memory import cost_meter

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CALIBRATION_FILE = "calibration.json"


class Forecast:
    """The costs and times of one run.

    Args:
        hf_config: of the model, as it can be run with fake tensors.
        others: forecasts of the same model, whose measurements are used where they are the same.
        world: with the cards that the run is planned for, in the order of its ranks; none where nothing is known of them.
    """

    def __init__(
        self,
        config: RunConfig,
        hf_config: PretrainedConfig,
        facts: ModelFacts,
        world: World,
        num_labels: int,
        others: Sequence[Forecast] = (),
    ) -> None:
        self.config, self.hf_config, self.facts, self.world, self.num_labels = config, hf_config, facts, world, num_labels
        self._others = tuple(others)

    @cached_property
    def meter(self) -> CostMeter:
        """The model's costs at any size of microbatch.

        Raises:
            ModelError: the model cannot be run with fake tensors as it is asked for.
        """
        for other in self._others:
            if other._is_measured_alike(self):
                return other.meter
        # The card with the fewest abilities keeps the most.
        capability = min((card.capability for card in self.world.cards if card.capability is not None), default=None)
        return cost_meter(self.config, self.hf_config, self.facts, self.num_labels, self.world.device_type, capability)

    def _is_measured_alike(self, other: Forecast) -> bool:
        """Whether the two have the same costs: the same weights that learn, held and computed in the same types, on the same cards."""
        mine, theirs = self.config, other.config
        names = ("model", "data", "precision", "quantize", "adapter", "trainable", "frozen")
        return self.world.cards == other.world.cards and all(getattr(mine, name) == getattr(theirs, name) for name in names)

    def with_prediction(self, plan: Plan) -> Plan:
        """The plan with its predicted step, if the times are known and the model can be measured."""
        try:
            return with_prediction(plan, self.config, self.facts, self.knowledge())
        except ModelError as error:
            return replace(plan, notes=(*plan.notes, f"time: {error}; the step is not predicted"))

    def knowledge(self) -> Knowledge:
        return Knowledge(self.times_of, schedule_orders, self.needed_bytes, self.block_kinds, self.config.data.max_length)

    def needed_bytes(self, plan: Plan, rank: int, device: int) -> int:
        """What the card of a rank must have; only this rank's row of the plan need be right."""
        costs = self.meter.measure(plan.micro_size, self.config.data.max_length)
        orders: Mapping[int, Sequence[Action]] = {}
        if plan.strategy == "pipeline":
            orders = schedule_orders(plan.schedule, plan.pipeline_ranks, plan.stages_per_rank, plan.microbatches)
        return card_memory(self.config, self.facts, plan, costs, orders, rank, device, ()).needed_bytes

    def block_kinds(self) -> Sequence[int]:
        """A number for each block, equal for those that cost the same and hold parameters of the same sizes."""
        costs = self.meter.measure(rows_to_measure(self.config), self.config.data.max_length)
        learning = learning_names(self.config, self.facts)
        numbers: dict[Any, int] = {}
        found = []
        for index, part in enumerate(costs.blocks):
            names = self.facts.names_of("block", index)
            held = tuple((self.facts.parameters[name].numel, self.facts.canonical_name(name) in learning) for name in names)
            found.append(numbers.setdefault((replace(part, name=""), held), len(numbers)))
        return found

    def times_of(self, rows: int, ranks: int, replicas: int) -> Sequence[RankTimes]:
        """Measured times if there are any of this very run, else by the cards' figures, else in proportion to the operations."""
        measured = read_calibration(self.config, self.calibration_key(ranks))
        if measured is not None:
            return [times.for_rows(rows) for times in measured]
        costs = self.meter.measure(rows, self.config.data.max_length)
        groups = cards_of_ranks(self.world.cards, replicas)[:ranks]
        found: list[RankTimes] = []
        for group, next_group in zip_longest(groups, groups[1:], fillvalue=()):
            pairs = zip_longest(group, next_group[: len(group)])
            times = [roofline(costs, card, following, self.config.precision) for card, following in pairs]
            known = [of_card for of_card in times if of_card is not None]
            if len(known) < len(times):
                break
            found.append(slowest(known))
        return found if len(found) == ranks else [relative_times(costs)] * ranks

    def calibration_key(self, ranks: int) -> dict[str, Any]:
        """What measured times depend on, besides the rows of a microbatch, in which they are proportional."""
        config = self.config
        model = json.dumps(self.hf_config.to_dict(), sort_keys=True, default=str)
        # Not the cards' memory or the number of threads: a rank measures with what it trains with.
        return {
            "model": hashlib.sha256(model.encode()).hexdigest()[:16],
            "task": config.model.task,
            "attention": config.model.attention,
            "tokens": config.data.max_length,
            "packing": config.data.packing,
            "precision": config.precision,
            "quantize": config.quantize,
            "adapter": asdict(config.adapter),
            "trainable": config.trainable,
            "frozen": config.frozen,
            "optimizer": config.optimizer.name,
            "device": self.world.device_type,
            "cards": [card.name for card in self.world.cards],
            "ranks": ranks,
            "torch": torch.__version__,
        }


def read_calibration(config: RunConfig, key: dict[str, Any]) -> list[RankTimes] | None:
    """The measured times of each pipeline rank from the run's folder, or None where there are none with this key.

    Raises:
        ConfigError: the file is not one that was written whole.
    """
    path = Path(config.run_dir) / CALIBRATION_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [RankTimes.from_json(times) for times in content["ranks"]] if content["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"run_dir: the measured times in '{path}' cannot be read ({type(error).__name__}: {error}); delete the file, and measure anew with "
            "plan --calibrate if you want them"
        ) from error


def write_calibration(config: RunConfig, key: dict[str, Any], ranks: Sequence[RankTimes]) -> Path:
    """Write the times whole or not at all: under another name first."""
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CALIBRATION_FILE
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps({"key": key, "ranks": [times.to_json() for times in ranks]}, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return path
