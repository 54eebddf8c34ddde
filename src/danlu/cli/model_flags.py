"""Flags that verbs which load a model share, and their messages: sampling, precision, quantization, the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_type_hints

import typer

from danlu.adapters.adapter_config import QUANTIZATIONS
from danlu.core.errors import DataError, ModelError, RecipeError
from danlu.core.terminal import print_status

if TYPE_CHECKING:
    from danlu.inference.chat_tokenizer import ChatTokenizer
    from danlu.inference.engine import EngineOptions
    from danlu.inference.generation_config import Precision
    from danlu.inference.load_model import LoadedModel
    from danlu.inference.request import SamplingOptions
    from danlu.inference.resolve_model import ResolvedModel

Temperature = Annotated[
    float | None, typer.Option(help="0 takes the likeliest token each time. Default: the model's own, else 0.8.")
]
TopP = Annotated[float | None, typer.Option(help="Smallest set of likely tokens with this probability. Default 0.95.")]
TopK = Annotated[int | None, typer.Option(help="Only this many of the likeliest tokens; 0 keeps all. Default 0.")]
MinP = Annotated[
    float | None, typer.Option(help="Only tokens at least this fraction as likely as the likeliest. Default 0.")
]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1 makes repetition less likely. Default 1.")]
Seed = Annotated[int, typer.Option(help="Fixes the random draws: the same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given several times.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
Dtype = Annotated[str, typer.Option(help="auto (as stored), fp32, bf16 or fp16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(help="A Jinja file, or a name from `danlu recipes templates`, instead of the tokenizer's own."),
]
ChatTemplateKwargs = Annotated[
    str | None,
    typer.Option(
        "--template-kwargs",
        metavar="JSON",
        help="Variables of the chat template, such as '{\"enable_thinking\": false}'.",
    ),
]
MODEL_HELP = "A model or adapter folder, a finished run, or a hub id."
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Base = Annotated[str | None, typer.Option(help="Of an adapter: the model it sits on, if not where it was trained.")]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="Quantize linear layers: nf4, int4, fp8, ...; none. Default: as an adapter was trained, or stored."
    ),
]

CacheGib = Annotated[
    float | None,
    typer.Option(help="The most memory for keys and values, in GiB. Default: 2, or what the longest answer takes."),
]
Cache = Annotated[
    Literal["auto", "fp8", "int8", "int4"],
    typer.Option(help="Keys and values in the type of activations, or in 8 or 4 bits."),
]
Draft = Annotated[
    str | None,
    typer.Option(
        help="Speculative decoding, with the same answers: ngram, or a smaller model with this one's vocabulary."
    ),
]

FALLBACK = {"temperature": 0.8, "top_p": 0.95}


def check_utf8(text: str, where: str) -> str:
    """The text itself. Raises DataError for bytes that are no UTF-8, which Python keeps as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: not UTF-8 text (character {error.start}); convert it first") from None
    return text


def check_flags(
    sampling: dict[str, Any], seed: int, dtype: str, device: str, stops: list[str], quantization: str | None = None
) -> Precision:
    """The precision that --dtype names. Raises RecipeError with everything that is wrong, before anything is loaded."""
    from danlu.inference.request import SamplingOptions

    problems = []
    try:
        SamplingOptions(**sampling, seed=seed)
    except RecipeError as error:
        problems += error.problems
    problems += model_problems(dtype, device, quantization)
    if "" in stops:
        problems.append("stop: an empty text would stop before the first token")
    if problems:
        raise RecipeError(
            [f"--{problem.replace('_', '-', problem.partition(':')[0].count('_'))}" for problem in problems]
        )
    return cast("Precision", dtype)


def model_problems(dtype: str, device: str, quantization: str | None) -> list[str]:
    """The words that are wrong about how a model is loaded, each with the ones to use."""
    from danlu.inference.generation_config import DEVICES, PRECISIONS

    problems = []
    if dtype not in PRECISIONS:
        problems.append(f"dtype: {dtype!r} is unknown; use {', '.join(PRECISIONS)}")
    if device not in DEVICES:
        problems.append(f"device: {device!r} is unknown; use {', '.join(DEVICES)}")
    if quantization not in (None, "none", *QUANTIZATIONS):
        problems.append(f"quantization: {quantization!r} is unknown; use {', '.join(QUANTIZATIONS)} or none")
    return problems


@dataclass(frozen=True)
class ModelFlags:
    """The flags that say how a model is loaded."""

    dtype: Dtype = "auto"
    device: Device = "auto"
    chat_template: ChatTemplate = None
    chat_template_kwargs: ChatTemplateKwargs = None
    base: Base = None
    quantization: Quantization = None

    def check(self, sampling: dict[str, Any], seed: int, stops: list[str]) -> Precision:
        """The precision, by `check_flags`, which raises RecipeError, as `template_kwargs` does."""
        _ = self.template_kwargs
        return check_flags(sampling, seed, self.dtype, self.device, stops, self.quantization)

    def load_tokenizer(self, resolved: ResolvedModel) -> ChatTokenizer:
        """The model's tokenizer with the chat template that was asked for."""
        from danlu.inference.load_model import load_chat_tokenizer

        return load_chat_tokenizer(resolved.tokenizer_folder, *self.template, model=resolved.folder)

    @property
    def template(self) -> tuple[Path | None, dict[str, Any]]:
        """The chat template that was asked for, and its variables."""
        return self.chat_template, self.template_kwargs

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of the chat template. Raises RecipeError for text that is no JSON object of them."""
        from danlu.recipe.rules.model import template_kwargs_are_free

        try:
            kwargs = json.loads(self.chat_template_kwargs or "{}")
        except (ValueError, RecursionError):
            kwargs = None
        if not isinstance(kwargs, dict):
            given = self.chat_template_kwargs
            raise RecipeError(
                f"--template-kwargs: {given!r} is no JSON object. Write it as in '{{\"enable_thinking\": false}}'"
            )
        if problems := [problem.message for problem in template_kwargs_are_free(kwargs)]:
            raise RecipeError([f"--template-kwargs: {problem}" for problem in problems])
        return kwargs

    def load(self, resolved: ResolvedModel, tokenizer: ChatTokenizer, *, merged: bool = False) -> LoadedModel:
        """Loads the model, and prints its notes to stderr. merged: as in `load_model`."""
        from danlu.inference.load_model import load_model
        from danlu.inference.quantization_choice import quantization_section

        section, precision = quantization_section(self.quantization, resolved), cast("Precision", self.dtype)
        loaded = load_model(
            resolved, tokenizer, precision=precision, device=self.device, quantization=section, merged=merged
        )
        for note in loaded.notes:
            print_status(note)
        return loaded


@dataclass(frozen=True)
class SamplingFlags:
    """The flags of sampling, and of the ends of an answer."""

    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    stop: Stop = None
    seed: Seed = 0

    @property
    def given(self) -> dict[str, Any]:
        """The flags that were given, by the names of SamplingOptions."""
        from danlu.inference.generation_config import SAMPLING_FIELDS

        return {name: getattr(self, name) for name in SAMPLING_FIELDS if getattr(self, name) is not None}

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        return self.stop or []

    def options(self, resolved: ResolvedModel) -> SamplingOptions:
        """Sampling options by the flags, else by the model's generation_config.json, else by danlu's own defaults."""
        from danlu.inference.generation_config import sampling_defaults
        from danlu.inference.request import SamplingOptions

        recommended = sampling_defaults(resolved.tokenizer_folder) or sampling_defaults(resolved.folder) or FALLBACK
        return SamplingOptions(**{**recommended, **self.given}, seed=self.seed)


@dataclass(frozen=True)
class EngineFlags:
    """The flags of the engine that answers."""

    cache_gib: CacheGib = None
    draft: Draft = None
    cache: Cache = "auto"

    def options(self, resolved: ResolvedModel) -> EngineOptions:
        """The engine's options. Raises RecipeError for --cache-gib, ModelError for a draft model that does not fit."""
        from danlu.inference.engine import DraftOptions, EngineOptions
        from danlu.inference.resolve_model import resolve_model

        if self.cache_gib is not None and not self.cache_gib > 0:
            raise RecipeError(f"--cache-gib: {self.cache_gib:g} is out of range; it must be above 0")
        options = EngineOptions(cache=self.cache)
        options = options if self.cache_gib is None else replace(options, cache_gib=self.cache_gib)
        if self.draft is None:
            return options
        if self.draft == "ngram":
            return replace(options, draft=DraftOptions("ngram"))
        drafts, own = resolve_model(self.draft).config.vocab_size, resolved.config.vocab_size
        if drafts != own:
            raise ModelError(
                f"--draft: {self.draft} has a vocabulary of {drafts} tokens, and {resolved.given_path} one of {own}: "
                "it has to be a smaller model of the same family, or ngram"
            )
        return replace(options, draft=DraftOptions("model", model=self.draft))


def takes_flag_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Makes an option of each field of the dataclasses that a command takes, such as `ModelFlags`."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        if parameter.name in groups:
            group = groups[parameter.name]
            of_group = get_type_hints(group, include_extras=True)
            parameters += [
                Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=of_group[field.name])
                for field in fields(group)
            ]
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[parameter.name]))

    @wraps(command)
    def with_groups(**given: Any) -> None:
        values = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **values)

    # typer reads both.
    with_groups.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    with_groups.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_groups
