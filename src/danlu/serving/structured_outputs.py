"""The parameters of a request that give its answer a form, as OpenAI and vLLM have them, and their grammars."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from danlu.inference.grammar import form_grammar


def _as_schema(value: Any) -> Any:
    """A JSON schema, which vLLM also takes as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the schema is no JSON: {error}") from None


Schema = Annotated[dict[str, Any], BeforeValidator(_as_schema)]
Choices = Annotated[list[str], Field(min_length=1)]

_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class NamedSchema(BaseModel):
    """The schema of `response_format`. `strict` changes nothing: a schema is always kept to."""

    model_config = _STRICT

    name: str = ""
    description: str | None = None
    of_answer: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`."""

    model_config = _STRICT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: belongs to type: json_schema, and only there")
        return self


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`, with one of its fields."""

    model_config = _STRICT

    of_answer: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class StructuredBody(BaseModel):
    """The parameters of a request for an answer in a form, of which it may have one. No form: any text."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # vLLM's names before version 0.12:
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _check_forms(self) -> Self:
        names = self.form_names
        if len(names) > 1:
            raise ValueError(f"{names[1]}: an answer has one form, and {names[0]} gives it one too; leave one out")
        if self.structured_outputs is not None and not names:
            raise ValueError("structured_outputs: give one of json, json_object, regex, choice and grammar")
        return self

    @property
    def form_names(self) -> list[str]:
        """The parameters that give the answer a form."""
        return [name for name, _, _ in self._forms()]

    def form(self) -> tuple[str, str] | None:
        """The parameter that gives the answer a form, and the grammar of it; None for any text.

        Raises ResourceError where the package that grammars need is not installed.
        """
        return next(((name, form_grammar({kind: value})) for name, kind, value in self._forms()), None)

    def _forms(self) -> list[tuple[str, str, Any]]:
        """The parameters that are there: name, kind of grammar, and value."""
        forms: list[tuple[str, str, Any]] = []
        asked = self.response_format
        if asked is not None and asked.type != "text":
            schema = {"type": "object"} if asked.json_schema is None else asked.json_schema.of_answer
            forms.append(("response_format", "json_schema", schema))
        if (given := self.structured_outputs) is not None:
            forms += [
                ("structured_outputs", kind, value)
                for kind, value in (
                    ("json_schema", given.of_answer),
                    ("json_schema", {"type": "object"} if given.json_object else None),
                    ("regex", given.regex),
                    ("choice", given.choice),
                    ("grammar", given.grammar),
                )
                if value is not None
            ]
        guided = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
        given_as = {kind: (f"guided_{name}", getattr(self, f"guided_{name}")) for kind, name in guided.items()}
        return forms + [(name, kind, value) for kind, (name, value) in given_as.items() if value is not None]
