"""The `danlu` command: finds the verb, imports only that one, and turns errors into one line and an exit code."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from danlu import __version__
from danlu.core.errors import DanluError, InternalError, RecipeError, ResourceError, Stopped
from danlu.core.garbage_collection import collection_paused, skip_collection_at_exit
from danlu.core.terminal import drop_failed_writes, echo, print_status, printable, wrap_to_terminal
from danlu.registry import SUGGESTIONS, VERBS, Verb, resolve

BROKEN_PIPE = 128 + 13  # what a shell reports for a program that SIGPIPE ended
INTERRUPTED = 128 + 2

# The base of every "wrong option" error. It has no public name that old typer (with click) and new (without) share.
UsageProblem: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

COMPLETE = "_DANLU_COMPLETE"
"""The environment variable with which a shell's script asks for completions: the name of the shell."""

WORKING_VERBS = ("train", "study", "verify", "demo")
"""Verbs that do not end when nobody reads stdout any more: their output is about the work, and not the work itself."""

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
HEADINGS = ("Begin", "Train", "Use", "Look")  # of the help page, in order; each verb names its own


def show_script(shell: str | None) -> None:
    if shell is not None:
        from danlu.cli.completion import script

        echo(script(shell), end="")
        raise typer.Exit


def install_script(shell: str | None) -> None:
    if shell is not None:
        from danlu.cli.completion import install

        echo(install(shell))
        raise typer.Exit


def show_version(wanted: bool) -> None:
    if wanted:
        echo(f"danlu {__version__}")
        raise typer.Exit


class Verbs(TyperGroup):
    """The group of all verbs, with a help page of its own: typer's imports a Markdown parser, twice the time."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        # Here because no other command line needs rich, and it is a third of the time that this one takes.
        from rich.console import Console
        from rich.table import Table

        console = Console(highlight=False)
        console.print(f"[bold]danlu {__version__}[/bold]  {danlu.__doc__}\n")
        console.print("Usage: danlu [cyan]VERB[/cyan] ...    (danlu [cyan]VERB[/cyan] --help says more)\n")
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column(style="cyan", no_wrap=True)
        for heading in HEADINGS:
            verbs = [(name, verb.about) for name, verb in VERBS.items() if verb.heading == heading]
            for row, (name, about) in enumerate(verbs):
                table.add_row("" if row else heading, name, about)
        console.print(table)
        console.print(
            "\nOptions without a verb: [cyan]--version[/cyan]; [cyan]--install-completion SHELL[/cyan], so that"
        )
        console.print("Tab completes verbs, options and keys of a recipe in bash, zsh or fish;")
        console.print("[cyan]--show-completion SHELL[/cyan] prints what that would install.\n")
        console.print("Begin with [cyan]danlu demo[/cyan], or [cyan]danlu recipes copy sft[/cyan].")


app = typer.Typer(name="danlu", cls=Verbs, context_settings=HELP_OPTIONS)


@app.callback()
def danlu(
    version: Annotated[bool, typer.Option("--version", "-V", is_eager=True, callback=show_version)] = False,
    show_completion: Annotated[
        str | None,
        typer.Option(
            metavar="SHELL", is_eager=True, callback=show_script, help="Print the script that completes danlu's words."
        ),
    ] = None,
    install_completion: Annotated[
        str | None,
        typer.Option(metavar="SHELL", is_eager=True, callback=install_script, help="Write it where SHELL reads it."),
    ] = None,
) -> None:
    """丹炉 trains large language models from one recipe, on a laptop CPU or a cluster."""


class LazyVerb(TyperCommand):
    """A verb's placeholder in `danlu --help`; the verb's module is imported when it is used."""

    def __init__(self, name: str, verb: Verb) -> None:
        super().__init__(name, help=verb.about)
        self.target = verb.target

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with collection_paused():  # the verb's module is imported, which the recipe's types come with
            return command(self.name or "", self.target).make_context(info_name, args, parent=parent, **extra)


def command(name: str, target: str) -> Any:
    """The command behind a verb: its function, or the sub-app that groups its own verbs."""
    function_or_app = resolve(target)
    if isinstance(function_or_app, typer.Typer):
        return typer.main.get_command(function_or_app)
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    single.command(name, context_settings=HELP_OPTIONS)(function_or_app)
    return typer.main.get_command(single)


def group() -> TyperGroup:
    """The whole command, with a stand-in for each verb."""
    whole = typer.main.get_group(app)
    for name, verb in VERBS.items():
        whole.add_command(LazyVerb(name, verb))
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0, that of the error (see `danlu.core.errors`), or 2 for misuse.

    Args: `arguments` without the program's name; those of the process by default.
    """
    if sys.platform == "win32":
        return _report(
            "danlu runs on Linux and macOS: it needs their file locks, signals and process groups. On Windows, run it "
            "in WSL 2 (https://learn.microsoft.com/windows/wsl)",
            code=ResourceError.exit_code,
        )
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    skip_collection_at_exit()
    drop_failed_writes("stderr", *(["stdout"] if given[0] in WORKING_VERBS else []))
    try:
        if COMPLETE in os.environ:  # the shell asks what could be typed next
            from danlu.cli.completion import answer

            echo(answer(os.environ), end="")
            return 0
        with collection_paused():
            whole = group()
            context = whole.make_context("danlu", given)
        with context:
            whole.invoke(context)
        sys.stdout.flush()
    except typer.Exit as exit_:
        return exit_.exit_code
    except RecipeError as error:
        return _report(*error.problems, code=error.exit_code)
    except (InternalError, ResourceError) as error:
        from danlu.cli.crash import without_traceback  # here: see below

        return _report(without_traceback(str(error), given), code=error.exit_code)
    except DanluError as error:
        return _report(str(error), code=error.exit_code)
    except UsageProblem as error:
        return _report(*_usage(error), code=RecipeError.exit_code)
    except Stopped as stopped:
        print_status(str(stopped))
        return stopped.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print_status("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Python would complain when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        # Here: a command line that ends well does not pay for it.
        from danlu.cli.crash import crash_message

        message, code = crash_message(error, given)
        return _report(message, code=code)
    return 0


def _usage(error: Any) -> list[str]:
    """``No such option: --stpes. See `danlu train --help` ``; nothing when the help itself has just been shown."""
    said = error.format_message()
    context = getattr(error, "ctx", None)
    unknown = re.match(r"No such command '([^']*)'\.", said)
    if unknown is not None and context is not None and context.parent is None and unknown[1] in SUGGESTIONS:
        said = f"{unknown[0]} Use {SUGGESTIONS[unknown[1]]}"
    missing = getattr(error, "param", None)
    if context is not None and said.startswith("Missing argument") and missing is not None and missing.nargs == -1:
        # What follows takes the last of too few words, so it is rather that one that is missing.
        arguments = [each for each in context.command.params if each.param_type_name == "argument"]
        said = f"Missing argument: {context.command_path} {' '.join(each.metavar or '' for each in arguments)}"
    end = "" if said.endswith((".", "?")) else "."
    flag = re.match(r"No such option:? '?--([\w.-]+)", said)
    if flag is not None and context is not None:
        from danlu.cli.unknown_flags import advice  # here: no other command line needs the keys of recipes

        arguments = [each.name or "" for each in context.command.params if each.param_type_name == "argument"]
        takes_overrides = "overrides" in arguments
        meant = advice(flag[1], context.command_path, takes_overrides=takes_overrides, arguments=arguments)
        if meant is not None:
            said, end = f"No such option: --{flag[1]}. {meant}", "."
    return [f"{said}{end} See `{context.command_path if context is not None else 'danlu'} --help`"] if said else []


def _report(*problems: str, code: int) -> int:
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    label = "\033[1;31merror:\033[0m" if colour else "error:"
    for problem in problems:
        said = wrap_to_terminal(f"error: {printable(problem)}", sys.stderr)
        sys.stderr.write(f"{label}{said.removeprefix('error:')}\n")
    sys.stderr.flush()
    return code
