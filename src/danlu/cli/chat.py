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
)
from danlu.errors import DanluError

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
    check_flags(asked, seed, dtype, device, stop or [])
    # torch takes a second to import, which `danlu chat --help` should not.
    from danlu.rollout.chat import Conversation
    from danlu.rollout.generate import Stopping, context_length
    from danlu.rollout.opening import find_model, open_model, open_wording

    folder = find_model(model)
    options = sampling_options(folder, asked, seed)
    wording = open_wording(folder, chat_template)
    wording.require_chat_template()
    opened = open_model(folder, wording, precision=dtype, device=device)
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
    if sys.stdin.isatty():
        print(f"{folder}  (/help lists the commands, Ctrl-D leaves)", file=sys.stderr)
        talk(conversation)
    else:
        for line in sys.stdin:
            if not obey(conversation, line.strip(), strict=False):
                break


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
            if not obey(conversation, line.strip(), strict=True):
                return
        except KeyboardInterrupt:
            print("\n(interrupted; what was said so far is kept)", file=sys.stderr)
        except DanluError as error:  # the user can go on: /undo, /reset, or say something else
            print(f"error: {error}. /undo takes the last turn back, /reset starts over", file=sys.stderr)


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
