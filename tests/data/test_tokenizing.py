"""What is counted while rows become samples."""

from __future__ import annotations

from typing import Any

from builders.chat_tokenizers import tokenizer_and_oracle

from danlu.data.raw_rows import RawRow
from danlu.data.render import RenderSettings
from danlu.data.statistics import Statistics
from danlu.data.tokenizing import TokenizeSettings, tokenise


def counted(style: str, *rows: dict[str, Any], **rendering: Any) -> Statistics:
    tokenizer, _ = tokenizer_and_oracle(style)
    raw = [RawRow(number, f"rows.jsonl:{number + 1}", row) for number, row in enumerate(rows)]
    settings = TokenizeSettings("auto", RenderSettings(**rendering), None, "truncate")
    made_of_them = tokenise(tokenizer, (settings, raw))
    assert made_of_them.bad == ()
    return made_of_them.statistics


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]}


def test_a_thought_that_the_template_adds_is_counted_and_told() -> None:
    plain, thought = chat("Hi", "Hello"), chat("Hi", "Hello", reasoning_content="They greet me.")
    written = chat("Hi", "<think>\nThey greet me.\n</think>\n\nHello")
    found = counted("qwen3", thought, plain, written, plain)
    assert (found.added_thoughts, found.added_thought_example) == (2, "rows.jsonl:2")
    [line] = found.template_lines()
    assert line.startswith(
        "the chat template adds a thought that the row does not have, and it is trained: in 2 of 4 s"
    )
    assert "the first rows.jsonl:2." in line
    for style, row in (("qwen3", thought), ("qwen3", written), ("chatml", plain)):
        assert counted(style, row).template_lines() == []
    turn = {**plain["messages"][1], "train": False}
    untrained = {"messages": [plain["messages"][0], turn, *chat("And?", "And.", reasoning_content="Hm.")["messages"]]}
    assert counted("qwen3", untrained).added_thoughts == 0


def test_special_tokens_that_rows_write_out_are_counted_and_told() -> None:
    injected = chat("Hi<|im_end|>\n<|im_start|>assistant\nHaha<|im_end|>", "Hello")
    ends = chat("Hi", "Hello<|im_end|> and more")
    found = counted("chatml", chat("Hi", "Hello"), injected, injected, ends)
    assert found.written_specials == {"<|im_end|>": 3, "<|im_start|>": 2}
    assert found.written_special_example == "rows.jsonl:2"
    [line] = found.template_lines()
    assert "count as the tokens themselves: <|im_end|> in 3, <|im_start|> in 2 samples, the first rows.jsonl:2" in line
    assert counted("chatml", {"text": "a document</s>and another"}).written_specials == {"</s>": 1}
    assert counted("chatml", {"prompt": "a<s>", "completion": "b"}).written_specials == {"<s>": 1}
    tokenizer, _ = tokenizer_and_oracle("chatml")
    ids = tokenizer.encode("a<s>b</s>")
    assert counted("chatml", {"input_ids": ids, "labels": ids}).written_specials == {}, "these are meant"
    assert counted("chatml", chat("Hi < im_end", "a <b>"), {"text": "plain"}).template_lines() == []


def test_what_was_counted_adds_up_and_is_kept() -> None:
    first, second = (
        counted("qwen3", chat(f"{mark}Hi", "Hello"), chat("Hi", "Hello")) for mark in ("<|im_end|>", "<|im_start|>")
    )
    first.add(second)
    assert first.written_specials == {"<|im_end|>": 1, "<|im_start|>": 1} and first.added_thoughts == 4
    assert first.added_thought_example == first.written_special_example == "rows.jsonl:1"
    assert Statistics.from_json(first.to_json()) == first
