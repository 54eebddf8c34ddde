"""Calls of tools in answers, read in the form that a family of models writes them in, whole or as a stream.

Forms are those of the published chat templates (`FORMS`); `form_of` finds out which of them a template writes. Text in
a thought is no call, nor is JSON that only looks like one. Where the form is not known, `ANY_FORM` reads only signs
that no text has by chance: the marks of every family, and an answer that is a call in JSON and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from danlu.core.errors import DataError
from danlu.core.types import MalformedCall, ToolCall
from danlu.data import gemma_tool_calls as gemma
from danlu.data import tool_call_forms as forms
from danlu.data.chat_template import ChatTemplate
from danlu.data.thoughts import THOUGHTS, opened_thought
from danlu.data.tool_call_forms import Call, Incomplete, Parts, Properties

_NAME, _ARGUMENTS = "Xtoolx", {"of": "Xa bx", "at": 1}
_PROPERTIES = {"of": {"type": "string"}, "at": {"type": "integer"}}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "d", "parameters": {"type": "object"}}}
_TOOL["function"]["parameters"]["properties"] = _PROPERTIES  # type: ignore[index]


@dataclass(frozen=True)
class CallForm:
    """How a family of models writes calls.

    Attributes:
        marks: the text that opens one or several calls, and the function that reads from there.
        bare: reads an answer that has calls without a mark; None where the family has no such answers.
    """

    name: str
    marks: Mapping[str, Callable[[str, int, bool, Properties], tuple[Parts, int]]]
    bare: Callable[[str, bool, Properties], Parts | None] | None = None


FORMS: dict[str, CallForm] = {
    form.name: form
    for form in (
        CallForm("hermes", {"<tool_call>": forms.read_hermes}),
        CallForm("qwen3-coder", {"<tool_call>": forms.read_qwen3_coder, "<function=": forms.read_qwen3_coder}),
        CallForm("glm-4.5", {"<tool_call>": forms.read_glm45}),
        CallForm("minimax-m2", {"<minimax:tool_call>": forms.read_minimax}),
        CallForm("deepseek", dict.fromkeys(forms.DEEPSEEK_MARKS, forms.read_deepseek)),
        CallForm("gpt-oss", dict.fromkeys(forms.HARMONY_MARKS, forms.read_harmony), forms.read_bare_harmony),
        CallForm("llama-3", {"<|python_tag|>": forms.read_python_tag}, forms.read_bare_json),
        CallForm("mistral", {"[TOOL_CALLS]": forms.read_mistral}, forms.read_bare_json),
        CallForm("gemma-4", {gemma.OPEN: gemma.read_gemma4}),
        CallForm("glm-4", {}, forms.read_bare_glm4),
    )
}
"""All known forms, by the names of the families."""
ANY_FORM = CallForm(
    "any",
    {mark: read for form in FORMS.values() for mark, read in form.marks.items()} | {"<tool_call>": forms.read_tag},
    forms.read_bare_json,
)


class AnswerReader:
    """Reads an answer as it comes: `feed` returns text that is certain not to belong to a call, and calls once they are
    whole.

    Args:
        form: the form of the calls. tools: their JSON schemas in OpenAI's form, which give the types of arguments.
        in_thought: the prompt has opened a thought, so the answer begins in it.
    """

    def __init__(
        self, form: CallForm = ANY_FORM, tools: Sequence[Mapping[str, Any]] = (), *, in_thought: bool = False
    ) -> None:
        self._form = form
        self._properties = forms.properties_of(tools)
        self._rest = ""
        self._thought_end: str | None = next(iter(THOUGHTS.values())) if in_thought else None
        self._may_be_bare = form.bare is not None

    @classmethod
    def whole(
        cls,
        answer: str,
        form: CallForm = ANY_FORM,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        in_thought: bool | None = None,
    ) -> tuple[str, list[Call]]:
        """The text of a whole answer without its calls, and the calls.

        in_thought: None where it is not known; then a thought that ends and has not begun began in the prompt.
        """
        if in_thought is None:
            before, end, _ = answer.partition("</think>")
            in_thought = bool(end) and "<think>" not in before
        reader = cls(form, tools, in_thought=in_thought)
        parts = [*reader.feed(answer), *reader.finish()]
        text = "".join(part for part in parts if isinstance(part, str))
        return text, [part for part in parts if not isinstance(part, str)]

    def feed(self, text: str) -> Parts:
        """Takes more of the answer; returns the text and the calls that are certain now."""
        self._rest += text
        return self._read(ended=False)

    def finish(self) -> Parts:
        """Ends the answer; returns the rest of it, where a call that is not whole is malformed."""
        return self._read(ended=True)

    def _read(self, *, ended: bool) -> Parts:
        parts: Parts = []
        try:
            while self._rest and self._step(parts, ended=ended):
                pass
        except Incomplete:
            assert not ended, "nothing more is to come"
        return parts

    def _step(self, parts: Parts, *, ended: bool) -> bool:
        """Reads on; returns whether there may be more to read. Raises Incomplete where a call is not whole."""
        if self._thought_end is not None:
            ends = self._take_text(parts, (self._thought_end,), ended=ended)
            if ends is not None:
                self._emit(parts, len(ends))
                self._thought_end, self._may_be_bare = None, self._form.bare is not None
            return ends is not None
        if self._may_be_bare and self._form.bare is not None and not self._opens_thought(ended=ended):
            calls = self._form.bare(self._rest, ended, self._properties)
            if calls is not None:
                text, self._rest = self._rest, ""
                parts += [replace(part, text=text) if isinstance(part, MalformedCall) else part for part in calls]
                return False
        mark = self._take_text(parts, (*self._form.marks, *THOUGHTS), ended=ended)
        if mark is None:
            return False
        if mark in THOUGHTS:
            self._thought_end = THOUGHTS[mark]
            self._emit(parts, len(mark))
            return True
        read, stop = self._form.marks[mark](self._rest, 0, ended, self._properties)
        text, self._rest = self._rest[:stop], self._rest[stop:]
        parts += [replace(part, text=text) if isinstance(part, MalformedCall) else part for part in read]
        return True

    def _opens_thought(self, *, ended: bool) -> bool:
        """Whether the answer begins with a thought. Raises Incomplete where that is not known yet."""
        begun = self._rest.lstrip()
        if not ended and any(mark.startswith(begun) for mark in THOUGHTS):
            raise Incomplete
        return begun.startswith(tuple(THOUGHTS))

    def _take_text(self, parts: Parts, marks: Sequence[str], *, ended: bool) -> str | None:
        """Takes the text before the first of some marks, or all that is certain to be before any; returns the mark."""
        places = [(place, mark) for mark in marks if (place := self._rest.find(mark)) >= 0]
        if places:
            place, mark = min(places, key=lambda entry: (entry[0], -len(entry[1])))
            self._emit(parts, place)
            return mark
        withheld = 0 if ended else forms.longest_beginning(self._rest, marks)
        self._emit(parts, len(self._rest) - withheld)
        return None

    def _emit(self, parts: Parts, size: int) -> None:
        text, self._rest = self._rest[:size], self._rest[size:]
        if text:
            parts.append(text)
        if text.strip():
            self._may_be_bare = False


@dataclass(frozen=True)
class ReadCalls:
    """Reads the calls of whole answers; can be sent to another process.

    Attributes:
        form: the name of a form in `FORMS`; None where that of the policy is not known.
        in_thought: see `AnswerReader.whole`.
        tools: their JSON schemas in OpenAI's form.
    """

    form: str | None = None
    in_thought: bool | None = None
    tools: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, template: ChatTemplate, tools: Sequence[Mapping[str, Any]]) -> ReadCalls:
        """Reads calls in the form that a chat template writes."""
        form = form_of(template)
        return cls(None if form is None else form.name, opens_thought(template), tuple(tools))

    def reader(self) -> AnswerReader:
        """Reads an answer as it comes."""
        form = ANY_FORM if self.form is None else FORMS[self.form]
        return AnswerReader(form, self.tools, in_thought=bool(self.in_thought))

    def __call__(self, answer: str) -> tuple[str, list[Call]]:
        """The text of an answer without its calls, and the calls."""
        form = ANY_FORM if self.form is None else FORMS[self.form]
        return AnswerReader.whole(answer, form, self.tools, in_thought=self.in_thought)


def form_of(template: ChatTemplate) -> CallForm | None:
    """The form in which a chat template writes calls; None where it writes none, or in a form that is not known."""
    for arguments in (_ARGUMENTS, forms.as_json(_ARGUMENTS)):  # some templates take the text
        call = {"id": "call00001", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        turns: list[dict[str, Any]] = [{"role": "user", "content": "Xquestionx"}]
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            whole = template.render([*turns, answer], [_TOOL])
            prompt = template.render(turns, [_TOOL], prompt=True)
            written = whole[template.common_prefix_length(prompt, whole) :]
            terminators = template.terminators
        except DataError:
            continue
        while end := next((each for each in terminators if written.rstrip().endswith(each)), None):
            written = written.rstrip().removesuffix(end)
        for form in FORMS.values():
            _, calls = AnswerReader.whole(written, form, [_TOOL])
            if calls == [ToolCall(_NAME, _ARGUMENTS)]:
                return form
    return None


def opens_thought(template: ChatTemplate) -> bool:
    """Whether the generation prompt of a chat template ends in a thought that answers go on with."""
    try:
        prompt = template.render([{"role": "user", "content": "Xquestionx"}], prompt=True)
    except DataError:
        return False
    return opened_thought(prompt) is not None


def unknown_form_line(template: ChatTemplate) -> str | None:
    """The line that names a chat template with calls in an unknown form; None where the form is known."""
    if form_of(template) is not None:
        return None
    return (
        "tool calls: the chat template writes no calls, or in a form that is not known (known are those of "
        f"{', '.join(FORMS)}): calls are read by the marks of all of these, and an answer in any other form is text"
    )
