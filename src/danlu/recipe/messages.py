"""Types and values as error messages and `danlu explain` write them, and the keys of other tools that users type."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal, get_args

from pydantic.fields import FieldInfo

from danlu.recipe.sections import Section
from danlu.recipe.type_hints import Hint, generic_origin, union_members, variants_of

_NAMES_IN_OTHER_TOOLS = {
    "adapter": "use_dora use_rslora",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "dropout lora_dropout",
    "adapter.init": "init_lora_weights",
    "adapter.modules_to_save": "modules_to_save",
    "adapter.rank": "lora_r lora_rank r",
    "adapter.targets": "lora_target lora_target_modules",
    "batch.micro": "micro_batch_size per_device_eval_batch_size per_device_train_batch_size",
    "batch.passes": "num_iterations num_ppo_epochs ppo_epochs",
    "batch.sequences": "batch_size global_batch_size train_batch_size",
    "batch.tokens": "accumulate_grad_batches gradient_accumulation_steps",
    "batch.updates": "num_mini_batches steps_per_generation",
    "checkpoint.every": "checkpointing_steps save_steps save_strategy",
    "checkpoint.keep": "save_total_limit",
    "compile": "torch_compile",
    "data.eval": "eval_dataset eval_split test_size val_set_size validation_file",
    "data.max_length": (
        "block_size context_length cutoff_len max_length max_prompt_length max_seq_len max_seq_length seq_len "
        "seq_length sequence_len"
    ),
    "data.packing": "group_by_length neat_packing pack packing sample_packing",
    "data.streaming": "streaming",
    "data.train": "dataset dataset_dir dataset_name dataset_path datasets train_dataset train_file",
    "data.train_on": "assistant_only_loss mask_history train_on_inputs",
    "data.workers": "dataloader_num_workers num_workers",
    "ema": "use_ema",
    "ema.decay": "ema_decay",
    "epochs": "num_epochs num_train_epochs",
    "evaluation.early_stop.patience": "early_stopping_patience",
    "evaluation.every": "eval_steps eval_strategy evaluation_strategy",
    "gradient_clipping": "grad_clip max_grad_norm",
    "log.every": "logging_steps",
    "log.wandb": "report_to wandb_project",
    "loss.label_smoothing": "label_smoothing label_smoothing_factor",
    "memory.offload": "cpu_offload offload",
    "memory.recompute": "activation_checkpointing gradient_checkpointing",
    "model.adapters": "adapter_name_or_path",
    "model.chat_template": "chat_template_path template",
    "model.path": "base_model model_name model_name_or_path",
    "model.tokenizer": "tokenizer_name tokenizer_name_or_path",
    "objective.clip": "cliprange epsilon epsilon_high",
    "objective.gae": "gae_lambda lam",
    "objective.kl": "init_kl_coef kl_coef",
    "objective.loss": "loss_type",
    "objective.mask_truncated": "mask_truncated_completions",
    "objective.ratio": "importance_sampling_level",
    "objective.scale": "scale_rewards",
    "objective.value_clip": "cliprange_value",
    "objective.value_weight": "vf_coef",
    "objective.whiten": "whiten_advantages whiten_rewards",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "adam_epsilon",
    "optimizer.kind": "optim",
    "optimizer.learning_rate": "learning_rate lr",
    "optimizer.rank": "galore_rank",
    "optimizer.weight_decay": "weight_decay",
    "output": "output_dir overwrite_output_dir run_name",
    "parallel.context": "context_parallel_size cp",
    "parallel.data": "ddp dp world_size",
    "parallel.device_map": "device_map",
    "parallel.pipeline": "pipeline_parallel_size pp",
    "parallel.shard": "deepspeed fsdp zero zero_stage",
    "parallel.tensor": "tensor_model_parallel_size tensor_parallel_size tp",
    "precision": "bf16 fp16 mixed_precision tf32",
    "quantization": "load_in_4bit load_in_8bit quantization_bit quantization_config",
    "rewards": "reward_funcs",
    "rewards.weight": "reward_weights",
    "rollout.max_new_tokens": "max_completion_length response_length",
    "rollout.samples": "num_generations",
    "rollout.stop_strings": "stop_sequences",
    "schedule.floor": "min_lr",
    "schedule.kind": "lr_scheduler lr_scheduler_type",
    "schedule.warmup": "warmup_ratio warmup_steps",
    "seed": "random_seed",
    "stage": "finetuning_type",
    "steps": "max_steps",
}
"""The names of danlu's keys in other tools."""
KEYS_OF_OTHER_TOOLS = {name: key for key, names in _NAMES_IN_OTHER_TOOLS.items() for name in names.split()}
"""Names that other tools use, and danlu's key for the same thing."""


_NUMBERS = {int: "a whole number", float: "a number"}


def first_sentence(text: str | None) -> str:
    """The first sentence of a documentation, without its full stop."""
    return " ".join((text or "").split()).partition(". ")[0].rstrip(".")


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
    # Each of a bound's limits is a dataclass of annotated_types with one field, named as the argument of Field.
    limits: dict[str, Any] = {}
    for bound in bounds:
        for limit in bound.metadata:
            limits |= asdict(limit)
    whole = noun == _NUMBERS[int]
    smallest, largest = limits.get("ge"), limits.get("le")
    if "lt" in limits:
        largest = "below 2^63" if limits["lt"] == 2**63 else f"below {limits['lt']}"
    if "gt" in limits and not whole:
        smallest = f"above {limits['gt']}"
        return f"{noun} {smallest}" if largest is None else f"{noun} {smallest} and {largest}"
    if "gt" in limits:
        smallest = limits["gt"] + 1
    if smallest is None:
        return noun if largest is None else f"{noun}, {largest} or less"
    return f"{noun}, {smallest} or more" if largest is None else f"{noun} from {smallest} to {largest}"


def describe_type(hint: Hint) -> str:
    """Describes the values that a field takes: `a whole number, 1 or more, or auto`."""
    if variants_of(hint):
        return f"one of {', '.join(sorted(variants_of(hint)))}, or a mapping with a 'kind'"
    parts: list[str] = []
    options: list[str] = []
    members = union_members(hint)
    for member, bounds in members:
        if generic_origin(member) is Literal:
            # A literal number next to a number type (`0` next to `int`) is covered by that type.
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
    if member in _NUMBERS:
        return _describe_number(_NUMBERS[member], bounds)
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
