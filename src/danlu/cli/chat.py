"""`danlu chat`: talk with a model in a terminal, or line by line over a pipe."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from danlu.cli.generate import (
    ChatTemplate,
    Device,
    Dtype,
    MaxNewTokens,
    MinP,
    ModelArgument,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    check_flags,
    sampling_flags,
    sampling_options,
    whole_characters,
    write_any_character,
)
from danlu.errors import DanluError, DataError

if TYPE_CHECKING:
    from danlu.rollout.chat import Conversation

COMMANDS = {
    "/reset": "forget the conversation (the system prompt stays)",
    "/system": "TEXT  replace the system prompt, or without TEXT remove it; starts anew",
    "/undo": "take the last turn back",
    "/exit": "leave; so does Ctrl-D",
    "/help": "this list",
}


def chat(
    model: ModelArgument,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    stop: Stop = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    chat_template: ChatTemplate = None,
) -> None:
    """Talk with a model. Ctrl-C interrupts an answer, Ctrl-D or /exit leaves, /help lists the commands.

    When stdin is not a terminal, each line is a user's turn, and the answers alone go to stdout.
    """
    asked = sampling_flags(temperature, top_p, top_k, min_p, repetition_penalty)
    precision = check_flags(asked, seed, dtype, device, stop or [])
    # numpy, a tenth of a second, and below torch, more than one: for this verb, not for its --help.
    from danlu.rollout.request import context_length, find_model

    folder = find_model(model)
    options = sampling_options(folder, asked, seed)
    from danlu.rollout.chat import Conversation
    from danlu.rollout.generate import Stopping
    from danlu.rollout.opening import open_model, open_wording

    wording = open_wording(folder, chat_template)
    wording.require_chat_template()
    opened = open_model(folder, wording, precision=precision, device=device)
    silent_stops, stop_strings = wording.split_stops(stop or [])
    conversation = Conversation(
        opened.model,
        wording.encode_chat,
        wording.decode,
        options,
        Stopping(max_new_tokens, context_length(opened.model.config), opened.stop_ids | silent_stops),
        stop_strings=stop_strings,
        system=system,
    )
    write_any_character()
    if sys.stdin.isatty():
        print(f"{folder}  (/help lists the commands, Ctrl-D leaves)", file=sys.stderr)
        talk(conversation)
    else:
        listen(conversation)


def listen(conversation: Conversation) -> None:
    """Reads turns from a pipe until it ends. Raises DataError for bytes that are no text."""
    number = 0
    try:
        for number, line in enumerate(sys.stdin, start=1):
            if not obey(conversation, whole_characters(line.strip(), f"stdin, line {number}"), strict=False):
                return
    except UnicodeDecodeError:
        raise DataError(f"stdin, line {number + 1} or one soon after it: not UTF-8 text; convert it first") from None
    except KeyboardInterrupt:
        print()  # what was written of an answer ends its line
        raise


def talk(conversation: Conversation) -> None:
    """Reads turns from the terminal until the user leaves."""
    with suppress(ImportError):  # Python can be built without it, and input() works without
        import readline  # noqa: F401  # line editing and history
    while True:
        try:
            line = input("\n> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)", file=sys.stderr)
            continue
        try:
            if not obey(conversation, whole_characters(line.strip(), "this line"), strict=True):
                return
        except KeyboardInterrupt:
            print("\n(interrupted; what was said so far is kept)", file=sys.stderr)
        except DanluError as error:  # the user can go on
            print(f"error: {error}. Say something else; /undo takes the last turn back, /reset all", file=sys.stderr)


def obey(conversation: Conversation, line: str, *, strict: bool) -> bool:
    """One line: a command or a turn. False when it asks to leave.

    strict: an unknown /word is a mistake, not a turn (a person typed it; a pipe may mean it).
    """
    command, _, rest = line.partition(" ")
    match command:
        case "":
            return True
        case "/exit":
            return False
        case "/help":
            print("\n".join(f"{name:8} {about}" for name, about in COMMANDS.items()), file=sys.stderr)
        case "/reset":
            conversation.reset()
        case "/undo":
            if not conversation.undo():
                print("nothing to take back", file=sys.stderr)
        case "/system":
            conversation.reset()
            conversation.system = rest.strip() or None
        case _ if strict and command.startswith("/"):
            print(f"{command}: no such command; there are {', '.join(COMMANDS)}", file=sys.stderr)
        case _:
            answer(conversation, line)
    return True


def answer(conversation: Conversation, turn: str) -> None:
    """Asks, and shows the answer as it is written; says so when it was cut."""

    def show(piece: str) -> None:
        print(piece, end="", flush=True)

    completion = conversation.ask(turn, show)
    print(flush=True)
    if completion.finish == "length":
        print("(cut: --max-new-tokens)", file=sys.stderr)
    elif completion.finish == "context":
        print("(cut: the model's context is full; /undo or /reset makes room)", file=sys.stderr)
