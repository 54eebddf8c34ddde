"""Requests as OpenAI's API has them, with some of vLLM's parameters: accepted and refused ones, and their checks.

A parameter that would change the answer and is not supported is refused by its name, so that no client misunderstands
an answer. Those that only describe the request are ignored.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from danlu.core.errors import RecipeError
from danlu.core.spelling import did_you_mean
from danlu.inference.generation_config import SAMPLING_FIELDS
from danlu.inference.request import SamplingOptions
from danlu.recipe.messages import format_value
from danlu.serving.structured_outputs import StructuredBody
from danlu.serving.template_options import TemplateBody
from danlu.serving.tool_choice import Tool, ToolsBody

MAX_SAMPLES = 128
"""The most answers of one prompt, as with OpenAI."""
MAX_CHOICES = 16384
"""The most answers of one request, as in vLLM."""
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 64
"""Texts that end an answer, of one request."""
MAX_STOP_TOKENS = 256
"""The most tokens of all stops together: each token of an answer is searched for the beginnings of all."""
MAX_DETOKENIZED = 64 * 2**10
"""Token ids that are made text at a time."""
MAX_VALUES = 2**20
"""The most values in a request's JSON, by its commas: token ids, for example. Python makes an object of each."""

IGNORED = frozenset(
    (
        "guided_decoding_backend",
        "metadata",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    )
)
"""Parameters that say something about a request and nothing about its answer."""

WITHOUT_EFFECT: dict[str, Sequence[Any]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "use_beam_search": (False,),
}
"""Parameters that this server does not have, and the values with which they change nothing. So does null, for all."""


class ApiError(Exception):
    """The fault of a request, or the reason why it was not answered, as OpenAI's clients expect it."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.headers = headers
        self.message = message
        self.param = param
        self.status = status
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def given_key(headers: Mapping[str, str]) -> bytes:
    """The API key that a request brings, as it came; nothing where it brings none.

    The scheme's name may be written in any case (RFC 9110, sec. 11.1). Headers are read as Latin-1, which gives their
    bytes back.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_text(content: Any) -> Any:
    """The text of a message's content: of a string, or of parts of type text, joined by newlines as vLLM joins them."""
    if not isinstance(content, list):
        return "" if content is None else content
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"part {index} is {format_value(kind or part)}; only parts of type text can be read")
        texts.append(part["text"])
    return "\n".join(texts)


def as_prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a request: of one text or several, of the token ids of one prompt or several."""

    def is_ids(item: Any) -> bool:
        return isinstance(item, list) and bool(item) and all(type(token) is int and token >= 0 for token in item)

    prompts: Any = value if isinstance(value, list) and not is_ids(value) else [value]
    if not prompts or not all(isinstance(prompt, str) or is_ids(prompt) for prompt in prompts):
        raise ValueError("expected a text, a list of texts, token ids, or a list of such lists, and none of them empty")
    return prompts


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

Positive = Annotated[int, Field(ge=1)]
TokenId = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    """The JSON object of a request. null counts as left out."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, values: Any) -> Any:
        """Takes out null, ignored parameters, and those that are refused at other values only."""
        if not isinstance(values, dict):
            return values
        return {
            name: value
            for name, value in values.items()
            if value is not None
            and (
                name in cls.model_fields
                or not (name in IGNORED or any(value == same for same in WITHOUT_EFFECT.get(name, ())))
            )
        }


class StreamOptions(Body):
    model: None = None
    include_usage: bool = False
    include_obfuscation: bool = False
    """Whether chunks are padded to lengths that say little of their text."""


class SamplingBody(StructuredBody, Body):
    """The common parameters of completions and chat completions."""

    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list), Field(max_length=MAX_STOPS)
    ] = []
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] = {}
    """Numbers that are added to the logits of tokens, by their ids."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    # vLLM's:
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    allowed_token_ids: list[TokenId] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """The fewest tokens of an answer: no end token is drawn before, and no stop string ends it."""
    include_stop_str_in_output: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """The number of likeliest tokens that are returned with each token of the prompt."""
    return_token_ids: bool = False
    skip_special_tokens: bool | None = None
    """Whether texts leave out all special tokens, or none; by default those that begin, end or pad a text."""

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: has a meaning with stream: true only")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: not in a stream; leave out prompt_logprobs or stream")
        if self.max_new_tokens is not None and self.min_tokens > self.max_new_tokens:
            raise ValueError(f"min_tokens: {self.min_tokens} are more than the {self.max_new_tokens} that may come")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def include_obfuscation(self) -> bool:
        """Whether the chunks of a stream are padded."""
        return self.stream_options is not None and self.stream_options.include_obfuscation

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are wanted."""
        return self.prompt_logprobs is not None

    @property
    def most_top_logprobs(self) -> int:
        """The number of likeliest tokens that the engine returns with each token."""
        return max(self.top_logprobs_count or 0, self.prompt_logprobs or 0)

    @property
    @abstractmethod
    def max_new_tokens(self) -> int | None:
        """The most tokens of an answer; None: all that the context has room for."""

    @property
    def returns_answer(self) -> bool:
        """Whether the answer's tokens are wanted; else one is drawn and dropped, for the prompt is all that counts."""
        return True

    @property
    @abstractmethod
    def top_logprobs_count(self) -> int | None:
        """The number of likeliest tokens that are returned with each token; None where no log-probabilities are
        wanted."""

    def sampling_options(self, advised: Mapping[str, Any], seed: int, vocab_size: int) -> SamplingOptions:
        """Makes the sampling options of the answers. Raises ApiError.

        advised: values of the model's generation_config.json, for parameters that the request lacks. seed: the seed of
        requests without one.
        """
        names = (*SAMPLING_FIELDS, "presence_penalty", "frequency_penalty")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if given.get("top_k") == -1:  # as vLLM has it for all
            given["top_k"] = 0
        allowed = None if self.allowed_token_ids is None else tuple(sorted(set(self.allowed_token_ids)))
        if allowed and allowed[-1] >= vocab_size:
            message = f"allowed_token_ids: {allowed[-1]} is none of the model's {vocab_size} tokens"
            raise ApiError(message, param="allowed_token_ids", code="invalid_value")
        try:
            # Seeds below 0 are seeds like others, as OpenAI has them; the engine counts from 0.
            own_seed = seed if self.seed is None else self.seed % 2**63
            options = {**advised, **given, "seed": own_seed, "allowed_ids": allowed}
            biases = {int(token): float(bias) for token, bias in self.logit_bias.items()}
            if wrong := [token for token in biases if token >= vocab_size]:
                message = f"logit_bias: {wrong[0]} is none of the model's {vocab_size} tokens"
                raise ApiError(message, param="logit_bias", code="invalid_value")
            return SamplingOptions(**options, biased_ids=tuple(biases), biases=tuple(biases.values()))
        except RecipeError as error:
            message = "; ".join(error.problems).replace("allowed_ids", "allowed_token_ids")
            param = message.partition(":")[0]
            raise ApiError(message, param=param, code=_range_code(given.get(param))) from None


class CompletionBody(SamplingBody):
    """The body of POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(as_prompts)]
    max_tokens: Annotated[int, Field(ge=0)] = 16
    """0: nothing is written, and the prompt alone is returned, with `echo`."""
    echo: bool = False
    """The prompt comes before the answer, with its log-probabilities where `logprobs` are wanted."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise ValueError(f"prompt: {len(self.prompt)} prompts x {self.n} answers are more than {MAX_CHOICES}")
        if self.echo and self.stream:
            raise ValueError("echo: not in a stream, since the client has the prompt; leave out echo or stream")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError(
                "max_tokens: 0 has a meaning with echo or prompt_logprobs only, for nothing else is returned"
            )
        return self

    @property
    def wants_prompt_logprobs(self) -> bool:
        return (self.echo and self.logprobs is not None) or super().wants_prompt_logprobs

    @property
    def max_new_tokens(self) -> int:
        return max(self.max_tokens, 1)

    @property
    def returns_answer(self) -> bool:
        return self.max_tokens > 0

    @property
    def top_logprobs_count(self) -> int | None:
        return self.logprobs


_THOUGHT_NAMES = ("reasoning", "reasoning_content", "thinking")
"""The names of an assistant's thought: vLLM's, the one of DeepSeek and Qwen, and that of gpt-oss's template."""


class Message(BaseModel):
    """A turn of a conversation. Its further fields are the chat template's business."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    role: str
    content: Annotated[str, BeforeValidator(_as_text)] = ""
    tool_calls: list[dict[str, Any]] | None = None

    @property
    def turn(self) -> dict[str, Any]:
        """The message as chat templates see it: arguments of tool calls are objects there, and text in OpenAI's API.

        A thought has the names of all templates, as rows have it in training.
        """
        turn = {name: value for name, value in self.model_dump().items() if value is not None}
        thought = next((turn[name] for name in _THOUGHT_NAMES if isinstance(turn.get(name), str)), "")
        turn |= {"reasoning_content": thought} if thought else {}
        if thought and not (self.tool_calls and self.content):  # both, with calls, gpt-oss's template refuses
            turn["thinking"] = thought
        turn["tool_calls"] = [_with_parsed_arguments(call) for call in self.tool_calls or ()]
        return turn if turn["tool_calls"] else {name: turn[name] for name in turn if name != "tool_calls"}


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError) as error:
        raise ApiError(f"messages: arguments of a tool call are no JSON: {error}", param="messages") from None


class ChatBody(ToolsBody, TemplateBody, SamplingBody):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Positive | None = None
    max_tokens: Positive | None = None
    """The older name of `max_completion_tokens`."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include_reasoning: bool = True
    """Whether the thought of an answer is returned, where it stands apart from its text."""
    echo: Literal[False] = False

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: has a meaning with logprobs: true only")
        if self.forced_tools and self.form_names:
            raise ValueError(f"{self.form_names[0]}: an answer that has to be a call of a tool has no other form")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top_logprobs_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(TemplateBody, Body):
    """POST /tokenize, as vLLM has it: of a text, or of a conversation."""

    prompt: str | None = None
    messages: list[Message] = []
    tools: list[Tool] = []
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_either(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("prompt: give either prompt or messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize, as vLLM has it."""

    tokens: Annotated[list[TokenId], Field(max_length=MAX_DETOKENIZED)]


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(kind: type[AnyBody], body: bytes) -> AnyBody:
    """The request of a JSON text. Raises ApiError that names the parameters that are wrong."""
    if (values := body.count(b",")) > MAX_VALUES:
        raise ApiError(f"the request's body has {values:,} commas: more than {MAX_VALUES:,} values are not read")
    try:
        text = body.decode()
        values = json.loads(text)
        if _SURROGATE.search(text):  # JSON can write halves of surrogate pairs, which no tokenizer takes
            json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the request's body is no JSON in UTF-8: {error}") from None
    if not isinstance(values, dict):
        raise ApiError(f"the request's body is {format_value(values)}; expected a JSON object")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        problems = [_problem(kind, problem) for problem in errors]
        code = _code(errors[0], problems[0][0])
    raise ApiError("; ".join(message for _, message in problems), param=problems[0][0], code=code)


_CODES = {
    "missing": "missing_required_parameter",
    "too_long": "array_above_max_length",
    "too_short": "empty_array",
    "string_too_short": "empty_string",
    "greater_than_equal": "below_min_value",
    "less_than_equal": "above_max_value",
    "less_than": "above_max_value",
}
"""OpenAI's codes by pydantic's types of errors; those of numbers have the number's type before them."""


def _code(problem: Any, param: str | None) -> str:
    """OpenAI's code for a problem of pydantic: unknown_parameter, invalid_type, integer_below_min_value, ..."""
    kind = problem["type"]
    if kind == "extra_forbidden":
        return "unsupported_parameter" if param in WITHOUT_EFFECT else "unknown_parameter"
    code = _CODES.get(kind)
    if code is None:
        return "invalid_type" if kind.endswith(("_type", "_parsing")) else "invalid_value"
    return f"{_number_kind(problem['input'])}_{code}" if code.endswith("_value") else code


def _range_code(value: Any) -> str:
    """Likewise for a sampling option that is out of its range, all of which hold 1 or begin at 0."""
    if not isinstance(value, int | float):
        return "invalid_value"
    return f"{_number_kind(value)}_{'above_max_value' if value > 0 else 'below_min_value'}"


def _number_kind(value: Any) -> str:
    return "integer" if isinstance(value, int) else "decimal"


def _problem(kind: type[Body], problem: Any) -> tuple[str | None, str]:
    """The parameter that a problem of pydantic is about, and a message that names it."""
    path = ""
    for key in problem["loc"]:
        path += f"[{key}]" if isinstance(key, int) else f".{key}" if path else key
    message = problem["msg"].removeprefix("Value error, ")
    match problem["type"]:
        case "extra_forbidden" if path in WITHOUT_EFFECT:
            return path, f"{path}: {format_value(problem['input'])} is not supported; leave it out"
        case "extra_forbidden":
            guess = did_you_mean(path, list(kind.model_fields))
            return path, f"{path}: no parameter of this server.{guess}"
        case "missing":
            return path, f"{path}: is required"
        case "value_error" if not path:  # of several parameters together: the message begins with one of them
            return message.partition(":")[0], message
        case "value_error":
            return path, f"{path}: {message}"
    return path or None, f"{path}: {message[:1].lower()}{message[1:]}, found {format_value(problem['input'])}"
