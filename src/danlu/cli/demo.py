"""`danlu demo`: from nothing to a model that answers, on data that danlu makes itself."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from danlu.core.terminal import print_status, printable

if TYPE_CHECKING:
    from danlu.demo.demo import Result, Tally
    from danlu.demo.demo_recipes import Place


def demo(
    output: Annotated[Path, typer.Option(help="Folder for everything; the same one again goes on.")] = Path("demo"),
    data_only: Annotated[
        bool, typer.Option("--data-only", help="Write data, tokenizer and recipes, and train nothing.")
    ] = False,
) -> None:
    """Train a tokenizer and a small model, teach it to answer and to add, and compare: a few minutes on two cores.

    Nothing is downloaded. Data, recipes, runs and the exported model stay in the folder, to be looked at and tried.
    """
    # Read by libgomp when torch is imported: how often a thread looks for work before it sleeps. So small a model comes
    # back to its threads every few microseconds. 100 steps of pretraining on two cores took 23 s (median of three) with
    # 6,000, 21 s with libgomp's own 300,000, 33 s with threads that sleep at once; next to two other busy processes
    # 143 s with 300,000, 77 s with 10,000, 49 s asleep at once.
    os.environ.setdefault("GOMP_SPINCOUNT", "6000")
    # torch takes a second to import, which `danlu demo --help` should not.
    from danlu.demo.demo import demo as make

    result = make(output, log=print_status, data_only=data_only)
    if result.exit_code:
        raise typer.Exit(result.exit_code)
    if data_only:
        for line in data_lines(result.place, program()):
            print(line)  # noqa: T201  printable already
        return
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for line in (*answer_lines(result, colour), "", *next_lines(result.place, program())):
        print(line)  # noqa: T201  with its own colours; the rest is printable already


def answer_lines(result: Result, colour: bool) -> Iterator[str]:
    """The questions with both answers, and the count over all questions."""
    groups = (
        (False, "Facts that the conversations asked for:"),
        (True, "Facts that it only read, and was never asked for (held out):"),
    )
    for held_out, heading in groups:
        yield ""
        yield heading
        for answered in result.shown:
            if answered.question.held_out != held_out:
                continue
            *context, question = answered.question.messages
            for message in context:
                yield printable(f"  {message['role']}: {message['content']}")
            verdict = _verdict(answered.is_right, answered.question.answer, colour)
            yield f"  {question['content']}"
            yield f"      before  {_short(answered.before)}"
            yield f"      after   {_short(answered.after)}   ({verdict})"
    yield ""
    yield f"{'Right answers':32}{'before':>10}{'after':>12}"
    for name, tally in (("asked in the conversations", result.asked), ("only read, never asked", result.held_out)):
        yield _tally_line(name, tally)
    yield ""
    yield "Sums that it has never seen, before and after reinforcement learning:"
    for each in result.shown_sums:
        yield f"  {each.question}"
        yield f"      before  {_short(each.before)}   ({_verdict(each.was_right, each.answer, colour)})"
        yield f"      after   {_short(each.after)}   ({_verdict(each.is_right, each.answer, colour)})"
    yield ""
    yield f"{'Right results':32}{'before':>10}{'after':>12}"
    yield _tally_line("sums never seen", result.sums)


def _tally_line(name: str, tally: Tally) -> str:
    before, after = (f"{right}/{tally.of}" for right in (tally.before, tally.after))
    return f"{name:32}{before:>10}{after:>12}"


def _verdict(right: bool, answer: str, colour: bool) -> str:
    """`right`, or `wrong:` and the right answer, in green or red."""
    verdict = "right" if right else f"wrong: {answer}"
    return f"\033[{32 if right else 31}m{verdict}\033[0m" if colour else verdict


def _short(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= 68 else f"{line[:65]}..."


def next_lines(place: Place, danlu: str) -> Iterator[str]:
    """Yields the places of files, and commands that work as they stand."""
    sft, pretrain, grpo = place.run("sft"), place.run("pretrain"), place.run("grpo")
    files = {
        place.report: "curves of reinforcement learning, its best and its worst answers",
        place.recipe("sft"): "a recipe, to read and edit; pretrain.yaml, sums.yaml and grpo.yaml next to it",
        place.conversations: "what it was taught; documents.jsonl next to it is what it read",
        sft / "metrics.jsonl": "loss and speed of every step (tensorboard/ next to it)",
        sft / "model": "the result in Hugging Face form: transformers loads it",
        place.answers: "all of the above answers",
    }
    yield "Where things are"
    width = max(len(str(path)) for path in files)
    yield from (printable(f"  {path!s:{width}}  {about}") for path, about in files.items())
    yield ""
    yield "What to try next"
    again = place.folder / "again"
    commands = {
        ("chat", sft): "talk with it",
        ("generate", grpo, "--chat", "--prompt", "What is 38 plus 57?"): "let it add",
        ("generate", sft, "--chat", "--prompt", "Where does the owl live?"): "one answer",
        ("generate", pretrain, "--prompt", "One morning,"): "how the pretrained model goes on",
        ("preview", place.recipe("sft")): "every token: trained or only read, and why",
        ("train", place.recipe("sft"), f"output={again}", "optimizer.learning_rate=3e-4"): "tune it another way",
        ("eval", sft, "--data", f"{place.conversations}#200"): "loss and perplexity",
        ("recipes", "copy", "sft"): "a commented recipe for your own data",
    }
    yield from _command_lines(commands, danlu)


def data_lines(place: Place, danlu: str) -> Iterator[str]:
    """Yields commands that need the data alone."""
    yield "What to try next"
    commands = {
        ("demo", "--output", place.folder): "train all four recipes, and compare",
        ("preview", place.recipe("pretrain")): "tokens and packs",
        ("recipes", "copy", "chain"): "all stages in one recipe; its files are those of a folder called demo",
    }
    yield from _command_lines(commands, danlu)


def _command_lines(commands: Mapping[tuple[str | Path, ...], str], danlu: str) -> Iterator[str]:
    """Yields commands as the shell takes them, each with its description."""
    lines = [(shlex.join([danlu, *map(str, arguments)]), about) for arguments, about in commands.items()]
    width = max(len(line) for line, _ in lines if len(line) < 70)
    yield from (printable(f"  {line:{width}}  {about}") for line, about in lines)


def program() -> str:
    """The command that calls danlu from here: its name where the shell finds it, else its path."""
    started = Path(sys.argv[0])
    if started.name != "danlu":  # python -m danlu, or a test
        return "danlu"
    on_path = shutil.which("danlu")
    return "danlu" if on_path is not None and Path(on_path).resolve() == started.resolve() else str(started)
