"""`danlu explain`: the meaning of a recipe's key, and the origin of its value."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from danlu.core.errors import RecipeError
from danlu.core.terminal import printable
from danlu.recipe import Chain, Recipe, load_recipe_or_chain
from danlu.recipe.chain import CHAIN_KEYS, STAGES
from danlu.recipe.explanation import Explanation
from danlu.recipe.explanation import explain as look_up
from danlu.recipe.field_docs import field_docs
from danlu.recipe.loading import LoadedSection
from danlu.recipe.messages import first_sentence


def explain(
    key: Annotated[
        str | None,
        typer.Argument(help="Such as data.max_length or optimizer, or words to look for; all sections without."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value …, with --recipe; or further words.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="Also say the value there, and where it came from.")] = None,
) -> None:
    """Explain a KEY of the recipe: type, default, allowed values, and where its value came from.

    Words that are no key are looked for in keys, in those of other tools, in the documentation and in messages.
    """
    if overrides and recipe is None:
        if any("=" in word for word in overrides):
            raise typer.BadParameter("overrides need --recipe")
        _explain_query([str(key), *overrides])
        return
    loaded: LoadedSection | None = None
    if recipe is not None:
        read = load_recipe_or_chain(recipe, overrides or ())
        key, loaded = _in_stage(read, key) if isinstance(read, Chain) else (key, read)
    console = Console(highlight=False, soft_wrap=False)
    if key is None:
        rows = [(name, first_sentence(doc)) for name, doc in field_docs(Recipe).items()]
        console.print(_table([*rows, (STAGES, first_sentence(CHAIN_KEYS[STAGES]))]))
        console.print("\n[dim]danlu explain KEY says more.[/dim]")
        return
    try:
        explanation = look_up(key, loaded)
    except RecipeError as unknown:
        if loaded is not None or "." in key:  # a key was meant, and no words
            raise
        _search(key, unknown)
    else:
        _show(console, explanation)


def _explain_query(query: list[str]) -> None:
    """Explains the key that these words name, here or in another tool (flash attention), and searches for them."""
    try:
        explanation = look_up("_".join(query).lower())
    except RecipeError as unknown:
        _search(" ".join(query), unknown if _knows(unknown) else None)
    else:
        _show(Console(highlight=False, soft_wrap=False), explanation)


def _knows(unknown: RecipeError) -> bool:
    """Whether an error for a key that no recipe has says what danlu has for it."""
    return not str(unknown).startswith("no recipe has")


def _search(query: str, unknown: RecipeError | None) -> None:
    """Shows all that is about some words. Raises `unknown`, or a RecipeError of its own, where nothing is."""
    from danlu.recipe import search  # here: a key that is known is looked up without it

    sections = {
        "keys of the recipe": search.search_keys(query),
        "keys of other tools": search.search_tools(query),
        "documentation": search.search_pages(query),
        "messages": search.search_messages(query),
    }
    if not any(sections.values()):
        raise unknown or RecipeError(f"nothing is about {query!r}. `danlu explain` lists the keys of a recipe")
    console = Console(highlight=False, soft_wrap=False)
    if unknown is not None and _knows(unknown):
        console.print(Text(printable(str(unknown))), end="\n\n")
    for title, matches in sections.items():
        if matches:
            console.print(Text(title, style="bold"))
            console.print(_table([(f"  {match.name}", match.about) for match in matches]))
            console.print()
    console.print("[dim]danlu explain KEY says more of a key.[/dim]")


def _in_stage(chain: Chain, key: str | None) -> tuple[str | None, LoadedSection | None]:
    """The key without the stage's name, and that stage's recipe; a key of the chain itself has none.

    Raises RecipeError where it is not said which stage is meant.
    """
    if key is None or key in CHAIN_KEYS:
        return key, None
    name, _, rest = key.partition(".")
    for stage in chain.stages:
        if stage.name == name and rest:
            return rest, stage.loaded
    names = ", ".join(stage.name for stage in chain.stages)
    raise RecipeError(f"{key!r}: in a chain say of which stage, as in {chain.stages[0].name}.{key}. Stages: {names}")


def _show(console: Console, explanation: Explanation) -> None:
    """Shows one key in full: its meaning, values, default and children."""
    console.print(Text(printable(explanation.key), style="bold"), Text(explanation.about), sep="\n", end="\n\n")
    rows = [("takes", explanation.takes)]
    if explanation.short is not None:
        rows.append(("short form", f"a bare value is its '{explanation.short}'"))
    for variant, default in explanation.defaults.items():
        rows.append(("default" if not variant else f"default, {variant}", default))
    if explanation.value is not None:
        rows += [("here", explanation.value), ("from", explanation.origin or "default")]
    console.print(_table(rows))
    if explanation.children:
        console.print()
        console.print(_table([(f"  {name}", about) for name, about in explanation.children]))


def _table(rows: list[tuple[str, str]]) -> Table:
    """Two columns: a name, and a text that is wrapped."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, text in rows:
        table.add_row(Text(name), Text(printable(text)))
    return table
