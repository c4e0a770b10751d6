"""A config before its types are known: reading YAML, merging ``key=value`` overrides, replacing ${...}; and writing it back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mpfinetune.errors import ConfigError


def read_yaml(path: Path) -> dict[Any, Any]:
    """The file as plain containers, ${...} left as it is; an empty file is an empty mapping.

    Raises:
        ConfigError: no such file, not YAML (with file and line), or not a mapping.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such config file; give the path of a YAML file, for example configs/demo.yaml")
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {_yaml_mistake(error)}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_interpolation_mistake(error)}") from error
    except PermissionError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except OSError:  # OmegaConf's word for a file that holds one number
        loaded = None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines, not a list or a single value")
    return loaded


def _yaml_mistake(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """On one line: where, what, and where the construct began that it breaks."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    text = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    if error.context and error.context_mark is not None:
        text += f" ({error.context} that begins on line {error.context_mark.line + 1})"
    return text


def _interpolation_mistake(error: OmegaConfBaseException) -> str:
    text = str(error).splitlines()[0] + " (${...} stands for another key's value; write \\${ for the characters themselves)"
    return f"{error.full_key}: {text}" if error.full_key else text


def merge_overrides(given: dict[Any, Any], overrides: list[str]) -> list[str]:
    """Write ``a.b=value`` into the nested dictionary; returns the problems."""
    problems = []
    for override in overrides:
        key, separator, _ = override.partition("=")
        if not separator or not key:
            problems.append(f"override '{override}': must have the form key=value, for example train.epochs=1")
            continue
        try:
            parsed = OmegaConf.to_container(OmegaConf.from_dotlist([override]))
        except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
            problems.append(f"override '{override}': cannot be read: {' '.join(str(error).split())}")
            continue
        assert isinstance(parsed, dict)
        _deep_update(given, parsed)
    return problems


def _deep_update(target: dict[Any, Any], update: dict[Any, Any]) -> None:
    for key, value in update.items():
        if isinstance(value, dict) and value and isinstance(target.get(key), dict):
            _deep_update(target[key], value)
        else:
            target[key] = value


def resolve(given: dict[Any, Any], problems: list[str]) -> dict[Any, Any]:
    """A copy in which ${other.key} and ${oc.env:NAME} are replaced. A mistake there leaves the text as it is."""
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(given), resolve=True)
    except OmegaConfBaseException as error:
        problems.append(_interpolation_mistake(error))
        return given
    assert isinstance(resolved, dict)
    return resolved


# One word where a section is expected, and the keys that it stands for.
_WORDS_FOR_SECTIONS: dict[tuple[str, str], dict[str, Any]] = {("offload", "auto"): {"optimizer": "auto"}}


def spell_out(given: dict[Any, Any]) -> dict[Any, Any]:
    """A copy in which a word that stands for a section, like ``offload: auto``, is that section."""
    return {key: _WORDS_FOR_SECTIONS.get((key, value), value) if isinstance(value, str) else value for key, value in given.items()}


def save_config(config: Any, path: Path) -> None:
    """Write a resolved ``RunConfig``, every default included, as YAML that ``load_config`` reads back equal."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(_escape(asdict(config)))), encoding="utf-8")


def _escape(value: Any) -> Any:
    """So that ${ in a text, of a prompt template for example, is read back as these characters."""
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
