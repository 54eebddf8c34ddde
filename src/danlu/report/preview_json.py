"""A preview as one JSON object, for scripts; docs/data.md documents its shape."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from danlu.core.types import Pack
from danlu.data.dataset_summary import DatasetSummary, PackingSummary, SplitSummary
from danlu.data.message_spans import Reason
from danlu.data.preview import PreviewRow, PreviewSample
from danlu.recipe.sections import Recipe
from danlu.report import preview_content as content


def as_json(
    recipe: Recipe,
    rows: Sequence[PreviewRow],
    overview: DatasetSummary,
    refused: str | None,
    new_tokens: Sequence[tuple[str, int, list[int]]] = (),
) -> str:
    """The object on one line of ASCII, so that no text of a row can be anything else to a terminal than its escapes.

    refused: why a run would refuse this data, if it would; the counts are of all rows then, and there are no packs.
    new_tokens: (text, id, ids that the text had before).
    """
    train = overview.train.packed
    return json.dumps(
        {
            "stage": recipe.stage,
            "max_length": recipe.data.max_length,
            "packing": recipe.data.packing.kind,
            "refused": refused,
            "warnings": list(content.warnings(overview, recipe)),
            "new_tokens": _new_tokens(new_tokens),
            "reasons": {reason.label: content.REASON_DESCRIPTIONS[reason] for reason in Reason},
            "rows": [_row(row, recipe) for row in rows],
            "packs": [] if train is None else [_pack(pack, number) for number, pack in enumerate(train.first)],
            "steps": None if train is None else _steps(recipe, train, overview.block),
            "first_block_only": overview.block,
            "train": _side(overview.train),
            "eval": None if overview.eval is None else _side(overview.eval),
        }
    )


def prompts_as_json(
    recipe: Recipe,
    rows: Sequence[PreviewRow],
    lines: Sequence[str],
    new_tokens: Sequence[tuple[str, int, list[int]]] = (),
) -> str:
    """Returns the prompts of stage rl as JSON. lines: the fate of all rows, as a run reports it; rest as `as_json`."""
    return json.dumps(
        {
            "stage": recipe.stage,
            "max_length": recipe.data.max_length,
            "max_new_tokens": recipe.rollout.max_new_tokens,
            "new_tokens": _new_tokens(new_tokens),
            "rows": [_row(row, recipe) for row in rows],
            "prompts": list(lines),
        }
    )


def _new_tokens(tokens: Sequence[tuple[str, int, list[int]]]) -> list[dict[str, Any]]:
    return [{"text": text, "id": token, "before": before} for text, token, before in tokens]


def _row(row: PreviewRow, recipe: Recipe) -> dict[str, Any]:
    """A row: its place, its fate, its samples."""
    return {
        "row": row.where,
        "source": row.source,
        "index": row.index,
        "evaluation": row.source >= len(recipe.data.train),
        "bad": row.bad or None,
        # NaN and infinities, which JSON lacks, as texts.
        "columns": json.loads(row.columns, parse_constant=str) if row.columns else None,
        "dropped": row.dropped or None,
        "shortened": row.shortened or None,
        "lost_tokens": row.lost_tokens,
        "samples": [_sample(sample) for sample in row.samples],
    }


def _sample(sample: PreviewSample) -> dict[str, Any]:
    """A sample as columns, an entry for each token."""
    return {
        "ids": sample.tokens.tolist(),
        "texts": list(sample.texts),
        "weights": sample.weights.tolist(),
        "reasons": [Reason(reason).label for reason in sample.reasons.tolist()],
        "special": sample.special.tolist(),
        "branches": [branch._asdict() for branch in sample.branches],
    }


def _pack(pack: Pack, number: int) -> dict[str, Any]:
    documents = [
        {"row": sample.row, "ids": sample.tokens.tolist(), "weights": sample.weights.tolist()}
        for sample in pack.samples
    ]
    return {"pack": number, "tokens": pack.tokens, "documents": documents}


def _steps(recipe: Recipe, packed: PackingSummary, block: bool) -> dict[str, Any]:
    """The steps of packs, of an epoch and of the run; a stream has no known epoch."""
    per_step = recipe.batch.packs(recipe.data.max_length)
    total = recipe.steps
    if total is None:
        total = math.ceil(math.ceil((recipe.epochs or 1) * packed.packs) / per_step)
    return {"packs": per_step, "epoch": None if block else math.ceil(packed.packs / per_step), "run": total}


def _side(side: SplitSummary) -> dict[str, Any]:
    """The counts of one split, its sample lengths as a histogram, how well it is packed."""
    packed, counted = side.packed, side.statistics
    reasons = {Reason[reason.upper()].label: number for reason, number in counted.reasons.items()}
    return {
        "statistics": {**counted.to_json(), "reasons": reasons, "trained_share": counted.trained_share},
        "lengths": [
            {"from": first, "to": last, "samples": number} for first, last, number in content.length_bins(side.lengths)
        ],
        "packed": None
        if packed is None
        else {
            "packs": packed.packs,
            "samples": packed.samples,
            "tokens": packed.tokens,
            "efficiency": packed.efficiency,
        },
    }
