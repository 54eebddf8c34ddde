"""What OpenAI's own client is answered, beside what the engine alone answers, and what it is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from builders.adapter_folders import adapter_folder
from builders.served import Loaded, Served, ask, serving
from builders.tiny_world import World
from openai import OpenAI

from danlu.inference.engine import DraftOptions, EngineOptions
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.recipe import sections
from danlu.serving.api_endpoints import decode_of
from danlu.serving.openai_api import CompletionBody, parse_body

PROMPT = "Once upon a time"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
DRAWN: dict[str, Any] = {"temperature": 1, "max_tokens": 8}


@pytest.fixture(scope="module")
def served(loaded: Loaded) -> Iterator[Served]:
    with serving(loaded.served, loaded.engine()) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    return served.client()


def expected(loaded: Loaded, prompt: Any = PROMPT, model: str = "tiny", **changes: Any) -> list[Completion]:
    """What the engine alone answers."""
    named = loaded.served.find(model)
    tokens = prompt
    if isinstance(prompt, str):
        tokens = named.chat_tokenizer.encode_prompt(prompt)
    request = {"sampling": SamplingOptions(temperature=0), "max_new_tokens": 8, "stop_ids": named.stop_ids}
    return loaded.engine().generate([Request(0, tuple(tokens), adapter=named.adapter, **{**request, **changes})])


def token_texts(loaded: Loaded, tokens: list[int]) -> list[str]:
    """Each token's text; of one that is a part of a character its bytes."""
    texts = []
    for content in loaded.model.chat_tokenizer.tokenizer.token_bytes(tokens):
        try:
            texts.append(content.decode())
        except UnicodeDecodeError:
            texts.append("bytes:" + "".join(f"\\x{byte:02x}" for byte in content))
    return texts


# -- completions -------------------------------------------------------------------------------------------------------


def test_a_completion_is_the_engines(client: OpenAI, loaded: Loaded) -> None:
    (answer,) = expected(loaded, top_logprobs=2)
    got = client.completions.create(
        model="tiny", prompt=PROMPT, logprobs=2, extra_body={"return_token_ids": True}, **GREEDY
    )
    (choice,) = got.choices
    tokens = loaded.served.find("tiny").chat_tokenizer.encode_prompt(PROMPT)
    assert choice.text == answer.text and choice.finish_reason == {"length": "length", "stop": "stop"}[answer.finish]
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == answer.tokens and choice.model_extra["prompt_token_ids"] == tokens
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert choice.logprobs.token_logprobs == pytest.approx(answer.logprobs, abs=1e-6)
    assert choice.logprobs.tokens == token_texts(loaded, answer.tokens)
    assert choice.logprobs.text_offset is not None and choice.logprobs.text_offset[:2] == [
        0,
        len(choice.logprobs.tokens[0]),
    ]
    assert answer.top is not None and choice.logprobs.top_logprobs is not None
    for top, likeliest, logprob in zip(choice.logprobs.top_logprobs, answer.top, answer.logprobs, strict=True):
        assert max(top.values()) == pytest.approx(likeliest[0][1], abs=1e-6)
        assert logprob == pytest.approx(max(top.values()), abs=1e-6)  # greedy
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(tokens), len(answer.tokens))
    assert got.object == "text_completion" and got.model == "tiny"


def test_prompts_in_every_form(client: OpenAI, loaded: Loaded) -> None:
    encode = loaded.served.find("tiny").chat_tokenizer.encode_prompt
    texts = [PROMPT, "The fox"]
    alone = [client.completions.create(model="tiny", prompt=text, **GREEDY).choices[0].text for text in texts]
    assert alone[0] != alone[1]
    for prompt in (texts, [encode(text) for text in texts]):
        answers = client.completions.create(model="tiny", prompt=prompt, **GREEDY).choices
        assert [answer.text for answer in answers] == alone and [answer.index for answer in answers] == [0, 1]
    assert client.completions.create(model="tiny", prompt=encode(PROMPT), **GREEDY).choices[0].text == alone[0]


def test_samples_of_several_prompts_are_in_order(client: OpenAI) -> None:
    ask = {"model": "tiny", "seed": 5, "n": 2, **DRAWN}
    both = client.completions.create(prompt=[PROMPT, PROMPT], **ask)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in both.choices]
    assert len(set(texts)) == 4
    assert [choice.text for choice in client.completions.create(prompt=PROMPT, **ask).choices] == texts[:2]


def test_the_same_seed_gives_the_same_answer_and_no_seed_another(client: OpenAI) -> None:
    def ask(**values: Any) -> str:
        return client.completions.create(model="tiny", prompt=PROMPT, **{**DRAWN, **values}).choices[0].text

    assert ask(seed=1) == ask(seed=1)
    assert len({ask(seed=1), ask(seed=2), ask(), ask()}) == 4


def test_many_clients_at_once_are_answered_as_one_by_one(client: OpenAI) -> None:
    def ask(number: int) -> list[str]:
        values: dict[str, Any] = {"seed": number, "n": 1 + number % 3, "max_tokens": 4 + number % 11, "temperature": 1}
        prompt = PROMPT[: 3 + number % 5]
        if number % 2:
            return [choice.text for choice in client.completions.create(model="lora", prompt=prompt, **values).choices]
        texts = [""] * values["n"]
        for chunk in client.completions.create(model="tiny", prompt=prompt, stream=True, **values):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        return texts

    alone = [ask(number) for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, range(12)))
    assert together == alone
    assert together != [ask(number + 1) for number in range(12)]


def test_answers_are_the_same_with_drafts(client: OpenAI, loaded: Loaded) -> None:
    ask: dict[str, Any] = {"model": "tiny", "prompt": "ababababab", "n": 2, "seed": 4, "max_tokens": 20, "logprobs": 0}
    ask["extra_body"] = {"allowed_token_ids": loaded.served.find("tiny").chat_tokenizer.tokenizer.encode("ab")}
    plain = client.completions.create(**ask).choices
    with serving(loaded.served, loaded.engine(EngineOptions(cache_gib=0.01, draft=DraftOptions(tokens=3)))) as served:
        whole = served.client().completions.create(**ask).choices
        assert [choice.text for choice in whole] == [choice.text for choice in plain]
        assert served.server.engine.statistics.drafts_accepted > 0
        texts = ["", ""]
        for chunk in served.client().completions.create(**ask, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in plain]


def test_what_ends_an_answer(client: OpenAI, loaded: Loaded) -> None:
    (whole,) = expected(loaded)
    stop = whole.text[2:4]

    def ask(**values: Any) -> Any:
        return client.completions.create(model="tiny", prompt=PROMPT, **{**GREEDY, **values}).choices[0]

    by_text = ask(stop=[stop, "never"])
    assert by_text.finish_reason == "stop" and by_text.text == whole.text.partition(stop)[0]
    assert ask(stop=stop).text == by_text.text != whole.text
    by_token = ask(extra_body={"stop_token_ids": [whole.tokens[2]], "return_token_ids": True})
    assert by_token.finish_reason == "stop"
    assert by_token.model_extra["token_ids"] == whole.tokens[: whole.tokens.index(whole.tokens[2]) + 1]
    assert ask(max_tokens=2).finish_reason == "length"


def test_a_real_model_tells_the_story_that_was_published_with_it(shared_data: Path) -> None:
    page = (shared_data / "weights" / "stories260K-llama2c" / "reference_sample.md").read_text(encoding="utf-8")
    story = page.split("-t 0.0\n", 1)[1].split("\n```", 1)[0]
    stories = Loaded.of(shared_data / "weights" / "stories260K-hf")
    with serving(stories.served, stories.engine()) as served:
        ask: dict[str, Any] = {"model": "stories260K-hf", "prompt": "", "temperature": 0, "max_tokens": 256}
        stream = served.client().completions.create(**ask, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == story
        assert served.client().completions.create(**ask).choices[0].text == story


def test_allowed_tokens_are_the_only_ones(client: OpenAI) -> None:
    allowed = [30, 31, 32]
    extra = {"allowed_token_ids": allowed, "return_token_ids": True}
    answer = client.completions.create(model="tiny", prompt=PROMPT, extra_body=extra, **DRAWN).choices[0]
    assert answer.model_extra is not None and set(answer.model_extra["token_ids"]) <= set(allowed)


def test_penalties_of_what_is_in_the_answer(client: OpenAI, loaded: Loaded) -> None:
    names = ("presence_penalty", "frequency_penalty")
    texts = {name: [] for name in names}
    for name in names:
        for value in (2.0, -2.0):
            (engines,) = expected(loaded, sampling=SamplingOptions(temperature=0, **{name: value}), max_new_tokens=40)
            asked: dict[str, Any] = {"temperature": 0, "max_tokens": 40, name: value}
            (choice,) = client.completions.create(model="tiny", prompt=PROMPT, **asked).choices
            assert choice.text == engines.text
            texts[name].append(choice.text)
    assert all(len(set(of_both)) == 2 for of_both in texts.values())  # control: the values are heeded


@pytest.mark.parametrize("prompt", [PROMPT, "Là-bas 丹炉 é🎈", [5, 9, 300, 7]], ids=["ascii", "unicode", "ids"])
def test_a_prompt_that_is_echoed(client: OpenAI, loaded: Loaded, prompt: Any) -> None:
    tokenizer = loaded.model.chat_tokenizer.tokenizer
    (engines,) = expected(loaded, prompt, top_logprobs=2, prompt_logprobs=True)
    asked: dict[str, Any] = {"model": "tiny", "prompt": prompt, **GREEDY}
    extra = {"return_token_ids": True}
    (choice,) = client.completions.create(**asked, echo=True, logprobs=2, extra_body=extra).choices
    ids, text = choice.prompt_token_ids, prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
    assert choice.text == text + engines.text and choice.token_ids == engines.tokens
    written = choice.logprobs
    assert written.tokens == token_texts(loaded, [*ids, *engines.tokens])
    assert written.token_logprobs[0] is None and written.top_logprobs[0] is None
    assert written.token_logprobs[1:] == pytest.approx([*engines.prompt_logprobs, *engines.logprobs], abs=1e-4)
    assert all(
        {own, *token_texts(loaded, [token for token, _ in top])} == set(shown)
        for own, top, shown in zip(
            written.tokens[1:], [*engines.prompt_top, *engines.top], written.top_logprobs[1:], strict=True
        )
    )
    assert written.text_offset[0] == 0 and written.text_offset == sorted(written.text_offset)
    assert written.text_offset[len(ids)] == len(text)
    if prompt == PROMPT:
        starts = zip(written.text_offset, written.tokens[: len(ids)], strict=False)
        assert all(text.startswith(token, start) for start, token in starts)
    (plain,) = client.completions.create(**asked, echo=True).choices
    assert plain.text == choice.text and plain.logprobs is None
    assert client.completions.create(**asked).choices[0].text == engines.text  # control: without it only the answer


def test_several_prompts_are_echoed_with_their_samples(client: OpenAI) -> None:
    prompts = [PROMPT, "Tom"]
    asked: dict[str, Any] = {"model": "tiny", "prompt": prompts, "n": 2, "seed": 1, **DRAWN}
    echoed = client.completions.create(**asked, echo=True, logprobs=0).choices
    plain = client.completions.create(**asked).choices
    assert [choice.text for choice in echoed] == [
        prompts[place // 2] + choice.text for place, choice in enumerate(plain)
    ]
    first, second = (choice.logprobs.token_logprobs for choice in echoed[:2])
    assert first[1:4] == second[1:4] and first != second


def test_each_adapter_answers_by_its_name(client: OpenAI, loaded: Loaded) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "lora", "soft"]
    logprobs = []
    for name in ("tiny", "lora", "soft"):
        (choice,) = client.completions.create(model=name, prompt=PROMPT, logprobs=0, **GREEDY).choices
        (answer,) = expected(loaded, model=name)
        assert choice.text == answer.text and choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx(answer.logprobs, abs=1e-5), name
        logprobs.append(answer.logprobs[:2])
    for index, other in ((0, 1), (0, 2), (1, 2)):
        assert logprobs[index] != pytest.approx(logprobs[other], abs=1e-3)
    card = client.models.retrieve("soft")
    assert card.id == "soft" and card.model_extra == {"max_model_len": 125}


# -- chats -------------------------------------------------------------------------------------------------------------


def test_a_chat_is_the_engines(client: OpenAI, loaded: Loaded) -> None:
    tokens = loaded.served.find("tiny").chat_tokenizer.encode_chat(HELLO)
    (answer,) = expected(loaded, tokens, top_logprobs=3)
    got = client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=3, **GREEDY)
    (choice,) = got.choices
    assert choice.message.role == "assistant" and choice.message.content == answer.text
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [token.logprob for token in choice.logprobs.content] == pytest.approx(answer.logprobs, abs=1e-6)
    assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)
    written = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
    assert written.decode(errors="replace").startswith(answer.text.rstrip("\ufffd"))
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert (
        client.chat.completions.create(model="tiny", messages=parts, **GREEDY).choices[0].message.content == answer.text
    )
    other: Any = [{"role": "user", "content": "Bye"}]
    bye = client.chat.completions.create(model="tiny", messages=other, logprobs=True, **GREEDY).choices[0].logprobs
    assert (
        bye is not None
        and bye.content is not None
        and bye.content[0].logprob != pytest.approx(answer.logprobs[0], 1e-4)
    )


def test_a_chat_without_a_limit_goes_on_to_the_end_of_the_context(client: OpenAI) -> None:
    got = client.chat.completions.create(model="soft", messages=HELLO, extra_body={"ignore_eos": True}, seed=1)
    assert got.usage is not None and got.usage.total_tokens == 125 and got.choices[0].finish_reason == "length"


def test_tools_that_the_template_does_not_show_are_refused(client: OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    with pytest.raises(openai.BadRequestError, match="tiny shows the model no tools.*--chat-template"):
        client.chat.completions.create(model="tiny", messages=HELLO, tools=tools, **GREEDY)
    plain = client.chat.completions.create(model="tiny", messages=HELLO, **GREEDY).choices[0].message.content
    answer = client.chat.completions.create(model="tiny", messages=HELLO, tools=tools, tool_choice="none", **GREEDY)
    assert answer.choices[0].message.content == plain


SHOWING_TOOLS = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.at }}){% endfor %};"
    "{% endfor %}assistant:"
)


def test_tools_and_calls_are_shown_where_the_template_shows_them(tiny_world: World, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_world.base, tmp_path / "calling"))
    (folder / "chat_template.jinja").write_text(SHOWING_TOOLS)
    calling = Loaded.of(folder)
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 7}'}}
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "a fox", "tool_call_id": "1"},
    ]
    with serving(calling.served, calling.engine()) as served:
        answer = served.client().chat.completions.create(
            model="calling", messages=messages, tools=tools, extra_body={"return_token_ids": True}, **GREEDY
        )
    assert answer.model_extra is not None
    prompt = calling.model.chat_tokenizer.decode(answer.model_extra["prompt_token_ids"])
    assert prompt == "look;user: Hello;assistant: look(7);tool: a fox;assistant:"


def test_an_answer_that_is_begun(client: OpenAI, loaded: Loaded) -> None:
    """The prompt ends with the text of the last message, and the answer is what the engine adds to it."""
    short = [*HELLO, {"role": "assistant", "content": "e"}]  # a letter of the mark that ends the turn
    begun = [*HELLO, {"role": "assistant", "content": "Once upon "}]
    tokenizer = loaded.model.chat_tokenizer
    text = tokenizer.render_chat(begun, begins_turn=False)
    tokens = tokenizer.tokenizer.encode(text[: text.rindex("Once upon ") + len("Once upon ")])
    extra = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    answer = client.chat.completions.create(model="tiny", messages=begun, extra_body=extra, **GREEDY)
    assert answer.model_extra is not None and answer.model_extra["prompt_token_ids"] == tokens
    assert answer.choices[0].message.content == expected(loaded, tokens)[0].text
    assert tokens != tokenizer.encode_chat(begun)  # a turn of its own behind the message
    ended = client.chat.completions.create(model="tiny", messages=short, extra_body=extra, **GREEDY).model_extra
    assert ended is not None and tokenizer.decode(ended["prompt_token_ids"]).endswith("<|im_start|>assistant\ne")
    for messages, wrong, told in (
        (HELLO, extra, "the last message is not the beginning of an answer"),
        (begun, {"continue_final_message": True, "add_generation_prompt": True}, "leave out one of both"),
        (begun, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: messages is a parameter of its own"),
    ):
        with pytest.raises(openai.BadRequestError, match=told):
            client.chat.completions.create(model="tiny", messages=messages, extra_body=wrong, **GREEDY)


def test_an_adapter_speaks_with_the_tokenizer_and_template_of_its_own(tiny_world: World, tmp_path: Path) -> None:
    own = adapter_folder(tiny_world.base, tmp_path / "own", sections.Lora(), size=0.3)
    shutil.copytree(tiny_world.tokenizer, own, dirs_exist_ok=True)
    (own / "chat_template.jinja").write_text(SHOWING_TOOLS)
    both = Loaded.of(tiny_world.base, [own])
    ask: dict[str, Any] = {"messages": HELLO, "extra_body": {"return_token_ids": True}, **GREEDY}
    prompts = {}
    with serving(both.served, both.engine()) as served:
        for name in served.client().models.list():
            extra = served.client().chat.completions.create(model=name.id, **ask).model_extra
            assert extra is not None
            prompts[name.id] = both.model.chat_tokenizer.tokenizer.decode(extra["prompt_token_ids"])
    assert prompts["own"] == "user: Hello;assistant:"
    assert prompts["base"].startswith("<|im_start|>user\nHello<|im_end|>")


def test_without_a_chat_template_texts_are_continued_and_chats_refused(tiny_world: World, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_world.base, tmp_path / "plain"))
    (folder / "chat_template.jinja").unlink()
    plain = Loaded.of(folder)
    with serving(plain.served, plain.engine()) as served:
        client = served.client()
        assert client.completions.create(model="plain", prompt=PROMPT, **GREEDY).choices[0].text
        with pytest.raises(openai.BadRequestError, match="plain: no chat template that says who speaks"):
            client.chat.completions.create(model="plain", messages=HELLO, **GREEDY)


# -- streams -----------------------------------------------------------------------------------------------------------


def test_the_chunks_of_a_completion_are_the_whole(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "lora", "prompt": [PROMPT, "A"], "n": 2, "seed": 3, "logprobs": 1, **DRAWN}
    whole = client.completions.create(**ask, extra_body={"return_token_ids": True})
    stream = client.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}, extra_body={"return_token_ids": True}
    )
    texts, tokens, logprobs, finishes = [""] * 4, [[], [], [], []], [[], [], [], []], {}  # type: ignore[var-annotated]
    *chunks, last = list(stream)
    for chunk in chunks:
        (choice,) = chunk.choices
        assert chunk.usage is None and chunk.id == last.id and choice.model_extra is not None
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.model_extra.get("token_ids", [])
        logprobs[choice.index] += choice.logprobs.token_logprobs if choice.logprobs is not None else []
        if choice.finish_reason is not None:
            finishes[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.model_extra["token_ids"] for choice in whole.choices if choice.model_extra]
    assert logprobs == [choice.logprobs.token_logprobs for choice in whole.choices if choice.logprobs]
    assert finishes == {choice.index: choice.finish_reason for choice in whole.choices}
    assert last.choices == [] and last.usage == whole.usage


def test_the_chunks_of_a_chat_are_the_whole(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": HELLO, "n": 2, "seed": 3, **DRAWN}
    whole = client.chat.completions.create(**ask, logprobs=True)
    texts, bytes_, roles = ["", ""], [0, 0], ["", ""]
    for chunk in client.chat.completions.create(**ask, logprobs=True, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role or ""
        bytes_[choice.index] += len(choice.logprobs.content or ()) if choice.logprobs else 0
    assert texts == [choice.message.content for choice in whole.choices]
    assert bytes_ == [len(choice.logprobs.content or ()) for choice in whole.choices if choice.logprobs]
    assert roles == ["assistant", "assistant"]


def test_a_stream_is_in_whole_characters(endless: Loaded) -> None:
    with serving(endless.served, endless.engine()) as served:
        chunks = served.client().completions.create(
            model=endless.served.names[0], prompt="a", max_tokens=20, stream=True
        )
        texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == "bcéa" * 4
    assert all(text in ("b", "c", "é", "a", "") for text in texts) and texts.count("") <= 1


def test_special_tokens_in_texts(endless: Loaded, loaded: Loaded) -> None:
    """By default those that begin, end or pad a text are left out; the request may leave out all of them, or none."""
    tokenizer = loaded.served.find(None).chat_tokenizer.tokenizer
    silent = loaded.served.find(None).chat_tokenizer.silent_ids
    shown = next(token for token in sorted(tokenizer.special_ids) if token not in silent)
    hidden = next(iter(sorted(silent)))

    def text(skip: bool | None) -> str:
        decode = decode_of(completion_body(skip), loaded.served.find(None))
        return decode([*tokenizer.encode("A"), hidden, shown])

    own, hidden_text = tokenizer.decode([shown]), tokenizer.decode([hidden])
    assert own in text(None) and hidden_text not in text(None)
    assert own not in text(True) and hidden_text not in text(True) and "A" in text(True)
    assert own in text(False) and hidden_text in text(False)


def completion_body(skip: bool | None) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps({"prompt": "a", "skip_special_tokens": skip}).encode())


def test_padding_of_the_chunks_of_a_stream(client: OpenAI) -> None:
    def chunks(**options: Any) -> list[Any]:
        ask: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "stream": True, "stream_options": options}
        return list(client.completions.create(**ask, **GREEDY))

    padded = [chunk for chunk in chunks(include_obfuscation=True) if chunk.choices]
    assert all((len(json.dumps(written(chunk))) + len(chunk.obfuscation)) % 64 == 0 for chunk in padded)
    assert len({chunk.obfuscation for chunk in padded if chunk.obfuscation}) > 1
    for options in ({"include_obfuscation": False}, {"include_usage": True}):
        assert not any(hasattr(chunk, "obfuscation") for chunk in chunks(**options))


def written(chunk: Any) -> Any:
    return [choice.model_dump(exclude_unset=True) for choice in chunk.choices]


def test_a_seed_below_zero_repeats_its_answer(client: OpenAI) -> None:
    def ask(seed: int) -> str:
        return client.completions.create(model="tiny", prompt=PROMPT, seed=seed, **DRAWN).choices[0].text

    assert ask(-1) == ask(-1) != ask(1)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "kind", "param", "message"),
    [
        ({"model": "tinny"}, openai.NotFoundError, "model", "model: no 'tinny' here; there are tiny, lora, soft"),
        ({"prompt": [1, 999]}, openai.BadRequestError, "prompt", "prompt: has token 999, but the model's vocabulary"),
        ({"prompt": [1] * 128}, openai.BadRequestError, "prompt", "prompt: has 128 tokens, but the model sees 128"),
        ({"prompt": ["a", [1] * 128]}, openai.BadRequestError, "prompt", "prompt: has 128 tokens"),
        (
            {"prompt": [1] * 125, "model": "soft"},
            openai.BadRequestError,
            "prompt",
            "prompt: has 125 tokens and the adapter 3, but the model sees 128 tokens",
        ),
        ({"best_of": 4}, openai.BadRequestError, "best_of", "best_of: 4 is not supported; leave it out"),
        ({"temperature": -1}, openai.BadRequestError, "temperature", "temperature: -1.0 is out of range"),
    ],
)
def test_requests_that_are_refused(
    client: OpenAI, values: dict[str, Any], kind: type[openai.APIStatusError], param: str, message: str
) -> None:
    with pytest.raises(kind) as refused:
        client.completions.create(**{"model": "tiny", "prompt": PROMPT, **GREEDY, **values})
    body: Any = refused.value.body
    assert body["param"] == param and body["message"].startswith(message)
    codes = ("model_not_found", "invalid_value", "context_length_exceeded", "unsupported_parameter")
    assert refused.value.code in (*codes, "decimal_below_min_value")
    assert (refused.value.code == "context_length_exceeded") == ("model sees" in message or "128 tokens" in message)
    with pytest.raises(kind):
        client.completions.create(**{"model": "tiny", "prompt": PROMPT, "stream": True, **GREEDY, **values})


def test_a_cache_that_is_too_small(loaded: Loaded) -> None:
    engine = loaded.engine(EngineOptions(cache_gib=24 * 2 * 2 * 2 * 8 * 4 / 2**30, block=8))
    assert engine.longest < 128
    with serving(loaded.served, engine) as served:
        client = served.client()
        with pytest.raises(
            openai.BadRequestError, match="that the server's cache holds: ask for fewer, or start it with"
        ):
            client.completions.create(model="tiny", prompt=[1] * 10, max_tokens=50)
        whole = client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"ignore_eos": True})
        assert whole.usage is not None and whole.usage.total_tokens == engine.longest


# -- the other endpoints -----------------------------------------------------------------------------------------------


def test_tokens_of_texts_and_conversations(served: Served, loaded: Loaded) -> None:
    json_type = {"Content_Type": "application/json"}
    chat_tokenizer = loaded.served.find("tiny").chat_tokenizer

    def tokenize(**body: Any) -> Any:
        return ask(f"{served.root}/tokenize", json.dumps(body).encode(), **json_type)[1]

    tokens = chat_tokenizer.encode_prompt(PROMPT)
    answer = tokenize(prompt=PROMPT, return_token_strs=True)
    assert answer["tokens"] == tokens and answer["count"] == len(tokens) and answer["max_model_len"] == 128
    assert "".join(answer["token_strs"]).endswith(PROMPT)
    assert tokenize(messages=HELLO)["tokens"] == chat_tokenizer.encode_chat(HELLO)
    body = json.dumps({"tokens": tokens}).encode()
    assert ask(f"{served.root}/detokenize", body, **json_type)[1]["prompt"].endswith(PROMPT)
    assert ask(f"{served.root}/detokenize", b'{"tokens": [400]}', **json_type)[0] == 400


def test_metrics(served: Served, client: OpenAI) -> None:
    def value(name: str) -> int:
        text = ask(f"{served.root}/metrics")[1]
        assert f"# TYPE danlu_{name} " in text
        return int(next(line.split()[1] for line in text.splitlines() if line.startswith(f"danlu_{name} ")))

    before = value("tokens_generated_total")
    answer = client.completions.create(model="tiny", prompt=PROMPT, **GREEDY)
    assert answer.usage is not None
    assert value("tokens_generated_total") == before + answer.usage.completion_tokens
    assert value("requests_running") == value("cache_blocks_used") == 0 < value("cache_blocks")
