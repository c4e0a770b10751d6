"""The errors a user can meet.

Each is one clear message: what was given, what is allowed, which key to change. The command line prints it without a traceback and
ends with exit code 2. Anything else that is raised is a defect of ours and ends with exit code 1 and a traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_USER_ERROR = 2


class UserError(Exception):
    """A mistake that the user can mend. Subclasses say where it lies."""

    heading = "error"


class ConfigError(UserError):
    """The YAML file or an override is wrong; holds every problem found, not only the first."""

    heading = "config"

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class ModelError(UserError):
    """The model folder is missing or incomplete, or its architecture cannot be split."""

    heading = "model"


class DataError(UserError):
    """A data file is missing, malformed or does not fit the task."""

    heading = "data"


class LaunchError(UserError):
    """The processes or devices present do not fit the plan (world size, devices, ports)."""

    heading = "launch"


class OwnLaunchError(LaunchError):
    """One that this process meets and the first of its host does not, which therefore cannot say it."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete or belongs to another run."""

    heading = "checkpoint"


def did_you_mean(name: str, valid_names: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the nearest valid name, or an empty string when nothing is near."""
    matches = get_close_matches(name, list(valid_names), n=1, cutoff=0.5)
    return f" (did you mean '{matches[0]}'?)" if matches else ""
