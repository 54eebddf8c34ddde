"""Rows, tokenizers and chat templates that are wrong."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile.case import Arrange, Case, Place, both, file_of_rows, json_with, recipe, rows, text

TRAIN = ("train", "r.yaml")
PREVIEW = ("preview", "r.yaml")


def messages(*turns: tuple[Any, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


GOOD = messages(("user", "hi"), ("assistant", "hello"))
IMAGES = "stage: classify\nmodel: {preset: lenet5}\ndata: @/images\noutput: @/run\nsteps: 1\n"


def tokenizer(changed: Callable[[Path], object]) -> Arrange:
    """The world's tokenizer in `@/tok`, spoilt, and a recipe that uses it."""

    def arrange(place: Place) -> None:
        shutil.copytree(place.world.tokenizer, place.tmp / "tok")
        changed(place.tmp / "tok")
        place.recipe(model={"tokenizer": "@/tok"}, data={"cache": "@/cache"})

    return arrange


def template(text: str) -> Arrange:
    return tokenizer(lambda folder: (folder / "chat_template.jinja").write_text(text))


def pipe_instead(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def data_folder(make: Callable[[Path], object]) -> Arrange:
    """A folder `@/rows` as data, filled by `make`."""

    def arrange(place: Place) -> None:
        (place.tmp / "rows").mkdir()
        make(place.tmp / "rows")
        place.recipe(data={"train": "@/rows", "cache": "@/cache"})

    return arrange


DEEP = "[" * 100_000

CASES = [
    # -- files
    Case("rows empty", TRAIN, 3, ("error: @/rows.jsonl: the file is empty",), rows()),
    Case("rows of blank lines", TRAIN, 3, ("error: @/rows.jsonl: there are no rows in it",), file_of_rows("\n\n\n")),
    Case(
        "rows not UTF-8",
        TRAIN,
        3,
        ("error: rows.jsonl:1: byte 0xe9 is not UTF-8 text; save the file as UTF-8",),
        file_of_rows(b'{"text": "\xe9"}\n'),
    ),
    Case(
        "rows of random bytes",
        TRAIN,
        3,
        ("error: rows.jsonl:1:1: broken JSON: Expecting value; each line must be one whole JSON object",),
        file_of_rows(bytes(range(256)) * 10),
    ),
    Case(
        "rows with NUL bytes",
        TRAIN,
        3,
        ("error: rows.jsonl:1:1: broken JSON: Expecting value; each line must be one whole JSON object",),
        file_of_rows(b"\0" * 4096),
    ),
    Case(
        "rows are a picture",
        TRAIN,
        3,
        ("error: rows.jsonl:1: byte 0x89 is not UTF-8 text; save the file as UTF-8",),
        file_of_rows(b"\x89PNG\r\n\x1a\n" + bytes(100)),
    ),
    Case(
        "rows are a pipe",
        TRAIN,
        3,
        ("error: @/rows.jsonl: rows cannot be read from it: it is a named pipe, not a file",),
        both(lambda place: os.mkfifo(place.tmp / "rows.jsonl"), recipe(data={"train": "@/rows.jsonl"})),
    ),
    Case(
        "rows are a device",
        TRAIN,
        3,
        ("error: /dev/zero: rows cannot be read from it: it is a device, not a file",),
        recipe(data={"train": "/dev/zero"}),
    ),
    Case(
        "rows of unknown ending",
        TRAIN,
        3,
        ("error: @/rows.xyz: cannot read a '.xyz' file; the kinds are arrow, csv, json, jsonl, ndjson, parquet,",),
        file_of_rows("x", "rows.xyz"),
    ),
    Case(
        "rows are a folder of nothing",
        TRAIN,
        3,
        ("error: @/rows: no data files in this folder; the kinds are arrow, csv, json, jsonl, ndjson, parquet,",),
        data_folder(lambda folder: None),
    ),
    Case(
        "rows are a folder of pictures",
        TRAIN,
        3,
        ("error: @/rows: no data files in this folder; the kinds are arrow, csv, json, jsonl, ndjson, parquet,",),
        data_folder(lambda folder: (folder / "a.png").write_bytes(b"x")),
    ),
    Case(
        "parquet that is none",
        TRAIN,
        3,
        ("error: rows.parquet: not a readable parquet file",),
        file_of_rows(b"PAR1xxxxPAR1", "rows.parquet"),
    ),
    Case(
        "arrow that is none",
        TRAIN,
        3,
        ("error: rows.arrow: not a readable arrow file",),
        file_of_rows(b"ARROW1xxxx", "rows.arrow"),
    ),
    Case(
        "csv with a ragged row",
        TRAIN,
        3,
        ("error: rows.csv:3: 4 fields, but the first line names 2 columns",),
        file_of_rows("prompt,completion\na,b\nc,d,e,f\n", "rows.csv"),
    ),
    Case(
        "csv with a header alone",
        TRAIN,
        3,
        ("error: @/rows.csv: there are no rows in it",),
        file_of_rows("prompt,completion\n", "rows.csv"),
    ),
    Case(
        "csv with an open quote",
        TRAIN,
        3,
        ("error: rows.csv:2: broken CSV: unexpected end of data",),
        file_of_rows('prompt,completion\n"a,b\n', "rows.csv"),
    ),
    Case(
        "json of one object",
        TRAIN,
        3,
        ("error: rows.json:1: no known row format has the columns a. Known: text · instruction, output (input,",),
        file_of_rows('{"a": 1}', "rows.json"),
    ),
    Case(
        "json of a number",
        TRAIN,
        3,
        ("error: rows.json:1: a row must be an object with named columns, this is of type int",),
        file_of_rows("17", "rows.json"),
    ),
    Case(
        "json cut off",
        TRAIN,
        3,
        ("error: rows.json:1:16: broken JSON: Expecting value",),
        file_of_rows('[{"text": "a"},', "rows.json"),
    ),
    Case(
        "json nested 100,000 deep",
        TRAIN,
        3,
        ("error: rows.json:1: unreadable JSON in the row that begins here: brackets are nested too deeply",),
        file_of_rows(DEEP, "rows.json"),
    ),
    Case(
        "no such rows of a share",
        TRAIN,
        2,
        ("error: r.yaml:9:10 data.train.0.path: no file or folder '@chat#0x'",),
        recipe(data={"train": "@chat#0x"}),
    ),
    Case(
        "gzip that is cut",
        TRAIN,
        3,
        ("error: @/rows.jsonl.gz: damaged, or no gz file: Compressed file ended before the end-of-stream marker",),
        file_of_rows(gzip.compress(json.dumps(GOOD).encode() * 100)[:60], "rows.jsonl.gz"),
    ),
    Case(
        "gzip that is none",
        TRAIN,
        3,
        ("error: @/rows.jsonl.gz: damaged, or no gz file: Not a gzipped file (b'he')",),
        file_of_rows(b"hello", "rows.jsonl.gz"),
    ),
    Case(
        "rows in a zip",
        TRAIN,
        3,
        ("error: @/rows.zip: cannot read a '.zip' file; the kinds are arrow, csv, json, jsonl, ndjson, parquet,",),
        file_of_rows(b"PK\x03\x04", "rows.zip"),
    ),
    Case(
        "array named jsonl and cut off",
        TRAIN,
        3,
        ("error: rows.jsonl:3:1: broken JSON: Expecting value",),
        file_of_rows('[\n{"text": "a"},\n', "rows.jsonl"),
    ),
    Case(
        "unpaired rows of KTO",
        TRAIN,
        3,
        ("error: rows.jsonl:1: 'label' (False) judges the answer: unpaired preferences are rows for a stage kto;",),
        rows({"prompt": "a", "completion": "b", "label": False}),
    ),
    Case(
        "pairs of DPO",
        TRAIN,
        3,
        ("error: rows.jsonl:1: these are preference pairs (chosen, rejected), rows for a stage dpo; stages",),
        rows({"prompt": "a", "chosen": "b", "rejected": "c"}),
    ),
    Case(
        "tool call nested 100,000 deep",
        TRAIN,
        3,
        ("error: rows.jsonl:1 message 2: a tool call cannot be read: brackets are nested too deeply, more than",),
        rows({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": "[" * 100_000}]}),
    ),
    Case(
        "row is broken JSON",
        TRAIN,
        3,
        ("error: rows.jsonl:2:15: broken JSON: Expecting value; each line must be one whole JSON object",),
        rows(GOOD, '{"messages": ['),
    ),
    Case(
        "row is nested 100,000 deep",
        TRAIN,
        3,
        ("error: rows.jsonl:2: unreadable JSON: brackets are nested too deeply",),
        rows(GOOD, DEEP),
    ),
    Case(
        "row is a mapping 100,000 deep",
        TRAIN,
        3,
        ("error: rows.jsonl:2: unreadable JSON: brackets are nested too deeply",),
        rows(GOOD, '{"messages":' * 100_000),
    ),
    Case(
        "row is a number of 5,000 digits",
        TRAIN,
        3,
        ("error: rows.jsonl:2: unreadable JSON: a number has too many digits",),
        rows(GOOD, '{"messages": %s}' % ("9" * 5000)),
    ),
    Case(
        "row is a list",
        TRAIN,
        3,
        ("error: rows.jsonl:2: a row must be an object with named columns, this is of type list",),
        rows(GOOD, "[1, 2]"),
    ),
    Case(
        "row is a text",
        TRAIN,
        3,
        ("error: rows.jsonl:2: a row must be an object with named columns, this is of type str",),
        rows(GOOD, '"hello"'),
    ),
    Case(
        "row is null",
        TRAIN,
        3,
        ("error: rows.jsonl:2: a row must be an object with named columns, this is of type NoneType",),
        rows(GOOD, "null"),
    ),
    Case(
        "row of other columns",
        TRAIN,
        3,
        ("error: rows.jsonl:2: no column 'messages', which rows of format messages have; the columns are",),
        rows(GOOD, {"prompt_id": 1}),
    ),
    Case(
        "columns unknown",
        TRAIN,
        3,
        ("error: rows.jsonl:1: no known row format has the columns alpha, beta. Known: text · instruction,",),
        rows({"alpha": 1, "beta": 2}),
    ),
    Case(
        "columns with escapes",
        TRAIN,
        3,
        ("error: rows.jsonl:1: no known row format has the columns ev\\x1b[2Jil, \\u009b31m. Known: text ·",),
        rows({"ev\x1b[2Jil": 1, "\x9b31m": 2}),
    ),
    Case(
        "column named twice by formats",
        TRAIN,
        3,
        ("error: rows.jsonl:1: 'text' must be a string, not an int",),
        rows({"text": 1}),
    ),
    Case(
        "messages are a text",
        TRAIN,
        3,
        ("error: rows.jsonl:1: a conversation must be a list of messages (objects), not a str",),
        rows({"messages": "hello"}),
    ),
    Case(
        "messages are empty",
        TRAIN,
        3,
        ("error: rows.jsonl:1: no assistant message, so there is nothing to train on; remove the row",),
        rows({"messages": []}),
    ),
    Case(
        "message is a text",
        TRAIN,
        3,
        ("error: rows.jsonl:1: a conversation must be a list of messages (objects), not a list",),
        rows({"messages": ["hello"]}),
    ),
    Case(
        "message without role",
        TRAIN,
        3,
        ("error: rows.jsonl:1 message 1: a message needs role and content (or from and value); it has content",),
        rows({"messages": [{"content": "a"}]}),
    ),
    Case(
        "message with unknown role",
        TRAIN,
        3,
        ("error: rows.jsonl:2 message 2: unknown role 'alien'. Known roles: system, developer, user, human,",),
        rows(GOOD, messages(("user", "a"), ("alien", "b"))),
    ),
    Case(
        "role with escapes",
        TRAIN,
        3,
        ("error: rows.jsonl:2 message 2: unknown role '\\x1b]0;t\\x07'. Known roles: system, developer, user,",),
        rows(GOOD, messages(("user", "a"), ("\x1b]0;t\x07", "b"))),
    ),
    Case(
        "role is a number",
        TRAIN,
        3,
        ("error: rows.jsonl:2 message 1: unknown role 1. Known roles: system, developer, user, human, assistant,",),
        rows(GOOD, messages((1, "a"), (2, "b"))),
    ),
    Case(
        "content is a number",
        TRAIN,
        3,
        ("error: rows.jsonl:2 message 1: content must be a string or a list of text parts, not an int",),
        rows(GOOD, messages(("user", 1), ("assistant", 2))),
    ),
    Case(
        "content is null",
        TRAIN,
        3,
        ("error: rows.jsonl:2 message 2: the assistant's answer is empty; remove the row or fill the answer in",),
        rows(GOOD, messages(("user", None), ("assistant", None))),
    ),
    Case(
        "assistant first",
        TRAIN,
        3,
        ("error: rows.jsonl:2 message 1: the conversation starts with the assistant; add the user's turn before",),
        rows(GOOD, messages(("assistant", "a"), ("user", "b"), ("assistant", "c"))),
    ),
    Case(
        "two user turns",
        TRAIN,
        3,
        ("error: rows.jsonl:2 message 2: two user turns in a row; join them into one, or add the assistant's",),
        rows(GOOD, messages(("user", "a"), ("user", "b"), ("assistant", "c"))),
    ),
    Case(
        "answer is empty",
        TRAIN,
        3,
        ("error: rows.jsonl:2 message 2: the assistant's answer is empty; remove the row or fill the answer in",),
        rows(GOOD, messages(("user", "a"), ("assistant", ""))),
    ),
    Case(
        "answer is missing",
        TRAIN,
        3,
        ("error: rows.jsonl:2: no assistant message, so there is nothing to train on; remove the row",),
        rows(GOOD, messages(("user", "a"))),
    ),
    Case(
        "half a surrogate pair in a row",
        TRAIN,
        3,
        ("error: rows.jsonl:2: the text holds \\ud800, half a character (a lone surrogate), which cannot be",),
        rows(GOOD, '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "a"}]}'),
    ),
    Case(
        "more bad rows than allowed",
        TRAIN,
        3,
        ("error: more than 2 bad rows (data.bad_row_limit); the last one: rows.jsonl:4:2: broken JSON: Expecting",),
        rows(*[GOOD, *["{"] * 5], data={"on_bad_row": "skip", "bad_row_limit": 2}),
    ),
    Case(
        "rows all too long",
        TRAIN,
        3,
        ("error: @/rows.jsonl: no row is left to train on, of 1 (1 longer than max_length, with no trained token",),
        rows(messages(("user", "hi there " * 100), ("assistant", "yes"))),
    ),
    Case(
        "one row and half of it for eval",
        TRAIN,
        3,
        (" data.eval: 0.5 holds out 1 of 1 rows, which leaves none to train on",),
        rows(GOOD, data={"eval": 0.5}),
    ),
    Case(
        "tokenized rows are texts",
        TRAIN,
        3,
        ("error: rows.jsonl:1: 'input_ids' must be a list of integers",),
        rows({"input_ids": "hello"}),
    ),
    Case(
        "tokenized rows beyond the vocabulary",
        TRAIN,
        3,
        ("error: rows.jsonl:1: token 1000000 is not in the vocabulary of @tokenizer (0 to 399)",),
        rows({"input_ids": [1, 2, 10**6], "labels": [1, 2, 10**6]}),
    ),
    Case(
        "tokenized rows below zero",
        TRAIN,
        3,
        ("error: rows.jsonl:1: token -2 is not in the vocabulary of @tokenizer (0 to 399)",),
        rows({"input_ids": [1, -2], "labels": [1, -2]}),
    ),
    Case(
        "tokenized rows of two lengths",
        TRAIN,
        3,
        ("error: rows.jsonl:1: 'labels' has 1 values, 'input_ids' has 3; they must be as long",),
        rows({"input_ids": [1, 2, 3], "labels": [1]}),
    ),
    Case(
        "preview of a bad row",
        PREVIEW,
        3,
        ("error: rows.jsonl:2 message 2: unknown role 'alien'. Known roles: system, developer, user, human,",),
        rows(GOOD, messages(("user", "a"), ("alien", "b"))),
    ),
    Case(
        "preview of a row that is not there",
        (*PREVIEW, "--row", "999999"),
        2,
        ("error: --row 999999: there is no such row in @chat",),
        recipe(),
    ),
    Case(
        "preview of a place with escapes",
        (*PREVIEW, "--row", "\x1b[2J:3"),
        2,
        ("error: --row \\x1b[2J:3: there is no such row in @chat",),
        recipe(),
    ),
    Case("eval on missing rows", ("eval", "@base", "--data", "@/no.jsonl"), 3, ("error: @/no.jsonl: no such file",)),
    Case(
        "eval on nothing",
        ("eval", "@base", "--data", "@/rows.jsonl"),
        3,
        ("error: @/rows.jsonl: the file is empty",),
        rows(),
    ),
    Case(
        "classify on a folder of nothing",
        TRAIN,
        3,
        ("error: @/images: no images of split train: expected train-images-idx3-ubyte[.gz]",),
        both(
            lambda place: (place.tmp / "images").mkdir(),
            text(IMAGES),
        ),
    ),
    # -- tokenizers and templates
    Case(
        "template is a number",
        TRAIN,
        3,
        ("error: @/tok: the chat_template in tokenizer_config.json is no text but 7. Correct it, or name a Jinja",),
        tokenizer(
            lambda folder: [
                (folder / "chat_template.jinja").unlink(),
                json_with(folder / "tokenizer_config.json", chat_template=7),
            ]
        ),
    ),
    Case(
        "template that writes gigabytes",
        TRAIN,
        3,
        ("error: @/tok: not even a question and its answer can be rendered: the chat template does not come to",),
        template("{{ 'x' * 4000000000 }}"),
    ),
    Case(
        "template not UTF-8",
        TRAIN,
        3,
        ("error: @/tok: the tokenizer cannot be read: UnicodeDecodeError: 'utf-8' codec can't decode byte 0xe9",),
        tokenizer(lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xe9")),
    ),
    Case(
        "tokenizer folder empty",
        TRAIN,
        3,
        ("error: @/tok: no tokenizer in this folder (one of tokenizer.json, vocab.json, vocab.txt,",),
        tokenizer(lambda folder: [one.unlink() for one in folder.iterdir()]),
    ),
    Case(
        "tokenizer.json cut off",
        TRAIN,
        3,
        ("error: @/tok: the tokenizer cannot be read: tokenizer.json:7:12: broken JSON: Expecting value",),
        tokenizer(lambda folder: os.truncate(folder / "tokenizer.json", 100)),
    ),
    Case(
        "tokenizer.json nested 100,000 deep",
        TRAIN,
        3,
        ("error: @/tok: the tokenizer cannot be read: tokenizer.json:1:1: broken JSON: nested too deeply",),
        tokenizer(lambda folder: (folder / "tokenizer.json").write_text(DEEP)),
    ),
    Case(
        "tokenizer.json is a pipe",
        TRAIN,
        3,
        ("error: @/tok/tokenizer.json: cannot be read: it is a named pipe, not a file",),
        tokenizer(pipe_instead("tokenizer.json")),
    ),
    Case(
        "tokenizer.json is a list",
        TRAIN,
        3,
        ("error: @/tok: the tokenizer cannot be read: tokenizer.json: expected a JSON object, found list",),
        tokenizer(lambda folder: (folder / "tokenizer.json").write_text("[]")),
    ),
    Case(
        "tokenizer_config.json cut off",
        TRAIN,
        3,
        ("error: @/tok: the tokenizer cannot be read: tokenizer_config.json:2:3: broken JSON: Unterminated",),
        tokenizer(lambda folder: os.truncate(folder / "tokenizer_config.json", 20)),
    ),
    Case(
        "tokenizer_config.json is a pipe",
        TRAIN,
        3,
        ("error: @/tok/tokenizer_config.json: cannot be read: it is a named pipe, not a file",),
        tokenizer(pipe_instead("tokenizer_config.json")),
    ),
    Case(
        "tokenizer_config.json nested 100,000 deep",
        TRAIN,
        3,
        ("error: @/tok: the tokenizer cannot be read: tokenizer_config.json:1:1: broken JSON: nested too deeply",),
        tokenizer(lambda folder: (folder / "tokenizer_config.json").write_text(DEEP)),
    ),
    Case(
        "tokenizer_config.json is a list",
        TRAIN,
        3,
        ("error: @/tok: the tokenizer cannot be read: tokenizer_config.json: expected a JSON object, found list",),
        tokenizer(lambda folder: (folder / "tokenizer_config.json").write_text("[]")),
    ),
    Case(
        "tokenizer with code of its own",
        TRAIN,
        3,
        ("error: @/tok: the tokenizer cannot be read: ValueError: The repository @/tok contains custom code",),
        tokenizer(
            lambda folder: json_with(
                folder / "tokenizer_config.json",
                tokenizer_class="Mine",
                auto_map={"AutoTokenizer": ["evil.Mine", None]},
            )
        ),
    ),
    Case(
        "tokenizer without template",
        TRAIN,
        3,
        ("error: @/tok: this tokenizer has no chat template, so conversations cannot be rendered. Name one",),
        tokenizer(lambda folder: (folder / "chat_template.jinja").unlink()),
    ),
    Case(
        "template is a pipe",
        TRAIN,
        3,
        ("error: @/tok/chat_template.jinja: cannot be read: it is a named pipe, not a file",),
        tokenizer(pipe_instead("chat_template.jinja")),
    ),
    Case(
        "template given is a pipe",
        TRAIN,
        3,
        (" model.chat_template: @/t.jinja cannot be read: it is a named pipe, not a file",),
        both(
            lambda place: os.mkfifo(place.tmp / "t.jinja"),
            recipe(model={"chat_template": "@/t.jinja"}, data={"cache": "@/cache"}),
        ),
    ),
    Case(
        "template that raises",
        TRAIN,
        3,
        (
            "error: @/tok: not even a question and its answer can be rendered: the chat template refuses this",
            "TemplateError: only Latin, please",
        ),
        template("{{ raise_exception('only Latin, please') }}"),
    ),
    Case(
        "template that raises escapes",
        TRAIN,
        3,
        (
            "error: @/tok: not even a question and its answer can be rendered: the chat template refuses this",
            "TemplateError: \\x1b]0;title\\x07",
        ),
        template("{{ raise_exception('\x1b]0;title\x07') }}"),
    ),
    Case(
        "template that is no Jinja",
        TRAIN,
        3,
        ("error: @/tok: the chat template does not compile: line 1: Expected an expression, got 'end of",),
        template("{% for message in %}"),
    ),
    Case(
        "template with an unknown filter",
        TRAIN,
        3,
        ("error: @/tok: the chat template does not compile: line 1: No filter named 'nosuch'.. Correct it, or",),
        template("{{ messages | nosuch }}"),
    ),
    Case(
        "template that divides by zero",
        TRAIN,
        3,
        (
            "error: @/tok: not even a question and its answer can be rendered: the chat template refuses this",
            "ZeroDivisionError: integer division or modulo by zero",
        ),
        template("{{ 1 // 0 }}"),
    ),
    Case(
        "template that reaches for the system",
        TRAIN,
        3,
        (
            "error: @/tok: not even a question and its answer can be rendered: the chat template refuses this",
            "SecurityError: access to attribute '__class__' of 'str' object is unsafe",
        ),
        template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    ),
    Case(
        "template that says nothing",
        TRAIN,
        3,
        ("error: @/tok: this tokenizer has no chat template, so conversations cannot be rendered. Name one",),
        template(""),
    ),
    Case(
        "template that leaves the answer out",
        TRAIN,
        3,
        ("error: chat.jsonl:1: message 2: the chat template leaves out text of its content,",),
        template("{{ messages[0].content }}"),
    ),
    Case(
        "template nested 100,000 deep",
        TRAIN,
        3,
        ("error: @/tok: the chat template does not compile: it is nested too deeply",),
        template("{{ " + "(" * 100_000 + " }}"),
    ),
    Case(
        "tokenizer without end of text",
        TRAIN,
        3,
        ("error: @/tok: this tokenizer has no end-of-text token (eos_token), so a model could not learn to stop.",),
        both(
            tokenizer(lambda folder: json_with(folder / "tokenizer_config.json", eos_token=None)),
            recipe(stage="pretrain", model={"tokenizer": "@/tok"}, data={"train": "@text", "cache": "@/cache"}),
        ),
    ),
]
