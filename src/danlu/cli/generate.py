"""`danlu generate`: a prompt in, its continuation on stdout; or rows of prompts, and a line of JSON for each answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from danlu.cli.model_flags import (
    EngineFlags,
    MaxNewTokens,
    ModelArgument,
    ModelFlags,
    SamplingFlags,
    check_utf8,
    takes_flag_groups,
)
from danlu.core.errors import DataError, RecipeError
from danlu.core.terminal import echo, escape_unencodable, print_status_early

if TYPE_CHECKING:
    from danlu.inference.embedded import EmbeddedEngine
    from danlu.inference.prompt_rows import PromptRow
    from danlu.inference.request import Request
    from danlu.inference.resolve_model import ResolvedModel


@takes_flag_groups
def generate(
    model: ModelArgument,
    *,
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
    sampling: SamplingFlags,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="A line of JSON for each answer as soon as it is complete, so not in the order of rows: row (from 0), "
            "prompt or messages, sample, text, tokens, logprobs, finish.",
        ),
    ] = False,
    engine: EngineFlags,
    adapter: Annotated[
        list[str] | None, typer.Option(help="An adapter folder or run on top of MODEL, which answers with it.")
    ] = None,
    loading: ModelFlags,
) -> None:
    """Continue a prompt. The text alone goes to stdout, as it is written.

    The prompt is taken as it is, without a chat template, unless --chat asks for one.

    An adapter is merged into its base in memory where it can be, so that it costs no time at each token.
    """
    loading.check(sampling.given, sampling.seed, sampling.stops)
    # numpy, a tenth of a second, and below torch, more than one: for this verb, not for its --help.
    from danlu.inference.resolve_model import resolve_model

    given = read_prompts(prompt, file)
    of_file = not isinstance(given, str)
    if (of_file or samples > 1) and not as_json:
        raise RecipeError("several answers are lines of JSON: add --json")
    resolved = resolve_model(model, loading.base, adapter or [])
    check_one_adapter(resolved)
    print_status_early(f"reading {resolved.given_path}")
    options = sampling.options(resolved)
    engine_options = engine.options(resolved)
    from danlu.inference.load_engine import engine_of, with_room_for
    from danlu.inference.prompt_rows import PromptRow, encode_rows
    from danlu.inference.request import Request

    where = "--prompt" if file is None else str(file)
    rows = [PromptRow.of_text(given, where)] if isinstance(given, str) else given
    tokenizer = loading.load_tokenizer(resolved)
    if chat or any(row.turns for row in rows):
        tokenizer.require_chat_template()
    virtual_tokens = resolved.virtual_tokens_per_prompt
    prompts = encode_rows(rows, tokenizer, resolved.config, as_turn=chat, virtual_tokens=virtual_tokens)
    loaded = loading.load(resolved, tokenizer, merged=True)
    silent_stops, stops = loaded.chat_tokenizer.split_stops(sampling.stops)
    request_of = partial(Request, stop_ids=loaded.stop_ids | silent_stops, stop_strings=tuple(stops))
    requests = [
        request_of(row.index, tokens, options, max_new_tokens, samples)
        for row, tokens in zip(rows, prompts, strict=True)
    ]
    if engine.cache_gib is None:
        engine_options = with_room_for(loaded, requests, engine_options)
    answering = engine_of(loaded, engine_options)
    escape_unencodable()
    if as_json:
        write_answers(answering, requests, rows, numbered=of_file)
    else:
        stream_answer(answering, requests[0])


def check_one_adapter(resolved: ResolvedModel) -> None:
    """Raises RecipeError for several adapters to switch between: an answer is by one of them."""
    from danlu.inference.resolve_model import adapter_names

    if len(resolved.stacks) > 1:
        raise RecipeError(
            f"--adapter: generate answers with one adapter, and there are {len(resolved.stacks)}, MODEL counted where "
            f"it is one: {', '.join(adapter_names(resolved.stacks))}. danlu chat and danlu serve switch between several"
        )


def stream_answer(engine: EmbeddedEngine, request: Request) -> None:
    """Prints the text of one answer as it is generated."""
    engine.submit(request, lambda new: echo(new.text, end=""))
    try:
        while engine.unfinished:
            engine.step()
    finally:  # an interruption too ends the line of the text so far
        echo("")


def write_answers(
    engine: EmbeddedEngine, requests: Sequence[Request], rows: Sequence[PromptRow], *, numbered: bool
) -> None:
    """Prints a line of JSON for each answer as soon as it is complete. numbered: with the number of its row."""
    from danlu.training.progress import RowProgress

    for request in requests:  # those that do not fit are reported before any is answered
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
    from danlu.inference.prompts import has_rows

    if (prompt is None) == (file is None):
        raise RecipeError("give the text to continue with either --prompt TEXT or --file FILE (--file - reads stdin)")
    if file is None:
        return check_utf8(prompt or "", "--prompt")
    if has_rows(file):
        from danlu.inference.prompt_rows import read_prompt_rows

        return read_prompt_rows(file)
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text (byte {error.start}); convert it first") from None
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None
    return check_utf8(text, "stdin" if str(file) == "-" else str(file))
