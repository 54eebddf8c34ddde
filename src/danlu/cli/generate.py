"""`danlu generate`: a prompt in, its continuation on stdout; or rows of prompts, and a line of JSON for each answer."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from danlu.adapters.adapter_config import QUANTIZATIONS
from danlu.errors import DataError, ModelError, RecipeError
from danlu.terminal import echo, print_status, print_status_early

if TYPE_CHECKING:
    from danlu.recipe.sections import QuantizationSection
    from danlu.rollout.engine import EngineOptions, RolloutEngine
    from danlu.rollout.generation_config import Precision
    from danlu.rollout.load_model import LoadedModel
    from danlu.rollout.prompt_rows import PromptRow
    from danlu.rollout.request import Request, SamplingOptions
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


def generate(
    model: ModelArgument,
    prompt: Annotated[str | None, typer.Option(help="The text to continue; '' starts from nothing.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="Take the whole file as the prompt; - reads stdin. Of a .jsonl or .json file each row is one: `prompt`"
            " (a text) or `messages` (a conversation to answer)."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Answers to each prompt; more than one need --json.")] = 1,
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
        bool,
        typer.Option(
            "--json",
            help="A line of JSON for each answer as soon as it is complete, so not in the order of rows: row (from 0), "
            "prompt or messages, sample, text, tokens, logprobs, finish.",
        ),
    ] = False,
    cache_gib: CacheGib = None,
    draft: Draft = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    chat_template: ChatTemplate = None,
    base: Base = None,
    adapter: Annotated[
        list[str] | None, typer.Option(help="An adapter folder or run on top of MODEL, which answers with it.")
    ] = None,
    quantization: Quantization = None,
) -> None:
    """Continue a prompt. The text alone goes to stdout, as it is written.

    The prompt is taken as it is, without a chat template, unless --chat asks for one.

    An adapter is merged into its base in memory where it can be, so that it costs no time at each token.
    """
    sampling = sampling_flags(temperature, top_p, top_k, min_p, repetition_penalty)
    precision = check_flags(sampling, seed, dtype, device, stop or [], quantization)
    # numpy, a tenth of a second, and below torch, more than one: for this verb, not for its --help.
    from danlu.rollout.resolve_model import resolve_model

    given = read_prompts(prompt, file)
    of_file = not isinstance(given, str)
    if (of_file or samples > 1) and not as_json:
        raise RecipeError("several answers are lines of JSON: add --json")
    resolved = resolve_model(model, base, adapter or [])
    check_one_adapter(resolved)
    print_status_early(f"reading {resolved.given_path}")
    options = sampling_options(resolved, sampling, seed)
    engine_options = engine_flags(resolved, cache_gib, draft)
    from danlu.rollout.load_engine import engine_of, with_room_for
    from danlu.rollout.load_model import load_chat_tokenizer, load_model
    from danlu.rollout.prompt_rows import PromptRow, encode_rows
    from danlu.rollout.request import Request

    where = "--prompt" if file is None else str(file)
    rows = [PromptRow.of_text(given, where)] if isinstance(given, str) else given
    chat_tokenizer = load_chat_tokenizer(resolved.tokenizer_folder, chat_template, model=resolved.folder)
    if chat or any(row.turns for row in rows):
        chat_tokenizer.require_chat_template()
    prompts = encode_rows(
        rows, chat_tokenizer, resolved.config, as_turn=chat, virtual_tokens=resolved.virtual_tokens_per_prompt
    )
    section = quantization_section(quantization, resolved)
    loaded = load_model(resolved, chat_tokenizer, precision=precision, device=device, quantization=section, merged=True)
    print_notes(loaded)
    silent_stops, stop_strings = chat_tokenizer.split_stops(stop or [])
    requests = [
        Request(
            row.index,
            tokens,
            options,
            max_new_tokens,
            samples,
            stop_ids=loaded.stop_ids | silent_stops,
            stop_strings=tuple(stop_strings),
        )
        for row, tokens in zip(rows, prompts, strict=True)
    ]
    if cache_gib is None:
        engine_options = with_room_for(loaded, requests, engine_options)
    engine = engine_of(loaded, engine_options)
    escape_unencodable()
    if as_json:
        write_answers(engine, requests, rows, numbered=of_file)
    else:
        stream_answer(engine, requests[0])


def check_one_adapter(resolved: ResolvedModel) -> None:
    """Raises RecipeError for several adapters to switch between: an answer is by one of them."""
    from danlu.rollout.resolve_model import adapter_names

    if len(resolved.stacks) > 1:
        raise RecipeError(
            f"--adapter: generate answers with one adapter, and there are {len(resolved.stacks)}, MODEL counted where "
            f"it is one: {', '.join(adapter_names(resolved.stacks))}. danlu chat and danlu serve switch between several"
        )


def stream_answer(engine: RolloutEngine, request: Request) -> None:
    """Prints the text of one answer as it is generated."""
    engine.submit(request, lambda new: echo(new.text, end=""))
    try:
        while engine.unfinished:
            engine.step()
    finally:  # an interruption too ends the line of the text so far
        echo("")


def write_answers(
    engine: RolloutEngine, requests: Sequence[Request], rows: Sequence[PromptRow], *, numbered: bool
) -> None:
    """Prints a line of JSON for each answer as soon as it is complete. numbered: with the number of its row."""
    from danlu.train.progress import RowProgress

    for request in requests:  # those that do not fit are told before any is answered
        engine.submit(request)
    row_of = {row.index: row for row in rows}
    done, total = 0, engine.unfinished
    # One rewritten line at a terminal that shows no answers, and now and then a line in a file.
    shown = numbered and not (sys.stderr.isatty() and sys.stdout.isatty())
    with closing(RowProgress(sys.stderr, doing="answering", units="answers")) as progress:
        while engine.unfinished:
            for answer in engine.step():
                number = {"row": answer.number} if numbered else {}
                said = {key: getattr(answer, key) for key in ("sample", "text", "tokens", "logprobs", "finish")}
                echo(json.dumps({**number, **row_of[answer.number].given, **said}, ensure_ascii=False))
                done += 1
            if shown:
                progress(done, total)


def read_prompts(prompt: str | None, file: Path | None) -> str | list[PromptRow]:
    """The rows of a file of prompts, or the one prompt of another file or flag. Raises RecipeError or DataError."""
    from danlu.rollout.prompts import has_rows

    if file is None or prompt is not None or not has_rows(file):
        return read_prompt(prompt, file)
    from danlu.rollout.prompt_rows import read_prompt_rows

    return read_prompt_rows(file)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt itself, or the content of a file or of stdin. Raises RecipeError or DataError."""
    if (prompt is None) == (file is None):
        raise RecipeError("give the text to continue with either --prompt TEXT or --file FILE (--file - reads stdin)")
    if file is None:
        return check_utf8(prompt or "", "--prompt")
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text (byte {error.start}); convert it first") from None
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None
    return check_utf8(text, "stdin" if str(file) == "-" else str(file))


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


def escape_unencodable() -> None:
    """Makes stdout print characters that its encoding lacks as \\u escapes, where Python would raise an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def sampling_flags(*values: float | None) -> dict[str, Any]:
    """The flags that were given, by the names of SamplingOptions. values: in the order of SAMPLING_FIELDS."""
    from danlu.rollout.generation_config import SAMPLING_FIELDS

    return {name: value for name, value in zip(SAMPLING_FIELDS, values, strict=True) if value is not None}


def check_flags(
    sampling: dict[str, Any], seed: int, dtype: str, device: str, stops: list[str], quantization: str | None = None
) -> Precision:
    """The precision that --dtype names. Raises RecipeError with everything that is wrong, before anything is loaded."""
    from danlu.rollout.generation_config import DEVICES, PRECISIONS
    from danlu.rollout.request import SamplingOptions

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
    from danlu.rollout.engine import DraftOptions, EngineOptions
    from danlu.rollout.resolve_model import resolve_model

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
    from danlu.rollout.generation_config import sampling_defaults
    from danlu.rollout.request import SamplingOptions

    recommended = sampling_defaults(resolved.tokenizer_folder) or sampling_defaults(resolved.folder) or FALLBACK
    return SamplingOptions(**{**recommended, **sampling}, seed=seed)
