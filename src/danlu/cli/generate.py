"""`danlu generate`: one prompt in, its continuation on stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from danlu.errors import DataError, RecipeError

if TYPE_CHECKING:
    from danlu.rollout.sampling import SamplingOptions

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
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a finished run, or a hub id.")]

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
) -> None:
    """Continue a prompt. The text alone goes to stdout, as it is written.

    The prompt is taken as it is, without a chat template, unless --chat asks for one.
    """
    asked = sampling_flags(temperature, top_p, top_k, min_p, repetition_penalty)
    check_flags(asked, seed, dtype, device, stop or [])
    text = read_prompt(prompt, file)
    # torch takes a second to import, which `danlu generate --help` should not.
    from danlu.rollout.generate import generate as complete
    from danlu.rollout.opening import find_model, open_model, open_wording

    folder = find_model(model)
    options = sampling_options(folder, asked, seed)
    wording = open_wording(folder, chat_template)
    if chat:
        wording.require_chat_template()
    tokens = wording.encode_chat_prompt(text) if chat else wording.encode_prompt(text)
    opened = open_model(folder, wording, precision=dtype, device=device)
    silent_stops, stop_strings = wording.split_stops(stop or [])

    def show(sample: int, token: int, piece: str) -> None:
        print(piece, end="", flush=True)

    (answer,) = complete(
        opened.model,
        [tokens],
        options,
        max_new_tokens,
        sorted(opened.stop_ids | silent_stops),
        stop_strings,
        None if as_json else show,
        decode=wording.decode,
    )
    if as_json:
        row = {
            "prompt": text,
            "text": answer.text,
            "tokens": answer.tokens,
            "finish": answer.finish,
            "logprobs": answer.logprobs,
        }
        print(json.dumps(row, ensure_ascii=False))
    else:
        print()


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt itself, or the content of a file or of stdin. Raises RecipeError or DataError."""
    if (prompt is None) == (file is None):
        raise RecipeError("give the text to continue with either --prompt TEXT or --file FILE (--file - reads stdin)")
    if file is None:
        return prompt or ""
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text (byte {error.start}); convert it first") from None
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None


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


def check_flags(asked: dict[str, Any], seed: int, dtype: str, device: str, stops: list[str]) -> None:
    """Raises RecipeError with everything that is wrong, before anything is loaded."""
    from danlu.rollout.opening import PRECISIONS
    from danlu.rollout.sampling import SamplingOptions

    problems = []
    try:
        SamplingOptions(**asked, seed=seed)
    except RecipeError as error:
        problems += error.problems
    if dtype not in ("auto", *PRECISIONS):
        problems.append(f"dtype: {dtype!r} is unknown; use auto, {', '.join(PRECISIONS)}")
    if device not in ("auto", "cpu", "cuda"):
        problems.append(f"device: {device!r} is unknown; use auto, cpu or cuda")
    if "" in stops:
        problems.append("stop: an empty text would stop before the first token")
    if problems:
        raise RecipeError(
            [f"--{problem.replace('_', '-', problem.partition(':')[0].count('_'))}" for problem in problems]
        )


def sampling_options(folder: Path, asked: dict[str, Any], seed: int) -> SamplingOptions:
    """The flags, then what the model's makers advise (generation_config.json), then danlu's own defaults."""
    from danlu.rollout.opening import sampling_defaults
    from danlu.rollout.sampling import SamplingOptions

    return SamplingOptions(**{**(sampling_defaults(folder) or FALLBACK), **asked}, seed=seed)
