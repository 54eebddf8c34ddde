"""The chat templates that come with danlu, beside the text of the published ones, and their variables.

PUBLISHED: conversations and the texts of published templates, as two collections of them state:
- "llama.cpp": ggml-org/llama.cpp, tests/test-chat-template.cpp, `expected_output` (`expected_output_jinja`, where one
  is given) of OpenHermes-2.5, Mistral-Large-2407 (v3, without its system message), Gemma, vicuna, Llama 3, Phi-3-small
  and DeepSeek-V2;
- "jinja.js": huggingface/huggingface.js, packages/jinja/test/e2e.test.js, `target` of zephyr-7b-beta, and its examples;
- "gemma 3": google/gemma-3-4b-it, tokenizer_config.json: the system text and a blank line before the first question;
- "qwen": Qwen/Qwen2.5-7B-Instruct, tokenizer_config.json, written out by hand for these conversations;
- "alpaca": hiyouga/LLaMA-Factory, src/llamafactory/data/template.py, `register_template(name="alpaca", ...)`;
- "vicuna": lm-sys/FastChat, fastchat/conversation.py, `vicuna_v1.1` (separators " " and "</s>").
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders.chat_tokenizers import make_tokenizer

from danlu.cli.main import main
from danlu.core.errors import DataError, RecipeError
from danlu.core.shipped_files import templates
from danlu.data.chat_template import ChatTemplate, render_begun, with_defaults
from danlu.data.tokenizer import load_tokenizer
from danlu.data.tokenizer_folder import read_chat_template, tokenizer_fingerprint
from danlu.inference.chat_tokenizer import ChatTokenizer
from danlu.recipe import library

LLAMA_CPP = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": "Who are you"},
    {"role": "assistant", "content": "   I am an assistant   "},
    {"role": "user", "content": "Another question"},
]
PIRATE = [
    {"role": "system", "content": "You are a friendly chatbot who always responds in the style of a pirate"},
    {"role": "user", "content": "Hello, how are you?"},
    {"role": "assistant", "content": "I'm doing great. How can I help you today?"},
    {"role": "user", "content": "I'd like to show off how chat templating works!"},
]
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {}}}
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"at": 1}}}]},
    {"role": "tool", "content": "here"},
    {"role": "tool", "content": "there"},
    {"role": "assistant", "content": "Here."},
]
PUBLISHED: dict[str, list[tuple[list[dict[str, Any]], str]]] = {
    "chatml": [
        (
            LLAMA_CPP,
            "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
            "<|im_start|>assistant\nHi there<|im_end|>\n<|im_start|>user\nWho are you<|im_end|>\n"
            "<|im_start|>assistant\n   I am an assistant   <|im_end|>\n<|im_start|>user\nAnother question<|im_end|>\n"
            "<|im_start|>assistant\n",
        )
    ],
    "llama3": [
        (
            LLAMA_CPP,
            "<s><|start_header_id|>system<|end_header_id|>\n\nYou are a helpful assistant<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHi there<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nWho are you<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nI am an assistant<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nAnother question<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        )
    ],
    "mistral": [
        (
            LLAMA_CPP,
            "<s>[INST] You are a helpful assistant\n\nHello[/INST] Hi there</s>[INST] Who are you[/INST] "
            "I am an assistant</s>[INST] Another question[/INST]",
        )
    ],
    "gemma": [
        (
            LLAMA_CPP,
            "<s><start_of_turn>user\nYou are a helpful assistant\n\nHello<end_of_turn>\n<start_of_turn>model\n"
            "Hi there<end_of_turn>\n<start_of_turn>user\nWho are you<end_of_turn>\n<start_of_turn>model\n"
            "I am an assistant<end_of_turn>\n<start_of_turn>user\nAnother question<end_of_turn>\n"
            "<start_of_turn>model\n",
        )
    ],
    "phi": [
        (
            LLAMA_CPP,
            "<|system|>\nYou are a helpful assistant<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\nHi there<|end|>\n"
            "<|user|>\nWho are you<|end|>\n<|assistant|>\n   I am an assistant   <|end|>\n"
            "<|user|>\nAnother question<|end|>\n<|assistant|>\n",
        )
    ],
    "deepseek": [
        (
            LLAMA_CPP,
            "<s>You are a helpful assistant\n\nUser: Hello\n\nAssistant: Hi there</s>User: Who are you\n\n"
            "Assistant:    I am an assistant   </s>User: Another question\n\nAssistant:",
        )
    ],
    "zephyr": [
        (
            [PIRATE[0], {"role": "user", "content": "How many helicopters can a human eat in one sitting?"}],
            "<|system|>\nYou are a friendly chatbot who always responds in the style of a pirate</s>\n<|user|>\n"
            "How many helicopters can a human eat in one sitting?</s>\n<|assistant|>\n",
        )
    ],
    "alpaca": [
        (
            PIRATE[1:],
            "<s>Below is an instruction that describes a task. Write a response that appropriately completes the "
            "request.\n\n### Instruction:\nHello, how are you?\n\n### Response:\nI'm doing great. How can I help you "
            "today?</s>\n\n### Instruction:\nI'd like to show off how chat templating works!\n\n### Response:\n",
        )
    ],
    "vicuna": [
        (
            PIRATE[1:],
            "<s>A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
            "detailed, and polite answers to the user's questions. USER: Hello, how are you? ASSISTANT: I'm doing "
            "great. How can I help you today?</s>USER: I'd like to show off how chat templating works! ASSISTANT:",
        )
    ],
    "qwen": [
        (
            PIRATE[1:],
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\nHello, how are you?<|im_end|>\n<|im_start|>assistant\nI'm doing great. How can I help "
            "you today?<|im_end|>\n<|im_start|>user\nI'd like to show off how chat templating works!<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            CALLS,
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n\n# Tools\n\n"
            "You may call one or more functions to assist with the user query.\n\nYou are provided with function "
            'signatures within <tools></tools> XML tags:\n<tools>\n{"type": "function", "function": {"name": "look", '
            '"description": "d", "parameters": {}}}\n</tools>\n\nFor each function call, return a json object with '
            "function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
            '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n<|im_start|>user\n'
            'Where?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n'
            "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nhere\n</tool_response>\n<tool_response>\nthere\n"
            "</tool_response><|im_end|>\n<|im_start|>assistant\nHere.<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
}
ADDED = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "</s>")
ENDS = {
    "chatml": "<|im_end|>",
    "qwen": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "phi": "<|end|>",
}


def named(name: str, **kwargs: Any) -> ChatTemplate:
    source = read_chat_template(name)
    assert source is not None
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, ADDED, name, None, kwargs)


def test_every_name_has_a_published_text() -> None:
    assert templates().keys() == PUBLISHED.keys()
    assert all(about and "{" not in about for about in templates().values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_texts_are_those_of_the_published_templates(name: str) -> None:
    for turns, text in PUBLISHED[name]:
        tools = [TOOL] if turns is CALLS else None
        assert named(name).render(turns, tools, prompt=True) == text
        assert named(name).render(turns[:-1], tools, prompt=True) != text
    assert named(name).terminators[0] == ENDS.get(name, "</s>")
    assert named(name).takes_system


def test_a_file_is_read_by_its_path_and_a_name_that_is_neither_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "chatml.jinja"
    own.write_text("{{ messages }}")
    assert read_chat_template(str(own)) == "{{ messages }}" != read_chat_template("chatml")
    with pytest.raises(DataError, match="chatlm cannot be read"):
        read_chat_template("chatlm")


def test_a_tokenizer_without_a_template_is_offered_those_that_end_with_a_token_of_it(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "base", None)
    tokenizer = load_tokenizer(str(folder))
    with pytest.raises(DataError) as error:
        tokenizer.template()
    offered = "alpaca, chatml, deepseek, gemma, llama3, mistral, phi, qwen, vicuna, zephyr"
    assert f"Name one in model.chat_template: {offered} (one of its tokens ends an answer there)" in str(error.value)
    assert load_tokenizer(str(folder), "llama3").template().terminators == ("<|eot_id|>",)


def test_the_verb_lists_and_copies_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["recipes", "templates"]) == 0
    assert capsys.readouterr().out.startswith('alpaca    Alpaca: "### Instruction:" and')
    assert main(["recipes", "templates", "zephyr", str(tmp_path)]) == 0
    copied = tmp_path / "zephyr.jinja"
    assert f"model.chat_template: {copied}" in capsys.readouterr().out.replace("\n", "")
    assert read_chat_template(str(copied)) == read_chat_template("zephyr")
    with pytest.raises(RecipeError, match=r"zephyr.jinja exists already; name another file: danlu recipes templates"):
        library.copy_template("zephyr", tmp_path)
    with pytest.raises(RecipeError, match=r"no chat template called 'zephir'. Did you mean 'zephyr'"):
        library.copy_template("zephir", tmp_path)


# -- variables ---------------------------------------------------------------------------------------------------------

THINKING = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<think>' if enable_thinking | default(true) else '<think></think>' }}{% endif %}"
)
ASKED = [{"role": "user", "content": "Hi"}]


def thinking(source: str = THINKING, **kwargs: Any) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"}, (), "t", None, kwargs)


def test_variables_of_a_template() -> None:
    assert thinking().render(ASKED, prompt=True) == "Hi<think>"
    assert thinking(enable_thinking=False).render(ASKED, prompt=True) == "Hi<think></think>"
    assert thinking(enable_thinking=False).render(ASKED, prompt=True, kwargs={"enable_thinking": True}) == "Hi<think>"
    assert named("llama3", bos_token="").render(ASKED).startswith("<|start_header_id|>")


def test_a_result_keeps_them_as_defaults() -> None:
    kept = with_defaults(THINKING, {"enable_thinking": False})
    assert thinking(kept).render(ASKED, prompt=True) == "Hi<think></think>"
    assert thinking(kept, enable_thinking=True).render(ASKED, prompt=True) == "Hi<think>"
    values: dict[str, Any] = {"a": None, "b": [1, "é'\"{{"], "c": {"x": True}, "d": -0.5}
    shown = thinking(with_defaults("{{ [a, b, c, d] }}", values)).render(ASKED)
    assert shown == str(list(values.values()))


def test_the_key_of_the_cache_knows_them(tmp_path: Path) -> None:
    folder = str(make_tokenizer(tmp_path / "base", THINKING))
    plain, none = tokenizer_fingerprint(folder), tokenizer_fingerprint(folder, template_kwargs={})
    assert plain == none
    keys = [tokenizer_fingerprint(folder, template_kwargs={"enable_thinking": value}) for value in (True, False)]
    assert len({plain, *keys, tokenizer_fingerprint(folder, "chatml")}) == 4


def test_a_conversation_has_variables_of_its_own(tmp_path: Path) -> None:
    folder = str(make_tokenizer(tmp_path / "base", THINKING))
    tokenizer = ChatTokenizer(load_tokenizer(folder, template_kwargs={"enable_thinking": False}))
    assert tokenizer.render_chat(ASKED) == "Hi<think></think>"
    assert tokenizer.render_chat(ASKED, None, {"enable_thinking": True}) == "Hi<think>"
    assert tokenizer.render_chat(ASKED, begins_turn=False) == "Hi"


def test_the_text_up_to_an_answer_that_is_begun() -> None:
    begun = [*ASKED, {"role": "assistant", "content": " Once "}]
    assert render_begun(named("chatml").render, begun).endswith("<|im_start|>assistant\n Once ")
    assert render_begun(named("llama3").render, begun).endswith("assistant<|end_header_id|>\n\nOnce")
    marked = [*ASKED, {"role": "assistant", "content": "e"}]  # the mark that ends the turn has the letter too
    assert render_begun(named("chatml").render, marked).endswith("<|im_start|>assistant\ne")
    with pytest.raises(DataError, match="does not show the last message as it is written"):
        render_begun(lambda turns: "".join(turn["content"].upper() for turn in turns), begun)
