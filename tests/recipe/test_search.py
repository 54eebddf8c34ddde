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
        ("muon", ["optimizer.kind", "optimizer"]),
    ],
)
def test_keys(query: str, first: list[str]) -> None:
    assert names(search_keys(query))[: len(first)] == first


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ("out of memory", "memory"),
        ("mask", "data.train_on"),
        ("epochs", "epochs"),
        ("eos", "data.append_eos"),
        ("padding", "data.packing.kind"),
        ("chat template", "model.chat_template"),
        ("wandb", "log.wandb"),
        ("lora rank", "adapter.rank"),
        ("quantization", "quantization"),
        ("vllm", "rollout.engine"),
        ("context length", "data.max_length"),
        ("mixed precision", "precision"),
        ("deepspeed", "parallel.shard"),
        ("fsdp", "parallel.shard"),
        ("kl", "objective.kl"),
        ("temperature", "rollout.temperature"),
        ("warmup", "schedule.warmup"),
        ("gradient accumulation", "batch.sequences"),
        ("tensor parallel", "parallel.tensor"),
        ("reward function", "rewards"),
        ("early stopping", "evaluation.early_stop.patience"),
        ("best checkpoint", "checkpoint.keep_best"),
        ("evaluation steps", "evaluation.every"),
        ("reference model", "reference.model"),
        ("beta", "objective.beta"),
        ("clip gradient", "gradient_clipping"),
        ("new tokens", "model.tokens"),
        ("number of generations", "rollout.samples"),
        ("group size", "rollout.samples"),
        ("validation split", "data.eval"),
        ("system prompt", "data.system"),
        ("cpu offload", "memory.offload"),
    ],
)
def test_the_key_that_is_looked_for_is_the_first_or_the_second(query: str, key: str) -> None:
    assert key in names(search_keys(query))[:2]


def test_a_key_is_described_as_the_first_kind_of_its_section_has_it() -> None:
    (rank,) = [match for match in search_keys("lora rank") if match.name == "adapter.rank"]
    assert "square" not in rank.about


def test_keys_that_mention_a_word_in_passing_are_left_out() -> None:
    assert names(search_keys("resume")) == ["checkpoint"]


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
