"""What a plan asks about time, found when it is asked for: costs from a run with fake tensors, times from cards' figures or as measured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpfinetune.config import RunConfig
from mpfinetune.models.architecture import TORCH_DTYPES
from mpfinetune.models.costs import CostMeter, CostQuestion
from mpfinetune.models.facts import ModelFacts
from mpfinetune.planning.hardware import PlanCard
from mpfinetune.planning.predict import Knowledge
from mpfinetune.planning.tensor_bytes import learning_names
from mpfinetune.planning.timing import RankTimes, relative_times, roofline
from mpfinetune.strategies.orders import schedule_orders
from mpfinetune.training.loss import loss_sum_for

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CALIBRATION_FILE = "calibration.json"


class Forecast:
    """The costs and times of one run.

    Args:
        hf_config: of the model, as it can be run with fake tensors.
        device_type: where the run is meant to be: ``cuda`` or ``cpu``.
        cards: that the run is planned for, in the order of its ranks; empty where nothing is known of them.
    """

    def __init__(
        self, config: RunConfig, hf_config: PretrainedConfig, facts: ModelFacts, device_type: str, cards: Sequence[PlanCard], num_labels: int
    ) -> None:
        self.config, self.hf_config, self.facts = config, hf_config, facts
        self.device_type, self.cards, self.num_labels = device_type, tuple(cards), num_labels

    @cached_property
    def meter(self) -> CostMeter:
        """The model's costs at any size of microbatch.

        Raises:
            ModelError: the model cannot be run with fake tensors as it is asked for.
        """
        config = self.config
        specs = [card.spec for card in self.cards if card.spec is not None]
        question = CostQuestion(
            task=config.model.task,
            attention=config.model.attention,
            dtype=TORCH_DTYPES[config.precision],
            learning=learning_names(config, self.facts),
            quantize=config.quantize,
            adapter=config.adapter if config.adapter.type != "none" else None,
            target="cuda" if self.device_type == "cuda" else "cpu",
            capability=min((spec.capability for spec in specs), default=None),
        )
        return CostMeter(self.hf_config, self.facts, question, loss_sum_for(config.model.task, self.num_labels))

    def knowledge(self) -> Knowledge:
        return Knowledge(self.times_of, schedule_orders, self.config.data.max_length)

    def times_of(self, rows: int, ranks: int) -> Sequence[RankTimes]:
        """Measured times if there are any of this very run, else by the cards' figures, else in proportion to the operations."""
        measured = read_calibration(self.config, self.calibration_key(ranks))
        if measured is not None:
            return [times.for_rows(rows) for times in measured]
        costs = self.meter.measure(rows, self.config.data.max_length)
        found: list[RankTimes] = []
        cards_a_rank = max(1, len(self.cards) // ranks)  # replicas of a rank are beside each other
        for rank in range(ranks if len(self.cards) >= ranks else 0):
            card = self.cards[rank * cards_a_rank]
            following = self.cards[(rank + 1) * cards_a_rank] if rank + 1 < ranks else None
            times = roofline(costs, card, following, self.config.precision)
            if times is None:
                break
            found.append(times)
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
            "precision": config.precision,
            "quantize": config.quantize,
            "adapter": asdict(config.adapter),
            "trainable": config.trainable,
            "frozen": config.frozen,
            "optimizer": config.optimizer.name,
            "device": self.device_type,
            "cards": [card.name for card in self.cards],
            "ranks": ranks,
            "torch": torch.__version__,
        }


def read_calibration(config: RunConfig, key: dict[str, Any]) -> list[RankTimes] | None:
    """The measured times of each pipeline rank from the run's folder, or None where there are none with this key."""
    path = Path(config.run_dir) / CALIBRATION_FILE
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    return [RankTimes.from_json(times) for times in content["ranks"]] if content.get("key") == key else None


def write_calibration(config: RunConfig, key: dict[str, Any], ranks: Sequence[RankTimes]) -> Path:
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CALIBRATION_FILE
    path.write_text(json.dumps({"key": key, "ranks": [times.to_json() for times in ranks]}, indent=2) + "\n", encoding="utf-8")
    return path
