"""Keys of steps: what their marks hang on, and what their decisions hang on."""

from __future__ import annotations

import dataclasses
from typing import Any

from danlu import __version__
from danlu.curation.steps import Step
from danlu.curation.words import function_name
from danlu.production.work_files import key_of


def marks_key(shard: str, step: Step) -> str:
    """The key of what a step measures of the rows of a shard."""
    return key_of(shard, step.name, step.version, step.measured_with())


def decisions_key(step: Step) -> str:
    """The key of a step with all its settings, in this version of danlu: its decisions hang on both."""
    return key_of(__version__, step.name, step.version, _value(step))


def _value(value: Any) -> Any:
    """A setting as JSON has it: functions by module and name."""
    if dataclasses.is_dataclass(value):
        return {field.name: _value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(value):
        return function_name(value)
    return [_value(entry) for entry in value] if isinstance(value, tuple | list) else value
