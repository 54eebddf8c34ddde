"""What README and docs say is so: tables of the recipe, short forms, commands, links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders.docs_scripts import TOP, script

from danlu.cli.main import command
from danlu.recipe import Recipe, load
from danlu.registry import VERBS

PAGES = sorted([*TOP.glob("*.md"), *TOP.glob("docs/*.md"), *TOP.glob("benchmarks/*.md")])
names = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TOP)))


@pytest.mark.parametrize(
    ("name", "is_so"),
    [
        ("recipe.md", "| `data.max_length` | `1024` |"),
        ("checkpoints.md", "| `checkpoint` | when"),
        ("quantization.md", "| `calibration.tokens` | `131072` |"),
    ],
)
def test_tables_are_those_of_the_types(name: str, is_so: str) -> None:
    tables = script("recipe_tables")
    assert name in tables.PAGES
    page = (TOP / "docs" / name).read_text(encoding="utf-8")
    assert tables.written(page) == page, "out of date: python docs/scripts/recipe_tables.py"
    outdated = page.replace(is_so, "| `gone` | no |")
    assert outdated != page
    assert tables.written(outdated) == page


def test_the_list_of_files_is_that_of_the_package() -> None:
    files = script("file_list")
    page = files.written()
    assert files.PAGE.read_text(encoding="utf-8") == page, "out of date: python docs/scripts/file_list.py"
    lines = [line for line in page.splitlines() if line.startswith("- `")]
    assert "- `loop.py`: " in page and [line for line in lines if line.endswith(": ")] == []


def test_files_that_the_map_names_exist() -> None:
    page = (TOP / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("| to change | open |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", table))
    assert len(named) > 60

    def is_there(name: str) -> bool:
        return (TOP / ("" if name.startswith(("tests/", "docs/")) else "src/danlu") / name).exists()

    assert [name for name in sorted(named) if not is_there(name)] == []
    assert not is_there("rollout/engine.py")  # control


def test_every_key_is_in_the_tables() -> None:
    from danlu.recipe.explanation import keys

    page = (TOP / "docs" / "recipe.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE))
    sections = {key for key in Recipe.model_fields if f"table: {key} " in page}
    kinds = {
        f"{key}.kind"
        for key in ("adapter", "environment", "objective", "optimizer", "quantization", "reference", "rewards")
    }
    elsewhere = {*kinds, *(key for key in keys() if key.startswith("data.eval."))}
    assert set(keys()) - elsewhere - sections == listed


def short_forms() -> list[tuple[str, str]]:
    page = (TOP / "docs" / "recipe.md").read_text(encoding="utf-8")
    return re.findall(
        r"^\| `([^`]+)` \| `([^`]+)` \(?", page.split("| short | full |")[1].split("\n\n")[0], re.MULTILINE
    )


@pytest.mark.parametrize(("short", "full"), short_forms())
def test_short_forms_mean_their_full_forms(short: str, full: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.json", "b.json"):
        Path(name).write_text("")

    def meaning(written: str) -> Recipe:
        line = f"data: {{train: a.json, {written}}}" if written.startswith("packing") else written
        needed = {"stage": "stage: sft", "model": "model: owner/folder", "data": "data: {train: a.json, eval: 9}"}
        needed.pop(line.partition(":")[0], None)
        Path("recipe.yaml").write_text("\n".join([*needed.values(), "output: run", line]))
        return load("recipe.yaml").recipe

    assert meaning(short) == meaning(full)
    assert meaning(short) != meaning("seed: 1")


def test_there_are_short_forms() -> None:
    assert len(short_forms()) >= 13


def test_settings_of_rollouts_are_ones_that_load(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text("")
    page = (TOP / "docs" / "rollout.md").read_text(encoding="utf-8")
    lines = re.findall(r"^    ((?:rollout|numerics|evaluation): .*)$", page, re.MULTILINE)
    assert len(lines) >= 6
    for line in lines:
        needed = {"stage": "sft", "model": "owner/folder", "data": "a.json", "output": "run"}
        needed["evaluation"] = "{every: 10, samples: hi}"
        needed.pop(line.partition(":")[0], None)
        Path("recipe.yaml").write_text("\n".join([*(f"{key}: {value}" for key, value in needed.items()), line]))
        assert load("recipe.yaml").recipe.evaluation.samples is not None


def commands(text: str) -> Iterator[list[str]]:
    """Words of every `danlu ...` that stands in a block or between back quotes, without its comment."""
    lines = re.findall(r"^    (?:\S+=\S+ )?danlu (.*)$", text, re.MULTILINE) + re.findall(r"`danlu ([^`]+)`", text)
    for line in lines:
        yield shlex.split(re.split(r"  | #|\.\.\.|…", line)[0].replace("|", " "))


def problems(words: list[str]) -> list[str]:
    """What is wrong with a command line: its verb, its sub-verb, an option."""
    name, *rest = words
    if name not in VERBS:
        return [] if name in ("VERB", "命令", "--help") else [f"no verb {name!r}"]
    found = command(name, VERBS[name].target)
    if hasattr(found, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in found.commands:
            return [f"no verb {name} {rest[0]!r}"]
        found = found.commands[rest[0]]
    known = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return [f"{name} has no {word}" for word in rest if word.startswith("--") and word not in known | {"--help"}]


@names
def test_commands_exist(page: Path) -> None:
    assert [said for words in commands(page.read_text(encoding="utf-8")) if words for said in problems(words)] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("    danlu trian r.yaml", ["no verb 'trian'"]),
        ("use `danlu recipes lst`", ["no verb recipes 'lst'"]),
        ("    A=1 danlu generate M --prompts x  # --wrong", ["generate has no --prompts"]),
    ],
)
def test_commands_that_do_not_exist_are_noticed(text: str, said: list[str]) -> None:
    assert [one for words in commands(text) for one in problems(words)] == said


@names
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text)
    missing = [path for path, _ in links if path and not (page.parent / path).exists()]
    assert missing == []
    for path, anchor in links:
        target = (page.parent / path if path else page).read_text(encoding="utf-8") if anchor else ""
        headings = {re.sub(r"[^\w\- ]", "", line).strip().lower().replace(" ", "-") for line in _headings(target)}
        assert not anchor or anchor in headings, f"{path}#{anchor}"


def _headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.*)$", text, re.MULTILINE)


def test_both_readmes_show_the_same_commands() -> None:
    ours, theirs = (
        [words for words in commands((TOP / name).read_text(encoding="utf-8")) if words and words[0] in VERBS]
        for name in ("README.md", "README.zh-CN.md")
    )
    assert ours == theirs
