"""The configs of adapter folders: of which kind they are, on which base and other adapters. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danlu.core.added_token import AddedToken, as_added_tokens
from danlu.core.errors import ModelError
from danlu.core.small_files import check_regular_entries, parse_json, read_small_text

if TYPE_CHECKING:  # it imports numpy, and a wrong recipe is reported without
    from danlu.core.types import Task

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
DANLU = "danlu.json"
QUANTIZATIONS = ("nf4", "fp4", "int8", "int4", "int3", "int2", "fp8", "mxfp8", "mxfp4", "nvfp4")
"""Kinds of quantization that a recipe may ask for."""
PEFT_TYPES = (
    "ADALORA",
    "DANLU_BOTTLENECK",
    "DANLU_MORA",
    "IA3",
    "LOHA",
    "LOKR",
    "LORA",
    "PREFIX_TUNING",
    "PROMPT_TUNING",
    "VERA",
)
"""Kinds of adapter folders that are read: the keys of `peft_folder.FORMATS`."""
_EVERY_KIND = (
    "auto_mapping base_model_name_or_path inference_mode modules_to_save peft_type peft_version revision task_type "
)
_TARGETED = _EVERY_KIND + "exclude_modules fan_in_fan_out layers_pattern layers_to_transform target_modules "
_VIRTUAL = _EVERY_KIND + "num_attention_heads num_layers num_transformer_submodules num_virtual_tokens token_dim "
_LORA = (
    _TARGETED + "alora_invocation_tokens alpha_pattern arrow_config bias corda_config ensure_weight_tying eva_config "
    "init_lora_weights kasa_config layer_replication loftq_config lora_alpha lora_bias lora_dropout lora_ga_config "
    "megatron_config megatron_core monteclora_config qalora_group_size r rank_pattern runtime_config "
    "target_parameters trainable_token_indices use_bdlora use_dora use_qalora use_rslora velora_config "
    "lora_dtype lorap_emb_lr lorap_lr_ratio"  # these three are ms-swift's, and of training alone
)
_LYCORIS = (
    _TARGETED + "alpha alpha_pattern init_weights module_dropout r rank_dropout rank_pattern use_effective_conv2d "
)
_KEYS = {
    "IA3": _TARGETED + "feedforward_modules init_ia3_weights",
    "LORA": _LORA,
    "ADALORA": _LORA + " beta1 beta2 deltaT init_r orth_reg_weight target_r tfinal tinit total_step",
    "LOHA": _LYCORIS,
    "LOKR": _LYCORIS + "decompose_both decompose_factor rank_dropout_scale",
    "PREFIX_TUNING": _VIRTUAL + "encoder_hidden_size init_weights prefix_projection",
    "PROMPT_TUNING": _VIRTUAL + "prompt_tuning_init prompt_tuning_init_text tokenizer_kwargs tokenizer_name_or_path",
    "VERA": _TARGETED + "bias d_initial init_weights projection_prng_key r save_projection vera_dropout",
}
KNOWN_KEYS = {kind: frozenset(keys.split()) for kind, keys in _KEYS.items()}
"""Keys of PEFT's configs (0.21.2) by peft_type. Settings that danlu cannot compute are refused where they are read."""
_TASKS: dict[str, Task] = {"SEQ_CLS": "sequence-classification", "TOKEN_CLS": "token-classification"}
TASK_TYPES: dict[Task, str] = {"causal-lm": "CAUSAL_LM", **{task: name for name, task in _TASKS.items()}}
"""PEFT's name of each task (`task_type`)."""
ROTATED = "rotated"
"""The key of danlu.json that says whether the folder's config.json has another rotary embedding than the base."""
TOKENS = "tokens"
"""The key of danlu.json that lists the new tokens for which the base needs rows."""
_MODEL_CONFIG = "config.json"
_RUN_RESULT = "adapter"
# Values of PEFT's init_lora_weights (0.21.2) with which loading an adapter leaves the base as it is.
_LEAVES_BASE = (True, False, None, "eva", "gaussian", "lora_ga", "mica", "orthogonal")
_CHANGES_BASE = ("olora", "pissa")


@dataclass(frozen=True)
class AdapterFolder:
    """The two config files of an adapter folder; its tensors are read later.

    values: adapter_config.json. danlu: danlu.json, empty where an adapter comes from another tool.
    """

    path: Path
    values: Mapping[str, Any]
    danlu: Mapping[str, Any]

    @property
    def base(self) -> str | None:
        """Folder or hub id of the model it was trained on. Raises ModelError if it is no text."""
        base = self.values.get("base_model_name_or_path")
        if not (base is None or isinstance(base, str)):
            raise ModelError(f"{self.path / CONFIG}: base_model_name_or_path is {base!r}, not a folder or a hub id")
        return base

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """The recipe's section of the base's quantization while the adapter was trained; None where there was none.

        Raises ModelError for a kind that danlu does not know.
        """
        section = self.danlu.get("quantization")
        if section is None:
            return None
        if not isinstance(section, dict) or section.get("kind") not in QUANTIZATIONS:
            kind = section.get("kind") if isinstance(section, dict) else section
            raise ModelError(
                f"{self.path / DANLU}: quantization is of the unknown kind {kind!r}; danlu knows "
                f"{', '.join(QUANTIZATIONS)}. Say with --quantization how the base is to be held, or none"
            )
        return section

    def tokens(self, rows: int) -> tuple[AddedToken, ...]:
        """The new tokens that it was trained with and for which its base needs rows.

        Of another tool's adapter those of `trainable_token_indices` behind the base's `rows`, by the tokenizer in its
        folder. Raises ModelError for a list that is none.
        """
        if self.danlu:
            try:
                return as_added_tokens(self.danlu.get(TOKENS, ()))
            except ValueError as error:
                raise ModelError(f"{self.path / DANLU}: {TOKENS}: {error}") from None
        indices = self.values.get("trainable_token_indices") or ()
        lists = list(indices.values()) if isinstance(indices, dict) else [indices]
        trained = {each for ids in lists if isinstance(ids, list | tuple) for each in ids if isinstance(each, int)}
        file = self.path / "tokenizer.json"
        if not any(each >= rows for each in trained) or not file.is_file():
            return ()
        entries = _json(file).get("added_tokens")
        named = {
            entry["id"]: AddedToken(str(entry.get("content")), entry["id"], bool(entry.get("special")))
            for entry in (entries if isinstance(entries, list) else ())
            if isinstance(entry, dict) and isinstance(entry.get("id"), int)
        }
        return tuple(named[each] for each in sorted(trained) if each >= rows and each in named)

    @property
    def kind(self) -> str:
        """PEFT's peft_type, or danlu's own for kinds that PEFT does not have."""
        return str(self.values.get("peft_type"))

    @property
    def task(self) -> Task:
        """The task of the model with this adapter."""
        return _TASKS.get(str(self.values.get("task_type")), "causal-lm")

    @property
    def rotation_folder(self) -> Path | None:
        """Returns the folder with the config.json for the base's rotation under this adapter: its own, if it was
        trained with `long_context`; None where the base's rotation stays.

        Raises ModelError where that config.json is missing.
        """
        if not self.danlu.get(ROTATED):
            return None
        if not (self.path / _MODEL_CONFIG).is_file():
            raise ModelError(
                f"{self.path / _MODEL_CONFIG}: missing. The adapter was trained with long_context, and this file says "
                "how its base is rotated. Put it back: without it the base is another model"
            )
        return self.path

    @property
    def below(self) -> list[Path]:
        """Adapter folders that it was trained on top of and needs, lowest first. Raises ModelError for no list."""
        paths = self.danlu.get("below", [])
        if not (isinstance(paths, list) and all(isinstance(path, str) for path in paths)):
            raise ModelError(f"{self.path / DANLU}: below is {paths!r}, not a list of adapter folders")
        return [Path(path) for path in paths]


def is_adapter(path: Path) -> bool:
    """Whether a folder is an adapter, or a run that ended with one."""
    return any((folder / CONFIG).is_file() for folder in (path, path / _RUN_RESULT))


def resolve_adapter(path: str | Path) -> Path:
    """The adapter folder meant by a folder or a finished run. Raises ModelError if there is none."""
    path = Path(path).expanduser()
    for folder in (path, path / _RUN_RESULT):
        if (folder / CONFIG).is_file():
            return folder
    if not path.is_dir():
        raise ModelError(f"{path}: no such folder; an adapter is a folder with {CONFIG}, or a finished run")
    raise ModelError(f"{path}: neither an adapter ({CONFIG} is missing) nor a finished run (no {_RUN_RESULT}/{CONFIG})")


def read_adapter_config(path: Path) -> AdapterFolder:
    """Reads the configs of a folder. Raises ModelError if it is no adapter, or its files cannot be read."""
    if not (path / CONFIG).is_file():
        raise ModelError(f"{path}: no adapter here ({CONFIG} is missing)")
    try:
        check_regular_entries(path)
    except OSError as error:
        raise ModelError(f"{error.filename}: cannot be read: {error.strerror}. Take it out of the folder") from None
    return AdapterFolder(path, _json(path / CONFIG), _json(path / DANLU) if (path / DANLU).is_file() else {})


def open_adapter(path: Path) -> AdapterFolder:
    """Reads the configs of an adapter folder. Raises ModelError if it is none, or one that danlu cannot compute."""
    folder = read_adapter_config(path)
    if folder.kind not in PEFT_TYPES:
        raise ModelError(
            f"{path / CONFIG}: peft_type {folder.kind!r} is not supported; supported: {', '.join(PEFT_TYPES)}. Merge "
            "it with PEFT (merge_and_unload), and save the model"
        )
    if not (path / WEIGHTS).is_file():
        pickled = " There is adapter_model.bin, a pickle, which could run any code" if any(path.glob("*.bin")) else ""
        raise ModelError(f"{path}: {WEIGHTS} is missing.{pickled}")
    known_keys = KNOWN_KEYS.get(folder.kind, folder.values)
    for key, value in folder.values.items():
        if key not in known_keys and value:
            raise ModelError(
                f"{path / CONFIG}: {key} is {value!r}: PEFT's {folder.kind} has no such key that danlu knows, and it "
                "may change what the adapter computes. If it does not, take it out of the file"
            )
    if folder.kind == "LORA":
        init_taken_from_base(folder.values, str(path / CONFIG))
    return folder


def init_taken_from_base(values: Mapping[str, Any], where: str) -> str | None:
    """Returns the initialisation with factors that PEFT subtracts from the base as it loads the adapter: "pissa",
    "olora", or None.

    Raises ModelError for those with factors that cannot be computed again (random, from data, dependent on a
    quantization):
    the base that the adapter belongs to is not known then.
    """
    init = values.get("init_lora_weights", True)
    lower = init.lower() if isinstance(init, str) else init
    if init == "pissa" or lower == "olora":
        return str(lower)
    if init in _LEAVES_BASE or lower in ("gaussian", "mica"):  # PEFT ignores the case of these and of olora alone
        return None
    if isinstance(init, str) and init.startswith(("pissa_niter_", "corda", "loftq")):
        raise ModelError(
            f"{where}: init_lora_weights is {init!r}: the start was taken out of the base and cannot be found again "
            "from this folder, so the base that the adapter belongs to is not known. Where it was trained, write it "
            "for the original base: model.save_pretrained(FOLDER, path_initial_model_for_weight_conversion=FOLDER OF "
            "THE ADAPTER BEFORE TRAINING)"
        )
    known = ", ".join(sorted(str(init) for init in (*_LEAVES_BASE[:2], *_LEAVES_BASE[3:], *_CHANGES_BASE)))
    raise ModelError(f"{where}: init_lora_weights is {init!r}, which PEFT does not know; danlu reads: {known}")


def adapter_stack(path: str | Path) -> list[AdapterFolder]:
    """An adapter, last, after those that it was trained on top of, lowest first, each once.

    Raises ModelError if one of them is missing, or is stacked on itself.
    """
    stack: dict[Path, AdapterFolder] = {}
    for folder in _with_below(resolve_adapter(path), ()):
        stack.setdefault(folder.path.resolve(), folder)
    return list(stack.values())


def _with_below(path: Path, above: tuple[Path, ...]) -> Iterator[AdapterFolder]:
    """The adapter of a folder after those below it. above: the adapters that led here."""
    folder = read_adapter_config(path)
    if path.resolve() in above:
        raise ModelError(f"{path / DANLU}: the adapter is said to be stacked on itself")
    for below in folder.below:
        if not is_adapter(below):
            raise ModelError(f"{path}: was trained on top of the adapter {below}, which is not there. Put it back")
        yield from _with_below(resolve_adapter(below), (*above, path.resolve()))
    yield folder


def _json(file: Path) -> dict[str, Any]:
    try:
        values = parse_json(read_small_text(file))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{file}: expected a JSON object")
    return values
