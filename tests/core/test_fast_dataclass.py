"""Classes of `core/fast_dataclass.py` behave as those of the standard library do."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import KW_ONLY, FrozenInstanceError, InitVar, field
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from danlu.core.fast_dataclass import dataclass


def classes(dataclass: Any) -> SimpleNamespace:
    """Classes with all that the decorator supports, made by it."""

    @dataclass(frozen=True)
    class Empty:
        """Nothing."""

    @dataclass(frozen=True)
    class Point:
        """A point."""

        kinds: ClassVar[int] = 3
        x: int
        y: float = 2.0

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("x is negative")

    @dataclass(frozen=True)
    class Named(Point):
        """A point with more."""

        x: int = 7  # keeps its place
        tags: list[str] = field(default_factory=list)
        hidden: int = field(default=5, repr=False, compare=False)
        unhashed: int = field(default=6, hash=False)
        given: dict[str, int] = field(default_factory=dict, init=False, hash=False)
        constant: str = field(default="c", init=False)

    @dataclass(frozen=True)
    class Keywords:
        """Keywords after a mark, and one of its own."""

        x: int
        _: KW_ONLY
        y: int
        z: int = 3

    @dataclass(frozen=True)
    class Own:
        """Methods of its own stay."""

        x: int

        def __repr__(self) -> str:
            return f"own {self.x}"

        def __eq__(self, other: object) -> bool:
            return True

    @dataclass(frozen=True)
    class Hash:
        """A hash of its own stays."""

        x: int

        def __hash__(self) -> int:
            return 11

    @dataclass(frozen=True, eq=False)
    class Identity:
        """Equal only to itself."""

        x: int

    return SimpleNamespace(**{kind.__name__: kind for kind in (Empty, Point, Named, Keywords, Own, Hash, Identity)})


CALLS: list[Callable[[Any], Any]] = [
    lambda c: [str(inspect.signature(kind)) for kind in vars(c).values()],
    lambda c: [(f.name, f.type, f.init, f.compare) for kind in vars(c).values() for f in dataclasses.fields(kind)],
    lambda c: [kind.__match_args__ for kind in vars(c).values()],
    lambda c: [kind.__doc__ for kind in vars(c).values()],
    lambda c: [kind.__init__.__qualname__.replace("fast", "") for kind in vars(c).values()],
    lambda c: repr([c.Empty(), c.Point(1), c.Point(y=3, x=1), c.Named(tags=[1]), c.Keywords(1, y=2), c.Own(1)]),
    lambda c: hash(c.Point(1)) == hash((1, 2.0)) and hash(c.Empty()) == hash(()) and hash(c.Hash(1)) == 11,
    lambda c: hash(c.Keywords(1, y=2)) == hash((1, 2, 3)),
    lambda c: hash(c.Named(tags=())) == hash((7, 2.0, (), "c")),
    lambda c: c.Own.__hash__ is None or hash(c.Own(1)) == hash((1,)),
    lambda c: [c.Point(1) == c.Point(1.0), c.Point(1) == c.Point(2), c.Point(1) == c.Named(1), c.Own(1) == c.Own(2)],
    lambda c: [c.Named(hidden=1) == c.Named(hidden=2), c.Named(unhashed=1) == c.Named(unhashed=2)],
    lambda c: c.Identity(1) == c.Identity(1),
    lambda c: c.Named().tags is c.Named().tags or c.Named().given is c.Named().given,
    lambda c: repr(dataclasses.replace(c.Named(3), y=1)),
    lambda c: dataclasses.asdict(c.Named(3)),
    lambda c: repr(copy.deepcopy(c.Named(3))),
    lambda c: c.Point(-1),
    lambda c: c.Point(),
    lambda c: c.Point(1, 2, 3),
    lambda c: c.Keywords(1, 2),
    lambda c: setattr(c.Point(1), "x", 2),
    lambda c: setattr(c.Named(1), "x", 2),
    lambda c: setattr(c.Point(1), "new", 2),
    lambda c: delattr(c.Point(1), "x"),
    lambda c: setattr(type("Below", (c.Point,), {})(1), "new", 2),  # a class that is no dataclass has attributes
    lambda c: setattr(type("Below", (c.Point,), {})(1), "x", 2),
    lambda c: hash(c.Named()),  # of a list
]


def outcome(call: Callable[[Any], Any], kinds: Any) -> Any:
    try:
        return call(kinds)
    except (TypeError, ValueError, FrozenInstanceError) as error:
        return type(error), str(error)


def test_everything_is_as_the_standard_library_does_it() -> None:
    ours, theirs = classes(dataclass), classes(dataclasses.dataclass)
    for number, call in enumerate(CALLS):
        assert outcome(call, ours) == outcome(call, theirs), number
    assert theirs.Point.__dataclass_params__.frozen != ours.Point.__dataclass_params__.frozen  # control: ours are ours


@dataclass(frozen=True)
class Pickled:
    """A class that pickle looks up."""

    x: int
    y: tuple[int, ...] = ()


def test_values_travel_to_other_processes() -> None:
    assert pickle.loads(pickle.dumps(Pickled(1, (2,)))) == Pickled(1, (2,)) != Pickled(1)  # noqa: S301 - its own bytes


def test_a_value_that_holds_itself_is_printed() -> None:
    value = Pickled(1, [])  # type: ignore[arg-type]
    value.y.append(value)  # type: ignore[attr-defined]
    assert repr(value) == "Pickled(x=1, y=[...])"


def test_what_is_not_supported_is_refused_or_left_to_the_standard_library() -> None:
    with pytest.raises(TypeError, match="Late: a field of type InitVar is left to dataclasses"):

        @dataclass(frozen=True)
        class Late:
            x: InitVar[int]

    @dataclass
    class Plain:
        x: int

    @dataclass(frozen=True, order=True)
    class Ordered:
        x: int

    plain = Plain(1)
    plain.x = 2
    assert plain == Plain(2) and Ordered(1) < Ordered(2)
