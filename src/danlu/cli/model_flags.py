"""Flags that verbs which load a model share, and their messages: sampling, precision, quantization, the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from danlu.adapters.adapter_config import QUANTIZATIONS
from danlu.core.errors import DataError, ModelError, RecipeError
from danlu.core.terminal import print_status

if TYPE_CHECKING:
    from danlu.inference.engine import EngineOptions
    from danlu.inference.generation_config import Precision
    from danlu.inference.load_model import LoadedModel
    from danlu.inference.request import SamplingOptions
    from danlu.inference.resolve_model import ResolvedModel
    from danlu.recipe.sections import QuantizationSection

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
ChatTemplate = Annotated[Path | None, typer.Option(help="A Jinja file instead of the tokenizer's own chat template.")]
MODEL_HELP = "A model or adapter folder, a finished run, or a hub id."
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Base = Annotated[str | None, typer.Option(help="Of an adapter: the model it sits on, if not where it was trained.")]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="Quantize linear layers: nf4, fp4, int8, int4; none. Default: as an adapter was trained, or stored."
    ),
]

CacheGib = Annotated[
    float | None,
    typer.Option(help="The most memory for keys and values, in GiB. Default: 2, or what the longest answer takes."),
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


def print_notes(loaded: LoadedModel) -> None:
    """Prints remarks on how a model was loaded to stderr."""
    for note in loaded.notes:
        print_status(note)


def sampling_flags(*values: float | None) -> dict[str, Any]:
    """The flags that were given, by the names of SamplingOptions. values: in the order of SAMPLING_FIELDS."""
    from danlu.inference.generation_config import SAMPLING_FIELDS

    return {name: value for name, value in zip(SAMPLING_FIELDS, values, strict=True) if value is not None}


def check_flags(
    sampling: dict[str, Any], seed: int, dtype: str, device: str, stops: list[str], quantization: str | None = None
) -> Precision:
    """The precision that --dtype names. Raises RecipeError with everything that is wrong, before anything is loaded."""
    from danlu.inference.generation_config import DEVICES, PRECISIONS
    from danlu.inference.request import SamplingOptions

    problems = []
    try:
        SamplingOptions(**sampling, seed=seed)
    except RecipeError as error:
        problems += error.problems
    if dtype not in PRECISIONS:
        problems.append(f"dtype: {dtype!r} is unknown; use {', '.join(PRECISIONS)}")
    if device not in DEVICES:
        problems.append(f"device: {device!r} is unknown; use {', '.join(DEVICES)}")
    if quantization not in (None, "none", *QUANTIZATIONS):
        problems.append(f"quantization: {quantization!r} is unknown; use {', '.join(QUANTIZATIONS)} or none")
    if "" in stops:
        problems.append("stop: an empty text would stop before the first token")
    if problems:
        raise RecipeError(
            [f"--{problem.replace('_', '-', problem.partition(':')[0].count('_'))}" for problem in problems]
        )
    return cast("Precision", dtype)


def engine_flags(resolved: ResolvedModel, cache_gib: float | None, draft: str | None) -> EngineOptions:
    """The engine's options by --cache-gib and --draft. Raises ModelError for a draft model that cannot be used."""
    from danlu.inference.engine import DraftOptions, EngineOptions
    from danlu.inference.resolve_model import resolve_model

    if cache_gib is not None and not cache_gib > 0:
        raise RecipeError(f"--cache-gib: {cache_gib:g} is out of range; it must be above 0")
    options = EngineOptions() if cache_gib is None else EngineOptions(cache_gib=cache_gib)
    if draft is None:
        return options
    if draft == "ngram":
        return replace(options, draft=DraftOptions("ngram"))
    drafts, own = resolve_model(draft).config.vocab_size, resolved.config.vocab_size
    if drafts != own:
        raise ModelError(
            f"--draft: {draft} has a vocabulary of {drafts} tokens, and {resolved.given_path} one of {own}: it has to "
            "be a smaller model of the same family, or ngram"
        )
    return replace(options, draft=DraftOptions("model", model=draft))


def quantization_section(kind: str | None, resolved: ResolvedModel | None = None) -> QuantizationSection | None:
    """The recipe's section for --quantization; without the flag, that of an adapter's base while it was trained.

    None keeps weights as they are stored. Raises ModelError for values of danlu.json that no recipe may have.
    """
    values: Mapping[str, Any] = {"kind": kind}
    if kind is None:
        from danlu.models.hf_folder import CONFIG, read_json

        if resolved is None or "quantization_config" in read_json(resolved.folder / CONFIG) or not resolved.stacks:
            return None
        if (trained_with := resolved.stacks[0][-1].quantization) is None:
            return None
        values = trained_with
    elif kind == "none":
        return None
    # Imported here: it brings pydantic, which takes half a second.
    from pydantic import ValidationError

    from danlu.recipe import sections

    known = {"nf4": sections.Nf4, "fp4": sections.Fp4, "int8": sections.Int8, "int4": sections.Int4}
    try:
        return known[values["kind"]](**values)
    except ValidationError as error:  # a kind alone is right: it is an adapter's own danlu.json
        assert resolved is not None
        first = error.errors()[0]
        key = ".".join(("quantization", *map(str, first["loc"])))
        raise ModelError(f"{resolved.stacks[0][-1].path / 'danlu.json'}: {key}: {first['msg']}") from None


def sampling_options(resolved: ResolvedModel, sampling: dict[str, Any], seed: int) -> SamplingOptions:
    """Sampling options by the flags, else by the model's generation_config.json, else by danlu's own defaults."""
    from danlu.inference.generation_config import sampling_defaults
    from danlu.inference.request import SamplingOptions

    recommended = sampling_defaults(resolved.tokenizer_folder) or sampling_defaults(resolved.folder) or FALLBACK
    return SamplingOptions(**{**recommended, **sampling}, seed=seed)
