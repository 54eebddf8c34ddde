"""Adapters that take turns in one conversation answer as each would alone."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from builders.adapter_folders import adapter_folder
from builders.tiny_world import World

from danlu.core.errors import DataError
from danlu.inference.chat import Conversation
from danlu.inference.chat_adapters import ActiveAdapter, ChatAdapters
from danlu.inference.engine_adapters import StackedAdapters
from danlu.inference.load_engine import engine_of
from danlu.inference.load_model import load_chat_tokenizer, load_model
from danlu.inference.request import Completion, SamplingOptions
from danlu.inference.resolve_model import resolve_model
from danlu.recipe import sections

GREEDY = SamplingOptions(temperature=0)
TURNS = ("Hello", "What colour is the fox?", "Why?")
SECTIONS: dict[str, Any] = {
    "lora": sections.Lora(modules_to_save=["norm"]),
    "dora": sections.Dora(rank=3, targets=["attention"]),
    "prefix": sections.Prefix(tokens=3),
    "bottleneck": sections.Bottleneck(width=4),
    "prompt": sections.Prompt(tokens=5),
}


@pytest.fixture(scope="module")
def folders(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: adapter_folder(tiny_world.base, root / name, section, seed=number, size=0.3)
        for number, (name, section) in enumerate(SECTIONS.items())
    }


class Talk:
    """A conversation over a model with adapters."""

    def __init__(self, path: Path, *adapters: Path) -> None:
        resolved = resolve_model(str(path), adapters=[str(one) for one in adapters])
        self.opened = load_model(resolved, load_chat_tokenizer(resolved.tokenizer_folder, model=resolved.folder))
        self.chat_adapters = ChatAdapters(resolved, self.opened)
        active = self.chat_adapters.switch(self.chat_adapters.active_name)
        self.conversation = Conversation(engine_of(self.opened), active.chat_format([], 8, 128), GREEDY)

    def switch(self, name: str) -> ActiveAdapter:
        active = self.chat_adapters.switch(name)
        self.conversation.adapter_changed(active.chat_format([], 8, 128))
        return active

    def answer(self, history: Sequence[dict[str, str]], turn: str) -> Completion:
        """With these turns before it."""
        self.conversation.messages = [dict(one) for one in history]
        return self.conversation.ask(turn)


def same(one: Completion, other: Completion) -> bool:
    return one.tokens == other.tokens and one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_each_answers_as_in_a_fresh_chat_of_its_own(tiny_world: World, folders: dict[str, Path]) -> None:
    """Whatever was in the cache: the turns are read again with the weights and the prefix that are active now."""
    talk = Talk(tiny_world.base, *folders.values())
    assert talk.chat_adapters.adapters == tuple(SECTIONS) and talk.chat_adapters.active_name == "lora"
    seen: list[Completion] = []
    for name in ("lora", "prefix", "none", "dora", "prompt", "lora", "bottleneck", "none"):
        talk.switch(name)
        talk.conversation.messages = talk.conversation.messages[-4:]  # more does not fit
        history = [dict(one) for one in talk.conversation.messages]
        turn = TURNS[len(seen) % 3]
        alone = Talk(tiny_world.base if name == "none" else folders[name])
        expected = alone.answer(history, turn)
        assert same(talk.conversation.ask(turn), expected), name
        assert not any(same(expected, other) for other in seen)
        seen.append(expected)


def test_the_cache_of_another_adapter_would_be_wrong(
    tiny_world: World, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: where the engine is not told of the switch, it goes on from keys that are not its own."""
    talk = Talk(tiny_world.base, *folders.values())
    talk.conversation.ask(TURNS[0])
    history = [dict(one) for one in talk.conversation.messages]
    assert talk.opened.stacks is not None
    monkeypatch.setattr(StackedAdapters, "use", lambda self, name: None)
    talk.opened.stacks.use(talk.chat_adapters.adapters.index("dora"))
    assert not same(talk.conversation.ask(TURNS[1]), Talk(folders["dora"]).answer(history, TURNS[1]))


def test_going_back_and_forth_leaves_no_trace(tiny_world: World, folders: dict[str, Path]) -> None:
    talk = Talk(tiny_world.base, *folders.values())
    first = talk.answer([], TURNS[0])
    for name in ("prompt", "none", "dora", "lora"):
        talk.switch(name)
    assert same(talk.answer([], TURNS[0]), first)
    talk.switch("dora")
    assert not same(talk.answer([], TURNS[0]), first)


def template(folder: Path, tiny_world: World, text: str | None) -> Path:
    """Gives a folder words of its own: the tokenizer, with another chat template or none."""
    shutil.copytree(tiny_world.tokenizer, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").unlink()
    if text is not None:
        (folder / "chat_template.jinja").write_text(text)
    return folder


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def test_each_speaks_with_the_template_it_was_trained_with(
    tiny_world: World, folders: dict[str, Path], tmp_path: Path
) -> None:
    own = template(Path(shutil.copytree(folders["dora"], tmp_path / "own")), tiny_world, PLAIN)
    talk = Talk(tiny_world.base, folders["lora"], own)
    turn = {"role": "user", "content": "Hello"}
    chatml = talk.chat_adapters.switch("lora").chat_tokenizer.encode_chat([turn])
    active = talk.switch("own")
    assert active.chat_tokenizer.decode(active.chat_tokenizer.encode_chat([turn])) == "user: Hello\nassistant:"
    assert same(talk.answer([], "Hello"), Talk(own).answer([], "Hello"))
    assert talk.switch("lora").chat_tokenizer.encode_chat([turn]) == chatml != active.chat_tokenizer.encode_chat([turn])


def test_a_base_that_cannot_chat_borrows_the_words_of_its_adapters(
    tiny_world: World, folders: dict[str, Path], tmp_path: Path
) -> None:
    base = template(Path(shutil.copytree(tiny_world.base, tmp_path / "base")), tiny_world, None)
    mute = Path(shutil.copytree(folders["lora"], tmp_path / "mute"))
    own = template(Path(shutil.copytree(folders["dora"], tmp_path / "own")), tiny_world, PLAIN)
    talk = Talk(base, own, mute)
    active = talk.switch("none")
    assert active.chat_tokenizer.decode(
        active.chat_tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    ).startswith("user: Hi")
    with pytest.raises(DataError, match="base: no chat template"):
        talk.switch("mute")
    assert talk.chat_adapters.active_name == "none"


def test_a_name_that_is_not_there(tiny_world: World, folders: dict[str, Path]) -> None:
    talk = Talk(tiny_world.base, folders["lora"], folders["dora"])
    with pytest.raises(DataError, match="lroa: no such adapter; there are lora, dora and none"):
        talk.switch("lroa")
    assert talk.chat_adapters.active_name == "lora"
    plain = Talk(tiny_world.base)
    assert plain.chat_adapters.active_name == "none" and plain.chat_adapters.adapters == ()
    with pytest.raises(DataError, match="lora: no such adapter; there are none. Start with --adapter PATH"):
        plain.switch("lora")


def test_what_cannot_chat_can_be_given_texts_to_continue(
    tiny_world: World, folders: dict[str, Path], tmp_path: Path
) -> None:
    mute = template(Path(shutil.copytree(folders["lora"], tmp_path / "mute")), tiny_world, None)
    talk = Talk(tiny_world.base, folders["prompt"], mute)
    with pytest.raises(DataError, match="mute: no chat template"):
        talk.chat_adapters.tokenizer_of("mute")
    assert talk.chat_adapters.tokenizer_of("mute", chat=False).chat_tokenizer.encode_prompt("Hi")
    assert talk.chat_adapters.tokenizer_of("prompt").virtual_tokens == 5
    assert talk.chat_adapters.tokenizer_of("none").virtual_tokens == 0
    assert [talk.chat_adapters.tokenizer_of(name, chat=False).adapter for name in ("none", "mute")] == ["none", "mute"]
    assert Talk(tiny_world.base).chat_adapters.tokenizer_of("none").adapter is None
    assert talk.chat_adapters.active_name == "prompt", "asking switches nothing"
