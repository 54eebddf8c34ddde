"""Types and values in words, for error messages and `danlu explain`."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, Literal, get_args

import annotated_types
from pydantic.fields import FieldInfo

from danlu.recipe.forms import Hint, branches, kinds, origin
from danlu.recipe.sections import Section

# Names that other tools use, and danlu's key for the same thing.
ELSEWHERE = {
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "batch_size": "batch.sequences",
    "bf16": "precision",
    "block_size": "data.max_length",
    "cutoff_len": "data.max_length",
    "dataset": "data.train",
    "datasets": "data.train",
    "eval_steps": "evaluation.every",
    "finetuning_type": "stage",
    "fp16": "precision",
    "global_batch_size": "batch.sequences",
    "gradient_accumulation_steps": "batch.tokens",
    "grad_clip": "gradient_clipping",
    "lr": "optimizer.learning_rate",
    "lr_scheduler": "schedule.kind",
    "lr_scheduler_type": "schedule.kind",
    "max_grad_norm": "gradient_clipping",
    "max_seq_length": "data.max_length",
    "max_steps": "steps",
    "micro_batch_size": "batch.micro",
    "model_name_or_path": "model.path",
    "neat_packing": "data.packing",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "optim": "optimizer.kind",
    "output_dir": "output",
    "per_device_train_batch_size": "batch.micro",
    "sample_packing": "data.packing",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "sequence_len": "data.max_length",
    "template": "model.chat_template",
    "val_set_size": "data.eval",
    "warmup_ratio": "schedule.warmup",
    "warmup_steps": "schedule.warmup",
}


def nearest(word: object, words: list[str]) -> str | None:
    """The word most like a misspelt one, if any is like it at all."""
    found = get_close_matches(str(word).lower(), words, n=1, cutoff=0.6)
    return found[0] if found else None


def show(value: Any) -> str:
    """A value as the user may have written it, short enough for a message."""
    if isinstance(value, dict):
        return f"a mapping ({', '.join(value) or 'empty'})"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    return repr(value)


def _number(noun: str, bounds: tuple[FieldInfo, ...]) -> str:
    """`a whole number, 1 or more`; `a number from 0 to below 1`."""
    limits: dict[type, Any] = {}
    for bound in bounds:
        limits.update({type(limit): limit for limit in bound.metadata})
    low = limits.get(annotated_types.Ge) or limits.get(annotated_types.Gt)
    high = limits.get(annotated_types.Le) or limits.get(annotated_types.Lt)
    whole = noun.startswith("a whole")
    least: Any = None
    if isinstance(low, annotated_types.Ge):
        least = low.ge
    elif isinstance(low, annotated_types.Gt):
        least = int(str(low.gt)) + 1 if whole else f"above {low.gt}"
    if isinstance(high, annotated_types.Lt):
        most: Any = f"below {high.lt}" if not (whole and high.lt == 2**63) else "below 2^63"
    else:
        most = getattr(high, "le", None)
    if least is None:
        return noun if most is None else f"{noun}, {most} or less"
    if most is not None:
        return f"{noun} from {least} to {most}" if not str(least).startswith("above") else f"{noun} {least} and {most}"
    return f"{noun} {least}" if str(least).startswith("above") else f"{noun}, {least} or more"


def describe(hint: Hint) -> str:
    """What a field takes: `a whole number, 1 or more, or auto`."""
    parts: list[str] = []
    options: list[str] = []
    if kinds(hint):
        return f"one of {', '.join(sorted(kinds(hint)))}, or a mapping with a 'kind'"
    for branch, bounds in branches(hint):
        form = origin(branch)
        if form is Literal:
            alone = len(branches(hint)) == 1  # a number beside others is covered by what they take
            words = [option if isinstance(option, str) else show(option) for option in get_args(branch)]
            options += words if alone else [option for option in get_args(branch) if isinstance(option, str)]
        elif branch is type(None):
            options.append("null")
        else:
            parts.append(_describe_branch(branch, bounds))
    if options:
        parts.append(f"one of {', '.join(options)}" if len(options) > 1 else options[0])
    if len(parts) == 1 or (len(parts) == 2 and "," not in parts[0]):
        return " or ".join(parts)
    return f"{', '.join(parts[:-1])}, or {parts[-1]}"


def _describe_branch(branch: Hint, bounds: tuple[FieldInfo, ...]) -> str:
    form = origin(branch)
    if branch is bool:
        return "true or false"
    if branch is int:
        return _number("a whole number", bounds)
    if branch is float:
        return _number("a number", bounds)
    if branch is str:
        return "a text"
    if form is list:
        (inside,) = get_args(branch)
        if isinstance(inside, type) and issubclass(inside, Section):
            return f"a list of {inside.__name__.lower()}s"
        return "a list of texts" if inside is str else "a list"
    if form is tuple:
        return f"a list of {len(get_args(branch))}, each {describe(get_args(branch)[0])}"
    if form is dict:
        return "a mapping"
    assert isinstance(branch, type) and issubclass(branch, Section), f"no words for {branch}"
    if branch.short is None:
        return f"a mapping of {branch.__name__} keys"
    return f"a mapping of {branch.__name__} keys (or its {branch.short} alone)"
