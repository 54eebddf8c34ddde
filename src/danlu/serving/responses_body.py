"""The body of POST /v1/responses, and the chat completion that asks the same: messages, calls of tools, thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from danlu.recipe.messages import format_value
from danlu.serving.openai_api import ApiError, Body, Positive

_TEXT_PARTS = ("input_text", "output_text", "text")


def _as_items(value: Any) -> Any:
    """The items of `input`: a text is one message of the user."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError("expected a text, or a list of items, which is not empty")
    return value


def messages_of(earlier: Sequence[Any], items: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages of a chat that items are, behind those of an earlier response. Raises ApiError for `items`."""
    conversation = _Conversation()
    for index, item in enumerate([*earlier, *items]):
        try:
            conversation.add(item, f"item {index - len(earlier)}")
        except ValueError as error:
            raise ApiError(f"input: {error}", param="input", code="invalid_value") from None
    return conversation.messages


class _Conversation:
    """The messages of a chat that items of `input` are; what the assistant thinks, says and calls is one of them."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}  # of functions, by the ids of their calls

    def add(self, item: Any, where: str) -> None:
        """Takes one more item. Raises ValueError."""
        kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
        readers = {
            "message": self._add_message,
            "reasoning": self._add_thought,
            "function_call": self._add_call,
            "function_call_output": self._add_output,
        }
        if kind not in readers:
            raise ValueError(f"{where} is of type {kind}; read are {', '.join(readers)}")
        readers[kind](item, where)

    def _add_message(self, item: dict[str, Any], where: str) -> None:
        role, content = item.get("role"), _text(item.get("content"), where)
        if not isinstance(role, str):
            raise ValueError(f"{where} has no role; a message has a role and a content")
        if role == "assistant":
            self._assistant("content", "tool_calls")["content"] = content
        else:
            self.messages.append({"role": role, "content": content})

    def _add_thought(self, item: dict[str, Any], where: str) -> None:
        text = "\n".join(
            str(part.get("text", "")) for part in item.get("content") or item.get("summary") or () if _is_part(part)
        )
        if text:  # one that is encrypted, which only OpenAI reads, says nothing here
            self._assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = text

    def _add_call(self, item: dict[str, Any], where: str) -> None:
        call_id, name, arguments = (item.get(key) for key in ("call_id", "name", "arguments"))
        if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, str)):
            raise ValueError(f"{where} is a call, which needs call_id, name and arguments, each a text")
        self._names[call_id] = name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _add_output(self, item: dict[str, Any], where: str) -> None:
        call_id = item.get("call_id")
        if call_id not in self._names:
            raise ValueError(
                f"{where} is the output of {format_value(call_id)}, and no function_call before it is that"
            )
        output = {"role": "tool", "tool_call_id": call_id, "name": self._names[call_id]}
        self.messages.append({**output, "content": _text(item.get("output"), where)})

    def _assistant(self, *behind: str) -> dict[str, Any]:
        """The message of the assistant that goes on; a new one where the last has any of the keys `behind`."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(key) for key in behind):
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _is_part(part: Any) -> bool:
    return isinstance(part, dict)


def _text(content: Any, where: str) -> str:
    """The text of a content or an output: a string, or parts of text. Raises ValueError for any other."""
    if isinstance(content, list):
        wrong = [part for part in content if not _is_part(part) or part.get("type") not in _TEXT_PARTS]
        if wrong:
            raise ValueError(f"{where} has content that is no text, which alone is read")
        content = "\n".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{where} has no content")
    return content


class TextFormat(Body):
    """`text.format`: as `response_format` of chat completions, with the schema next to its name."""

    model: None = None
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str | None = None
    of_answer: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.of_answer is not None):
            raise ValueError("schema: belongs to type: json_schema, and only there")
        return self

    @property
    def response_format(self) -> dict[str, Any]:
        """The same for chat completions."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.of_answer}}


class TextOptions(Body):
    """`text`."""

    model: None = None
    format: TextFormat = TextFormat()


class FunctionTool(Body):
    """A tool: the function itself, where chat completions have it below `function`. `strict` changes nothing."""

    model: None = None
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def written(self) -> dict[str, Any]:
        """The tool as requests have it."""
        return self.model_dump(exclude={"model"})

    @property
    def chat_tool(self) -> dict[str, Any]:
        """The same for chat completions."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _check_choice(value: Any) -> Any:
    is_name = isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("name"), str)
    if not is_name and value not in ("auto", "none", "required"):
        raise ValueError('give auto, none, required or {"type": "function", "name": ..}')
    return value


class ConversationBody(Body):
    """The parameters of a question that its prompt is made of."""

    input: Annotated[list[Any], BeforeValidator(_as_items)]
    previous_response_id: str | None = None
    """A response that the server has stored, behind which this conversation goes on."""
    instructions: str | None = None
    text: TextOptions = TextOptions()
    truncation: Literal["disabled"] = "disabled"
    tools: Annotated[list[FunctionTool], Field(default_factory=list)]
    tool_choice: Annotated[Any, BeforeValidator(_check_choice)] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]
    """vLLM's: variables of the chat template."""

    def chat_values(self, earlier: Sequence[Any] = ()) -> dict[str, Any]:
        """The same question as the body of a chat completion. Raises ApiError.

        earlier: the items of the conversation that it goes on with.
        """
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        choice = self.tool_choice
        named = choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice["name"]}}
        values = {
            "model": self.model,
            "messages": [*system, *messages_of(earlier, self.input)],
            "response_format": self.text.format.response_format,
            "tools": [tool.chat_tool for tool in self.tools],
            "tool_choice": named,
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return {name: value for name, value in values.items() if value is not None}


class ResponsesBody(ConversationBody):
    """The body of POST /v1/responses."""

    max_output_tokens: Positive | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    store: bool = True
    """Whether a later request may go on with this response, by `previous_response_id`."""
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(default_factory=list)]
    """Changes nothing: thoughts are there as text, and can be given back as they are."""

    def chat_values(self, earlier: Sequence[Any] = ()) -> dict[str, Any]:
        values = {
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
        }
        return super().chat_values(earlier) | {name: value for name, value in values.items() if value is not None}
