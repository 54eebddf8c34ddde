"""Recipes of stage curate: their keys are the settings of the steps, and what is wrong has its line."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from builders.docs_scripts import TOP

from danlu.core.errors import DataError, RecipeError
from danlu.curation.decontaminate import Decontaminate
from danlu.curation.near_duplicates import NearDuplicates
from danlu.curation.quality.gopher import GopherRules
from danlu.production.recipe_steps import steps_of
from danlu.recipe.curate_recipe import load_curate_recipe
from danlu.recipe.loading import load

ALL = """
stage: curate
data: rows.jsonl
steps:
  - repair
  - {kind: language, keep: en}
  - {kind: quality, rules: [c4, gopher, gopher-repetition, fineweb]}
  - {kind: deduplicate, by: [exact, paragraph, minhash]}
  - personal
  - {kind: decontaminate, against: rows.jsonl}
  - {kind: select, rows: 5}
output: out
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"text": "some text"}\n', encoding="utf-8")


def problems(text: str, *overrides: str) -> list[str]:
    Path("r.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as error:
        load_curate_recipe(Path("r.yaml"), overrides)
    return error.value.problems


def test_a_step_has_the_settings_and_the_defaults_of_its_class() -> None:
    Path("r.yaml").write_text(ALL, encoding="utf-8")
    recipe = load_curate_recipe(Path("r.yaml"))
    steps = steps_of(recipe.steps)
    assert len(steps) == 12
    for step in steps:
        assert dataclasses.is_dataclass(step)
        for field in dataclasses.fields(step):
            if field.default is not dataclasses.MISSING:
                assert getattr(step, field.name) == field.default, (step.name, field.name)
    sections = [section for each in recipe.steps for section in (getattr(each, "rules", None) or [each])]
    keys = {name for section in sections for name in type(section).model_fields}
    missing = {field.name for step in steps for field in dataclasses.fields(step)} - keys  # type: ignore[arg-type]
    # Functions are for users of the classes; benchmarks are `against`; drop_at is in `paragraph`.
    assert missing == {"split_words", "count_sentences", "benchmarks", "drop_at"}


def test_values_of_the_recipe_arrive() -> None:
    Path("r.yaml").write_text(ALL.replace("minhash]", "minhash], bands: [4, 2]"), encoding="utf-8")
    recipe = load_curate_recipe(Path("r.yaml"), ["steps.2.rules.1.words=[7,9]", "steps.3.at_least=0.5"])
    steps: dict[str, Any] = {step.name: step for step in steps_of(recipe.steps)}
    assert steps["quality.gopher"] == GopherRules(words=(7, 9))
    assert steps["deduplicate.minhash"] == NearDuplicates(bands=(4, 2), at_least=0.5)
    decontaminate: Decontaminate = steps["decontaminate"]
    assert decontaminate.benchmarks[0].texts == ("some text",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("- repair", "- repiar"), "r.yaml:5:5 steps.0.kind: unknown kind 'repiar'. Did you mean 'repair'?"),
        (("keep: en", "keep: en, at_last: 1"), "r.yaml:6:32 steps.1.at_last: unknown key. Did you mean 'at_least'?"),
        (("keep: en", "keep: en, at_least: 2"), "r.yaml:6:42 steps.1.at_least: expected a number from 0 to 1, not 2"),
        (("c4,", "c4, c4,"), "steps.2.rules: names c4 twice"),
        (("gopher,", "{kind: gopher, words: [9, 2]},"), "steps.2.rules.1.words: the smallest, 9, is larger than"),
        (("paragraph, minhash]", "paragraph], bands: [1, 2]"), "steps.3.bands: is a setting of minhash, which `by`"),
        (("- personal", "- {kind: personal, action: drop, mask: x}"), "steps.4.mask: only read with action: mask"),
        (("against: rows.jsonl", "against: row.jsonl"), "steps.5.against.0.path: no file or folder 'row.jsonl' in"),
        (("rows.jsonl}", "rows.jsonl, words: 5}"), "steps.5.shortest: is more than words: 5"),
        (("rows: 5", "rows: 5, of: language"), "steps.6.of: only read with by: quota"),
        (("data: rows.jsonl", "data: [{path: rows.jsonl, weight: 2}]"), "data.0.weight: is a share of a mixture"),
        (("output: out", "output: rows.jsonl"), "output: is or holds data.0.path (rows.jsonl), which is read"),
        (("data: rows.jsonl", "data: ."), "output: lies in data.0.path (.), which is read"),
        (("stage: curate", "stage: sft"), "takes recipes with stage: curate, this is sft. Use `danlu train`"),
    ],
)
def test_what_is_wrong(change: tuple[str, str], message: str) -> None:
    assert message in "\n".join(problems(ALL.replace(*change)))


def test_danlu_train_names_the_verb() -> None:
    Path("r.yaml").write_text(ALL, encoding="utf-8")
    with pytest.raises(RecipeError) as error:
        load(Path("r.yaml"))
    assert error.value.problems == [
        "r.yaml:2:8 stage: a recipe with stage: curate does not train: `danlu data clean` takes it"
    ]


def test_a_benchmark_without_texts() -> None:
    Path("b.jsonl").write_text('{"text": " "}\n', encoding="utf-8")
    Path("r.yaml").write_text(ALL.replace("against: rows", "against: b"), encoding="utf-8")
    with pytest.raises(DataError, match="b.jsonl: a benchmark without any text"):
        steps_of(load_curate_recipe(Path("r.yaml")).steps)


def test_the_documented_recipe_is_one() -> None:
    page = (TOP / "docs" / "curation.md").read_text(encoding="utf-8")
    (block,) = (each for each in re.findall(r"(?:^ {4}.*\n)+", page, re.MULTILINE) if "stage: curate" in each)
    for name in ("crawl", "chats.jsonl", "gsm8k_test.jsonl"):
        Path(name).touch()
    Path("curate.yaml").write_text(textwrap.dedent(block), encoding="utf-8")
    assert [step.kind for step in load_curate_recipe(Path("curate.yaml")).steps][-1] == "decontaminate"
