"""Prompts: what rows ask, as tokens; which are held out, dropped and shortened; and in which order they come."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.chat_templates import STYLES
from builders.chat_tokenizers import make_tokenizer, tokenizer_and_oracle
from builders.inline_workers import InlineWorkers

from danlu.core.errors import CheckpointError, DataError
from danlu.data import prepare as prepare_module
from danlu.data.prepare import DatasetSpec, prepare, prepare_prompts
from danlu.data.prompt_encoding import shorten_text
from danlu.data.prompts import (
    Prompt,
    PromptOrder,
    PromptSets,
    PromptSettings,
    render_prompts,
)
from danlu.data.sources import read_rows
from danlu.data.tokenizer import load_tokenizer
from danlu.data.tokenizing import TokenizerJob
from danlu.inference.chat_tokenizer import ChatTokenizer
from danlu.recipe.sections import Data, Packing, Source

Read = Callable[..., PromptSets]


@pytest.fixture(autouse=True)
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "WorkerPool", InlineWorkers)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "chat": make_tokenizer(folder / "chat", STYLES["chatml"]),
        "gemma": make_tokenizer(folder / "gemma", STYLES["gemma"]),
        "plain": make_tokenizer(folder / "plain", None),
    }


@pytest.fixture
def read(folders: dict[str, Path], tmp_path: Path) -> Read:
    def read(*rows: Any, kind: str = "chat", max_new_tokens: int = 100, seed: int = 0, **data: Any) -> PromptSets:
        source = Source(path=str(write(tmp_path / "rows.jsonl", rows)))
        settings = Data(**{"train": [source], "packing": Packing(kind="none"), "workers": 1, **data})
        return prepare_prompts(
            DatasetSpec(settings, "rl", str(folders[kind]), None, seed, max_new_tokens=max_new_tokens)
        )

    return read


def write(path: Path, rows: Iterable[Any]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def text_of(prompt: Prompt, folder: Path) -> str:
    return load_tokenizer(str(folder)).decode(prompt.tokens)


USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}


# -- what a row asks ---------------------------------------------------------------------------------------------------


def test_a_template_over_the_columns(read: Read, folders: dict[str, Path]) -> None:
    row = {"Body": "Edward has $ 12.", "Question": "How much?", "Answer": 3.0}
    (prompt,) = read(row, prompt="{Body} {Question} {{{Answer}}}").train
    assert prompt.prompt == "Edward has $ 12. How much? {3.0}"
    assert prompt.row == row and prompt.where == "rows.jsonl:1"
    expected = ChatTokenizer(load_tokenizer(str(folders["chat"]))).encode_chat_prompt(prompt.prompt)
    assert list(prompt.tokens) == expected
    assert list(prompt.tokens) != expected[:-1]


@pytest.mark.parametrize("style", ["chatml", "llama3", "mistral", "gemma", "qwen3"])
def test_tokens_are_those_of_transformers(style: str, tmp_path: Path) -> None:
    """A question, and a conversation of several turns, as apply_chat_template renders them for an answer."""
    tokenizer, oracle = tokenizer_and_oracle(style)
    turns = [USER, ASSISTANT, {"role": "user", "content": "2 + 2?"}]
    path = write(tmp_path / "rows.jsonl", [{"question": "2 + 2?"}, {"messages": [*turns, ASSISTANT]}])
    data = Data(train=[Source(path=str(path))], workers=1)
    single, several = prepare_prompts(DatasetSpec(data, "rl", tokenizer.path, None, 0, max_new_tokens=100)).train
    for prompt, asked in ((single, [{"role": "user", "content": "2 + 2?"}]), (several, turns)):
        expected = oracle.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        assert list(prompt.tokens) == expected
        without = oracle.apply_chat_template([*asked, ASSISTANT], return_dict=False)
        assert list(prompt.tokens) != without


def test_without_a_chat_template_texts_stand_as_they_are(folders: dict[str, Path], tmp_path: Path) -> None:
    plain = make_tokenizer(tmp_path / "bos", None, add_bos_token=True)
    for folder in (folders["plain"], plain):
        chat_tokenizer = ChatTokenizer(load_tokenizer(str(folder)))
        data = Data(train=[Source(path=str(write(tmp_path / "rows.jsonl", [{"prompt": "1 + 1 ="}])))], workers=1)
        (prompt,) = prepare_prompts(DatasetSpec(data, "rl", str(folder), None, 0, max_new_tokens=100)).train
        assert list(prompt.tokens) == chat_tokenizer.encode_prompt("1 + 1 =")
        assert chat_tokenizer.tokenizer.decode(prompt.tokens).endswith("1 + 1 =")


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"prompt": "Hi"}, "Hi"),
        ({"prompt": "Hi", "completion": "hello"}, "Hi"),
        ({"prompt": [USER]}, [USER]),
        ({"prompt": json.dumps([USER])}, [USER]),
        ({"messages": [USER, ASSISTANT]}, [USER]),
        ({"messages": [USER]}, [USER]),
        ({"messages": [USER, ASSISTANT, {"role": "user", "content": "23!"}]}, "all"),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "hello"}]}, [USER]),
        ({"question": "Hi", "answer": "#### 2"}, "Hi"),
        ({"query": "Hi"}, "Hi"),
        ({"instruction": "Hi", "output": "hello"}, "Hi"),
        ({"instruction": "Hi", "input": "you", "output": "hello"}, "Hi\nyou"),
        ({"question": "Hi", "context": "you"}, "Hi\nyou"),
        ({"question": "Hi", "system": "Be."}, [{"role": "system", "content": "Be."}, USER]),
        ({"question": "23!", "history": [["Hi", "hello"]]}, [USER, ASSISTANT, {"role": "user", "content": "23!"}]),
        ({"prompt": "Hi", "chosen": "a", "rejected": "b"}, "Hi"),
        ({"chosen": [USER, ASSISTANT], "rejected": [USER, {"role": "assistant", "content": "no"}]}, [USER]),
        ({"chosen": "\n\nHuman: Hi\n\nAssistant: a", "rejected": "\n\nHuman: Hi\n\nAssistant: b"}, [USER]),
        ({"prompt": "Hi", "completions": ["a"], "labels": [True]}, "Hi"),
        ({"messages": [USER, ASSISTANT], "label": True}, [USER]),
    ],
    ids=str,
)
def test_what_known_formats_ask(read: Read, row: dict[str, Any], asked: Any) -> None:
    (prompt,) = read(row).train
    assert prompt.prompt == (row["messages"] if asked == "all" else asked)
    assert prompt.row == row


def test_a_fixed_format_says_which_column(read: Read, tmp_path: Path) -> None:
    row = {"prompt": "Hi", "instruction": "hello", "output": "x"}
    path = str(write(tmp_path / "both.jsonl", [row]))
    assert read(train=[Source(path=path)]).train[0].prompt == "Hi"
    assert read(train=[Source(path=path, format="alpaca")]).train[0].prompt == "hello"


def test_the_system_prompt_of_the_recipe(read: Read, folders: dict[str, Path]) -> None:
    own = {"messages": [{"role": "system", "content": "Own."}, USER]}
    with_system, kept, without = (
        text_of(read(row, **data).train[0], folders["chat"])
        for row, data in (({"prompt": "Hi"}, {"system": "Be."}), (own, {"system": "Be."}), ({"prompt": "Hi"}, {}))
    )
    assert "Be." in with_system and "Be." not in kept and "Own." in kept and "Be." not in without
    merged = text_of(read({"prompt": "Hi"}, kind="gemma", system="Be.").train[0], folders["gemma"])
    assert "Be.\n\nHi" in merged  # its template has no place for a system message


def test_tools_reach_the_template(read: Read, folders: dict[str, Path]) -> None:
    tool = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
    with pytest.raises(DataError, match="the chat template has no place for tools"):
        read({"messages": [USER], "tools": [tool]}, kind="gemma")


def test_what_processes_are_sent_and_send_back_can_be_pickled(folders: dict[str, Path], tmp_path: Path) -> None:
    job = TokenizerJob(str(folders["chat"]), None, None, render_prompts)
    rows = list(read_rows(Source(path=str(write(tmp_path / "rows.jsonl", [{"prompt": "Hi"}, {"prompt": ""}])))))
    task = (PromptSettings(None, "auto", None, 100, "drop"), rows)
    chunk = job.start()(task)
    assert (len(chunk.prompts), chunk.statistics.rows, len(chunk.bad)) == (1, 2, 1)
    sent_job, sent_task, returned = pickle.loads(pickle.dumps((job, task, chunk)))  # noqa: S301  # our own
    assert sent_job.start()(sent_task) == chunk == returned


# -- rows that are none ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "data", "message"),
    [
        (
            {"Question": "x", "Answer": 1},
            {"prompt": "{question}"},
            "rows.jsonl:2: data.prompt: the template names the column 'question', and the row has 'Question', 'Answer'",
        ),
        ({"a": None}, {"prompt": "{a}"}, "rows.jsonl:2: data.prompt: the column 'a' of the template holds nothing (nu"),
        ({"a": " "}, {"prompt": "{a}\n"}, "rows.jsonl:2: the prompt is empty, so there is nothing to answer; fill it"),
        (
            {"question": " ", "system": "Be brief."},
            {},
            "rows.jsonl:2: the prompt is empty, so there is nothing to answer",
        ),
        (
            {"question": "", "history": [["Hi", "hello"]]},
            {},
            "rows.jsonl:2: the prompt is empty, so there is nothing to",
        ),
        (
            {"nums": [1, 2], "target": 3},
            {},
            "rows.jsonl:2: no prompt (prompt or messages or conversations or query or question or instruction) in the "
            "columns nums, target. Say what the prompt is made of, as in data.prompt: '{question}'",
        ),
        (
            {"context": "Q: 1 + 1 =", "target": "2"},
            {},
            "Say what the prompt is made of, as in data.prompt: '{context}'",
        ),
        ({"prompt": 3}, {}, "rows.jsonl:2: a prompt is a text or a list of messages, not"),
        ({"messages": [{"role": "system", "content": "Be."}]}, {}, "rows.jsonl:2: the prompt is empty"),
        ({"messages": []}, {}, "rows.jsonl:2: the prompt is empty"),
        ({"question": 3}, {}, "rows.jsonl:2: 'question' must be a string, not"),
        ({"messages": [USER, USER]}, {}, "rows.jsonl:2 message 2: two user turns in a row"),
        ({"prompt": "half \ud800"}, {}, "rows.jsonl:2: the text holds \\ud800, half a character (a lone surrogate)"),
        ("{broken", {}, "rows.jsonl:2:2: broken JSON"),
        ("[1]", {}, "rows.jsonl:2: a row must be an object with named columns"),
    ],
    ids=str,
)
def test_bad_rows(read: Read, row: Any, data: dict[str, Any], message: str) -> None:
    good = {"prompt": "Hi", "a": "Hi", "question": "Hi"}
    with pytest.raises(DataError) as error:
        read(good, row, good, **data)
    assert message in str(error.value) and "Set data.on_bad_row: skip to leave such rows out" in str(error.value)
    sets = read(good, row, good, on_bad_row="skip", **data)
    assert [prompt.where for prompt in sets.train] == ["rows.jsonl:1", "rows.jsonl:3"]
    assert "data: 1 bad row skipped, the first: rows.jsonl:2" in sets.lines()[-1]


def test_a_misspelt_column_has_its_neighbour_named(read: Read) -> None:
    with pytest.raises(DataError, match=r"and the row has 'question', 'answer'\. Did you mean 'question'\?"):
        read({"question": "x", "answer": 1}, prompt="{qestion}")


def test_too_many_bad_rows(read: Read) -> None:
    rows = [{"prompt": "Hi"}, *[{"prompt": ""}] * 3]
    with pytest.raises(DataError, match="more than 2 bad rows"):
        read(*rows, on_bad_row="skip", bad_row_limit=2)
    assert len(read(*rows, on_bad_row="skip", bad_row_limit=3).train) == 1


def test_only_bad_rows(read: Read) -> None:
    with pytest.raises(DataError, match="none of 2 rows can be used; the first: rows.jsonl:1"):
        read({"prompt": ""}, {"prompt": ""}, on_bad_row="skip")


def test_what_a_tokenizer_without_a_template_cannot_show(read: Read) -> None:
    with pytest.raises(DataError, match="this tokenizer has no chat template, so conversations cannot be rendered"):
        read({"messages": [USER]}, kind="plain", on_bad_row="skip")
    with pytest.raises(DataError, match=r"data\.system is given, and this tokenizer has no chat template"):
        read({"prompt": "Hi"}, kind="plain", system="Be.", on_bad_row="skip")
    assert len(read({"prompt": "Hi"}, kind="plain").train) == 1


def test_a_template_that_does_not_compile(read: Read, tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "broken", "{% if %}")
    data = Data(train=[Source(path=str(write(tmp_path / "a.jsonl", [{"prompt": "Hi"}])))], workers=1)
    with pytest.raises(DataError, match="the chat template does not compile"):
        prepare_prompts(DatasetSpec(data, "rl", str(folder), None, 0, max_new_tokens=100))


# -- length ------------------------------------------------------------------------------------------------------------


def test_long_prompts_are_dropped_and_told(read: Read) -> None:
    rows = [{"prompt": "hello " * count} for count in (1, 100, 2)]
    lengths = [len(prompt.tokens) for prompt in read(*rows).train]
    assert lengths[1] > 100 > max(lengths[0], lengths[2])
    just = {"max_length": lengths[1] + 50, "max_new_tokens": 50, "overlong": "drop"}
    assert [len(prompt.tokens) for prompt in read(*rows, **just).train] == lengths
    sets = read(*rows, **{**just, "max_new_tokens": 51})
    assert [prompt.where for prompt in sets.train] == ["rows.jsonl:1", "rows.jsonl:3"]
    told = "data: 1 rows dropped: the prompt leaves no room for rollout.max_new_tokens in data.max_length"
    assert told in sets.lines() and sets.statistics.dropped.total() == 1


def test_no_prompt_is_left(read: Read) -> None:
    with pytest.raises(DataError) as error:
        read({"prompt": "hello " * 50}, max_length=60, max_new_tokens=50, overlong="drop")
    assert (
        "rows.jsonl: no prompt is left of 1 rows: 1 are longer than the 10 tokens that rollout.max_new_tokens (50) "
        "leaves of data.max_length (60). Raise data.max_length, or lower rollout.max_new_tokens"
    ) in str(error.value)


@pytest.mark.parametrize("kind", ["chat", "plain"])
def test_a_text_loses_its_beginning(read: Read, folders: dict[str, Path], kind: str) -> None:
    long = " ".join(str(number) for number in range(200))
    sets = read({"prompt": long}, kind=kind, max_length=90, max_new_tokens=50)
    (prompt,) = sets.train
    assert isinstance(prompt.prompt, str) and long.endswith(prompt.prompt) and len(prompt.prompt) > 20
    assert 35 <= len(prompt.tokens) <= 40
    assert prompt.row == {"prompt": long}
    told = "data: 1 of them prompt shortened: the prompt leaves no room for rollout.max_new_tokens in data.max_length"
    assert told in sets.lines()
    (whole,) = read({"prompt": prompt.prompt}, kind=kind).train  # the template stands around what is left
    assert whole.tokens == prompt.tokens
    assert read({"prompt": long}, kind=kind).statistics.shortened.total() == 0


def test_a_text_is_shortened_without_another_look_at_all_of_it() -> None:
    """The caller has found that it does not fit, and to render it again takes longest."""
    for length in range(1, 9):
        text, asked = "abcdefgh"[:length], []
        for longest in range(length):
            short = shorten_text(text, lambda end: asked.append(end) or len(end) <= longest)  # noqa: B023
            assert short == (text[-longest:] if longest else None)
        assert text not in asked


def test_a_conversation_loses_whole_exchanges_first(read: Read) -> None:
    system = {"role": "system", "content": "Be."}
    exchanges = [[{"role": "user", "content": f"{n} " * 9}, ASSISTANT] for n in range(3)]
    turns = [system, *exchanges[0], *exchanges[1], *exchanges[2], USER]
    whole = len(read({"messages": turns}).train[0].tokens)
    (shorter,) = read({"messages": turns}, max_length=whole + 49, max_new_tokens=50).train
    assert shorter.prompt == [system, *exchanges[1], *exchanges[2], USER]
    least = len(read({"messages": [system, USER]}).train[0].tokens)
    (shortest,) = read({"messages": turns}, max_length=least + 50, max_new_tokens=50).train
    assert shortest.prompt == [system, USER]
    (cut,) = read(
        {"messages": [system, {"role": "user", "content": "a b c d e"}]}, max_length=least + 51, max_new_tokens=50
    ).train
    assert cut.prompt[0] == system and isinstance(cut.prompt[1], Mapping)
    assert "a b c d e".endswith(cut.prompt[1]["content"]) and cut.prompt[1]["content"] != "a b c d e"
    with pytest.raises(DataError, match="no prompt is left of 1 rows"):
        read({"messages": turns}, max_length=62, max_new_tokens=50)


# -- held-out rows and mixtures ----------------------------------------------------------------------------------------


def chats(count: int) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": f"Hi {n}"}, ASSISTANT]} for n in range(count)]


@pytest.mark.parametrize("eval", [7, 0.25])
@pytest.mark.parametrize("seed", [0, 5])
def test_the_rows_held_out_are_those_of_other_stages(
    read: Read, folders: dict[str, Path], tmp_path: Path, eval: float, seed: int
) -> None:
    rows = chats(30)
    sets = read(*rows, eval=eval, seed=seed)
    source = Source(path=str(tmp_path / "rows.jsonl"))
    settings = Data(train=[source], eval=eval, workers=1, cache=str(tmp_path / "cache"))
    prepared = prepare(DatasetSpec(settings, "sft", str(folders["chat"]), None, seed))
    assert prepared.eval is not None and prepared.train is not None
    assert [prompt.where for prompt in sets.eval] == [sample.row for sample in prepared.eval]
    assert [prompt.where for prompt in sets.train] == [sample.row for sample in prepared.train]
    assert [prompt.where for prompt in read(*rows, eval=eval, seed=seed + 1).eval] != [p.where for p in sets.eval]
    assert f"evaluation data: {len(sets.eval)} prompts of these rows are held out" in sets.lines()


def test_evaluation_rows_of_their_own(read: Read, tmp_path: Path) -> None:
    own = Source(path=str(write(tmp_path / "own.jsonl", chats(2))))
    sets = read(*chats(3), eval=[own])
    assert [prompt.where for prompt in sets.eval] == ["own.jsonl:1", "own.jsonl:2"]
    assert len(sets.train) == 3 and sets.eval_statistics is not None and sets.eval_statistics.rows == 2
    assert read(*chats(3)).eval == ()


def test_everything_held_out(read: Read) -> None:
    with pytest.raises(DataError, match=r"data\.eval: 3 holds out 3 of 3 rows, which leaves none to train on"):
        read(*chats(3), eval=3)


def test_weights_repeat_the_prompts_of_a_source(read: Read, tmp_path: Path) -> None:
    paths = [write(tmp_path / name, chats(count)) for name, count in (("few.jsonl", 2), ("many.jsonl", 8))]
    train = [Source(path=str(path), weight=1.0) for path in paths]
    counts = Counter(prompt.where.partition(":")[0] for prompt in read(train=train).train)
    assert counts == {"few.jsonl": 8, "many.jsonl": 8}
    unweighted = [Source(path=str(path)) for path in paths]
    assert len(read(train=unweighted).train) == 10


# -- order -------------------------------------------------------------------------------------------------------------


def prompts(count: int, **row: Any) -> list[Prompt]:
    return [Prompt((number,), {"n": number, **row}, str(number), f"rows:{number}") for number in range(count)]


def numbers(order: PromptOrder, asked: Iterable[int]) -> list[int]:
    return [order.at(number).tokens[0] for number in asked]


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_each_epoch_has_every_prompt_once(count: int) -> None:
    order = PromptOrder(prompts(count), 3)
    epochs = [numbers(order, range(count * n, count * (n + 1))) for n in range(3)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert order.per_epoch == count
    assert count < 7 or len({tuple(epoch) for epoch in epochs}) == 3


def test_a_prompt_follows_from_the_seed_and_its_number() -> None:
    order = PromptOrder(prompts(20), 1)
    asked = np.random.default_rng(0).permutation(60).tolist()
    forwards = numbers(order, range(60))
    assert numbers(PromptOrder(prompts(20), 1), asked) == [forwards[number] for number in asked]
    assert numbers(PromptOrder(prompts(20), 2), range(60)) != forwards


def test_other_prompts_are_not_those_of_a_checkpoint() -> None:
    state = PromptOrder(prompts(5), 1).state()
    PromptOrder(prompts(5), 1).restore(state)
    for other in (PromptOrder(prompts(6), 1), PromptOrder(prompts(5), 2), PromptOrder(prompts(5, answer=3), 1)):
        with pytest.raises(CheckpointError, match="the prompts are not what the checkpoint was made with"):
            other.restore(state)


# -- real rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "template", "begins"),
    [
        ("gsm8k_train.jsonl", None, "Natalia sold clips to 48 of her friends"),
        ("gsm8k_train.jsonl", "{question}", "Natalia sold clips to 48 of her friends"),
        ("svamp.jsonl", "{Body} {Question}", "Edward spent $ 6 to buy 2 books each book costing him the same amount"),
        ("bigbench_simple_arithmetic.jsonl", "{context}", "Q: 86 + 33 ="),
        ("countdown_generated.jsonl", "Make {target} of some numbers.", "Make 186 of"),
    ],
)
def test_real_rows(read: Read, shared_data: Path, file: str, template: str | None, begins: str) -> None:
    sets = read(train=[Source(path=str(shared_data / "rl" / file), rows=50)], eval=10, prompt=template)
    assert len(sets.train) == 40 and len(sets.eval) == 10
    (first,) = [prompt for prompt in (*sets.train, *sets.eval) if prompt.where == f"{file}:1"]
    assert isinstance(first.prompt, str) and first.prompt.startswith(begins)
    line = (shared_data / "rl" / file).read_text(encoding="utf-8").splitlines()[0]
    assert first.row == json.loads(line)
