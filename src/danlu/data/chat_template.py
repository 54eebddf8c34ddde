"""A tokenizer's chat template, rendered as transformers renders it, and tests of what it can show.

Templates come from the internet, so they run in Jinja's immutable sandbox (`danlu.data.jinja_sandbox`). Its filters,
globals and white space are those of `transformers.PreTrainedTokenizerBase.apply_chat_template`; tests compare the two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date as Date
from functools import cached_property
from typing import Any

from danlu.core.errors import DataError
from danlu.data import resource_limits
from danlu.data.resource_limits import OutOfBounds, TookTooLong, describe_limit

Turn = Mapping[str, Any]
"""A message as templates see it: role, content, and where there are any tool_calls, reasoning_content, ..."""
_QUESTION, _ANSWER, _SYSTEM, _RESULT, _TOOL = "Xquestionx", "Xanswerx", "Xsystemx", "Xresultx", "Xtoolx"
_HARMLESS_FILTERS = ("default", "items", "list", "rejectattr", "safe", "selectattr", "string", "tojson", "trim")
_HARMLESS_METHODS = ("append", "endswith", "get", "items", "join", "keys", "lstrip", "rstrip", "startswith", "strip")
_SEARCHING_METHODS = ("count", "find", "replace", "split")
_TELLING_TESTS = ("ge", "gt", "le", "lower", "lt", "upper")
_LIST_NAME = re.compile(r"messages|tools|calls|^loop$")
_CALL = {"id": "call00001", "type": "function", "function": {"name": _TOOL, "arguments": {"at": 1}}}
_FUNCTION = {"name": _TOOL, "description": "d", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_CONTENT_END = "Zq0content0endqZ "
# Conversations that tell what a template can express.
_EXCHANGE: list[Turn] = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
_SYSTEM_EXCHANGE: list[Turn] = [{"role": "system", "content": _SYSTEM}, *_EXCHANGE]
_TOOL_EXCHANGE: list[Turn] = [
    {"role": "user", "content": _QUESTION},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": _RESULT, "name": _TOOL, "tool_call_id": "call00001"},
    {"role": "assistant", "content": _ANSWER},
]


def render_begun(render: Callable[[Sequence[Turn]], str], turns: Sequence[Turn]) -> str:
    """The text of a conversation up to the end of its last message's content, for an answer that goes on with it.

    The end is found by a mark behind the content, as transformers' `continue_final_message` finds it: white space at
    the end of the content stays where the template keeps it.

    Args:
        render: renders messages without a generation prompt.

    Raises:
        DataError: the template refuses the conversation, or does not show the content as it is written.
    """
    *before, last = turns
    text = render([*before, {**last, "content": last["content"] + _CONTENT_END}])
    end = text.rfind(_CONTENT_END.strip())
    if end < 0 or last["content"].strip() not in text[:end]:
        raise DataError(
            "the chat template does not show the last message as it is written, so an answer cannot go on with it"
        )
    return text[:end] if text.startswith(_CONTENT_END, end) else text[:end].rstrip()


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja text.
        special_tokens: variables that templates may name, such as bos_token and eos_token.
        added_tokens: texts the tokenizer never breaks up.
        name: the tokenizer or file it comes from, with which messages about it begin. date: the day that `strftime_now`
            writes, at midnight; None for the time of the call. kwargs: further variables, such as enable_thinking.

    Raises:
        DataError: the Jinja text does not compile.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, Any],
        added_tokens: Iterable[str],
        name: str,
        date: Date | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        # Imported here: 60 ms that a run on cached tokens does not need.
        import jinja2

        from danlu.data.jinja_sandbox import count_passes, sandboxed_environment

        self.source = source
        self.name = name
        self.special_tokens = dict(special_tokens)
        self.date = date
        self.kwargs = dict(kwargs or {})
        self._added = _either(added_tokens)
        environment = sandboxed_environment(date)
        try:
            self._parsed = environment.parse(source)
            with resource_limits.limited():
                self._template = environment.from_string(count_passes(environment.parse(source)))
        except RecursionError:
            raise DataError(f"{name}: the chat template does not compile: it is nested too deeply") from None
        except (MemoryError, TookTooLong) as error:
            raise DataError(f"{name}: the chat template does not compile: {describe_limit(error)}") from None
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"{name}: the chat template does not compile: line {error.lineno}: {error.message}. Correct it, or "
                "name another Jinja file in model.chat_template"
            ) from error

    def render(
        self,
        turns: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation; with `prompt`, up to where the assistant would go on.

        kwargs: variables of this conversation, which come before those of the template.

        Raises:
            DataError: the template refuses the conversation or fails on it.
        """
        environment = self._template.environment
        environment.steps_left = resource_limits.STEPS + 20 * len(turns) ** 2
        parts, written, limit = [], 0, resource_limits.CHARACTERS
        try:
            with resource_limits.limited():
                for part in self._template.generate(
                    messages=turns,
                    tools=list(tools) if tools else None,
                    documents=None,
                    add_generation_prompt=prompt,
                    **{**self.special_tokens, **self.kwargs, **(kwargs or {})},
                ):
                    parts.append(part)
                    written += len(part)
                    if written > limit:
                        limit = resource_limits.CHARACTERS + 16 * resource_limits.characters([*turns, *(tools or ())])
                        if written > limit:
                            raise OutOfBounds(f"it writes more than {limit:,} characters")
                return "".join(parts)
        except (OutOfBounds, MemoryError, RecursionError, TookTooLong) as error:
            raise DataError(
                f"the chat template does not come to an end with this conversation: {describe_limit(error)}. Correct "
                "it, or name another Jinja file in model.chat_template"
            ) from None
        except Exception as error:  # a template is a program: it can raise anything
            said = (str(error).strip().splitlines() or [""])[0]
            raise DataError(f"the chat template refuses this conversation: {type(error).__name__}: {said}") from error

    # -- what it can express ------------------------------------------------------------------------------------------

    @cached_property
    def terminators(self) -> tuple[str, ...]:
        """The added tokens with which it closes an answer that ends the conversation, in order; often one, or none.

        Raises:
            DataError: it takes no conversation at all.
        """
        said = None
        for turns in (_EXCHANGE, _SYSTEM_EXCHANGE):
            try:
                _, answer, rest = self.render(turns).rpartition(_ANSWER)
            except DataError as error:
                said = said or error
            else:
                return tuple(dict.fromkeys(self._added.findall(rest))) if answer else ()
        raise DataError(f"{self.name}: not even a question and its answer can be rendered: {said}") from said

    @cached_property
    def call_terminators(self) -> tuple[str, ...]:
        """The added tokens with which it closes an answer that ends the conversation with a call: `terminators`, or the
        one that it has for calls instead.

        gpt-oss closes a call with `<|call|>`, Gemma 4 with the `<|tool_response>` that its result begins with. Such a
        token is written once, however many calls an answer has; a token of the calls is written for each.

        Raises:
            DataError: as in `terminators`.
        """
        if not self.terminators:
            return ()
        answers = ({"role": "assistant", "content": "", "tool_calls": [_CALL] * count} for count in (1, 2))
        try:
            single, double = (self.render([_EXCHANGE[0], answer], _TOOLS).rstrip() for answer in answers)
        except DataError:
            return self.terminators
        last = next((match[0] for match in self._added.finditer(single) if match.end() == len(single)), None)
        if (
            last is None
            or last in self.terminators
            or not double.endswith(last)
            or single.count(last) != double.count(last)
        ):
            return self.terminators
        return (last,)

    @cached_property
    def closing(self) -> re.Pattern[str]:
        """Matches text made of terminators and white space only."""
        return re.compile(rf"(?:\s|{_either(self.terminators).pattern})*")

    @cached_property
    def takes_system(self) -> bool:
        """Whether a system message is shown to the model (Gemma's template refuses it, others leave it out)."""
        return self._shows(_SYSTEM, _SYSTEM_EXCHANGE)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template lists the tools that can be called."""
        return self._shows(_TOOL, _EXCHANGE, _TOOLS)

    @cached_property
    def takes_calls(self) -> bool:
        """Whether the template shows the assistant's tool calls and their results."""
        return self._shows(_TOOL, _TOOL_EXCHANGE) and self._shows(_RESULT, _TOOL_EXCHANGE)

    @cached_property
    def takes_results(self) -> bool:
        """Whether the template shows a message of role tool behind an answer that has its calls in its text."""
        return self._shows(_RESULT, [*_EXCHANGE, {"role": "tool", "content": _RESULT, "name": _TOOL}])

    @cached_property
    def looks_for(self) -> tuple[frozenset[str], frozenset[str]]:
        """Constants by which it can tell one content from another: those it compares for equality, those it searches.

        Two contents that hold none of them, are not empty and have no white space at their ends look the same to it.
        """
        from jinja2 import nodes

        equal: set[str] = set()
        searched: set[str] = set()
        for node in self._parsed.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
            is_equality = isinstance(node, nodes.Compare) and all(part.op in ("eq", "ne") for part in node.ops)
            for constant in node.find_all(nodes.Const):
                if isinstance(constant.value, str) and constant.value.strip():
                    (equal if is_equality else searched).add(constant.value)
        return frozenset(equal), frozenset(searched)

    @cached_property
    def is_transparent(self) -> bool:
        """Whether `looks_for` is all by which it can tell contents apart: it measures, slices and indexes none, and
        does not ask for the date."""
        from jinja2 import nodes

        for node in self._parsed.find_all((nodes.Filter, nodes.Getitem, nodes.Test, nodes.Call)):
            if isinstance(node, nodes.Filter):
                harmless = node.name in _HARMLESS_FILTERS or _is_list(node.node)
            elif isinstance(node, nodes.Getitem):
                harmless = isinstance(getattr(node.arg, "value", None), str) or _is_list(node.node)
            elif isinstance(node, nodes.Test):
                harmless = node.name not in _TELLING_TESTS
            elif isinstance(node.node, nodes.Getattr):
                # Searching for white space, which contents may hold, can tell them apart.
                texts = [argument.value for argument in node.args if isinstance(argument, nodes.Const)] or [""]
                searches = node.node.attr in _SEARCHING_METHODS and all(str(text).strip() for text in texts)
                harmless = node.node.attr in _HARMLESS_METHODS or searches
            else:
                harmless = not isinstance(node.node, nodes.Name) or node.node.name != "strftime_now"
            if not harmless:
                return False
        return True

    def common_prefix_length(self, first: str, second: str) -> int:
        """Characters of the longest common beginning of two texts that cuts no added token of either."""
        low, high = 0, min(len(first), len(second))
        if first[:high] == second[:high]:
            low = high
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
        for text in (first, second):
            for token in self._added.finditer(text, max(0, low - 200), min(len(text), low + 200)):
                if token.start() < low < token.end():
                    low = token.start()
        return low

    def _shows(self, what: str, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None = None) -> bool:
        try:
            return what in self.render(turns, tools)
        except DataError:
            return False


def with_defaults(source: str, kwargs: Mapping[str, Any]) -> str:
    """A template's text with values for variables that a conversation does not give it. kwargs: JSON values by name."""
    parts = [
        f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}"
        for name, value in kwargs.items()
    ]
    return "".join(parts) + source


def _literal(value: Any) -> str:
    """A JSON value as Jinja writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _is_list(node: Any) -> bool:
    """Whether an expression is a list of messages, tools or calls, going by its name, or the parts of a split text."""
    from jinja2 import nodes

    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        return bool(node.node.attr == "split")
    name = getattr(node, "name", None) or getattr(node, "attr", None)
    name = name or getattr(getattr(node, "arg", None), "value", None)
    return isinstance(name, str) and _LIST_NAME.search(name) is not None


def _either(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the texts, the longest first; nothing when there are none."""
    options = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, options)) or r"(?!)")
