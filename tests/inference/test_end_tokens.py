"""Answers end at the same tokens wherever they are drawn: the tokenizer's and those of a model's two configs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from builders.distillation_worker import recipe as distilling
from builders.distillation_worker import teacher_folder, train
from builders.tiny_world import World
from test_environment_runs import environment
from test_rl_runs import run

from danlu.data.tokenizer import load_tokenizer
from danlu.inference.chat_tokenizer import ChatTokenizer
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.generation_config import end_tokens
from danlu.inference.load_model import load_chat_tokenizer, load_model
from danlu.inference.resolve_model import resolve_model
from danlu.models.hf_folder import read_config
from danlu.rl.turn_rendering import TurnRenderer

GKD: dict[str, Any] = {"on_policy": True, "objective": "forward", "rollout": {"max_new_tokens": 8}}

pytestmark = pytest.mark.usefixtures("module_tokenises_here")


@pytest.fixture
def base(tiny_world: World, tmp_path: Path) -> Path:
    """A model whose config.json ends text at 41 and whose generation_config.json does at 43 and 44."""
    folder = shutil.copytree(tiny_world.base, tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 41}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [43, 44]}))
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, frozenset[int]]]:
    """At which tokens answers were to end, and of an environment's turns at which they did."""
    seen: set[tuple[str, frozenset[int]]] = set()
    generate, answered = EmbeddedEngine.generate, TurnRenderer.answered

    def recorded(self: Any, requests: Any) -> Any:
        seen.update(("request", request.stop_ids) for request in requests)
        return generate(self, requests)

    def taken(self: Any, *given: Any) -> Any:
        seen.add(("turn", self.stop_ids))
        return answered(self, *given)

    monkeypatch.setattr(EmbeddedEngine, "generate", recorded)
    monkeypatch.setattr(TurnRenderer, "answered", taken)
    return seen


def test_rollouts_turns_and_samples_end_where_generate_does(
    tiny_world: World, base: Path, tmp_path: Path, asked: set[tuple[str, frozenset[int]]]
) -> None:
    tokenizer = load_tokenizer(str(base))
    ends = end_tokens(tokenizer, read_config(base), base)
    assert ends == {*tokenizer.end_of_turn_ids, 41, 43, 44}
    assert ChatTokenizer(tokenizer).stop_ids == {*tokenizer.end_of_turn_ids}  # control: the tokenizer's alone
    samples = {"every": 1, "samples": {"prompts": ["Who?"], "max_new_tokens": 4}}
    more = {"model": {"path": str(base)}, "evaluation": samples, "steps": 2, "data": {"max_length": 96}}
    run(tiny_world, tmp_path / "rl", **more, **environment(tiny_world))
    assert asked == {("request", ends), ("turn", ends)}
    asked.clear()
    changes = {**GKD, "teacher": teacher_folder(tiny_world), "steps": 2, "evaluation": {}, "data": {"eval": None}}
    assert train([distilling(tiny_world, tmp_path / "gkd", **changes, model={"path": str(base), "config": None})]) == [
        0
    ]
    assert asked == {("request", ends)}
    resolved = resolve_model(str(base), None)  # as generate, chat, serve and eval load it
    loaded = load_model(resolved, load_chat_tokenizer(resolved.tokenizer_folder, model=resolved.folder))
    assert loaded.stop_ids == ends
