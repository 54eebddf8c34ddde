"""`danlu.load`: the texts of the command line, and transformers' log-probabilities."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.tiny_world import World, danlu

from danlu.api.model import Model, TokenLogprob, load
from danlu.core.errors import DanluError

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def stories(shared_data: Path) -> Path:
    """A real model of 260k parameters that tells stories."""
    return shared_data / "weights" / "stories260K-hf"


@pytest.fixture(scope="module")
def model(stories: Path) -> Model:
    return load(stories)


def test_texts_are_those_of_the_command_line(model: Model, stories: Path, tmp_path: Path, capsys: Any) -> None:
    prompts = ["Once upon a time", "Lily and Tom"]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps({'prompt': prompt})}\n" for prompt in prompts))
    flags = ["--max-new-tokens", 20, "--seed", 3, "--temperature", 1.2]
    assert danlu("generate", stories, "--file", file, "--json", *flags) == 0
    rows = sorted((json.loads(line) for line in capsys.readouterr().out.splitlines()), key=lambda row: row["row"])
    options: dict[str, Any] = {"max_new_tokens": 20, "seed": 3, "temperature": 1.2}
    assert model.generate(prompts, **options) == [row["text"] for row in rows]
    assert model.generate(prompts[0], **options) == rows[0]["text"]
    assert model.generate(prompts[0], **options | {"seed": 4}) != rows[0]["text"]  # control
    assert model.generate(prompts[0], temperature=0, stop="park") == model.generate(
        prompts[0], temperature=0, stop=["park"]
    )
    assert model.generate([]) == []


def test_logprobs_are_those_of_transformers(model: Model, stories: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, theirs = AutoTokenizer.from_pretrained(stories), AutoModelForCausalLM.from_pretrained(stories)
    ids = tokenizer("Lily and Tom went to the park.", return_tensors="pt").input_ids
    with torch.no_grad():
        scores = theirs(ids).logits[0].log_softmax(-1)
    expected = scores[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    ours = model.logprobs("Lily and Tom went to the park.")
    assert [token.id for token in ours] == ids[0, 1:].tolist()
    assert [token.logprob for token in ours] == pytest.approx(expected, abs=1e-4)
    assert [token.logprob for token in ours] != pytest.approx([value + 1e-3 for value in expected], abs=1e-4)  # control
    assert "".join(token.text for token in ours).split() == ["LilyandTomwenttothepark."] or ours[0].text
    behind = model.logprobs(" to the park.", prompt="Lily and Tom went")
    assert len(behind) < len(ours) and all(isinstance(token, TokenLogprob) for token in behind)
    assert sum(token.logprob for token in behind) == pytest.approx(_sum_behind(theirs, tokenizer), abs=1e-3)
    assert model.logprobs("") == []


def _sum_behind(theirs: Any, tokenizer: Any) -> float:
    """The log-probability of " to the park." behind "Lily and Tom went", each tokenised by itself."""
    before = tokenizer("Lily and Tom went").input_ids
    after = tokenizer(" to the park.", add_special_tokens=False).input_ids
    with torch.no_grad():
        scores = theirs(torch.tensor([before + after])).logits[0].log_softmax(-1)
    return sum(scores[len(before) + place - 1, id_].item() for place, id_ in enumerate(after))


def test_chat_answers_as_the_command_line(tiny_world: World, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    folder = tiny_world.base
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"What is a fox?\n"), encoding="utf-8"))
    assert danlu("chat", folder, "--temperature", 1, "--max-new-tokens", 8, "--system", "Be kind.") == 0
    said = capsys.readouterr().out
    chatting = load(folder)
    options: dict[str, Any] = {"temperature": 1, "max_new_tokens": 8}
    assert chatting.chat("What is a fox?", system="Be kind.", **options) + "\n" == said
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is a fox?"}]
    assert chatting.chat(turns, **options) + "\n" == said
    assert chatting.chat(turns, **options, seed=1) + "\n" != said  # control
    with pytest.raises(DanluError, match="ends with the assistant's turn"):
        chatting.chat([*turns, {"role": "assistant", "content": "A fox."}])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.generate("a", temperature=-1), "^temperature: -1 is out of range"),
        (lambda model: model.generate("a", max_new_tokens=0), "^max_new_tokens: 0 is no number of tokens"),
        (lambda model: model.generate("a", stop=""), "^stop: an empty text would stop before the first token"),
        (lambda model: model.generate(["a", 5]), "^prompt 1: 5 is no text. Model.chat takes messages"),
        (lambda model: model.generate("a b " * 500), "^prompt: the prompt has .* tokens, but the model sees 512"),
        (lambda model: model.logprobs("a b " * 500), "^text: .* tokens with all that stands before it"),
        (lambda model: model.chat([]), "'messages' is an empty list; there is nothing to answer"),
        (lambda model: load(model.path, dtype="fp64"), "^dtype: 'fp64' is unknown; use auto, "),
        (lambda model: load("/nowhere/at/all"), "/nowhere/at/all"),
    ],
)
def test_what_is_wrong_is_said(model: Model, call: Any, message: str) -> None:
    with pytest.raises(DanluError, match=message):
        call(model)
    assert model.generate("a", max_new_tokens=1, temperature=0) != ""  # it answers on
