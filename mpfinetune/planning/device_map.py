"""From a map {module name, glob: device number} to a device for every module, also inside a block: pure functions for `strategy: local`.

A key covers the modules below it; the deepest match decides, and of two equally deep ones the one with more letters outside its
wildcards. A module computes with all its own parameters, so these have one device. A module whose parts are on several devices is
*mixed*; it has a *home*, where its own arithmetic (residual additions) happens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mpfinetune.errors import ConfigError, did_you_mean
from mpfinetune.models.facts import ModelFacts

_PATH = "partition.device_map"
_WILDCARDS = re.compile(r"[*?\[\]]")
_LISTED = 6


@dataclass(frozen=True)
class Placement:
    """Where each module is. Devices are numbers: n is the n-th device that the run uses.

    ``homes`` has every module with parameters at or below it (the model itself is ""); ``mixed`` are those of them whose parts are on
    several devices. ``notes`` say what differs from the map that was given, for the user.
    """

    homes: dict[str, int]
    mixed: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def device_of(self, name: str) -> int:
        """The device of a module, parameter or buffer by its full name; what has no parameters follows the module around it."""
        while name not in self.homes:
            assert name, "the model itself has a home"
            name = name.rpartition(".")[0]
        return self.homes[name]


@dataclass(frozen=True)
class Transfer:
    """What happens around a module's forward: its inputs go to ``device``, its outputs back to where they came from if ``bring_back``."""

    device: int
    bring_back: bool


def resolve_device_map(device_map: dict[str, int], facts: ModelFacts, num_devices: int) -> Placement:
    """Give every module with parameters its device.

    Args:
        device_map: keys are names of modules or parameters, or globs over them (``model.layers.*.mlp``); "" is the whole model.

    Raises:
        ConfigError: keys that match nothing (with the nearest name), device numbers that the run does not have, keys that contradict each
            other, modules on no device; all of them at once.
    """
    problems: list[str] = []
    names = sorted({"", *facts.module_names, *facts.parameters})
    for key, device in device_map.items():
        if not any(_covers(key, name) for name in names):
            problems.append(f"{_PATH}: '{key}' is no module of this model{did_you_mean(_spelled_out(key, facts), names)}")
        if not 0 <= device < num_devices:
            numbers = "0" if num_devices == 1 else f"0-{num_devices - 1}"
            problems.append(
                f"{_PATH}: '{key}' is given device {device}, but the run uses {num_devices} device(s), numbered {numbers}; "
                "change the number, or devices (and CUDA_VISIBLE_DEVICES)"
            )
    given = {name: _most_specific(device_map, name, problems) for name in names}
    owners = _owners(given, facts, problems)
    notes = _place_tied_together(owners, facts)
    missing = sorted(name for name, device in owners.items() if device is None)
    if missing:
        listed = ", ".join(_shortest_cover(missing, owners)[:_LISTED])
        problems.append(f"{_PATH}: missing, on no device: {listed} ({len(missing)} modules with parameters); '' stands for all that is not named")
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return _with_homes({name: device for name, device in owners.items() if device is not None}, given, facts, notes)


def parameters_by_device(placement: Placement, facts: ModelFacts) -> dict[int, int]:
    """Number of parameters on each device that the map uses, tied ones counted once; ascending."""
    names: dict[int, list[str]] = {}
    for name in facts.parameters:
        names.setdefault(placement.device_of(name), []).append(name)
    return {device: facts.numel(names[device]) for device in sorted(names)}


def transfers(placement: Placement, facts: ModelFacts) -> dict[str, Transfer]:
    """The modules around which tensors have to move. Nothing moves within a module that is on one device.

    Between blocks the hidden states stay where the last block left them, and logits stay where the head is. Everywhere else, inside a
    block as among the embeddings, a part's output is added to or combined with something of the module around it, so it comes back.
    """
    found: dict[str, Transfer] = {}
    after = {name.rpartition(".")[0] for name, parameter in facts.parameters.items() if parameter.part == "epilogue"}
    for name, device in placement.homes.items():
        parent = name.rpartition(".")[0]
        while parent and parent not in placement.homes:
            parent = parent.rpartition(".")[0]
        if not name or parent not in placement.mixed or _is_spine(name, facts):
            continue
        stays = _is_spine(parent, facts) and (_is_block(name, facts) or any(f"{owner}.".startswith(f"{name}.") for owner in after))
        found[name] = Transfer(device, bring_back=not stays)
    return found


def _covers(key: str, name: str) -> bool:
    return _matched_depth(key, name) is not None


def _matched_depth(key: str, name: str) -> int | None:
    """How deep the outermost module lies that the key matches, among the name and the modules around it; None where none is."""
    if key == "":
        return 0
    segments = name.split(".") if name else []
    for depth in range(1, len(segments) + 1):
        prefix = ".".join(segments[:depth])
        if prefix == key or (_WILDCARDS.search(key) and fnmatchcase(prefix, key)):
            return depth
    return None


def _most_specific(device_map: dict[str, int], name: str, problems: list[str]) -> int | None:
    matches = []
    for key, device in device_map.items():
        depth = _matched_depth(key, name)
        if depth is not None:
            matches.append(((depth, not _WILDCARDS.search(key), len(_WILDCARDS.sub("", key))), key, device))
    if not matches:
        return None
    best = max(rank for rank, _, _ in matches)
    winners = {key: device for rank, key, device in matches if rank == best}
    if len(set(winners.values())) > 1:
        keys = " and ".join(f"'{key}' ({device})" for key, device in winners.items())
        problems.append(f"{_PATH}: overlapping, {keys} match the same modules and none is more specific; give one of them or a longer key")
    return next(iter(winners.values()))


def _owners(given: dict[str, int | None], facts: ModelFacts, problems: list[str]) -> dict[str, int | None]:
    """The device of each module that holds parameters itself; None where the map says nothing."""
    owners: dict[str, int | None] = {}
    for name in facts.parameters:
        owner, device = name.rpartition(".")[0], given[name]
        if owner in owners and owners[owner] != device:
            problems.append(
                f"{_PATH}: the parameters of '{owner}' are given several devices; a module computes with all of them, so give '{owner}' one"
            )
        owners.setdefault(owner, device)
    return owners


def _place_tied_together(owners: dict[str, int | None], facts: ModelFacts) -> tuple[str, ...]:
    """Modules that share a parameter are on one device, that of the first: two copies would drift apart. In place; returns what was changed."""
    notes = []
    for names in facts.tied_names:
        modules = [name.rpartition(".")[0] for name in names]
        first = next((module for module in modules if owners[module] is not None), None)
        if first is None:
            continue
        for module in modules:
            if owners[module] not in (None, owners[first]):
                notes.append(
                    f"{_PATH}: '{module}' shares its weight with '{first}', so it is placed on device {owners[first]} instead of {owners[module]} "
                    "and its inputs are sent there"
                )
            owners[module] = owners[first]
    return tuple(notes)


def _with_homes(owners: dict[str, int], given: dict[str, int | None], facts: ModelFacts, notes: tuple[str, ...]) -> Placement:
    below: dict[str, list[int]] = {}
    for owner, device in owners.items():
        below.setdefault(owner, []).append(device)
        while owner:
            owner = owner.rpartition(".")[0]
            below.setdefault(owner, []).append(device)
    mixed = frozenset(name for name, devices in below.items() if len(set(devices)) > 1)
    homes = {}
    for name, devices in below.items():
        said = given.get(name)
        # Along the spine the first part decides (token ids and masks are made there); elsewhere what the map says of the module.
        homes[name] = devices[0] if name not in mixed or said is None or _is_spine(name, facts) or name in owners else said
        homes[name] = owners.get(name, homes[name])
    return Placement(homes, mixed, notes)


def _is_spine(name: str, facts: ModelFacts) -> bool:
    """Whether the module is the model itself, the list of blocks or around it: what runs the blocks one after the other."""
    return not name or facts.blocks_path == name or facts.blocks_path.startswith(f"{name}.")


def _is_block(name: str, facts: ModelFacts) -> bool:
    return bool(facts.blocks_path) and name.rpartition(".")[0] == facts.blocks_path


def _spelled_out(key: str, facts: ModelFacts) -> str:
    """A glob with numbers in place of its wildcards, so that the nearest name can be found."""
    return key.replace("*", "0") if _WILDCARDS.search(key) and facts.blocks_path else key


def _shortest_cover(missing: list[str], owners: dict[str, int | None]) -> list[str]:
    """The outermost modules all of whose parameters are missing, in place of long lists of what they hold."""
    placed = [name for name, device in owners.items() if device is not None]
    cover: list[str] = []
    for name in missing:
        parts = name.split(".")
        outer = next(
            (".".join(parts[:n]) for n in range(1, len(parts)) if not any(f"{p}.".startswith(".".join(parts[:n]) + ".") for p in placed)), name
        )
        cover += [outer] if outer not in cover else []
    return cover
