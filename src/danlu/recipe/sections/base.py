"""The base class of the sections, and types of numbers that several of them use.

Files of sections do not import `annotations` from `__future__`: pydantic would compile the text of each annotation for
each class that inherits it, a third of the time in which the sections are imported.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A part of the recipe: frozen, strict, unknown keys refused; docstrings of fields document them (`field_docs`)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        defer_build=True,  # usually only Recipe's validator is needed; building all of them costs 60 ms at start
        protected_namespaces=(),  # no field of a section has the name of a method; to ask for each takes 10 ms at start
    )

    short: ClassVar[str | None] = None
    """The field that a bare value fills."""
    switch: ClassVar[tuple[str, str] | None] = None
    """The values for `short` that `true` and `false` stand for, where they are allowed."""
    one_of: ClassVar[tuple[str, ...]] = ()
    """Fields that exclude each other; an override of one of them replaces the file's."""
    old_names: ClassVar[dict[str, str]] = {}
    """Names that fields had in earlier versions, which recipes may still have, and the names of these fields now."""


SectionType = TypeVar("SectionType", bound=Section)


def default_section(section: type[SectionType], **values: Any) -> SectionType:
    """A section as the default of a field, from values that are not validated; `tests/recipe` does.

    The validator of the whole recipe has those of all sections in it. To call the class would build one more for each
    section that is a default, at every start. Not for a section with a validator of its own, which would not run.
    """
    return cast(SectionType, section.model_construct(**values))


class VariantSection(Section):
    """A section that is one of several, distinguished by their `kind`."""

    short = "kind"
    short_pattern: ClassVar[str | None] = None
    """A bare text in which this regular expression is found is the variant's `short`, and no kind."""

    kind: str


@dataclass(frozen=True)
class ReadWith:
    """Metadata of a field that is only read with some values of another key: elsewhere it has to keep its default."""

    key: str
    """A field of the same section, or else a dotted key of the recipe."""
    values: Any = ()
    """The value, or a tuple of values, with which the field is read; (): all but null, false, 0 and an empty list."""
    message: str = "only read with {key}: {values}"
    """The fault and the remedy; {value} is the value of `key`."""
    or_with: str = ""
    """A dotted key of the recipe with which the field is read too, if it has a value."""
    hint: tuple[str, str] = ("", "")
    """A dotted key of the recipe, and a text for the end of the message where that key has a value."""

    @property
    def choices(self) -> tuple[Any, ...]:
        """`values` as a tuple."""
        return self.values if isinstance(self.values, tuple) else (self.values,)

    def is_met(self, value: object) -> bool:
        """Whether the field is read where `key` has a value."""
        return value in self.choices if self.choices else bool(value)


class NotReadWith(ReadWith):
    """Metadata of a field that is read with all values of another key but some."""

    def is_met(self, value: object) -> bool:
        """Whether the field is read where `key` has a value."""
        return not super().is_met(value)


OF_TOKENS = NotReadWith("stage", "classify", "not read with stage {value}, which has no tokens")
OF_RL = ReadWith("stage", "rl", "only read with stage rl; this is {value}")


def value_at(section: Section, key: str) -> Any:
    """The value at a dotted key of a section such as the recipe; None where there is none."""
    value: Any = section
    for part in key.split("."):
        if isinstance(value, list):
            value = value[int(part)] if part.isdecimal() and int(part) < len(value) else None
        else:
            value = getattr(value, part, None)
    return value


PositiveInt = Annotated[int, Field(gt=0)]

NonNegative = Annotated[float, Field(ge=0)]

Share = Annotated[float, Field(ge=0, le=1)]

Beta = Annotated[float, Field(ge=0, lt=1)]

Steps = Annotated[int, Field(ge=1)] | Annotated[float, Field(ge=0, lt=1)]
"""Optimizer steps (an integer), or a share of the run (below 1)."""

RowType = Literal["preference", "unpaired", "stepwise"]
"""The content of rows that are trees: a pair of answers, an answer that is judged alone, or an answer judged step by
step.
"""
