"""What an engine switches between: the stacks of a loaded model, by name."""

from __future__ import annotations

import pytest
from builders.adapter_folders import adapter_folder
from builders.tiny_world import World

from danlu.inference.load_model import LoadedModel, load_chat_tokenizer, load_model
from danlu.inference.resolve_model import resolve_model
from danlu.recipe import sections


@pytest.fixture(scope="module")
def loaded(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    root = tmp_path_factory.mktemp("adapters")
    soft = adapter_folder(tiny_world.base, root / "soft", sections.Prompt(tokens=5), seed=1)
    lora = adapter_folder(tiny_world.base, root / "lora", sections.Lora(), seed=0)
    resolved = resolve_model(str(tiny_world.base), adapters=[str(soft), str(lora)])
    return load_model(resolved, load_chat_tokenizer(resolved.tokenizer_folder, model=resolved.folder))


def test_stacks_are_switched_by_name(loaded: LoadedModel) -> None:
    adapters, stacks = loaded.engine_adapters, loaded.stacks
    assert adapters is not None and stacks is not None
    assert list(adapters.names) == ["soft", "lora"] == list(loaded.adapter_names)
    seen = {}
    for name in ("lora", "none", "soft", None):
        adapters.use(name)
        seen[name] = stacks.adapters.active
    assert seen == {"lora": stacks.names[1], "none": (), "soft": stacks.names[0], None: stacks.names[0]}
    assert len(set(seen.values())) == 3


def test_virtual_tokens_are_told_of_what_is_not_active(loaded: LoadedModel) -> None:
    adapters, stacks = loaded.engine_adapters, loaded.stacks
    assert adapters is not None and stacks is not None
    adapters.use("lora")
    soft = adapters.virtual_token_ids("soft")
    assert len(soft) == 5 and adapters.virtual_token_ids(None) == soft
    assert adapters.virtual_token_ids("lora") == adapters.virtual_token_ids("none") == ()
    assert stacks.adapters.active == stacks.names[1], "asking switches nothing"
    adapters.use("soft")
    assert stacks.adapters.virtual_token_ids == soft


def test_using_what_is_active_does_nothing(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters, stacks = loaded.engine_adapters, loaded.stacks
    assert adapters is not None and stacks is not None
    adapters.use("lora")
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(stacks.adapters, "activate", lambda *names: calls.append(names))
    adapters.use("lora")
    assert calls == []
    adapters.use("none")
    assert calls == [()]  # control


def test_a_model_without_adapters_has_none_to_switch(tiny_world: World) -> None:
    resolved = resolve_model(str(tiny_world.base))
    assert load_model(resolved, load_chat_tokenizer(resolved.tokenizer_folder)).engine_adapters is None
