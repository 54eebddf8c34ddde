"""Types and values as error messages and `danlu explain` write them, and the keys of other tools that users type."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, Literal, get_args

import annotated_types
from pydantic.fields import FieldInfo

from danlu.recipe.sections import Section
from danlu.recipe.type_hints import Hint, generic_origin, union_members, variants_of

KEYS_OF_OTHER_TOOLS = {
    "accumulate_grad_batches": "batch.tokens",
    "activation_checkpointing": "memory.recompute",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "adapter_name_or_path": "model.adapters",
    "assistant_only_loss": "data.train_on",
    "base_model": "model.path",
    "batch_size": "batch.sequences",
    "beta1": "optimizer.betas",
    "beta2": "optimizer.betas",
    "bf16": "precision",
    "block_size": "data.max_length",
    "chat_template_path": "model.chat_template",
    "checkpointing_steps": "checkpoint.every",
    "context_length": "data.max_length",
    "context_parallel_size": "parallel.context",
    "cp": "parallel.context",
    "cpu_offload": "memory.offload",
    "cutoff_len": "data.max_length",
    "dataloader_num_workers": "data.workers",
    "dataset": "data.train",
    "dataset_dir": "data.train",
    "dataset_name": "data.train",
    "dataset_path": "data.train",
    "datasets": "data.train",
    "ddp": "parallel.data",
    "deepspeed": "parallel.shard",
    "dp": "parallel.data",
    "dropout": "adapter.dropout",
    "early_stopping_patience": "evaluation.early_stop.patience",
    "ema_decay": "ema.decay",
    "eval_dataset": "data.eval",
    "eval_split": "data.eval",
    "eval_steps": "evaluation.every",
    "eval_strategy": "evaluation.every",
    "evaluation_strategy": "evaluation.every",
    "finetuning_type": "stage",
    "fp16": "precision",
    "fsdp": "parallel.shard",
    "galore_rank": "optimizer.rank",
    "global_batch_size": "batch.sequences",
    "grad_clip": "gradient_clipping",
    "gradient_accumulation_steps": "batch.tokens",
    "gradient_checkpointing": "memory.recompute",
    "group_by_length": "data.packing",
    "init_lora_weights": "adapter.init",
    "label_smoothing": "loss.label_smoothing",
    "label_smoothing_factor": "loss.label_smoothing",
    "learning_rate": "optimizer.learning_rate",
    "load_in_4bit": "quantization",
    "load_in_8bit": "quantization",
    "logging_steps": "log.every",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_target": "adapter.targets",
    "lora_target_modules": "adapter.targets",
    "lr": "optimizer.learning_rate",
    "lr_scheduler": "schedule.kind",
    "lr_scheduler_type": "schedule.kind",
    "mask_history": "data.train_on",
    "max_grad_norm": "gradient_clipping",
    "max_length": "data.max_length",
    "max_prompt_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "max_steps": "steps",
    "micro_batch_size": "batch.micro",
    "min_lr": "schedule.floor",
    "mixed_precision": "precision",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "modules_to_save": "adapter.modules_to_save",
    "neat_packing": "data.packing",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "num_workers": "data.workers",
    "offload": "memory.offload",
    "optim": "optimizer.kind",
    "output_dir": "output",
    "overwrite_output_dir": "output",
    "pack": "data.packing",
    "packing": "data.packing",
    "per_device_eval_batch_size": "batch.micro",
    "per_device_train_batch_size": "batch.micro",
    "pipeline_parallel_size": "parallel.pipeline",
    "pp": "parallel.pipeline",
    "quantization_bit": "quantization",
    "quantization_config": "quantization",
    "r": "adapter.rank",
    "random_seed": "seed",
    "report_to": "log.wandb",
    "run_name": "output",
    "sample_packing": "data.packing",
    "save_steps": "checkpoint.every",
    "save_strategy": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "seq_len": "data.max_length",
    "seq_length": "data.max_length",
    "sequence_len": "data.max_length",
    "streaming": "data.streaming",
    "template": "model.chat_template",
    "tensor_model_parallel_size": "parallel.tensor",
    "tensor_parallel_size": "parallel.tensor",
    "test_size": "data.eval",
    "tf32": "precision",
    "tokenizer_name": "model.tokenizer",
    "tokenizer_name_or_path": "model.tokenizer",
    "torch_compile": "compile",
    "tp": "parallel.tensor",
    "train_batch_size": "batch.sequences",
    "train_dataset": "data.train",
    "train_file": "data.train",
    "train_on_inputs": "data.train_on",
    "use_dora": "adapter",
    "use_ema": "ema",
    "use_rslora": "adapter",
    "val_set_size": "data.eval",
    "validation_file": "data.eval",
    "wandb_project": "log.wandb",
    "warmup_ratio": "schedule.warmup",
    "warmup_steps": "schedule.warmup",
    "weight_decay": "optimizer.weight_decay",
    "world_size": "parallel.data",
    "zero": "parallel.shard",
    "zero_stage": "parallel.shard",
}
"""Names that other tools use, and danlu's key for the same thing."""


def closest_match(name: object, candidates: list[str]) -> str | None:
    """The candidate most like a misspelt name; None if none is like it at all."""
    matches = get_close_matches(str(name).lower(), candidates, n=1, cutoff=0.6)
    return matches[0] if matches else None


def format_value(value: Any) -> str:
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


def _describe_number(noun: str, bounds: tuple[FieldInfo, ...]) -> str:
    """`a whole number, 1 or more`; `a number from 0 to below 1`."""
    limits: dict[type, Any] = {type(limit): limit for bound in bounds for limit in bound.metadata}
    lower = limits.get(annotated_types.Ge) or limits.get(annotated_types.Gt)
    upper = limits.get(annotated_types.Le) or limits.get(annotated_types.Lt)
    whole = noun.startswith("a whole")
    smallest: Any = None
    if isinstance(lower, annotated_types.Ge):
        smallest = lower.ge
    elif isinstance(lower, annotated_types.Gt):
        smallest = int(str(lower.gt)) + 1 if whole else f"above {lower.gt}"
    if isinstance(upper, annotated_types.Lt):
        largest: Any = f"below {upper.lt}" if not (whole and upper.lt == 2**63) else "below 2^63"
    else:
        largest = getattr(upper, "le", None)
    if smallest is None:
        return noun if largest is None else f"{noun}, {largest} or less"
    is_open = str(smallest).startswith("above")
    if largest is not None:
        return f"{noun} {smallest} and {largest}" if is_open else f"{noun} from {smallest} to {largest}"
    return f"{noun} {smallest}" if is_open else f"{noun}, {smallest} or more"


def describe_type(hint: Hint) -> str:
    """What a field takes: `a whole number, 1 or more, or auto`."""
    if variants_of(hint):
        return f"one of {', '.join(sorted(variants_of(hint)))}, or a mapping with a 'kind'"
    parts: list[str] = []
    options: list[str] = []
    members = union_members(hint)
    for member, bounds in members:
        if generic_origin(member) is Literal:
            # A literal number beside a number type (`0` beside `int`) is covered by what that takes.
            values = get_args(member) if len(members) == 1 else [v for v in get_args(member) if isinstance(v, str)]
            options += [value if isinstance(value, str) else format_value(value) for value in values]
        elif member is type(None):
            options.append("null")
        else:
            parts.append(_describe_member(member, bounds))
    if options:
        parts.append(f"one of {', '.join(options)}" if len(options) > 1 else options[0])
    if len(parts) == 1 or (len(parts) == 2 and "," not in parts[0]):
        return " or ".join(parts)
    return f"{', '.join(parts[:-1])}, or {parts[-1]}"


def _describe_member(member: Hint, bounds: tuple[FieldInfo, ...]) -> str:
    """One alternative of a type: `a list of sources`, `a mapping of Lora keys (or its kind alone)`."""
    container = generic_origin(member)
    if member is bool:
        return "true or false"
    if member is int:
        return _describe_number("a whole number", bounds)
    if member is float:
        return _describe_number("a number", bounds)
    if member is str:
        return "a text"
    if container is list:
        (item_type,) = get_args(member)
        if isinstance(item_type, type) and issubclass(item_type, Section):
            return f"a list of {item_type.__name__.lower()}s"
        return "a list of texts" if item_type is str else "a list"
    if container is tuple:
        return f"a list of {len(get_args(member))}, each {describe_type(get_args(member)[0])}"
    if container is dict:
        return "a mapping"
    assert isinstance(member, type) and issubclass(member, Section), f"no description of {member}"
    if member.short is None:
        return f"a mapping of {member.__name__} keys"
    return f"a mapping of {member.__name__} keys (or its {member.short} alone)"
