"""Adapters that are loaded and dropped while a server runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from builders.adapter_folders import adapter_folder
from builders.served import Loaded, Served, ask, serving, wait_until
from builders.tiny_world import World

from danlu.core.added_token import AddedToken
from danlu.core.errors import ModelError
from danlu.inference.engine import EngineOptions
from danlu.inference.load_engine import engine_of, loadable_adapters
from danlu.recipe import sections
from danlu.serving.adapter_endpoints import AdapterLoader

GREEDY: dict[str, Any] = {"prompt": "Once upon", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def root(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for name, size in (("one", 0.3), ("two", 0.6)):
        adapter_folder(tiny_world.base, root / name, sections.Lora(), size=size, seed=int(size * 10))
    return root


@pytest.fixture(scope="module")
def served(tiny_world: World, root: Path) -> Iterator[Served]:
    loaded = Loaded.of(tiny_world.base, name="tiny")
    adapters = loadable_adapters(loaded.model)
    engine = engine_of(loaded.model, EngineOptions(cache_gib=0.01), adapters)
    loader = AdapterLoader(loaded.resolved, engine, adapters, loaded.model.chat_tokenizer, root)
    with serving(loaded.served, engine, adapters=loader) as served:
        yield served


def post(served: Served, path: str, **body: Any) -> tuple[int, str]:
    status, answer = ask(f"{served.url}/{path}", json.dumps(body).encode(), Content_Type="application/json")
    return status, answer["error"]["message"] if isinstance(answer, dict) else answer


def text(served: Served, model: str) -> str:
    return served.client().completions.create(model=model, **GREEDY).choices[0].text


def test_adapters_come_and_go(served: Served, tiny_world: World, root: Path) -> None:
    together = Loaded.of(tiny_world.base, [root / "one", root / "two"], name="tiny")
    with serving(together.served, together.engine()) as beside:
        expected = {name: text(beside, name) for name in ("tiny", "one", "two")}
    assert len(set(expected.values())) == 3
    assert post(served, "load_lora_adapter", lora_name="a", lora_path="one") == (
        200,
        "Success: LoRA adapter 'a' added successfully.",
    )
    assert [model.id for model in served.client().models.list()] == ["tiny", "a"]
    assert (text(served, "a"), text(served, "tiny")) == (expected["one"], expected["tiny"])
    status, message = post(served, "load_lora_adapter", lora_name="a", lora_path=str(root / "two"))
    assert status == 400 and message == "lora_name: a is there already; drop it first, or load_inplace"
    assert post(served, "load_lora_adapter", lora_name="a", lora_path=str(root / "two"), load_inplace=True)[0] == 200
    assert text(served, "a") == expected["two"]
    assert post(served, "unload_lora_adapter", lora_name="a")[0] == 200
    with pytest.raises(openai.NotFoundError, match="model: no 'a' here; there are tiny"):
        text(served, "a")
    adapters = served.server.engine._engine._adapters
    assert adapters is not None
    wait_until(lambda: adapters.names == () and not adapters._adapters.added)
    assert text(served, "tiny") == expected["tiny"]


def test_an_adapter_that_is_dropped_while_it_answers(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    post(served, "load_lora_adapter", lora_name="a", lora_path="one")
    whole = text(served, "a")
    engine, goes_on, texts = served.server.engine._engine, threading.Event(), list[str]()
    step, steps = engine.step, [0]

    def held_step() -> Any:
        steps[0] += 1
        assert steps[0] < 3 or goes_on.wait(20)
        return step()

    monkeypatch.setattr(engine, "step", held_step)
    thread = threading.Thread(target=lambda: texts.append(text(served, "a")))
    thread.start()
    wait_until(lambda: steps[0] == 3)
    assert post(served, "unload_lora_adapter", lora_name="a")[0] == 200
    with pytest.raises(openai.NotFoundError):
        text(served, "a")
    assert engine._adapters is not None and engine._adapters.names
    goes_on.set()
    thread.join(20)
    assert texts == [whole], "it goes on to its end"
    wait_until(lambda: engine._adapters is not None and not engine._adapters.names)


def test_what_is_no_adapter(served: Served, root: Path, tmp_path: Path) -> None:
    (root / "empty").mkdir(exist_ok=True)
    for path, status, message in (
        (str(tmp_path), 400, f"lora_path: {tmp_path} is not below {root}, the server's --adapters-root"),
        ("../x", 400, "lora_path: ../x is not below"),
        ("nowhere", 404, f"lora_path: no folder {root.resolve() / 'nowhere'} on the server's machine"),
        ("empty", 400, f"{root.resolve() / 'empty'}: "),
    ):
        given, said = post(served, "load_lora_adapter", lora_name="b", lora_path=path)
        assert (given, said[: len(message)]) == (status, message)
    assert post(served, "load_lora_adapter", lora_name="tiny", lora_path="one")[0] == 400
    assert post(served, "unload_lora_adapter", lora_name="tiny") == (
        404,
        "lora_name: no 'tiny' was loaded; there are none",
    )
    assert post(served, "load_lora_adapter", lora_name="b")[0] == 400
    assert [model.id for model in served.client().models.list()] == ["tiny"]


def test_a_server_without_a_folder_for_adapters_loads_none(loaded: Loaded) -> None:
    with serving(loaded.served, loaded.engine()) as plain:
        assert post(plain, "load_lora_adapter", lora_name="a", lora_path="one")[0] == 404


def test_adapters_come_to_a_base_with_rows_for_new_tokens(tiny_world: World, tmp_path: Path) -> None:
    """The base is still the one that they were trained on; a token without a row there is named."""
    plan, act, far = (AddedToken(text, number) for text, number in (("<plan>", 400), ("<act>", 401), ("<far>", 402)))
    for name, tokens in (("first", [plan, act]), ("second", [plan]), ("third", []), ("beyond", [plan, act, far])):
        ids = [token.id for token in tokens]
        adapter_folder(
            tiny_world.base,
            tmp_path / name,
            sections.Lora(rank=2),
            tokens=tokens,
            token_ids={"embedding": ids, "head": ids},
        )
    loaded = Loaded.of(tmp_path / "first")
    loader = AdapterLoader(
        loaded.resolved,
        engine_of(loaded.model, EngineOptions(cache_gib=0.01)),
        loadable_adapters(loaded.model),
        loaded.model.chat_tokenizer,
        tmp_path,
    )
    for name in ("second", "third"):
        folder, tokenizer = loader.read(name)
        assert loader.load(name, folder, tokenizer).name == name
    with pytest.raises(ModelError, match="beyond: was trained with the new token '<far>', for which the model that is"):
        loader.read("beyond")
