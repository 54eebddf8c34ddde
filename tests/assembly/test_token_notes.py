"""What a run says of rows: those of new tokens, and those that the base was never trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders.tiny_run import tiny_model

from danlu.assembly.token_notes import new_token_lines, untrained_lines, untrained_tokens
from danlu.models.saving import save
from danlu.recipe import load
from danlu.recipe.sections import Model, NewToken


def untrained(folder: Path, change: Any, **more: Any) -> list[int]:
    """Of the tokens 2 and 3 of a base with 512 rows."""
    model = tiny_model(vocab_size=512, **more)
    with torch.no_grad():
        change(model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight)
    save(model, folder)
    return untrained_tokens(folder, [2, 3])


def test_rows_that_were_never_trained_are_found(tmp_path: Path) -> None:
    def zero(rows: Any) -> None:
        rows[2] = 0

    def alike(rows: Any) -> None:  # as all rows that got the same small pushes away, and none of their own
        rows[[2, *range(500, 512)]] = rows[2] + 1e-4 * torch.randn(13, rows.shape[1])

    def only_two(rows: Any) -> None:
        rows[2] = rows[500]

    assert untrained(tmp_path / "zero", zero) == [2]
    assert untrained(tmp_path / "alike", alike) == [2]
    assert untrained(tmp_path / "tied", alike, tie_word_embeddings=True) == [2]
    assert untrained(tmp_path / "trained", lambda rows: None) == []
    assert untrained(tmp_path / "two", only_two) == []


def test_the_end_token_of_a_real_base_is_told(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """stories260K separates its stories by bos, and never saw its end token."""
    base = shared_data / "weights/stories260K-hf"
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')

    def lines(adapter: str) -> list[str]:
        values = f"stage: sft\nmodel: {base}\ndata: {{train: {tmp_path}/rows.jsonl}}\noutput: {tmp_path}/x\n{adapter}"
        (tmp_path / "recipe.yaml").write_text(values)
        return untrained_lines(load(tmp_path / "recipe.yaml").recipe, [2])

    (told,) = lines("adapter: lora")
    assert told.startswith("</s>: the base was never trained on this end of answers")
    assert "Add adapter.trainable_tokens: ['</s>']" in told
    assert lines("adapter: {kind: lora, trainable_tokens: [</s>]}") == []
    assert "adapter" not in lines("")[0]

    monkeypatch.setattr("danlu.assembly.extended_base.MODELS", str(tmp_path / "cache"))
    (line,) = new_token_lines(Model(path=str(base), tokens=[NewToken(text="<plan>"), NewToken(text="<act>")]))
    assert line.startswith("new tokens: <plan> 512, <act> 513; embedding and head have 520 rows in place of 512")
    assert "the last 6 have no token" in line
