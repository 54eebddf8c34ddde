"""`danlu preview`: the training data of a recipe, before anything is trained."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from danlu import recipe as recipes
from danlu.core.errors import DataError, RecipeError
from danlu.core.terminal import echo, escape_unencodable, print_status, print_status_early
from danlu.recipe import Recipe
from danlu.recipe.rules import language_stage
from danlu.recipe.sections import Model

if TYPE_CHECKING:
    from danlu.data.dataset_summary import DatasetSummary
    from danlu.data.prepare import DatasetSpec
    from danlu.data.preview import PreviewRow
    from danlu.data.tokenizer_info import TokenizerInfo
    from danlu.report.preview_text import PlainWriter


def preview(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values that replace the file's: section.key=value.")
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows to show of each source, from its front.")] = 2,
    row: Annotated[
        list[str] | None,
        typer.Option(help="Show this row instead: alpaca.json:17 as in messages, or 17 for its number. Repeatable."),
    ] = None,
    packs: Annotated[int, typer.Option(min=0, help="Packed sequences to show, from where training begins.")] = 3,
    tokens: Annotated[
        int, typer.Option(min=0, help="Tokens to show of a sample, beginning and end; 0 for all, as --json has.")
    ] = 512,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a page; only an earlier preview is overwritten.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object with ids, texts, weights and reasons, for scripts.")
    ] = False,
) -> None:
    """See every token with its reason, the packed sequences and the totals, of what `danlu train` would train on."""
    loaded = recipes.load(recipe, overrides or [])
    print_status_early(f"reading the rows of {recipe}")
    # Here, not above: a wrong recipe is refused before numpy is imported. Rows need neither torch nor a tokenizer.
    from danlu.report.preview_page import PAGE

    if html is not None:
        PAGE.check_target(html)
    for note in loaded.notes:
        print_status(note)
    escape_unencodable()  # rows may hold what this terminal's encoding cannot write
    if loaded.recipe.stage == "rl" and html is not None:
        raise RecipeError("--html: a page shows what is trained on, and stage rl draws it. Use --json, or leave it out")
    with loaded.naming_places():
        _preview(loaded.recipe, recipe.name, rows, row or (), packs, tokens or None, html, as_json=as_json)


def _preview(
    recipe: Recipe,
    name: str,
    rows: int,
    places: Sequence[str],
    packs: int,
    max_tokens: int | None,
    html: Path | None,
    *,
    as_json: bool,
) -> None:
    """Shows rows, then packed sequences and totals, or the fate of all prompts; also of data that a run refuses, which
    is raised at the end.

    name: of the recipe's file, for the page.
    """
    from danlu.assembly.recipe_adapters import check_without_weights, max_sample_length
    from danlu.data.preview import render_examples
    from danlu.report import preview_json
    from danlu.report.preview_page import PAGE, page
    from danlu.report.preview_text import preview_writer, write_rows, write_summary

    check_without_weights(recipe.model, recipe.adapter)
    spec = _dataset_spec(recipe)
    out = preview_writer(io.StringIO() if as_json else sys.stdout)
    new_tokens = _new_tokens(recipe.model)
    if new_tokens:
        out.heading("new tokens")
    for text, token, before in new_tokens:
        out.line(f"{text}: {token}, before {' '.join(map(str, before))}")
    if new_tokens and recipe.stage == "rl" and recipe.rollout.engine != "embedded":
        from danlu.assembly.recipe_adapters import model_folder

        out.line(f"the base with rows for them: start the rollout server with {model_folder(recipe.model)}")
    shown = render_examples(spec, rows=rows, places=places) if rows or places else []
    write_rows(out, shown, recipe.data, max_tokens)
    sys.stdout.flush()  # reading the rest may take minutes
    if recipe.stage == "rl":
        _show_prompts(recipe, out, shown, new_tokens, as_json=as_json)
        return
    positions = max_sample_length(recipe.model, recipe.adapter, recipe.long_context, recipe.data.max_length)
    summary, refused = _summary(spec, positions, packs, shown)
    if refused is not None:
        out.heading("a run refuses this data: what follows counts all rows, as far as they can be read")
    write_summary(out, summary, recipe)
    if refused is None and not as_json:
        sys.stdout.flush()
        _write_model_and_memory(out, recipe, summary.tokenizer)
    refusal = None if refused is None else str(refused)
    if as_json:
        echo(preview_json.as_json(recipe, shown, summary, refusal, new_tokens))
    if html is not None:
        PAGE.write(html, page(name, recipe, shown, summary, max_tokens, refusal, new_tokens))
        (print_status if as_json else echo)(f"\nwritten to {html}")
    if refused is not None:
        raise refused


def _dataset_spec(recipe: Recipe) -> DatasetSpec:
    from danlu.assembly.document_lengths import written_day
    from danlu.data.prepare import DatasetSpec

    model = recipe.model
    tools: tuple[Mapping[str, Any], ...] = ()
    if recipe.stage == "rl":
        from danlu.rewards.environments.build import tool_schemas

        tools = tool_schemas(recipe.environment)
    return DatasetSpec(
        data=recipe.data,
        stage="rl" if recipe.stage == "rl" else language_stage(recipe, "danlu preview"),
        tokenizer_path=_tokenizer_path(model),
        chat_template=model.chat_template,
        seed=recipe.seed,
        date=written_day(recipe),
        row_type=recipe.row_type,
        needs_mismatched=recipe.needs_mismatched,
        max_new_tokens=recipe.rollout.max_new_tokens,
        tools=tools,
        in_turns=recipe.environment is not None,
        template_kwargs=model.chat_template_kwargs,
    )


def _new_tokens(model: Model) -> list[tuple[str, int, list[int]]]:
    """(text, id, ids before) of each new token of the recipe."""
    if not model.tokens:
        return []
    from danlu.assembly.document_lengths import with_named_tokenizer
    from danlu.assembly.token_notes import replaced_ids

    return replaced_ids(with_named_tokenizer(model))


def _tokenizer_path(model: Model) -> str:
    if not model.tokens and not model.adapters:
        return model.tokenizer or model.path or ""
    from danlu.assembly.document_lengths import with_named_tokenizer
    from danlu.assembly.recipe_adapters import tokenizer_path

    return tokenizer_path(with_named_tokenizer(model))


def _summary(
    spec: DatasetSpec, positions: int, packs: int, shown: Sequence[PreviewRow]
) -> tuple[DatasetSummary, DataError | None]:
    """Summarizes all rows, with the error of a run that would refuse them, if it would.

    Raises DataError where they cannot even be counted.
    """
    from danlu.data.dataset_summary import summarize_dataset, summarize_refused
    from danlu.training.progress import RowProgress

    progress = RowProgress(sys.stderr)
    try:
        return summarize_dataset(spec, positions=positions, packs=packs, shown=shown, progress=progress), None
    except DataError as error:
        try:
            return summarize_refused(spec, positions=positions, progress=progress), error
        except DataError:  # the run's own error says why
            raise error from None
    finally:
        progress.close()


def _write_model_and_memory(out: PlainWriter, recipe: Recipe, tokenizer: TokenizerInfo | None) -> None:
    from danlu.run.expected_memory import memory_lines
    from danlu.run.preview_model import preview_parameters

    if (counted := preview_parameters(recipe, tokenizer)) is not None:
        out.heading("model")
        out.line(counted)
    out.heading("memory")
    for line in memory_lines(recipe):
        out.line(line.removeprefix("memory "))


def _show_prompts(
    recipe: Recipe,
    out: PlainWriter,
    shown: Sequence[PreviewRow],
    new_tokens: Sequence[tuple[str, int, list[int]]],
    *,
    as_json: bool,
) -> None:
    """Shows the fate of all prompts."""
    from danlu.report import preview_json
    from danlu.stages.prompt_reader import PromptReader  # loads torch

    lines = PromptReader(recipe).read(sys.stderr).lines
    out.heading("prompts")
    for line in lines:
        out.line(line)
    if as_json:
        echo(preview_json.prompts_as_json(recipe, shown, lines, new_tokens))
