from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import chat_tokenizers
from builders.chat_templates import CHATML, NO_TERMINATOR, RAISES, STYLES, TERMINATORS
from builders.chat_tokenizers import (
    KINDS,
    MARKS,
    Kind,
    WrongMask,
    check_sample,
    make_tokenizer,
    pretrained,
    tokenizer_and_oracle,
)
from builders.covering import fast
from builders.rendering import render
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.core.errors import DataError
from danlu.data import render as render_module
from danlu.data.message_spans import Reason
from danlu.data.messages import Conversation, turn_of
from danlu.data.render import RenderedSample, RenderSettings, render_rows, untrained_terminator
from danlu.data.rows import parse_row
from danlu.data.tokenizer import Tokenizer, load_tokenizer
from danlu.data.tokenizing import NOTHING_LEFT, NOTHING_TRAINED, TOO_LONG, fit_to_length

ASSISTANT = RenderSettings()
TWO_TURNS: list[tuple[str, str]] = [
    ("user", "Hi there"), ("assistant", "Hello, you!"), ("user", "你好 é"), ("assistant", "I think so.\n\nYes 😀"),
]  # fmt: skip


def messages(*turns: tuple[str, str], **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **columns}


def rendered(
    style: str, row: dict[str, Any], rendering: RenderSettings = ASSISTANT, kind: Kind = "byte"
) -> tuple[Tokenizer, list[RenderedSample]]:
    tokenizer = tokenizer_and_oracle(style, kind)[0]
    return tokenizer, render(parse_row(row, "auto", "chat.jsonl:1"), "chat.jsonl:1", tokenizer, rendering)


def trained_text(tokenizer: Tokenizer, sample: RenderedSample) -> str:
    return tokenizer.decode(sample.tokens[sample.weights > 0].tolist())


def turns_shown(row: dict[str, Any], tokenizer: Tokenizer) -> tuple[list[dict[str, Any]], Any]:
    """The messages and tools as the template is given them: where it takes no system message, merged into the first."""
    parsed = parse_row(row, "auto", "row")
    assert isinstance(parsed, Conversation)
    shown = render_module.shown_messages(parsed, tokenizer.template(bool(parsed.tools)), ASSISTANT.system)
    return [turn_of(message) for message in shown], parsed.tools


# -- equal to transformers, exactly what the assistant writes ----------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "kind"), fast(product(STYLES, KINDS), *zip(list(STYLES) * 2, cycle((*KINDS, *KINDS[1:])), strict=False))
)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_ids_are_those_of_transformers_and_the_trained_ones_what_the_assistant_writes(
    style: str, kind: Kind, data: st.DataObject
) -> None:
    row = data.draw(chat_tokenizers.rows(tools=style == "qwen3"))
    tokenizer, oracle = tokenizer_and_oracle(style, kind)
    turns, tools = turns_shown(row, tokenizer)
    try:
        _, samples = rendered(style, row, kind=kind)
    except DataError as error:
        # A content of odd texts can hold what templates cut, or nothing but the marks that they write themselves.
        lost = re.search(r"leaves out text of its (\w+), |writes no more than what ends it", str(error))
        assert lost and any(mark in json.dumps(row) for mark in MARKS)
        return
    for sample in samples:
        check_sample(oracle, turns, tools, sample, TERMINATORS.get(style))
    trained = sorted(turn for sample in samples for turn in np.unique(sample.turns[sample.weights > 0]).tolist())
    assert trained == [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]


@pytest.mark.parametrize("style", [style for style in STYLES if style != "no-terminator"])
def test_trained_tokens_decode_to_the_answers_and_their_terminators(style: str) -> None:
    tokenizer, samples = rendered(style, messages(*TWO_TURNS))
    end = TERMINATORS[style]
    answers = [content + end for role, content in TWO_TURNS if role == "assistant"]
    written = [trained_text(tokenizer, sample) for sample in samples]
    match style:
        case "qwen3":  # an answer without thoughts is written behind an empty thought, and earlier ones show none
            assert written == [f"<think>\n\n</think>\n\n{answer}" for answer in reversed(answers)]
        case "mistral":  # a space is the first that is written
            assert written == [f" {answers[0]} {answers[1]}"]
        case "phi3":  # the end of the conversation has a token of its own
            assert written == [f"{answers[0]}{answers[1]}\n</s>"]
        case _:
            assert written == ["".join(answers)]


def test_without_a_terminator_white_space_and_eos_end_the_answers() -> None:
    tokenizer, (sample,) = rendered("no-terminator", messages(*TWO_TURNS))
    # " I" is one token, half of it the prompt's.
    assert trained_text(tokenizer, sample) == "Hello, you!\n I think so.\n\nYes 😀\n</s>"
    assert sample.reasons[-1] == Reason.TERMINATOR
    assert untrained_terminator(sample) is None


def shifted(sample: RenderedSample, by: int) -> RenderedSample:
    return replace(sample, weights=np.roll(sample.weights, by))


def changed(sample: RenderedSample, place: int, weight: float) -> RenderedSample:
    weights = sample.weights.copy()
    weights[place] = weight
    return replace(sample, weights=weights)


def grown(sample: RenderedSample) -> RenderedSample:
    columns = ("tokens", "weights", "reasons", "turns")
    return replace(sample, **{name: np.append(getattr(sample, name), getattr(sample, name)[-1]) for name in columns})


WRONG: dict[str, Callable[[RenderedSample], RenderedSample]] = {
    "nothing": lambda sample: sample,
    "a token later": lambda sample: shifted(sample, 1),
    "a token earlier": lambda sample: shifted(sample, -1),
    "terminator left out": lambda sample: changed(sample, np.flatnonzero(sample.weights)[-1], 0),
    "first letter left out": lambda sample: changed(sample, np.flatnonzero(sample.weights)[0], 0),
    "end of the prompt trained": lambda sample: changed(sample, np.flatnonzero(sample.weights)[0] - 1, 1),
    "other tokens": lambda sample: replace(sample, tokens=np.roll(sample.tokens, 1)),
    "a token too many": grown,
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("style", ["chatml", "llama3", "no-terminator", "qwen3"])
def test_the_check_catches_wrong_samples(style: str, wrong: str) -> None:
    row = messages(*TWO_TURNS)
    tokenizer, oracle = tokenizer_and_oracle(style)
    turns, tools = turns_shown(row, tokenizer)
    sample = WRONG[wrong](rendered(style, row)[1][0])
    with nullcontext() if wrong == "nothing" else pytest.raises(WrongMask):
        check_sample(oracle, turns, tools, sample, TERMINATORS.get(style))


def test_marked_templates_train_what_transformers_marks() -> None:
    row = messages(*TWO_TURNS)
    _, oracle = tokenizer_and_oracle("marked")
    _, (sample,) = rendered("marked", row)
    marked = oracle.apply_chat_template(row["messages"], tokenize=True, return_assistant_tokens_mask=True)
    assert sample.tokens.tolist() == marked["input_ids"]
    assert (sample.weights > 0).astype(int).tolist() == marked["assistant_masks"]


def test_many_rows_at_once_are_what_they_are_one_by_one() -> None:
    tokenizer, _ = tokenizer_and_oracle("chatml")
    texts = [*({"text": text} for text in ("One.", "", "é" * 30)), {"prompt": "a", "completion": "b"}]
    values = [messages(*TWO_TURNS), *(text for text in texts if text.get("text") != ""), messages(*TWO_TURNS[:2])]
    rows, wheres = [parse_row(value, "auto", "row") for value in values], [f"row {n}" for n in range(len(values))]
    together = render_rows(rows, wheres, tokenizer, ASSISTANT)
    for row, where, samples in zip(rows, wheres, together, strict=True):
        assert isinstance(samples, list)
        for one, other in zip(samples, render(row, where, tokenizer, ASSISTANT), strict=True):
            assert one.where == other.where == where
            for name in ("tokens", "weights", "reasons", "turns"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


# -- real tokenizers ---------------------------------------------------------------------------------------------------

REAL = {
    "minimind": ("tokenizers/minimind", "<|im_end|>"),
    "phi3-mini": ("tokenizers/phi3-mini", "<|end|>"),
    "stories260K": ("weights/stories260K-hf", None),
    "torchtitan-test": ("tokenizers/torchtitan-test", "<|end_of_text|>"),
}


def real_rows(shared_data: Path, calls: bool) -> list[dict[str, Any]]:
    names = ["alpaca_en_demo", "alpaca_zh_demo", "fastchat_dummy_conversation"]
    names += ["glaive_toolcall_en_demo"] if calls else []
    return [row for name in names for row in json.loads((shared_data / f"instruct/{name}.json").read_text())[:12]]


@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers_and_rows(name: str, shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, terminator = shared_data / REAL[name][0], REAL[name][1]
    tokenizer, oracle = load_tokenizer(str(folder)), pretrained(folder)
    monkeypatch.setattr(
        chat_tokenizers, "MARKS", tuple(token.content for token in oracle.added_tokens_decoder.values())
    )
    for row in real_rows(shared_data, calls=tokenizer.template().takes_calls):
        turns, tools = turns_shown(row, tokenizer)
        for sample in render(parse_row(row, "auto", "row"), "row", tokenizer, ASSISTANT):
            check_sample(oracle, turns, tools, sample, terminator)


def test_a_jinja_file_takes_the_place_of_the_tokenizers_own(shared_data: Path, tmp_path: Path) -> None:
    config = json.loads((shared_data / "tokenizers/qwen2.5-config/tokenizer_config.json").read_text())
    (tmp_path / "qwen.jinja").write_text(config["chat_template"])
    folder = shared_data / "tokenizers/minimind"
    tokenizer, oracle = load_tokenizer(str(folder), str(tmp_path / "qwen.jinja")), pretrained(folder)
    oracle.chat_template = config["chat_template"]
    for row in real_rows(shared_data, calls=True):
        turns, tools = turns_shown(row, tokenizer)
        for sample in render(parse_row(row, "auto", "row"), "row", tokenizer, ASSISTANT):
            check_sample(oracle, turns, tools, sample, "<|im_end|>")


# -- what is trained ---------------------------------------------------------------------------------------------------


def test_train_on() -> None:
    row = messages(("system", "Be kind."), *TWO_TURNS)
    every = {name: rendered("chatml", row, RenderSettings(train_on=name)) for name in ("all", "assistant", "last")}
    (tokenizer, (all_,)), (_, (assistant,)), (_, (last,)) = every.values()
    assert all_.weights.tolist() == [0.0] + [1.0] * (len(all_.tokens) - 1)
    assert trained_text(tokenizer, assistant) == "Hello, you!<|im_end|>I think so.\n\nYes 😀<|im_end|>"
    assert trained_text(tokenizer, last) == "I think so.\n\nYes 😀<|im_end|>"
    for sample in (assistant, last):
        np.testing.assert_array_equal(sample.tokens, all_.tokens)


def test_a_message_says_itself_whether_it_is_trained() -> None:
    row = messages(*TWO_TURNS)
    row["messages"][1]["train"] = False
    row["messages"][2]["weight"] = 0.5
    row["messages"][3]["weight"] = 2
    tokenizer, (sample,) = rendered("chatml", row)
    assert set(sample.weights[sample.turns == 1].tolist()) == {0.0}
    assert tokenizer.decode(sample.tokens[sample.weights == 0.5].tolist()) == "你好 é"
    assert tokenizer.decode(sample.tokens[sample.weights == 2].tolist()) == "I think so.\n\nYes 😀<|im_end|>"


def test_the_messages_of_a_prompt_are_context() -> None:
    prompt, completion = messages(*TWO_TURNS[:3])["messages"], messages(TWO_TURNS[3])["messages"]
    row = {"prompt": prompt, "completion": completion}
    tokenizer, (sample,) = rendered("chatml", row)
    assert trained_text(tokenizer, sample) == "I think so.\n\nYes 😀<|im_end|>"
    prompt[1]["train"] = True
    assert trained_text(tokenizer, rendered("chatml", row)[1][0]).startswith("Hello, you!<|im_end|>I think")
    _, (everything,) = rendered("chatml", row, RenderSettings(train_on="all"))
    assert everything.weights[1:].all()


def test_reasons_and_turns_of_a_conversation() -> None:
    tokenizer, (sample,) = rendered("chatml", messages(("system", "Be kind."), ("user", "Hi"), ("assistant", "Yes.")))

    def of(reason: Reason) -> str:
        return tokenizer.decode(sample.tokens[sample.reasons == reason].tolist())

    assert (of(Reason.SYSTEM), of(Reason.USER), of(Reason.ASSISTANT)) == ("Be kind.", "Hi", "Yes.")
    assert of(Reason.TERMINATOR) == "<|im_end|>"
    heads = "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n\n"
    assert of(Reason.TEMPLATE) == heads
    parts = [tokenizer.decode(sample.tokens[sample.turns == turn].tolist()) for turn in range(3)]
    assert parts == [
        "<|im_start|>system\nBe kind.",
        "<|im_end|>\n<|im_start|>user\nHi",
        "<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n",
    ]


def test_thoughts_are_trained_and_told_apart() -> None:
    row = messages(("user", "Hi"), ("assistant", "Yes."))
    row["messages"][1]["reasoning_content"] = "Say yes."
    tokenizer, (sample,) = rendered("qwen3", row)
    thought = tokenizer.decode(sample.tokens[sample.reasons == Reason.REASONING].tolist())
    assert thought == "<think>\nSay yes.\n</think>"
    assert trained_text(tokenizer, sample) == f"{thought}\n\nYes.<|im_end|>"


CALLS: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Weather in Paris and Rome?"},
        {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
            {"function": {"name": "weather", "arguments": {"city": "Rome"}}},
        ]},
        {"role": "tool", "tool_call_id": "1", "name": "weather", "content": "sunny"},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "Sunny in Paris, rain in Rome."},
    ],
    "tools": [{"name": "weather", "description": "The weather.", "parameters": {"type": "object", "properties": {}}}],
}  # fmt: skip


def test_tool_calls_are_trained_and_results_are_not() -> None:
    # Once an answer follows, this template shows no empty thought before a call: the call is a sample of its own.
    tokenizer, (whole, early) = rendered("qwen3", CALLS)
    calls = [
        f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
        for city in ("Paris", "Rome")
    ]
    thought, end = "<think>\n\n</think>\n\n", "<|im_end|>"
    assert trained_text(tokenizer, early) == f"{thought}{calls[0]}\n{calls[1]}{end}"
    assert trained_text(tokenizer, whole) == f"{thought}Sunny in Paris, rain in Rome.{end}"
    assert tokenizer.decode(whole.tokens[whole.reasons == Reason.TOOL].tolist()) == "sunnyrain"
    assert "# Tools\n<tools>\n" in tokenizer.decode(whole.tokens.tolist())


def test_the_same_calls_in_the_sharegpt_format_give_the_same_tokens() -> None:
    call = {"name": "weather", "arguments": {"city": "Paris"}}
    turns = [
        {"from": "human", "value": "Weather in Paris?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "Sunny."},
    ]
    same = [
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "Sunny."},
    ]
    _, ones = rendered("qwen3", {"conversations": turns, "tools": json.dumps(CALLS["tools"])})
    _, others = rendered("qwen3", {"messages": same, "tools": CALLS["tools"]})
    for one, other in zip(ones, others, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.weights, other.weights)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (CALLS, r"^calls:1: the chat template has no place for tools; name one that has in model\.chat_template"),
        ({"messages": CALLS["messages"]}, r"^calls:1: the chat template leaves out tool calls or results; name one"),
    ],
)
def test_a_template_without_tools_does_not_lose_them_silently(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        render(parse_row(row, "auto", "calls:1"), "calls:1", tokenizer_and_oracle("chatml")[0], ASSISTANT)


# -- system prompts ----------------------------------------------------------------------------------------------------


def test_a_system_prompt_is_given_to_conversations_that_have_none() -> None:
    rendering = RenderSettings(system="Be brief.")
    tokenizer, (sample,) = rendered("chatml", messages(*TWO_TURNS), rendering)
    assert tokenizer.decode(sample.tokens.tolist()).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    _, (own,) = rendered("chatml", messages(("system", "Be kind."), *TWO_TURNS), rendering)
    assert "brief" not in tokenizer.decode(own.tokens.tolist())


def test_where_a_template_refuses_system_messages_the_first_question_holds_them() -> None:
    row = messages(("system", "Be kind."), *TWO_TURNS)
    tokenizer, (sample,) = rendered("gemma", row)
    start = "<s><start_of_turn>user\nBe kind.\n\nHi there<end_of_turn>\n"
    assert tokenizer.decode(sample.tokens.tolist()).startswith(start)
    assert trained_text(tokenizer, sample) == "Hello, you!<end_of_turn>I think so.\n\nYes 😀<end_of_turn>"


# -- templates that rewrite history ------------------------------------------------------------------------------------


def test_turns_that_are_rewritten_later_are_samples_of_their_own() -> None:
    thoughts = messages(
        ("user", "A"), ("assistant", "<think>\na\n</think>\n\nAlpha"), ("user", "B"),
        ("assistant", "<think>\nb\n</think>\n\nBeta"), ("user", "C"), ("assistant", "<think>\nc\n</think>\n\nGamma"),
    )  # fmt: skip
    tokenizer, samples = rendered("qwen3", thoughts)
    assert [trained_text(tokenizer, sample) for sample in samples] == [
        f"<think>\n{thought}\n</think>\n\n{answer}<|im_end|>"
        for thought, answer in (("c", "Gamma"), ("a", "Alpha"), ("b", "Beta"))
    ]
    texts = [tokenizer.decode(sample.tokens.tolist()) for sample in samples]
    assert "\na\n" not in texts[0] and "\na\n" not in texts[2]  # as it is when the later answers are generated
    assert [
        trained_text(tokenizer, one) for one in rendered("qwen3", thoughts, RenderSettings(train_on="last"))[1]
    ] == ["<think>\nc\n</think>\n\nGamma<|im_end|>"]


def test_a_whole_conversation_without_anything_to_train_is_left_out() -> None:
    row = messages(*TWO_TURNS)
    row["messages"][3]["train"] = False
    tokenizer, (sample,) = rendered("qwen3", row)
    assert trained_text(tokenizer, sample) == "<think>\n\n</think>\n\nHello, you!<|im_end|>"
    assert sample.turns.max() == 1


def test_all_of_a_rewritten_conversation_is_trained_once() -> None:
    tokenizer, samples = rendered("qwen3", messages(*TWO_TURNS), RenderSettings(train_on="all"))
    whole, early = samples
    assert "user\nHi there<|im_end|>" in trained_text(tokenizer, whole) and "Hello, you!" not in trained_text(
        tokenizer, whole
    )
    assert trained_text(tokenizer, early) == "<think>\n\n</think>\n\nHello, you!<|im_end|>"


# -- plain text, prompts and completions, tokens -----------------------------------------------------------------------


def test_text_ends_with_eos_and_nothing_else_is_added() -> None:
    tokenizer, (sample,) = rendered("chatml", {"text": "Once upon a time."})
    assert tokenizer.decode(sample.tokens.tolist()) == "Once upon a time.</s>"
    assert sample.weights.tolist() == [0.0] + [1.0] * (len(sample.tokens) - 1)
    assert sample.reasons.tolist() == [Reason.TEXT] * (len(sample.tokens) - 1) + [Reason.EOS]
    _, (open_,) = rendered("chatml", {"text": "Once upon a time."}, RenderSettings(append_eos=False))
    np.testing.assert_array_equal(open_.tokens, sample.tokens[:-1])


def test_parts_of_a_document_are_closed_once() -> None:
    part = {"text": "Once", "document_ends": False}
    rest = {"text": " upon", "document_begins": False}
    (tokenizer, (first,)), (_, (last,)) = rendered("chatml", part), rendered("chatml", rest)
    assert tokenizer.decode([*first.tokens, *last.tokens]) == "Once upon</s>"


@pytest.mark.parametrize("text", ["Once upon</s>", "Once upon"])
def test_an_eos_that_the_text_brings_itself_is_not_doubled(text: str) -> None:
    tokenizer, (sample,) = rendered("chatml", {"prompt": "Begin: ", "completion": text})
    assert tokenizer.decode(sample.tokens.tolist()) == "Begin: Once upon</s>"
    assert sample.reasons[-1] == Reason.EOS and sample.weights[-1] == 1


def test_tokenizers_that_put_bos_in_front_of_text_do_so_once(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, CHATML)
    described = json.loads((folder / "tokenizer.json").read_text())
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))
    tokenizer, oracle = load_tokenizer(str(folder)), pretrained(folder)
    assert tokenizer.adds_bos
    for text in ("Once", "<s>Once"):
        (sample,) = render(parse_row({"text": text}, "auto", "row"), "row", tokenizer, ASSISTANT)
        assert sample.tokens.tolist() == [*oracle("Once")["input_ids"], oracle.eos_token_id]
        assert sample.reasons[0] == Reason.BOS and sample.weights[0] == 0
    (chat_sample,) = render(parse_row(messages(*TWO_TURNS), "auto", "row"), "row", tokenizer, ASSISTANT)
    assert chat_sample.tokens[0] != tokenizer.bos_id  # a template says itself where it wants one


def test_a_completion_is_trained_and_its_prompt_is_context() -> None:
    tokenizer, (sample,) = rendered("chatml", {"prompt": "Two plus two is", "completion": " four."})
    assert trained_text(tokenizer, sample) == " four.</s>"
    _, (everything,) = rendered("chatml", {"prompt": "Two plus two is", "completion": " four."}, RenderSettings("all"))
    assert everything.weights[1:].all()


def test_a_token_across_a_border_counts_to_the_trained_side() -> None:
    tokenizer, (sample,) = rendered("chatml", {"prompt": "hell", "completion": "o"})
    assert tokenizer.encode("hello")[-1:] == tokenizer.encode("lo")
    assert trained_text(tokenizer, sample) == "lo</s>"


def test_given_tokens_stay_as_they_are() -> None:
    tokenizer, (sample,) = rendered("chatml", {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]})
    assert sample.tokens.tolist() == [5, 6, 7, 8] and sample.weights.tolist() == [0, 0, 1, 1]
    assert sample.reasons.tolist() == [Reason.PROMPT, Reason.PROMPT, Reason.TEXT, Reason.TEXT]
    _, (all_,) = rendered("chatml", {"input_ids": [5, 6]})
    assert all_.weights.tolist() == [0, 1]
    for token in (tokenizer.vocab_size, -1):
        with pytest.raises(
            DataError, match=rf"^chat\.jsonl:1: token {token} is not in the vocabulary of .* \(0 to \d+\)"
        ):
            rendered("chatml", {"input_ids": [1, token]})


# -- bad input ---------------------------------------------------------------------------------------------------------


def load(folder: Path, template: str | None, **config: Any) -> Tokenizer:
    return load_tokenizer(str(make_tokenizer(folder, template, **config)))


CHAT_ROW = messages(*TWO_TURNS)


def test_a_tokenizer_without_chat_template_renders_text_only(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, None)
    problem = r"no chat template.*Name one in model\.chat_template: .*chatml.*\. Or train on rows of plain text"
    with pytest.raises(DataError, match=problem):
        render(parse_row(CHAT_ROW, "auto", "row"), "row", tokenizer, ASSISTANT)
    (sample,) = render(parse_row({"text": "Hi"}, "auto", "row"), "row", tokenizer, ASSISTANT)
    assert tokenizer.decode(sample.tokens.tolist()) == "Hi</s>"


def test_a_tokenizer_without_eos_closes_what_has_a_terminator(tmp_path: Path) -> None:
    tokenizer = load(tmp_path / "chatml", CHATML, eos_token=None)
    (sample,) = render(parse_row(CHAT_ROW, "auto", "row"), "row", tokenizer, ASSISTANT)
    assert trained_text(tokenizer, sample).endswith("<|im_end|>")
    endless = load(tmp_path / "none", NO_TERMINATOR, eos_token=None)
    problem = r"no end-of-text token \(eos_token\).*tokenizer_config\.json, or set data\.append_eos: false"
    for value, one in (({"text": "Hi"}, tokenizer), (CHAT_ROW, endless)):
        with pytest.raises(DataError, match=problem):
            render_rows([parse_row(value, "auto", "row")], ["row"], one, ASSISTANT)
    (open_,) = render(parse_row({"text": "Hi"}, "auto", "row"), "row", tokenizer, RenderSettings(append_eos=False))
    assert tokenizer.decode(open_.tokens.tolist()) == "Hi"


def test_a_tokenizer_without_pad_needs_none(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, CHATML, pad_token=None)
    assert tokenizer.pad_id is None
    (sample,) = render(parse_row(CHAT_ROW, "auto", "row"), "row", tokenizer, ASSISTANT)
    np.testing.assert_array_equal(sample.tokens, rendered("chatml", CHAT_ROW)[1][0].tokens)


def test_a_template_that_takes_no_conversation_at_all(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, RAISES)
    problem = rf"^{tmp_path}: not even a question and its answer can be rendered: .*this template takes nothing"
    with pytest.raises(DataError, match=problem):
        render_rows([parse_row(CHAT_ROW, "auto", "row")], ["row"], tokenizer, ASSISTANT)
    (sample,) = render(parse_row({"text": "Hi"}, "auto", "row"), "row", tokenizer, ASSISTANT)
    assert tokenizer.decode(sample.tokens.tolist()) == "Hi</s>"


REFUSES = CHATML + "{% if messages[0].content == 'no' %}{{ raise_exception('not this one') }}{% endif %}"


def test_a_template_that_refuses_a_row_spares_the_others(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, REFUSES)
    values = [CHAT_ROW, messages(("user", "no"), ("assistant", "yes")), CHAT_ROW]
    outcomes = render_rows(
        [parse_row(value, "auto", "row") for value in values], ["a:1", "a:2", "a:3"], tokenizer, ASSISTANT
    )
    assert isinstance(outcomes[0], list) and isinstance(outcomes[2], list)
    assert str(outcomes[1]) == "a:2: the chat template refuses this conversation: TemplateError: not this one"


def test_a_template_that_writes_nothing(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "{# nothing #}")
    with pytest.raises(DataError, match=r"^row 3: the chat template renders this conversation as no text at all"):
        render(parse_row(CHAT_ROW, "auto", "row 3"), "row 3", tokenizer, ASSISTANT)


@pytest.mark.parametrize("kind", ["byte", "prepend"])
@pytest.mark.parametrize(
    "value",
    [
        messages(("user", "Hi"), ("assistant", "so \ud83d sad")),
        {"text": "so \ud83d sad"},
        {"prompt": "Hi", "completion": "so \ud83d sad"},
    ],
)
def test_half_a_character_is_a_bad_row(kind: Kind, value: dict[str, Any]) -> None:
    tokenizer, _ = tokenizer_and_oracle("chatml", kind)
    rows = [parse_row(one, "auto", "row") for one in (value, CHAT_ROW)]
    bad, good = render_rows(rows, ["x.jsonl:1", "x.jsonl:2"], tokenizer, ASSISTANT)
    assert str(bad).startswith(r"x.jsonl:1: the text holds \ud83d, half a character") and isinstance(good, list)


# -- length ------------------------------------------------------------------------------------------------------------


def sample_of(weights: list[float], turns: list[int] | None = None, reasons: list[int] | None = None) -> RenderedSample:
    count = len(weights)
    return RenderedSample(
        tokens=np.arange(count, dtype=np.int32),
        weights=np.array(weights, np.float32),
        reasons=np.array(reasons or [Reason.TEXT] * count, np.uint8),
        turns=np.array(turns or [-1] * count, np.int32),
        where="row",
    )


def test_a_short_sample_is_left_alone() -> None:
    sample = sample_of([0, 1, 1])
    for max_length in (3, 4, None):
        fitted = fit_to_length(sample, max_length, "truncate")
        assert fitted.samples == [sample] and fitted.shortened is None and fitted.lost_tokens == 0


def test_truncate_keeps_the_beginning() -> None:
    fitted = fit_to_length(sample_of([0, 1, 1, 1, 1]), 3, "truncate")
    assert [sample.tokens.tolist() for sample in fitted.samples] == [[0, 1, 2]]
    assert (fitted.shortened, fitted.dropped, fitted.lost_tokens) == ("truncated", None, 2)


def test_truncation_that_leaves_nothing_trained_drops_the_row() -> None:
    fitted = fit_to_length(sample_of([0, 0, 0, 0, 1]), 4, "truncate")
    assert (fitted.samples, fitted.shortened, fitted.dropped, fitted.lost_tokens) == ([], "truncated", NOTHING_LEFT, 5)


def test_drop_drops_the_long() -> None:
    fitted = fit_to_length(sample_of([0, 1, 1]), 2, "drop")
    assert (fitted.samples, fitted.shortened, fitted.dropped, fitted.lost_tokens) == ([], "dropped", TOO_LONG, 3)


def test_a_sample_that_trains_nothing_is_dropped_whatever_its_length() -> None:
    fitted = fit_to_length(sample_of([0, 0]), None, "truncate")
    assert (fitted.samples, fitted.shortened, fitted.dropped, fitted.lost_tokens) == ([], None, NOTHING_TRAINED, 2)


def test_split_cuts_before_a_user_turn_where_it_can() -> None:
    row = messages(*TWO_TURNS, ("user", "More?"), ("assistant", "No."))
    tokenizer, (sample,) = rendered("chatml", row)
    parts = fit_to_length(sample, 40, "split").samples
    texts = [tokenizer.decode(part.tokens.tolist()) for part in parts]
    assert len(parts) > 1 and all(len(part.tokens) <= 40 for part in parts)
    assert all(text.startswith(("<|im_start|>user", "<|im_end|>\n<|im_start|>user")) for text in texts)
    assert "".join(trained_text(tokenizer, part) for part in parts) == trained_text(tokenizer, sample)


def targets(samples: list[RenderedSample]) -> list[tuple[int, int, float]]:
    """(the token before, the token, its weight) of every target."""
    return [
        (int(before), int(token), float(weight))
        for sample in samples
        for before, token, weight in zip(sample.tokens[:-1], sample.tokens[1:], sample.weights[1:], strict=True)
        if weight > 0
    ]


@st.composite
def long_samples(draw: st.DrawFn) -> RenderedSample:
    turns = draw(st.lists(st.tuples(st.sampled_from([Reason.USER, Reason.ASSISTANT]), st.integers(1, 6)), min_size=1))
    reasons = [reason for reason, count in turns for _ in range(count)]
    numbers = [number for number, (_, count) in enumerate(turns) for _ in range(count)]
    weights = draw(st.lists(st.sampled_from([0.0, 0.0, 1.0, 0.5]), min_size=len(reasons), max_size=len(reasons)))
    return sample_of([0.0, *weights[1:]], numbers, [int(reason) for reason in reasons])


@settings(deadline=None)
@given(sample=long_samples(), max_length=st.integers(2, 12))
def test_split_loses_no_target_and_repeats_none(sample: RenderedSample, max_length: int) -> None:
    fitted = fit_to_length(sample, max_length, "split")
    assert all(0 < len(part.tokens) <= max_length and part.weights[0] == 0 for part in fitted.samples)
    assert targets(fitted.samples) == targets([sample])
    kept = {token for part in fitted.samples for token in part.tokens.tolist()}
    assert fitted.lost_tokens == len(sample.tokens) - len(kept)


def test_the_check_of_a_split_catches_a_lost_target() -> None:
    sample = sample_of([0, 1, 1, 1, 1, 1])
    assert targets([sample.part(0, 3), sample.part(3, 6)]) != targets([sample])


def test_split_of_the_smallest_parts_ends() -> None:
    fitted = fit_to_length(sample_of([0, 1, 1]), 1, "split")
    assert (fitted.samples, fitted.shortened, fitted.dropped, fitted.lost_tokens) == ([], "split", NOTHING_LEFT, 3)


def test_an_answer_without_a_trained_end_is_told() -> None:
    _, (sample,) = rendered("chatml", messages(*TWO_TURNS))
    assert untrained_terminator(sample) is None
    cut = sample.part(0, int(np.flatnonzero(sample.reasons == Reason.TERMINATOR)[0]))
    problem = untrained_terminator(cut)
    assert problem is not None and problem.startswith("chat.jsonl:1: answers are trained, but not the token that ends")
    assert "data.append_eos: true" in problem and "model.chat_template" in problem and "data.max_length" in problem
    _, (endless,) = rendered("chatml", {"prompt": "a", "completion": "b"}, RenderSettings(append_eos=False))
    assert untrained_terminator(endless) is not None
    _, (text,) = rendered("chatml", {"text": "a b c"}, RenderSettings(append_eos=False))
    assert untrained_terminator(text) is None
