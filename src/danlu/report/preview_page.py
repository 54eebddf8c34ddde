"""A preview of the data as one HTML page (`templates/preview.html.j2`)."""

from __future__ import annotations

from collections.abc import Sequence

from danlu import __version__
from danlu.data.dataset_summary import DatasetSummary
from danlu.data.preview import PreviewRow
from danlu.recipe.sections import Recipe
from danlu.report import preview_content as content
from danlu.report.html_page import HtmlPage

PAGE = HtmlPage("preview")

REASON_COLOURS = {  # on a light background, on a dark one; each with a contrast of 4.5 or more
    "template": ("#57606a", "#9198a1"),
    "system": ("#a21caf", "#e879f9"),
    "user": ("#0e7490", "#22d3ee"),
    "assistant": ("#15803d", "#4ade80"),
    "reasoning": ("#a16207", "#facc15"),
    "tool": ("#1d4ed8", "#60a5fa"),
    "end-of-turn": ("#b91c1c", "#f87171"),
    "bos": ("#be185d", "#f472b6"),
    "eos": ("#b91c1c", "#f87171"),
    "text": ("#15803d", "#4ade80"),
    "prompt": ("#0e7490", "#22d3ee"),
    "completion": ("#15803d", "#4ade80"),
}


def page(
    name: str,
    recipe: Recipe,
    rows: Sequence[PreviewRow],
    overview: DatasetSummary,
    max_tokens: int | None,
    refusal: str | None,
    new_tokens: Sequence[tuple[str, int, list[int]]] = (),
) -> str:
    """The whole page.

    Args:
        name: of the recipe.
        max_tokens: the number of tokens shown of a sample; None for all.
        refusal: why a run would not begin; None if it would.
        new_tokens: (text, id, ids that the text had before) of the recipe's model.tokens.
    """
    return PAGE.render(
        title=f"danlu preview of {name}",
        heading=f"Preview of {name}",
        settings=_settings(recipe),
        content=content,
        data=recipe.data,
        max_tokens=max_tokens,
        overview=overview,
        reason_colours=REASON_COLOURS,
        new_tokens=new_tokens,
        refusal=refusal,
        rows=rows,
        sentence=lambda text: text[0].upper() + text[1:],
        steps=content.describe_steps(recipe, overview),
        warnings=list(content.warnings(overview, recipe)),
    )


def _settings(recipe: Recipe) -> str:
    """The settings that decide how rows become tokens: `stage sft · tokenizer FOLDER · max_length 2,048 · ...`."""
    data = recipe.data
    settings = [
        f"stage {recipe.stage}",
        f"tokenizer {recipe.model.tokenizer or recipe.model.path}",
        f"max_length {data.max_length:,}",
        f"overlong {data.overlong}",
        f"packing {data.packing.kind}",
    ]
    if recipe.stage == "sft":
        settings.append(f"train_on {data.train_on}")
    return f"{' · '.join(settings)} · danlu {__version__}"
