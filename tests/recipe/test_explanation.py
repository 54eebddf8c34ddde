"""`explain`: type, default, words, and where a value came from."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from danlu.core.errors import RecipeError
from danlu.recipe import load
from danlu.recipe.explanation import explain, keys
from danlu.recipe.field_docs import field_docs
from danlu.recipe.sections import Recipe, Section
from danlu.recipe.type_hints import field_types, subsection_types
from danlu.registry import SUGGESTIONS, VERBS

Write = Callable[..., str]


def test_a_key() -> None:
    found = explain("data.max_length")
    assert (found.takes, found.defaults) == ("a whole number, 1 or more", {"": "1024"})
    assert found.about == "Longest sample, and length of a packed sequence, in tokens."
    assert explain("data.overlong").allowed == ("truncate", "split", "drop")
    assert explain("output").defaults == {"": "required"}
    assert explain("data.train.0.path").takes == explain("data.train.path").takes == "a text"


def test_a_key_of_several_variants_of_another_kind() -> None:
    found = explain("steps.at_least")
    assert found.defaults == {"language": "0.65", "deduplicate": "0.75"}
    assert found.about.startswith("language: ") and " deduplicate: minhash: " in found.about
    assert found.about.endswith("(Of `danlu data clean`, stage: curate.)")


def test_keys_of_quantize_alone() -> None:
    found = explain("calibration.tokens")
    assert (found.takes, found.defaults) == ("a whole number, 1 or more", {"": "131072"})
    assert found.about.endswith("(Of `danlu quantize`, stage: quantize.)")
    assert explain("quantization.act_order").defaults == {"gptq": "true"}
    assert "danlu quantize" not in explain("seed").about  # every recipe has it
    with pytest.raises(RecipeError, match="Did you mean 'calibration.tokens'"):
        explain("calibration.token")
    assert explain("budget.cost").about.endswith("(Of `danlu synthesize`, stage: synthesize.)")


def test_a_section() -> None:
    found = explain("data")
    assert found.short == "train"
    assert ("max_length", "Longest sample, and length of a packed sequence, in tokens") in found.children
    assert [name for name, _ in explain("optimizer").children] == [
        "adafactor",
        "adamw",
        "adamw8bit",
        "galore",
        "lion",
        "muon",
        "paged-adamw",
        "sgd",
    ]


def test_a_key_of_several_kinds() -> None:
    defaults = explain("optimizer.betas").defaults
    assert defaults == dict.fromkeys(("adamw", "adamw8bit", "galore", "paged-adamw"), "[0.9, 0.95]") | {
        "lion": "[0.9, 0.99]"
    }


def test_the_words_of_all_kinds() -> None:
    found = explain("optimizer.kind")
    assert found.takes == "one of adamw, adamw8bit, paged-adamw, galore, sgd, adafactor, lion, muon"
    assert found.allowed == ("adamw", "adamw8bit", "paged-adamw", "galore", "sgd", "adafactor", "lion", "muon")
    assert found.defaults == {kind: kind for kind in found.allowed}
    assert explain("optimizer.decay").takes == "one of matrices, all"


def test_where_a_value_came_from(write: Write) -> None:
    loaded = load(write("stage: sft\nmodel: base\ndata: rows.json\noutput: runs/x\nema: 0.9\n"), ["seed=3"])
    asked = {key: explain(key, loaded) for key in ("seed", "ema.decay", "precision", "data.train.0.path", "data.eval")}
    assert {key: (found.value, found.origin) for key, found in asked.items()} == {
        "seed": ("3", "override 'seed=3'"),
        "ema.decay": ("0.9", "recipe.yaml:5:6"),
        "precision": ("bf16", "default"),
        "data.train.0.path": ("rows.json", "recipe.yaml:3:7"),
        "data.eval": ("null", "default"),
    }


@pytest.mark.parametrize(
    ("key", "guess"),
    [
        ("rank", "'adapter.rank'"),
        ("data.max_lenght", "'data.max_length'"),
        ("optimiser", "'optimizer'"),
    ],
)
def test_unknown_keys(key: str, guess: str) -> None:
    with pytest.raises(RecipeError) as caught:
        explain(key)
    assert str(caught.value).startswith(f"no recipe has the key {key!r}. Did you mean {guess}?")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "lora",
            "'lora' is a value of adapter and of value.adapter: set adapter to lora. It has targets, modules_to_save,",
        ),
        ("LoRA", "'LoRA' is a value of adapter and of value.adapter: set adapter to lora"),
        (
            "nf4",
            "is a value of quantization and of reference.quantization and of teacher.quantization: set quantization "
            "to nf4. It has trained, block, double: `danlu explain quantization.trained`",
        ),
        ("zero3", "'zero3' is a value of parallel.shard: set parallel.shard to zero3. `danlu explain parallel.shard`"),
        ("cosine", "'cosine' is a value of schedule: set schedule to cosine"),
        ("ngram", "'ngram' is a value of rollout.draft: set rollout.draft to ngram. It has tokens, longest"),
        ("api", "'api' is no key of a recipe but a thing to do: `danlu serve`"),
        ("export", "'export' is no key of a recipe but a thing to do: `danlu checkpoint export`"),
        ("train", "'train' is no key of a recipe but a thing to do: `danlu train --help`"),
        (
            "bf16",
            "'bf16' is a value of precision and of optimizer.moments and of precision.activations and of",
        ),
        ("lr", "'lr' is a key of another tool: danlu's key for it is optimizer.learning_rate"),
        ("learning_rate", "danlu's key for it is optimizer.learning_rate"),
        ("lora-rank", "danlu's key for it is adapter.rank"),
        ("per_device_train_batch_size", "danlu's key for it is batch.micro"),
    ],
)
def test_words_that_people_try(word: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        explain(word)
    assert said in str(caught.value)


def test_every_word_that_people_try_leads_somewhere() -> None:
    """Each verb, each kind of a section, and each key of another tool."""
    known = set(keys())
    kinds = {
        kind for key in known for kind in explain(key).allowed if not kind.isdecimal() and kind not in ("True", "False")
    }
    assert {"lora", "muon", "nf4"} <= kinds
    for word in {*VERBS, *SUGGESTIONS, *kinds} - known:
        with pytest.raises(RecipeError) as caught:
            explain(word)
        assert "set " in str(caught.value) or "thing to do" in str(caught.value)


def test_every_key_can_be_explained_and_says_what_it_is() -> None:
    def undocumented(section: type[Section]) -> list[str]:
        found = [name for name in field_types(section) if not field_docs(section)[name] and name != "kind"]
        inner = [below for hint in field_types(section).values() for below in subsection_types(hint)]
        return [f"{section.__name__}.{name}" for name in found] + [
            name for kind in inner for name in undocumented(kind)
        ]

    assert undocumented(Recipe) == []
    for key in keys():
        assert explain(key).takes


class _Documented(Section):
    kept: int = 1
    """The documentation of a base."""
    replaced: int = 1
    """The documentation of a base."""
    undocumented: int = 1


class _Variant(_Documented):
    kept: int = 2
    replaced: int = 2
    """Its own."""


def test_a_field_has_its_own_documentation_or_that_of_the_base_class() -> None:
    base = "The documentation of a base."
    assert field_docs(_Documented) == {"kept": base, "replaced": base, "undocumented": ""}
    assert field_docs(_Variant) == {"kept": base, "replaced": "Its own.", "undocumented": ""}
