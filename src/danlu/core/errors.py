"""Every error danlu raises on purpose, and the exit code the command line gives for it.

::

    DanluError                    1   anything a user can cause; never shown with a traceback
    ├── RecipeError               2   the recipe, an override or a command-line argument is wrong (all problems at once)
    ├── DataError                 3   a data file, a row, a tokenizer or a chat template is wrong
    ├── ModelError                4   a model folder, config or weight tensor is wrong
    ├── CheckpointError           5   a checkpoint is missing, torn, altered or belongs to another run
    ├── ResourceError             6   the machine ran out of disk or memory, or a folder cannot be written
    ├── TrainingError             7   training itself went wrong: a non-finite loss, a loss spike past its policy
    └── InternalError            70   a bug of danlu, as far as it can tell; the message names a file with the traceback

Any other exception that reaches the command line becomes one of these too (`danlu.cli.crash`): ResourceError where
the machine refused (memory, a file, a package that cannot be imported), else InternalError (70 is EX_SOFTWARE of
sysexits.h).

A run stopped by a signal exits with 128 + the signal's number (130 for Ctrl-C) after saving; Stopped, which is no
DanluError, ends one at once.
"""

from __future__ import annotations

from collections.abc import Sequence


class DanluError(Exception):
    """Base of everything danlu raises on purpose. The message names the fault, its place and a remedy."""

    exit_code = 1


class RecipeError(DanluError):
    """One or more problems in a recipe; `problems` holds one line for each, in file order."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class Stopped(KeyboardInterrupt):
    """A signal that stops the program where it is; like Ctrl-C, it passes handlers of ordinary errors."""

    def __init__(self, number: int, message: str = "stopped at once") -> None:
        self.number = number
        self.exit_code = 128 + number
        super().__init__(message)


class DataError(DanluError):
    exit_code = 3


class ModelError(DanluError):
    exit_code = 4


class CheckpointError(DanluError):
    exit_code = 5


class ResourceError(DanluError):
    exit_code = 6


class TrainingError(DanluError):
    exit_code = 7


class HangError(DanluError):
    """Processes of a run wait for one that does not come."""

    exit_code = 8


class InternalError(DanluError):
    """An exception that nothing in danlu raises on purpose. Only the command line and the launcher make it."""

    exit_code = 70
