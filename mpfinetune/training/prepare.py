"""Everything that can be known, and can go wrong, before a process is started or a weight is read."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpfinetune.config import RunConfig
from mpfinetune.data.batches import LengthRule, UpdateLoader
from mpfinetune.data.tasks import GLUE_TASKS, LoadedData, choose_pad_token, load_rows
from mpfinetune.dist import device_type, host_memory_bytes, processes_per_host, visible_cards, visible_devices
from mpfinetune.errors import ConfigError, ModelError
from mpfinetune.models.adapters import facts_with_adapters
from mpfinetune.models.architecture import load_hf_config, load_tokenizer, resolve_model_folder
from mpfinetune.models.facts import ModelFacts, inspect_model
from mpfinetune.models.load import weight_files
from mpfinetune.planning.capability import Card, judge_precision
from mpfinetune.planning.hardware import cards_of, present_card
from mpfinetune.planning.plan import Plan, World, make_plan
from mpfinetune.strategies.deepspeed_config import engine_config
from mpfinetune.training.choose import choose, leaves_open
from mpfinetune.training.forecast import Forecast
from mpfinetune.training.memory import plan_with_memory

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

Say = Callable[[str], None]


@dataclass(frozen=True)
class PlannedRun:
    """The model's configuration and facts, and the plan; no data, no weights."""

    config: RunConfig
    hf_config: PretrainedConfig
    facts: ModelFacts
    plan: Plan
    num_labels: int
    forecast: Forecast


@dataclass(frozen=True)
class PreparedRun:
    """A planned run with its tokenizer and rows."""

    planned: PlannedRun
    folder: Path | None  # of the weights; None: they are drawn
    tokenizer: PreTrainedTokenizerFast
    data: LoadedData
    pad_token_id: int

    @property
    def config(self) -> RunConfig:
        return self.planned.config

    def train_loader(self) -> UpdateLoader:
        return self._loader(training=True)

    def evaluation_loader(self) -> UpdateLoader | None:
        return self._loader(training=False) if self.data.evaluation else None

    def _loader(self, training: bool) -> UpdateLoader:
        return UpdateLoader(
            self.data.train if training else self.data.evaluation,
            global_size=self.config.batch.global_size,
            seed=self.config.train.seed,
            length_rule=LengthRule.from_config(self.config.data),
            pad_token_id=self.pad_token_id,
            shuffle=training,
        )

    def total_updates(self) -> int:
        """Updates of the whole run; a part of an epoch is rounded up to whole updates."""
        if self.config.train.max_steps is not None:
            return self.config.train.max_steps
        # Rounded first: 1.1 epochs of 10 updates are 11.000000000000002 in floating point, and 11 updates.
        return math.ceil(round(self.config.train.epochs * self.train_loader().updates_per_epoch, 6))


def refuse_run_dir_under_a_file(run_dir: str) -> None:
    """Before anything is planned or started, since the run would fail when it first writes.

    Raises:
        ConfigError: the run's folder cannot be made.
    """
    path = Path(run_dir).absolute()
    for taken in (path, *path.parents):
        if taken.exists() and not taken.is_dir():
            what = "is" if taken == path else f"lies under '{taken}', which is"
            raise ConfigError(f"run_dir: '{run_dir}' {what} a file, but must be a folder, or one that can be made; name another")


def plan_run(config: RunConfig, world_size: int | None, with_memory: bool = False, for_hardware: bool = False) -> PlannedRun:
    """Facts and plan; ``world_size`` is None before the launch.

    Args:
        with_memory: the plan says what every card will hold, and how long a step will take where that is known.
        for_hardware: plan for the cards of ``hardware``, where the config names some, instead of the present ones.

    Raises:
        UserError: whatever is wrong with config, model, map or processes.
    """
    wanted_labels = config.model.num_labels or (GLUE_TASKS[config.data.task].num_labels if config.data.task else None)
    hf_config = load_hf_config(config.model, wanted_labels)
    if config.model.task == "causal_lm":
        _check_causal(hf_config)
    num_labels = getattr(hf_config, "num_labels", 1)
    runnable = _runnable(hf_config)
    structure = inspect_model(runnable, config.model.task, config.model.attention)
    forecasts: list[Forecast] = []  # what is measured for one combination serves those that cost the same

    def forecast_of(wanted: RunConfig) -> Forecast:
        facts = facts_with_adapters(structure, wanted.adapter)
        forecasts.append(Forecast(wanted, runnable, facts, _world(wanted, world_size, for_hardware), num_labels, forecasts[-1:]))
        return forecasts[-1]

    world = _world(config, world_size, for_hardware)
    advice = judge_precision(config.precision, _judged_cards(config, world, for_hardware))
    has_cards = bool(world.cards)
    if leaves_open(config, has_cards):
        wished_rows = config.batch.micro_size
        config, plan = choose(config, world, lambda wanted: _planned(forecast_of(wanted), True, for_hardware))
        forecast = forecast_of(config)
        if wished_rows == "auto":  # the plan's rows are those with which probing begins
            config = replace(config, batch=replace(config.batch, micro_size=wished_rows))
    else:
        forecast = forecast_of(config)
        plan = _planned(forecast, with_memory, for_hardware)
    return PlannedRun(config, hf_config, forecast.facts, replace(plan, notes=(*plan.notes, *advice)), num_labels, forecast)


def _planned(forecast: Forecast, with_memory: bool, for_hardware: bool) -> Plan:
    config, facts, world = forecast.config, forecast.facts, forecast.world
    plan = make_plan(config, facts, world, forecast.knowledge())
    if plan.zero_stage:
        engine_config(config, facts, plan)  # expert keys that contradict the config are said now
    if with_memory:
        elsewhere = for_hardware and bool(config.hardware)
        plan = plan_with_memory(config, facts, plan, world, lambda: forecast.meter, None if elsewhere else host_memory_bytes())
        plan = forecast.with_prediction(plan)
    return plan


def _world(config: RunConfig, world_size: int | None, for_hardware: bool) -> World:
    """The devices that are here; ``for_hardware``, the cards of ``hardware`` stand for them where the config names some.

    Over several hosts nothing is said of the cards: each rank sees its own host's only, and ranks that plan for other cards could disagree.
    """
    wanted = cards_of(config)  # a card that nobody knows is said by every command
    if for_hardware and wanted:
        return World("cuda", config.devices or len(wanted), None, None, min(card.memory_bytes for card in wanted), wanted)
    present = tuple(present_card(name, capability, size) for name, capability, size in visible_cards(config))
    here = processes_per_host() if world_size is not None else None
    smallest = min((card.memory_bytes for card in present), default=None)
    several_hosts = here is not None and world_size is not None and here < world_size
    return World(device_type(config), visible_devices(config), world_size, here, smallest, () if several_hosts else present)


def _judged_cards(config: RunConfig, world: World, for_hardware: bool) -> list[Card]:
    if for_hardware and config.hardware:
        return [Card(card.name, card.capability) for card in world.cards if card.capability is not None]
    return [Card(name, capability) for name, capability, _ in visible_cards(config)]


def _check_causal(hf_config: PretrainedConfig) -> None:
    """transformers builds a next-token head on encoders, too, with a warning; each token would see the one that it has to predict."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    if type(hf_config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(hf_config, "is_decoder", False):
        raise ModelError(
            f"model.task: causal_lm given, but {hf_config.model_type} is an encoder that reads in both directions, so every token would see "
            "the next one; take a decoder (llama, gpt2, ...), or set model.overrides: {is_decoder: true} if it is meant"
        )


def _runnable(hf_config: PretrainedConfig) -> PretrainedConfig:
    """For the run with fake tensors: a decoder's classification head refuses several rows without a pad token, which is chosen later."""
    runnable = copy.deepcopy(hf_config)
    if getattr(runnable, "pad_token_id", None) is None and not getattr(runnable, "is_encoder_decoder", False):
        runnable.pad_token_id = 0
    return runnable


def prepare_run(planned: PlannedRun, say: Say) -> PreparedRun:
    """Find the weights, read and check the data.

    Raises:
        UserError: whatever is wrong with weights, tokenizer or data.
    """
    config = planned.config
    folder = None
    if config.model.init == "pretrained":
        folder = resolve_model_folder(config.model, weights=True)
        weight_files(folder)
    tokenizer = load_tokenizer(config.model)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # What transformers makes of a folder without tokenizer files: every word would be unknown.
        raise ModelError(
            f"model.tokenizer: no tokenizer can be loaded from '{config.model.tokenizer or config.model.path}': it has special tokens only "
            f"({len(tokenizer)}), no words; give the folder with tokenizer.json or the vocabulary"
        )
    vocabulary = planned.hf_config.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        raise ConfigError(
            f"model.tokenizer: the tokenizer has {len(tokenizer)} tokens, but the model's vocabulary has {vocabulary}; they do not belong together"
        )
    pad_token_id = choose_pad_token(tokenizer, say)
    # A decoder's classification head looks for the last token that is no padding. A causal LM is not told: its embedding would leave
    # the row of that token, often EOS, without a gradient.
    if config.model.task == "sequence_classification" and getattr(planned.hf_config, "pad_token_id", None) is None:
        planned.hf_config.pad_token_id = pad_token_id
    data = load_rows(config, tokenizer, planned.num_labels, planned.facts.max_positions, say)
    return PreparedRun(planned, folder, tokenizer, data, pad_token_id)
