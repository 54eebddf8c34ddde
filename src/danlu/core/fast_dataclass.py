"""`dataclass` for the classes that a command line imports before it says anything.

The standard library writes and compiles six methods for each frozen class, which takes a millisecond: `danlu plan`
imports 140 such classes. Here `__init__` alone is compiled, and the other methods are closures over the names of the
fields. They behave as the standard library's do (`tests/core/test_fast_dataclass.py` compares them).
"""

from __future__ import annotations

import dataclasses
import operator
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: type | None = None, /, *, frozen: bool = False, eq: bool = True, **options: Any) -> Any:
        """Returns the class with a dataclass's methods, as `dataclasses.dataclass` does, or a decorator that does so.

        Only classes with `frozen=True` and at most `eq` as a further option have the fast methods; all others are left
        to the standard library. Raises TypeError for a field of type InitVar.
        """

        def decorate(cls: type) -> type:
            if not frozen or options:
                return dataclasses.dataclass(cls, frozen=frozen, eq=eq, **options)
            return _with_methods(cls, eq=eq)

        return decorate if cls is None else decorate(cls)


def _with_methods(cls: Any, *, eq: bool) -> Any:
    """A class with its fields collected and the methods of a frozen dataclass, where it does not define them itself."""
    own = vars(cls)
    # A class with an `__eq__` of its own has None for a hash, which Python puts there.
    hash_is_own = "__hash__" in own and not (own["__hash__"] is None and "__eq__" in own)
    if cls.__doc__ is None:
        cls.__doc__ = cls.__name__  # else the standard library asks for a signature, which takes longer than all this
    dataclasses.dataclass(cls, init=False, repr=False, eq=False)
    fields = dataclasses.fields(cls)
    methods = {"__init__": _init(cls, fields), "__repr__": _repr([field.name for field in fields if field.repr])}
    if eq:
        methods["__eq__"] = _eq(_values_of([field.name for field in fields if field.compare]))
    for name, method in (methods | _set_and_delete(cls, {field.name for field in fields})).items():
        if name not in own:
            method.__qualname__, method.__module__ = f"{cls.__qualname__}.{name}", cls.__module__
            setattr(cls, name, method)
    if eq and not hash_is_own:
        in_hash = [field.name for field in fields if (field.compare if field.hash is None else field.hash)]
        cls.__hash__ = _hash(_values_of(in_hash))
    return cls


def _init(cls: Any, fields: tuple[dataclasses.Field, ...]) -> Callable[..., None]:
    """`__init__`, compiled from its text, so that a call is as fast as that of any function."""
    if any("InitVar" in str(kind) for kind in vars(cls).get("__annotations__", {}).values()):
        raise TypeError(f"{cls.__name__}: a field of type InitVar is left to dataclasses.dataclass")
    names: dict[str, Any] = {"_set": object.__setattr__, "_not_given": _NotGiven()}  # which the text reads
    positional, keywords, lines = ["self"], ["*"], []
    for field in fields:
        value = field.name
        if field.default_factory is not dataclasses.MISSING:
            names[f"_make_{field.name}"] = field.default_factory
            value = f"_make_{field.name}()"
            if field.init:
                value = f"{value} if {field.name} is _not_given else {field.name}"
        elif not field.init:
            continue  # its default is an attribute of the class, or `__post_init__` sets it
        if field.init:
            parameter = field.name
            if field.default is not dataclasses.MISSING:
                names[f"_default_{field.name}"] = field.default
                parameter += f"=_default_{field.name}"
            elif field.default_factory is not dataclasses.MISSING:
                parameter += "=_not_given"
            (keywords if field.kw_only else positional).append(parameter)
        lines.append(f"_set(self, '{field.name}', {value})")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    parameters = ", ".join([*positional, *(keywords if len(keywords) > 1 else [])])
    body = "\n ".join(lines or ["pass"])
    exec(f"def __init__({parameters}):\n {body}", names)
    init = names["__init__"]
    init.__annotations__ = {field.name: field.type for field in fields if field.init} | {"return": None}
    return init


class _NotGiven:
    """The default of a parameter in the place of its field's factory, which is called in `__init__`."""

    def __repr__(self) -> str:
        return "<factory>"


def _values_of(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns the attributes of these names as a tuple."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda self: tuple(getattr(self, name) for name in names)


def _repr(names: list[str]) -> Callable[[Any], str]:
    @reprlib.recursive_repr()
    def __repr__(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return __repr__


def _eq(values: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any, object], Any]:
    def __eq__(self: Any, other: object) -> Any:
        return values(self) == values(other) if type(other) is type(self) else NotImplemented

    return __eq__


def _hash(values: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], int]:
    def __hash__(self: Any) -> int:
        return hash(values(self))

    return __hash__


def _set_and_delete(cls: Any, names: set[str]) -> dict[str, Callable[..., None]]:
    """`__setattr__` and `__delattr__`, which refuse fields, and any attribute of an instance that is no subclass's."""

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}
