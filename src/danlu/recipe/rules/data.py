"""Rules about rows: sources, packing, streaming, evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from danlu.core.spelling import did_you_mean
from danlu.recipe.messages import format_value
from danlu.recipe.rules.paths import sources_of
from danlu.recipe.sections import Data, Recipe
from danlu.recipe.sections.data import COLUMN_NAMES, TAG_NAMES, Columns
from danlu.recipe.yaml_tree import Problem


def packing_suits_stage(data: Data, stage: str) -> Iterator[Problem]:
    """Concatenated rows are cut anywhere, which only plain text survives."""
    reads = ("stage", "data.packing.kind")
    if data.packing.kind != "concatenate":
        return
    if stage == "sft":
        message = "a conversation must stay whole, so concatenate is for stage pretrain. Use best-fit or none"
        yield Problem("data.packing.kind", message, reads=reads)
        return
    for index, source in enumerate(data.train):
        if source.format not in ("auto", "text", "tokenized"):
            message = f"concatenate joins plain text, and rows of {source.format} are not. Use packing best-fit"
            yield Problem(f"data.train.{index}.format", message, reads=reads)


def pretraining_has_no_turns(data: Data, stage: str) -> Iterator[Problem]:
    """Stage pretrain has no chat roles, and so no last turn."""
    # `assistant` is the default and stands in every resolved recipe; `all` is what pretraining does anyway.
    if stage == "pretrain" and data.train_on == "last":
        message = "pretraining trains every token: train_on is for stage sft"
        yield Problem("data.train_on", message, reads=("stage",))


def sources_are_consistent(data: Data) -> Iterator[Problem]:
    """Sources are named, weighted all or none, and none is listed twice."""
    train = data.train
    if not train:
        yield Problem("data.train", "the list is empty: name at least one file or data set")
    if data.eval == []:
        yield Problem("data.eval", "the list is empty: name a source, give a share such as 0.02, or leave eval out")
    weighted = [source.weight is not None for source in train]
    if any(weighted) and not all(weighted):
        index = weighted.index(False)
        message = "has no weight although other sources do: give every source a weight, or none"
        yield Problem(f"data.train.{index}", message)
    if len(train) == 1:
        return
    seen: dict[str, int] = {}
    for index, source in enumerate(train):
        same = source.model_dump_json(exclude={"weight"})
        if same in seen:
            message = f"the same as data.train.{seen[same]}. To use it more often, give the sources weights"
            yield Problem(f"data.train.{index}", message)
        seen.setdefault(same, index)


def columns_are_known(data: Data, stage: str) -> Iterator[Problem]:
    """Columns are given for names that rows of this stage are read by, and templates over columns can be read."""
    named: dict[str, Columns | None] = {"data.columns": data.columns}
    named |= {key.removesuffix("path") + "columns": source.columns for key, source in sources_of(data)}
    for key, columns in named.items():
        for name, column in (columns or {}).items():
            # Rewards of stage rl read columns of any name, and any column may be hidden.
            if name not in (*COLUMN_NAMES, *TAG_NAMES) and stage != "rl" and column is not None:
                hint = did_you_mean(name, [*COLUMN_NAMES, *TAG_NAMES])
                known = "" if hint else f" Known: {', '.join((*COLUMN_NAMES, *TAG_NAMES))}"
                yield Problem(key, f"{name!r} is no column that row formats read.{hint}{known}", reads=("stage",))
            elif column is not None and (problem := _column_problem(name, column)) is not None:
                yield Problem(key, f"{name}: {problem}")


def _column_problem(name: str, column: str) -> str | None:
    """Why a text names no column; None where it does."""
    if not column.strip():
        return "the text is empty. Name a column of the file, or write null to hide one"
    if name in TAG_NAMES or not {"{", "}"} & set(column):
        return None
    from danlu.core.prompt_template import PromptTemplate, PromptTemplateError

    try:
        names = PromptTemplate.parse(column).columns
    except PromptTemplateError as error:
        return str(error)
    return None if names else "the template names no column, so every row would be the same. Name one, as in {title}"


def streaming_is_consistent(recipe: Recipe) -> Iterator[Problem]:
    """A stream has no length: it needs steps, and evaluation rows from elsewhere."""
    data = recipe.data
    if not data.streaming:
        return
    if recipe.epochs is not None:
        message = "a stream has no known end, so it cannot run for epochs. Give steps"
        yield Problem("epochs", message, reads=("data.streaming",))
    elif recipe.steps is None:
        yield Problem(
            "steps", "missing: a stream has no known end, so streaming needs steps", reads=("data.streaming",)
        )
    if isinstance(data.eval, int | float):
        message = (
            f"{format_value(data.eval)} of a stream cannot be set aside. Give evaluation rows as files of their own"
        )
        yield Problem("data.eval", message, reads=("data.streaming",))


def evaluation_has_rows(recipe: Recipe) -> Iterator[Problem]:
    """Settings that use an evaluation loss need evaluation rows."""
    evaluation = recipe.evaluation
    if recipe.data.eval is not None:
        return
    needs = "needs rows to evaluate on: add data.eval (a share such as 0.02, or files)"
    if evaluation.early_stop is not None:
        yield Problem("evaluation.early_stop", f"early stop {needs}", reads=("data.eval",))
    if evaluation.every is not None and evaluation.samples is None:
        message = f"evaluation {needs}, or evaluation.samples to generate"
        yield Problem("evaluation.every", message, reads=("data.eval", "evaluation.samples"))
    if evaluation.metric != "loss":
        yield Problem("evaluation.metric", f"a metric {needs}", reads=("data.eval",))
    if recipe.checkpoint.keep_best:
        yield Problem("checkpoint.keep_best", f"keep_best {needs}", reads=("data.eval",))


def judged_rows_are_read_whole(data: Data, stage: str) -> Iterator[Problem]:
    """Rows that compare or judge answers, and prompts, are neither streamed, split nor joined; answers are trained."""
    reads = ("stage",)
    if stage not in ("preference", "reward", "rl"):
        return
    if data.streaming:
        message = f"stage {stage} reads its rows before it begins. Leave streaming out"
        yield Problem("data.streaming", message, reads=reads)
    if data.overlong == "split":
        whole = "a prompt" if stage == "rl" else "an answer that is compared or judged"
        message = f"{whole} cannot be split. Use truncate, which shortens prompts first, or drop"
        yield Problem("data.overlong", message, reads=reads)
    if data.train_on != "assistant":
        answers = "answers that the policy draws" if stage == "rl" else "answers of its rows"
        message = f"stage {stage} trains the {answers} and nothing else. Leave train_on out"
        yield Problem("data.train_on", message, reads=reads)
    if data.packing.kind != "none":
        message = f"a step of stage {stage} counts rows, which lie end to end in any case. Leave packing out"
        yield Problem("data.packing.kind", message, reads=reads)
