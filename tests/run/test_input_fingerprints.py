"""What each process opens for itself, and what a resumed run opens again: the same, or an error that names the file."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from builders.process_group import run_group
from builders.stale_copies_worker import Edit, edit_json, edit_text, flip_a_bit, outcomes
from builders.tiny_world import CONFIG, World, write_rows

from danlu.core.errors import DataError
from danlu.data.demo_data import conversations
from danlu.data.tokenizer_training import CHATML
from danlu.parallel.comm import Group
from danlu.recipe import Recipe, load
from danlu.run.input_fingerprints import (
    MOST_BYTES,
    SAMPLE_BYTES,
    Input,
    Region,
    recipe_inputs,
    same_on_all_ranks,
    sampled_digests,
)
from danlu.stages.table import STAGES


@pytest.mark.parametrize("at", [0.0, 0.5, 0.999])
def test_start_middle_and_end_of_a_region_are_seen(tmp_path: Path, at: float) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(10 * SAMPLE_BYTES))
    regions = {"a": Region(file, 0, 10 * SAMPLE_BYTES), "small": Region(file, SAMPLE_BYTES, 100)}
    before = sampled_digests(regions)
    flip_a_bit(file, at=at)
    after = sampled_digests(regions)
    assert after["a"] != before["a"] and after["small"] == before["small"]
    flip_a_bit(file, at=at)
    assert sampled_digests(regions) == before
    described = sampled_digests({"a": Region(file, 0, 10 * SAMPLE_BYTES, "bf16")})
    shorter = sampled_digests({"a": Region(file, 0, 10 * SAMPLE_BYTES - 1)})
    assert len({before["a"], described["a"], shorter["a"]}) == 3


def test_of_very_many_regions_less_is_read_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 20))
    monkeypatch.setattr("danlu.run.input_fingerprints.MOST_BYTES", 3 << 16)
    few, many = ({str(n): Region(file, 0, 1 << 20) for n in range(count)} for count in (1, 100))
    before = sampled_digests(few)["0"], sampled_digests(many)["0"]
    flip_a_bit(file, at=0.04)  # within 64 KiB of the start, and beyond 4
    assert MOST_BYTES > 700 * 3 * SAMPLE_BYTES  # the tensors of a model of 70B: none is sampled less
    assert sampled_digests(few)["0"] != before[0] and sampled_digests(many)["0"] == before[1]


# -- what a recipe names -----------------------------------------------------------------------------------------------


def folder_of_everything(folder: Path, world: World) -> Recipe:
    """A recipe of stage rl whose every input is a file below `folder`."""
    base, reward = folder / "base", folder / "scores"
    for model in (base, reward):
        shutil.copytree(world.base, model)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.6}))
    write_rows(folder / "rows.jsonl", [{"prompt": "one", "answer": "1"}, {"prompt": "two", "answer": "2"}])
    write_rows(folder / "held_out.jsonl", [{"prompt": "three", "answer": "3"}])
    (folder / "my_rewards.py").write_text("def short(completion, **row):\n    return -len(completion)\n")
    (folder / "my_tools.py").write_text('def ask(text: str) -> str:\n    """Asks."""\n    return text\n')
    (folder / "chat.jinja").write_text(CHATML)
    shutil.copytree(world.tokenizer, folder / "tokenizer")
    template = str(folder / "chat.jinja")
    values = {
        "stage": "rl",
        "model": {"path": str(base), "tokenizer": str(folder / "tokenizer"), "chat_template": template},
        "data": {
            "train": str(folder / "rows.jsonl"),
            "eval": [str(folder / "held_out.jsonl")],
            "cache": str(folder / "cache"),
        },
        "environment": {"kind": "tools", "tools": [f"{folder / 'my_tools.py'}:ask"]},
        "rewards": [{"kind": "model", "path": str(reward)}, f"{folder / 'my_rewards.py'}:short"],
        "objective": {"kind": "grpo", "kl": 0.1},
        "reference": {"kind": "frozen", "model": str(reward)},
        "rollout": {"samples": 2, "max_new_tokens": 8, "draft": {"kind": "model", "model": str(reward)}},
        "steps": 2,
        "output": str(folder / "run"),
    }
    file = folder / "rl.yaml"
    file.write_text(json.dumps(values), encoding="utf-8")
    return load(file).recipe


WHAT_IS_SEEN: dict[str, tuple[Edit, set[str]]] = {
    "rows.jsonl": (partial(edit_text, old="one", new="ten"), {"data.train.0"}),
    "held_out.jsonl": (partial(edit_text, old="three", new="seven"), {"data.eval.0"}),
    "tokenizer/tokenizer.json": (partial(edit_text, old="1.0", new="1.1"), {"model.tokenizer (tokenizer)"}),
    "chat.jinja": (partial(edit_text, old="role", new="rule"), {"model.chat_template"}),
    "base/config.json": (partial(edit_json, values={"rope_theta": 5e5}), {"model.path (config.json)"}),
    "base/generation_config.json": (
        partial(edit_json, values={"eos_token_id": [2, 3]}),
        {"model.path (generation_config.json)"},
    ),
    "base/model.safetensors": (partial(flip_a_bit, at=0.5), {"model.path (weights)"}),
    "scores/model.safetensors": (
        partial(flip_a_bit, at=0.9),
        {"rewards.0 (weights)", "reference.path (weights)", "rollout.draft (weights)"},
    ),
    "my_rewards.py": (partial(edit_text, old="-len", new="len"), {"rewards.1"}),
    "my_tools.py": (partial(edit_text, old="Asks", new="Says"), {"environment.0"}),
}
NOT_SEEN: dict[str, Edit] = {
    "base/config.json": partial(edit_json, values={"transformers_version": "9.9", "use_cache": False}),
    "base/generation_config.json": partial(edit_json, values={"temperature": 0.7}),
}


def test_each_file_that_a_recipe_names_has_a_fingerprint(tiny_world: World, tmp_path: Path) -> None:
    recipe = folder_of_everything(tmp_path, tiny_world)

    def found(resumed: bool = False) -> dict[str, Input]:
        inputs = recipe_inputs(recipe, STAGES["rl"], resumed=resumed)
        assert not [each.problem for each in inputs if each.problem]
        return {each.key: each for each in inputs}

    before = found()
    assert set().union(*(keys for _, keys in WHAT_IS_SEEN.values())) <= before.keys()
    edits = [(name, edit, keys) for name, (edit, keys) in WHAT_IS_SEEN.items()]
    for name, edit, keys in [*edits, *((name, edit, set[str]()) for name, edit in NOT_SEEN.items())]:
        content = (tmp_path / name).read_bytes()
        edit(tmp_path / name)
        after = found()
        assert {key for key in before if after[key].compared() != before[key].compared()} == keys, name
        (tmp_path / name).write_bytes(content)
    # Of a resumed run the weights are the checkpoint's, and of prompts that are stored it knows the tokens.
    assert before.keys() - found(resumed=True).keys() == {
        "data.train.0",
        "model.path (weights)",
        *(key for key in before if key.startswith("rollout.draft") and "config" not in key),
    }


# -- several processes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gathered(Group):
    """A group of two processes, of which the other one has found what it says."""

    other: Sequence[Input] = ()

    def from_first(self, make: Callable[[], Any], **options: Any) -> Any:
        return make()

    def all_gather_objects(self, value: Any) -> list[Any]:
        return [value, list(self.other)]


def test_a_file_that_one_process_alone_lacks_is_said_by_name() -> None:
    rows, gone = Input("data.train.0", "rows.jsonl", {"rows.jsonl": "1"}), "rows.jsonl: no such file"
    missing = Input("data.train.0", "", problem=gone)

    def compare(own: Input, *other: Input) -> list[Input]:
        return same_on_all_ranks(Gathered(ranks=(0, 1), other=other), lambda: [own], lambda: None)

    assert compare(rows, rows) == [rows]
    assert compare(missing, missing) == [missing]  # whoever reads it says it best
    with pytest.raises(DataError, match=f"\n  rank 1: data.train.0: {gone}\n"):
        compare(rows, missing)
    with pytest.raises(DataError, match=f"\n  rank 0: data.train.0: {gone}\n"):
        compare(missing, rows)
    with pytest.raises(DataError, match=r"\n  rank 1: data.train.0: not read, rank 0: rows.jsonl\n"):
        compare(rows)


@pytest.fixture
def copies(tiny_world: World, tmp_path: Path) -> Path:
    """rank-0 and rank-1, each with rows, held-out rows, tokenizer, template, base and adapter of its own."""
    for rank in (0, 1):
        folder = tmp_path / f"rank-{rank}"
        shutil.copytree(tiny_world.base, folder / "base")
        shutil.copytree(tiny_world.tokenizer, folder / "tokenizer")
        write_rows(folder / "rows.jsonl", list(conversations(1, 12)))
        write_rows(folder / "held_out.jsonl", list(conversations(2, 4)))
        (folder / "chat.jinja").write_text(CHATML)
        (folder / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def append_a_row(file: Path) -> None:
    with file.open("a") as handle:
        handle.write(json.dumps({"text": "One row more."}) + "\n")


def rewrite(file: Path) -> None:
    file.write_bytes(file.read_bytes())


class Case(NamedTuple):
    """A recipe, what rank 1 does to which of its own files before it trains it, and how both of them end."""

    name: str
    edited: str
    edit: Edit
    expected: str = "1 steps"
    kind: str = "DataError"
    changes: Mapping[str, Any] = MappingProxyType({})


BASE = {"model": {"path": "base", "config": None, "tokenizer": "tokenizer", "chat_template": "chat.jinja"}}
CASES = [
    Case("the same", "rows.jsonl", rewrite),
    Case("rows", "rows.jsonl", append_a_row, "data.train.0: rows.jsonl: rows.jsonl is another"),
    Case(
        "evaluation",
        "held_out.jsonl",
        append_a_row,
        "data.eval.0: held_out.jsonl",
        changes={"evaluation": {"every": 1}, "data": {"eval": ["held_out.jsonl"]}},
    ),
    Case("stream", "rows.jsonl", append_a_row, "data.train.0: rows.jsonl", changes={"data": {"streaming": True}}),
    Case(
        "tokenizer",
        "tokenizer/tokenizer.json",
        partial(edit_text, old="1.0", new="1.1"),
        r"model.tokenizer \(tokenizer\): tokenizer: tokenizer.json is another",
        changes=BASE,
    ),
    Case("template", "chat.jinja", partial(edit_text, old="role", new="rule"), "model.chat_template", changes=BASE),
    Case(
        "config of the base",
        "base/config.json",
        partial(edit_json, values={"rms_norm_eps": 1e-3}),
        r"model.path \(config.json\): base/config.json: rms_norm_eps: 1e-0[56] -> 0.001 ",
        "ModelError",
        BASE,
    ),
    Case(
        "weights of the base",
        "base/model.safetensors",
        partial(flip_a_bit, at=0.5),
        r"model.path \(weights\): base: model.safetensors is another",
        "ModelError",
        BASE,
    ),
    Case(
        "config",
        "config.json",
        partial(edit_json, values={"rope_theta": 5e5}),
        "model.config: config.json: rope_theta is new",
        "ModelError",
        {"model": {"config": "config.json", "tokenizer": "tokenizer"}},
    ),
]


@pytest.mark.distributed
def test_processes_that_open_other_files_end_with_their_names(copies: Path, tiny_world: World) -> None:
    files = {}
    for case in CASES:
        data = {"train": "rows.jsonl", "max_length": 64, "cache": "cache", "workers": 1, **case.changes.get("data", {})}
        values = {**case.changes, "steps": 1, "schedule": {"warmup": 0}, "data": data}
        files[case.name] = str(tiny_world.recipe(copies / "runs" / case.name, **values))
    stale = {case.name: (case.edited, case.edit) for case in CASES}
    for found in run_group(outcomes, 2, copies, files, stale, timeout=60.0):
        for case in CASES:
            expected = rf"{case.kind}: the processes have not opened the same files:\n  rank 1: {case.expected}"
            assert re.match(case.expected if case.edit is rewrite else expected, found[case.name]), found[case.name]
            assert case.edit is rewrite or "Give each process what rank 0 has" in found[case.name]
