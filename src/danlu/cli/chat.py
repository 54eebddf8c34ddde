"""`danlu chat`: talk with a model in a terminal, or line by line over a pipe."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
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
from danlu.core.errors import DanluError, DataError
from danlu.core.terminal import echo, escape_unencodable, print_status, print_status_early

if TYPE_CHECKING:
    from danlu.inference.chat import Conversation
    from danlu.inference.chat_adapters import ChatAdapters

COMMANDS = {
    "/reset": "forget the conversation (the system prompt stays)",
    "/system": "TEXT  replace the system prompt, or without TEXT remove it; starts again",
    "/undo": "take the last turn back",
    "/adapter": "NAME  go on with another adapter, or with none; without NAME list them",
    "/exit": "leave; so does Ctrl-D",
    "/help": "this list",
}


@takes_flag_groups
def chat(
    model: ModelArgument,
    *,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: MaxNewTokens = 1024,
    sampling: SamplingFlags,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="An adapter folder or run to switch to with /adapter; may be given several times."),
    ] = None,
    loading: ModelFlags,
    engine: EngineFlags,
) -> None:
    """Talk with a model. Ctrl-C interrupts an answer, Ctrl-D or /exit leaves, /help lists the commands.

    Adapters share one base in memory; the first one speaks first, and /adapter NAME switches.

    When stdin is not a terminal, each line is a user's turn, and the answers alone go to stdout.
    """
    loading.check(sampling.given, sampling.seed, sampling.stops)
    # numpy, a tenth of a second, and below torch, more than one: for this verb, not for its --help.
    from danlu.inference.resolve_model import resolve_model

    resolved = resolve_model(model, loading.base, adapter or [])
    print_status_early(f"reading {resolved.given_path}")
    context = resolved.config.context_length
    options = sampling.options(resolved)
    engine_options = engine.options(resolved)
    from danlu.inference.chat import Conversation
    from danlu.inference.chat_adapters import ChatAdapters
    from danlu.inference.load_engine import engine_of

    chat_tokenizer = loading.load_tokenizer(resolved)
    chat_tokenizer.require_chat_template()
    loaded = loading.load(resolved, chat_tokenizer)
    chat_adapters = ChatAdapters(resolved, loaded, *loading.template)
    active = chat_adapters.switch(chat_adapters.active_name)
    chat_format = active.chat_format(sampling.stops, max_new_tokens, context)
    conversation = Conversation(engine_of(loaded, engine_options), chat_format, options, system=system)
    session = Session(conversation, chat_adapters, sampling.stops, max_new_tokens, context)
    escape_unencodable()
    if sys.stdin.isatty():
        speaks = f", adapter {chat_adapters.active_name}" if chat_adapters.adapters else ""
        print_status(f"{resolved.folder}{speaks}  (/help lists the commands, Ctrl-D leaves)")
        chat_in_terminal(session)
    else:
        chat_over_pipe(session)


@dataclass
class Session:
    """A conversation, the adapters that it can be continued with, and the limits of its answers."""

    conversation: Conversation
    chat_adapters: ChatAdapters
    stops: list[str]
    max_new_tokens: int
    context: int

    def switch(self, name: str) -> None:
        """Continues the conversation with another adapter. Raises DataError if there is none of that name."""
        if name == self.chat_adapters.active_name:
            return
        active = self.chat_adapters.switch(name)
        self.conversation.adapter_changed(active.chat_format(self.stops, self.max_new_tokens, self.context))


def chat_over_pipe(session: Session) -> None:
    """Reads one turn per line of stdin until it ends. Raises DataError for bytes that are no text."""
    number = 0
    try:
        for number, line in enumerate(sys.stdin, start=1):
            if not handle_line(session, check_utf8(line.strip(), f"stdin, line {number}"), strict=False):
                return
    except UnicodeDecodeError:
        raise DataError(f"stdin, line {number + 1} or one soon after it: not UTF-8 text; convert it first") from None
    except KeyboardInterrupt:
        echo("")  # ends the line of the answer so far
        raise


def chat_in_terminal(session: Session) -> None:
    """Reads turns from the terminal until the user leaves."""
    with suppress(ImportError):  # Python can be built without it, and input() works without
        import readline  # noqa: F401  # line editing and history
    while True:
        try:
            line = input("\n> ")
        except EOFError:
            echo("")
            return
        except KeyboardInterrupt:
            print_status("\n(Ctrl-D or /exit leaves)")
            continue
        try:
            if not handle_line(session, check_utf8(line.strip(), "this line"), strict=True):
                return
        except KeyboardInterrupt:
            print_status("\n(interrupted; what was said so far is kept)")
        except DanluError as error:  # the user can go on
            print_status(f"error: {error}. Say something else; /undo takes the last turn back, /reset all")


def handle_line(session: Session, line: str, *, strict: bool) -> bool:
    """Carries out one line, a command or a turn. Returns False for the command to leave.

    strict: whether an unknown /word is a mistake, as of a person who types, or a turn, as in a pipe.
    """
    conversation = session.conversation
    command, _, rest = line.partition(" ")
    match command:
        case "":
            return True
        case "/exit":
            return False
        case "/help":
            print_status("\n".join(f"{name:9} {about}" for name, about in COMMANDS.items()))
        case "/reset":
            conversation.reset()
        case "/undo":
            if not conversation.undo():
                print_status("nothing to take back")
        case "/system":
            conversation.reset()
            conversation.system = rest.strip() or None
        case "/adapter" if rest.strip():
            try:
                session.switch(rest.strip())
                print_status(adapters_line(session.chat_adapters))
            except DataError as error:
                if not strict:
                    raise
                print_status(f"error: {error}")
        case "/adapter":
            print_status(adapters_line(session.chat_adapters))
        case _ if strict and command.startswith("/"):
            print_status(f"{command}: no such command; there are {', '.join(COMMANDS)}")
        case _:
            print_answer(conversation, line)
    return True


def adapters_line(chat_adapters: ChatAdapters) -> str:
    """The names of all adapters, the active one in brackets."""
    if not chat_adapters.adapters:
        return "no adapters; `danlu chat MODEL --adapter PATH` brings some"
    return "  ".join(
        f"[{name}]" if name == chat_adapters.active_name else name for name in (*chat_adapters.adapters, "none")
    )


def print_answer(conversation: Conversation, turn: str) -> None:
    """Asks a question and prints the answer as it is generated, with a remark on stderr where it was cut."""
    completion = conversation.ask(turn, lambda text: echo(text, end=""))
    echo("")
    if completion.finish == "length":
        print_status("(cut: --max-new-tokens)")
    elif completion.finish == "context":
        print_status("(cut: the model's context is full; /undo or /reset makes room)")
