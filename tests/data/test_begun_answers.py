"""Prompts that end in the assistant's turn: the answer goes on with it, and the beginning is context.

The oracle is transformers' `apply_chat_template`: a prompt is what `continue_final_message` gives, and an answer is the
rest of the whole turn's tokens behind those that it shares with the prompt, as in TRL (`common_prefix_length` of
trl/data_utils.py, version 1.16.0).
"""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.chat_tokenizers import make_tokenizer, tokenizer_and_oracle
from builders.inline_workers import InlineWorkers
from builders.tiny_world import World, danlu, write_rows

from danlu.core.errors import DataError
from danlu.data import prepare as prepare_module
from danlu.data.answer_trees import render_answers
from danlu.data.messages import Conversation
from danlu.data.preference_rows import parse_answers
from danlu.data.prepare import DatasetSpec, prepare_prompts
from danlu.data.prompts import Prompt
from danlu.data.render import RenderedSample, RenderSettings, render_rows
from danlu.data.rows import parse_row
from danlu.data.tokenizer import load_tokenizer
from danlu.recipe.sections import Data, Packing, Source
from danlu.recipe.sections.base import RowType

ASK = {"role": "user", "content": "Hi there, how are you today?"}
STYLES = ("chatml", "llama3", "mistral", "gemma", "qwen3")
BEGINNINGS = ("I think ", "e", "I am so")
"""White space that some templates trim, a letter that stands in the marks of every template, half a word."""
CHOSEN, REJECTED = "it is sunny.", "me fox over"
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "a fox"}
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


@pytest.fixture(autouse=True)
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "WorkerPool", InlineWorkers)


def prompts(folder: str, path: Path, *rows: dict[str, Any], in_turns: bool = False, **data: Any) -> tuple[Prompt, ...]:
    source = Source(path=str(write_rows(path / "rows.jsonl", list(rows))))
    section = Data(train=[source], packing=Packing(kind="none"), workers=1, **data)
    return prepare_prompts(DatasetSpec(section, "rl", folder, None, 0, max_new_tokens=100, in_turns=in_turns)).train


# -- stage rl ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_prompts_of_stage_rl_are_those_of_continue_final_message(style: str, tmp_path: Path) -> None:
    tokenizer, oracle = tokenizer_and_oracle(style)
    asked = [[ASK, said(begun)] for begun in BEGINNINGS]
    for prompt, turns in zip(
        prompts(tokenizer.path, tmp_path, *[{"prompt": each} for each in asked]), asked, strict=True
    ):
        assert list(prompt.tokens) == oracle.apply_chat_template(turns, continue_final_message=True, return_dict=False)
        assert prompt.prompt == turns
        # Controls: a turn of its own behind the beginning, and the beginning as a whole turn.
        assert list(prompt.tokens) != oracle.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert list(prompt.tokens) != oracle.apply_chat_template(turns, return_dict=False)


def test_the_beginning_is_of_the_prompt_column_and_not_of_answered_conversations(tmp_path: Path) -> None:
    tokenizer, _ = tokenizer_and_oracle("chatml")
    begun = [ASK, said("I think ")]
    answers = {"chosen": [said(CHOSEN)], "rejected": [said(REJECTED)]}
    rows = [{"messages": begun}, {"messages": begun, **answers}, {"prompt": begun, "completion": [said("so")]}]
    answered, preferred, completed = prompts(tokenizer.path, tmp_path, *rows)
    assert answered.prompt == [ASK] and preferred.prompt == completed.prompt == begun


def test_a_long_prompt_keeps_its_beginning(tmp_path: Path) -> None:
    tokenizer, oracle = tokenizer_and_oracle("chatml")
    turns = [ASK, said("No."), ASK, said("I think ")]
    shorter = oracle.apply_chat_template(turns[2:], continue_final_message=True, return_dict=False)
    (prompt,) = prompts(tokenizer.path, tmp_path, {"prompt": turns}, max_length=100 + len(shorter))
    assert list(prompt.tokens) == shorter and prompt.prompt == turns[2:]


@pytest.mark.parametrize(
    ("prompt", "in_turns", "message"),
    [
        ([ASK, said("I")], True, "rows.jsonl:1: the prompt ends in the assistant's turn, and with an environment each"),
        ([ASK, CALL], False, "rows.jsonl:1: the prompt ends with a call, which no answer can go on with; add the tool"),
        ([ASK, said(" ")], False, "rows.jsonl:1 message 2: the assistant's answer is empty"),
    ],
    ids=["environment", "call", "empty"],
)
def test_prompts_that_no_answer_goes_on_with(prompt: Any, in_turns: bool, message: str, tmp_path: Path) -> None:
    tokenizer, _ = tokenizer_and_oracle("chatml")
    with pytest.raises(DataError, match="none of 1 rows can be used") as error:
        prompts(tokenizer.path, tmp_path, {"prompt": prompt}, in_turns=in_turns, on_bad_row="skip")
    assert message in str(error.value)


# -- compared and judged answers ---------------------------------------------------------------------------------------


def tree_of(style: str, value: dict[str, Any], row_type: RowType = "preference") -> RenderedSample:
    row = parse_answers(value, "auto", row_type, "rows.jsonl:1")
    (tree,) = render_answers([row], ["rows.jsonl:1"], tokenizer_and_oracle(style)[0], RenderSettings())
    assert isinstance(tree, RenderedSample), tree
    return tree


def path(tree: RenderedSample, branch: int) -> tuple[list[int], list[float]]:
    """The tokens from the root to the end of a branch, and their weights."""
    places = np.empty(0, int)
    while branch >= 0:
        parent, start, stop = tree.branches[branch]
        places, branch = np.concatenate([np.arange(start, stop), places]), parent
    return tree.tokens[places].tolist(), tree.weights[places].tolist()


def common(first: list[int], second: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def trained_from(oracle: Any, turns: list[Any], whole: list[int]) -> int:
    """The first token of an answer, as TRL has it."""
    prompt = oracle.apply_chat_template(turns, continue_final_message=True, return_dict=False)
    return common(prompt, whole)


FORMS = {
    "prompt": lambda begun: {"prompt": [ASK, said(begun)], "chosen": [said(CHOSEN)], "rejected": [said(REJECTED)]},
    "texts": lambda begun: {"prompt": [ASK, said(begun)], "chosen": CHOSEN, "rejected": REJECTED},
    "messages": lambda begun: {"messages": [ASK, said(begun)], "chosen": said(CHOSEN), "rejected": said(REJECTED)},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("style", STYLES)
def test_pairs_are_trained_from_the_end_of_the_beginning(style: str, form: str) -> None:
    _, oracle = tokenizer_and_oracle(style)
    for begun in BEGINNINGS:
        tree = tree_of(style, FORMS[form](begun))
        for branch, answer in ((1, CHOSEN), (2, REJECTED)):
            tokens, weights = path(tree, branch)
            assert tokens == oracle.apply_chat_template([ASK, said(begun + answer)], return_dict=False)
            first = trained_from(oracle, [ASK, said(begun)], tokens)
            assert not any(weights[:first]) and all(weights[first : first + 2])
            # Control: without a beginning training begins earlier.
            asked = oracle.apply_chat_template([ASK], add_generation_prompt=True, return_dict=False)
            assert common(asked, tokens) < first or begun == "e"


def test_a_token_across_the_border_is_the_answers_and_is_remarked() -> None:
    """The prompt ends inside a word, which one answer makes a single token of."""
    _, oracle = tokenizer_and_oracle("chatml")
    begun = "The quick bro"
    value = {"prompt": [ASK, said(begun)], "chosen": "wn fox", "rejected": "ther"}
    tree = tree_of("chatml", value)
    tokens, weights = path(tree, 1)
    prompt = oracle.apply_chat_template([ASK, said(begun)], continue_final_message=True, return_dict=False)
    first = common(prompt, tokens)
    assert first < len(prompt), "the tokenizer knows the word"
    assert not any(weights[:first]) and weights[first] == 1 and tree.remarks.split_token == tokens[first]
    clean = tree_of("chatml", {**value, "prompt": [ASK, said("The quick")], "chosen": " brown", "rejected": " dog"})
    assert clean.remarks.split_token == -1 and not clean.remarks.unlike_prompt


@pytest.mark.parametrize("style", ["chatml", "qwen3"])
def test_judged_answers_and_steps(style: str) -> None:
    _, oracle = tokenizer_and_oracle(style)
    turns = [ASK, said("I think ")]
    judged = tree_of(style, {"prompt": turns, "completion": [said(CHOSEN)], "label": True}, "unpaired")
    steps = tree_of(style, {"prompt": turns, "completions": ["one fox", "two dogs"], "labels": [1, 0]}, "stepwise")
    for tree, answer in ((judged, CHOSEN), (steps, "one fox\ntwo dogs")):
        tokens, weights = path(tree, len(tree.branches) - 1)
        assert tokens == oracle.apply_chat_template([ASK, said("I think " + answer)], return_dict=False)
        first = trained_from(oracle, turns, tokens)
        assert not any(weights[:first]) and weights[first] == 1
    tokenizer = tokenizer_and_oracle(style)[0]
    parts = [tokenizer.decode(steps.tokens[start:stop].tolist()) for _, start, stop in steps.branches]
    assert parts[0].rstrip().endswith("\nI think")
    assert parts[1].strip() == "one fox" and parts[2].strip().startswith("two dogs")


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_a_completion_in_stage_sft(train_on: Any) -> None:
    tokenizer, oracle = tokenizer_and_oracle("chatml")
    row = parse_row({"prompt": [ASK, said("I think ")], "completion": [said(CHOSEN)]}, "auto", "row")
    ((sample,),) = render_rows([row], ["row"], tokenizer, RenderSettings(train_on=train_on))  # type: ignore[misc]
    first = trained_from(oracle, [ASK, said("I think ")], sample.tokens.tolist())
    assert sample.weights[first] == 1
    assert sample.weights[1:first].all() if train_on == "all" else not sample.weights[:first].any()


def test_an_answer_that_goes_on_to_call_a_tool_and_answer_again(tmp_path: Path) -> None:
    value = {"prompt": [ASK, said("I look: ")], "chosen": [CALL, RESULT, said(CHOSEN)], "rejected": REJECTED}
    pair: Any = parse_answers(value, "auto", "preference", "row")
    assert isinstance(pair.chosen, Conversation)
    user, call, result, last = pair.chosen.messages
    assert (call.content, call.begun, last.begun, result.role) == ("I look: ", len("I look: "), 0, "tool")
    assert call.tool_calls and not call.is_context and user.is_context
    tokenizer = load_tokenizer(str(make_tokenizer(tmp_path / "calls", CALLS)))
    (tree,) = render_answers([pair], ["row"], tokenizer, RenderSettings())
    assert isinstance(tree, RenderedSample)
    tokens, weights = path(tree, 1)
    text = tokenizer.decode([token for token, weight in zip(tokens, weights, strict=True) if weight])
    assert text.replace(" <", "<").strip() == f"<tool_call>look</tool_call><|im_end|>{CHOSEN}<|im_end|>"


@pytest.mark.parametrize(
    ("begun", "chosen", "message"),
    [
        (said("I"), said(" "), "rows.jsonl:1 message 3: the assistant's answer is empty; remove the row or fill"),
        (
            said("I"),
            {**said("a"), "reasoning_content": "b"},
            "message 3: the answer goes on with the turn that the pro",
        ),
        ({**said("I"), "weight": 1}, said("a"), "message 3: the prompt has begun this turn, and gives its beginning a"),
        (said(" "), said("a"), "message 2: the assistant's answer is empty"),
        (CALL, said("a"), "preferred"),
    ],
    ids=["empty", "thought", "weight", "empty beginning", "a turn behind a call"],
)
def test_answers_that_cannot_go_on(begun: dict[str, Any], chosen: dict[str, Any], message: str) -> None:
    value = {"prompt": [ASK, begun], "chosen": chosen, "rejected": chosen}
    with pytest.raises(DataError, match=message):
        parse_answers(value, "auto", "preference", "rows.jsonl:1")


def test_a_template_that_shows_the_beginning_otherwise_in_the_whole() -> None:
    """Qwen3's writes an empty thought before one that is not closed."""
    value = {
        "prompt": [ASK, said("<think>\nLet")],
        "chosen": " me.\n</think>\n\nOne",
        "rejected": " us.\n</think>\n\nTwo",
    }
    row = parse_answers(value, "auto", "preference", "rows.jsonl:1")
    (error,) = render_answers([row], ["rows.jsonl:1"], tokenizer_and_oracle("qwen3")[0], RenderSettings())
    assert isinstance(error, DataError)
    assert "rows.jsonl:1: message 2: the chat template shows the turn that the prompt has begun otherwise" in str(error)
    assert tree_of("chatml", value).weights.any()


def test_log_probabilities_are_those_of_transformers(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`danlu eval` of a pair: the sums over the tokens behind the beginning."""
    import json

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    turns = [{"role": "user", "content": "Who is there?"}, said("A small ")]
    answers = {"chosen": "fox ran away.", "rejected": "dog."}
    file = write_rows(tmp_path / "pairs.jsonl", [{"prompt": turns, **answers}])
    assert danlu("eval", tiny_world.base, "--data", file, f"data.cache={tmp_path / 'cache'}", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_world.base)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_world.base).eval()
    for name, answer in answers.items():
        whole = tokenizer.apply_chat_template([turns[0], said("A small " + answer)], return_dict=False)
        whole = whole[: max(place for place, token in enumerate(whole) if token == tokenizer.eos_token_id) + 1]
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
        of_tokens = [float(logprobs[place - 1, whole[place]]) for place in range(1, len(whole))]
        first = trained_from(tokenizer, turns, whole)
        assert values[f"logps/{name}"] == pytest.approx(sum(of_tokens[first - 1 :]), abs=1e-4)
        asked = common(tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False), whole)
        assert abs(values[f"logps/{name}"] - sum(of_tokens[asked - 1 :])) > 1e-2  # control
