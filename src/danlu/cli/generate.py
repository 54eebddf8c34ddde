"""`danlu generate`: one prompt in, its continuation on stdout."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from danlu.errors import DataError, ModelError, RecipeError
from danlu.terminal import echo, print_status, print_status_early

if TYPE_CHECKING:
    from danlu.recipe.sections import QuantizationSection
    from danlu.rollout.load_model import LoadedModel
    from danlu.rollout.request import Precision, SamplingOptions
    from danlu.rollout.resolve_model import ResolvedModel

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
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model or adapter folder, a finished run, or a hub id.")
]
Base = Annotated[str | None, typer.Option(help="Of an adapter: the model it sits on, if not where it was trained.")]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="Quantize linear layers: nf4, fp4, int8, int4; none. Default: as an adapter was trained, or stored."
    ),
]

QUANTIZATIONS = ("nf4", "fp4", "int8", "int4")
FALLBACK = {"temperature": 0.8, "top_p": 0.95}


def generate(
    model: ModelArgument,
    prompt: Annotated[str | None, typer.Option(help="The text to continue; '' starts from nothing.")] = None,
    file: Annotated[Path | None, typer.Option(help="Take the whole file as the prompt; - reads stdin.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask the prompt as a user's turn, by the chat template.")
    ] = False,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    stop: Stop = None,
    seed: Seed = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object: prompt, text, tokens, finish, logprobs.")
    ] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    chat_template: ChatTemplate = None,
    base: Base = None,
    quantization: Quantization = None,
) -> None:
    """Continue a prompt. The text alone goes to stdout, as it is written.

    The prompt is taken as it is, without a chat template, unless --chat asks for one.

    An adapter is merged into its base in memory where it can be, so that it costs no time at each token.
    """
    asked = sampling_flags(temperature, top_p, top_k, min_p, repetition_penalty)
    precision = check_flags(asked, seed, dtype, device, stop or [], quantization)
    text = read_prompt(prompt, file)
    # numpy, a tenth of a second, and below torch, more than one: for this verb, not for its --help.
    from danlu.rollout.resolve_model import resolve_model

    resolved = resolve_model(model, base)
    print_status_early(f"reading {resolved.given_path}")
    options = sampling_options(resolved, asked, seed)
    from danlu.models.hf_folder import read_config
    from danlu.rollout.generate import check_prompts
    from danlu.rollout.generate import generate as complete
    from danlu.rollout.load_model import load_chat_tokenizer, load_model

    chat_tokenizer = load_chat_tokenizer(resolved.tokenizer_folder, chat_template, model=resolved.folder)
    if chat:
        chat_tokenizer.require_chat_template()
    tokens = chat_tokenizer.encode_chat_prompt(text) if chat else chat_tokenizer.encode_prompt(text)
    check_prompts(read_config(resolved.folder), [tokens], resolved.virtual_tokens_per_prompt)
    opened = load_model(
        resolved,
        chat_tokenizer,
        precision=precision,
        device=device,
        quantization=quantization_section(quantization, resolved),
        merged=True,
    )
    say_notes(opened)
    silent_stops, stop_strings = chat_tokenizer.split_stops(stop or [])
    write_any_character()

    def show(sample: int, token: int, piece: str) -> None:
        echo(piece, end="")

    try:
        (answer,) = complete(
            opened.model,
            [tokens],
            options,
            max_new_tokens,
            sorted(opened.stop_ids | silent_stops),
            stop_strings,
            None if as_json else show,
            decode=chat_tokenizer.decode,
            dtype=opened.dtype,
            virtual_token_ids=opened.virtual_token_ids,
        )
    except KeyboardInterrupt:
        if not as_json:  # what was written ends its line; an object is whole or not there
            echo("")
        raise
    if as_json:
        row = {
            "prompt": text,
            "text": answer.text,
            "tokens": answer.tokens,
            "finish": answer.finish,
            "logprobs": answer.logprobs,
        }
        echo(json.dumps(row, ensure_ascii=False))
    else:
        echo("")


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt itself, or the content of a file or of stdin. Raises RecipeError or DataError."""
    if (prompt is None) == (file is None):
        raise RecipeError("give the text to continue with either --prompt TEXT or --file FILE (--file - reads stdin)")
    if file is None:
        return whole_characters(prompt or "", "--prompt")
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text (byte {error.start}); convert it first") from None
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None
    return whole_characters(text, "stdin" if str(file) == "-" else str(file))


def whole_characters(text: str, where: str) -> str:
    """The text itself. Raises DataError for bytes that are no UTF-8: Python carries them along as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: not UTF-8 text (character {error.start}); convert it first") from None
    return text


def say_notes(opened: LoadedModel) -> None:
    """On stderr, what there is to know of how a model was opened."""
    for note in opened.notes:
        print_status(note)


def write_any_character() -> None:
    """Characters that the terminal's encoding lacks come out as \\u escapes, where Python would stop with an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def sampling_flags(
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    repetition_penalty: float | None,
) -> dict[str, Any]:
    """The flags that were given, by the names of SamplingOptions."""
    given = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    return {name: value for name, value in given.items() if value is not None}


def check_flags(
    asked: dict[str, Any], seed: int, dtype: str, device: str, stops: list[str], quantization: str | None = None
) -> Precision:
    """The precision that --dtype names. Raises RecipeError with everything that is wrong, before anything is loaded."""
    from danlu.rollout.request import DEVICES, PRECISIONS, SamplingOptions

    problems = []
    try:
        SamplingOptions(**asked, seed=seed)
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


def quantization_section(kind: str | None, resolved: ResolvedModel | None = None) -> QuantizationSection | None:
    """What --quantization names, as a recipe would say it; without it, how an adapter's base was held in training."""
    values: Mapping[str, Any] = {"kind": kind}
    if kind is None:
        from danlu.models.hf_folder import CONFIG, read_json

        stored = resolved is not None and "quantization_config" in read_json(resolved.folder / CONFIG)
        if stored or resolved is None or not resolved.stacks or (own := resolved.stacks[0][-1].quantization) is None:
            return None
        values = own
    elif kind == "none":
        return None
    # Here: it brings pydantic, half a second that those who do not ask for it need not wait.
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


def sampling_options(resolved: ResolvedModel, asked: dict[str, Any], seed: int) -> SamplingOptions:
    """The flags, then what the model's makers advise (generation_config.json), then danlu's own defaults."""
    from danlu.rollout.request import SamplingOptions, sampling_defaults

    advised = sampling_defaults(resolved.tokenizer_folder) or sampling_defaults(resolved.folder) or FALLBACK
    return SamplingOptions(**{**advised, **asked}, seed=seed)
