"""`danlu plan`: memory, seconds and price of a recipe's step before anything runs, or next to a run's own numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from danlu import recipe as recipes
from danlu.core.errors import CheckpointError, RecipeError, ResourceError
from danlu.core.garbage_collection import collection_paused
from danlu.core.run_files import PLAN
from danlu.core.terminal import echo, print_status
from danlu.recipe import resolved_yaml

if TYPE_CHECKING:
    from danlu.planning.cluster import Cluster
    from danlu.planning.lengths import Lengths
    from danlu.planning.rollout_lengths import RolloutLengths


def plan(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file; or the folder of a run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values that replace the file's: section.key=value.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="CLUSTER", help="16x8xH100-80G (nodes, cards, kind) or a YAML file; else this machine."),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Lengths of documents or answers: a number a line, or rollouts.jsonl."),
    ] = None,
    fits: Annotated[
        str | None,
        typer.Option(metavar="MEMORY", help="Find the largest batch, length and model for cards of so much: 24GB."),
    ] = None,
    neighbours: Annotated[
        bool, typer.Option("--neighbours", help="Also plan the layouts with one degree doubled or halved.")
    ] = False,
    search: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Find the N fastest layouts that fit, of all that there are.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --search: write the recipe in the fastest layout.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, as plan.json, for scripts.")] = False,
) -> None:
    """Say what a step of `danlu train` takes: memory by part, seconds by operation, hours and price; nothing is run.

    Where it does not fit, single changes that make it fit. Of a run's folder, what was expected next to what it took.
    """
    if recipe.is_dir():
        options: dict[str, object] = {"--on": on, "--lengths": lengths, "--fits": fits, "--search": search}
        options |= {"--write": write, "--neighbours": neighbours or None}
        _refuse_with_run({**options, "key=value": overrides or None})
        _show_run(recipe, as_json=as_json)
        return
    _refuse_together(fits=fits, search=search, write=write, lengths=lengths, neighbours=neighbours)
    with collection_paused():
        loaded = recipes.load(recipe, overrides or [])
        # Here, not above: a wrong recipe is refused before the planner is imported. Nothing here loads torch.
        from danlu.planning.cluster import Cluster
        from danlu.planning.target import Target
        from danlu.run.planned_step import planned_step

    for note in loaded.notes:
        print_status(note)
    if fits is not None:
        with loaded.naming_places():
            _show_limits(
                loaded.recipe, recipe.name, _memory(fits), None if on is None else Cluster.of(on), as_json=as_json
            )
        return
    target = None if on is None else Target(Cluster.of(on))
    if search is not None:
        from danlu.run.plan_search import fastest_layouts

        with loaded.naming_places(), collection_paused():
            layouts = fastest_layouts(loaded.recipe, search, target, *_lengths(loaded.recipe, lengths))
        _show_layouts(layouts, recipe.name, as_json=as_json)
        if write is not None:
            best = recipes.load(recipe, [*(overrides or []), *layouts[0]["settings"]]).recipe
            _write(write, resolved_yaml(best))
        return
    with loaded.naming_places(), collection_paused():
        planned = planned_step(loaded.recipe, target, *_lengths(loaded.recipe, lengths))
    values = planned.values
    more: dict[str, list[dict[str, Any]]] = {}
    if values["fits"] is False or neighbours:
        from danlu.run.plan_changes import lighter_plans, neighbouring_layouts

        def load(change: str) -> recipes.Recipe:
            return recipes.load(recipe, [*(overrides or []), change]).recipe

        if values["fits"] is False:
            more["changes"] = lighter_plans(planned, load)
        if neighbours:
            more["neighbours"] = neighbouring_layouts(planned, load)
    if as_json:
        echo(json.dumps({**values, **more}, allow_nan=False))
        return
    _print(values, recipe.name, more)


def _show_layouts(layouts: list[dict[str, Any]], name: str, *, as_json: bool) -> None:
    from danlu.report.plan_text import layout_lines

    if as_json:
        echo(json.dumps({"layouts": layouts}, allow_nan=False))
        return
    for line in layout_lines(layouts, name):
        echo(line)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"{file}: cannot be written: {error.strerror}") from None
    print_status(f"written to {file}")


def _memory(text: str) -> int:
    from danlu.planning.cluster import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise RecipeError(f"--fits: {error}") from None


def _show_limits(
    recipe: recipes.Recipe, name: str, memory_bytes: int, cluster: Cluster | None, *, as_json: bool
) -> None:
    from danlu.report.plan_text import limit_lines
    from danlu.run.plan_limits import limits

    values = limits(recipe, memory_bytes, cluster)
    if as_json:
        echo(json.dumps(values, allow_nan=False))
        return
    for line in limit_lines(values, name):
        echo(line)


def _lengths(recipe: recipes.Recipe, file: Path | None) -> tuple[Lengths | None, RolloutLengths | None]:
    """The lengths of documents, or of the answers that a recipe draws, as a file has them."""
    from danlu.planning.lengths import read_lengths, read_row_lengths
    from danlu.planning.rollout_lengths import RolloutLengths, draws_answers

    if file is None:
        return None, None
    if draws_answers(recipe):
        return None, RolloutLengths.of_file(recipe, file)
    if recipe.row_type is not None:
        return read_row_lengths(file, shared=recipe.data.share_stem), None
    return read_lengths(file), None


def _print(values: Mapping[str, Any], name: str, more: Mapping[str, list[dict[str, Any]]]) -> None:
    from danlu.report.plan_text import change_lines, neighbour_lines, plan_lines

    def lines() -> Iterator[str]:
        yield from plan_lines(values, name)
        if "changes" in more:
            yield ""
            yield from change_lines(more["changes"])
        if "neighbours" in more:
            yield ""
            yield from neighbour_lines(more["neighbours"], values)

    for line in lines():
        echo(line)


def _refuse_together(
    *, fits: str | None, search: int | None, write: Path | None, lengths: Path | None, neighbours: bool
) -> None:
    """Raises RecipeError for options of which one would be ignored, and for a file that cannot be written later."""
    if fits is not None:
        others = {"--search": search, "--write": write, "--lengths": lengths, "--neighbours": neighbours or None}
        if given := [option for option, value in others.items() if value is not None]:
            raise RecipeError(
                f"{', '.join(given)}: not with --fits, which looks for the largest that fits, of full packs"
            )
    if search is not None and neighbours:
        raise RecipeError("--neighbours: not with --search, which plans all layouts. Leave one of them out")
    if write is None:
        return
    if search is None:
        raise RecipeError(
            "--write: writes the recipe in the layout that --search finds. Add --search 1, or leave it out"
        )
    if write.exists():
        raise RecipeError(f"--write {write}: exists already. Name another file")
    if not write.absolute().parent.is_dir():
        raise RecipeError(
            f"--write {write}: there is no folder {write.absolute().parent}. Create it, or name another file"
        )


def _refuse_with_run(options: Mapping[str, object]) -> None:
    if given := [option for option, value in options.items() if value is not None]:
        raise RecipeError(f"{', '.join(given)}: not with the folder of a run, which has its plan. Name a recipe")


def _show_run(folder: Path, *, as_json: bool) -> None:
    """Prints the plan of a run next to what its steps took, as far as it has got. Raises DataError for a torn plan."""
    from danlu.report.plan_comparison import comparison_lines, plan_of_record, read_plan
    from danlu.report.plan_text import plan_lines
    from danlu.report.run_record import read_record

    plan = read_plan(folder)
    if plan is None:
        raise CheckpointError(
            f"{folder}: no run with a plan ({PLAN}) is in this folder; runs of danlu write one when they start. Name a "
            "recipe to plan it"
        )
    comparison = plan_of_record(plan, read_record(folder))
    if as_json:
        echo(json.dumps({"plan": plan, "measured": comparison}, allow_nan=False))
        return
    for line in plan_lines(plan, folder.resolve().name):
        echo(line)
    echo("\n== expected and measured, by part")
    for line in comparison_lines(comparison):
        echo(f"  {line}")
