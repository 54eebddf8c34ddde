"""Words that are looked for: keys, keys of other tools, pages and messages."""

from __future__ import annotations

import pytest

from danlu.recipe.explanation import keys
from danlu.recipe.search import Match, search_keys, search_messages, search_pages, search_tools


def names(matches: list[Match]) -> list[str]:
    return [match.name for match in matches]


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("rank", ["adapter.rank", "optimizer.rank", "value.adapter.rank"]),
        ("learning rate", ["optimizer.learning_rate"]),
        ("mask", ["objective.mask_truncated", "data.train_on"]),
        ("label mask", ["data.train_on"]),
        ("batch size", ["batch.micro"]),
        ("gradient checkpointing", ["memory.recompute.kind"]),
        ("early stopping patience", ["evaluation.early_stop.patience"]),
        ("muon", ["optimizer"]),
    ],
)
def test_keys(query: str, first: list[str]) -> None:
    assert names(search_keys(query))[: len(first)] == first


def test_every_key_is_found_by_its_name() -> None:
    for key in ("data.packing", "rollout.staleness", "schedule.floor", "watch.rewinds", "output"):
        assert key in keys()
        assert names(search_keys(key.rpartition(".")[2]))[0] == key


def test_keys_of_other_tools() -> None:
    assert search_tools("flash attention")[0].about.startswith("danlu does it by itself: The fastest attention")
    assert names(search_tools("lora alpha"))[0] == "lora_alpha"


def test_pages() -> None:
    found = search_pages("label mask")
    assert found[0].name.startswith("docs/data.md, ")
    assert "mask" in found[0].about.lower()


def test_messages() -> None:
    """A message as it was printed, with its values, finds the line that says it."""
    found = search_messages("batch.micro: 3 does not divide the 8 sequences of a step. Use 4, or auto")
    assert found[0].name.startswith("recipe/rules/training.py:")
    assert found[0].about == "{} does not divide the {} sequences of a step. Use {}, or auto"


def test_words_that_nothing_is_about() -> None:
    for search in (search_keys, search_tools, search_pages, search_messages):
        assert search("zyzzyva quokka") == []
        assert search("") == []
