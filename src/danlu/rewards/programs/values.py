"""Values on the pipe between the judge and an answer's program: plain data by value, other objects by a number.

A message is flat: a table of nodes that name each other by their place, so that shared, cyclic and very deep values
pass. Both sides use this module, the sandboxed one without the rest of danlu; it needs the standard library alone.
"""

from __future__ import annotations

import builtins
import sys

TYPE_CHECKING = False  # as `typing` has it, which takes longer to import than most programs to run
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

LARGEST_INT = 2**62
NUMPY_KINDS = "biufc"
MUTABLE = (list, dict, set, bytearray)
SINGLETONS = {"...": Ellipsis, "NotImplemented": NotImplemented}
SPECIAL = (
    "__call__ __len__ __iter__ __next__ __reversed__ __getitem__ __setitem__ __delitem__ __contains__ __missing__ "
    "__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __matmul__ __rmatmul__ "
    "__truediv__ __rtruediv__ __itruediv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __divmod__ __rdivmod__ "
    "__pow__ __rpow__ __lshift__ __rlshift__ __rshift__ __rrshift__ __and__ __rand__ __or__ __ror__ __xor__ "
    "__rxor__ __iand__ __ior__ __ixor__ __neg__ __pos__ __abs__ __invert__ __bool__ __int__ __float__ __complex__ "
    "__index__ __round__ __trunc__ __floor__ __ceil__ __enter__ __exit__ __aiter__ __anext__ __aenter__ __aexit__ "
    "__lt__ __le__ __gt__ __ge__ __eq__ __hash__"
)
"""The methods of operators that a proxy passes on where the object has them."""
REACHING = frozenset(
    (
        *("eval", "exec", "compile", "open", "input", "breakpoint", "getattr", "setattr", "delattr", "globals"),
        *("locals", "vars", "dir", "super", "memoryview", "__import__", "__build_class__"),
    )
)
"""Builtin functions that reach beyond their arguments: the answer's stay in its sandbox, as objects of its own."""
STANDARD = {
    "collections.OrderedDict": lambda value: [list(value.items())],
    "collections.defaultdict": lambda value: [value.default_factory, dict(value)],
    "collections.Counter": lambda value: [dict(value)],
    "collections.deque": lambda value: [list(value), value.maxlen],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    "decimal.Decimal": lambda value: [str(value)],
    "pathlib.PosixPath": lambda value: [str(value)],
    "datetime.date": lambda value: [value.year, value.month, value.day],
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    "datetime.datetime": lambda value: [
        *(value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond, value.tzinfo)
    ],
    "datetime.timezone": lambda value: [value.utcoffset(None)],
    "datetime.time": lambda value: [value.hour, value.minute, value.second, value.microsecond, value.tzinfo],
}
"""Immutable or plain classes of the standard library, and the arguments that make an equal object."""


class BadValue(Exception):
    """A message holds no value."""


class Encoder:
    """Values as a table of nodes.

    Args:
        export: the node of an object that is no plain data.
        known: the places, in the other side's message, of containers that came from there, by id.
        handles: the names of builtin functions that are no plain data either.
    """

    def __init__(
        self,
        export: Callable[[Any, Callable[[Any], Any]], list[Any]],
        known: Mapping[int, int],
        *,
        handles: frozenset[str] = frozenset(),
    ) -> None:
        self.nodes: list[Any] = []
        self.kept: list[Any] = []
        """The object of each node."""
        self._export, self._known, self._handles = export, known, handles
        self._places: dict[int, int] = {}
        self._pending: list[int] = []

    def add(self, value: Any) -> Any:
        """A reference to a value: an atom itself, else [its place]."""
        reference = self._reference(value)
        while self._pending:
            place = self._pending.pop()
            self.nodes[place] = self._node(self.kept[place])
        return reference

    def _reference(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str or kind is float:
            return value
        if kind is int and -LARGEST_INT < value < LARGEST_INT:
            return value
        place = self._places.get(id(value))
        if place is None:
            place = self._places[id(value)] = len(self.nodes)
            self.nodes.append(None)
            self.kept.append(value)
            self._pending.append(place)
        return [place]

    def _node(self, value: Any) -> list[Any]:
        known = self._known.get(id(value))
        if known is not None:
            return ["own", known]
        node = plain_node(value, self._reference)
        if node is None or (node[0] == "builtin" and node[1] in self._handles):
            return self._export(value, self._reference)
        return node


def plain_node(value: Any, reference: Callable[[Any], Any]) -> list[Any] | None:
    """The node of plain data; None for any other object. reference: that of a value which the node holds."""
    kind = type(value)
    if kind is list or kind is tuple or kind is set or kind is frozenset:
        return [kind.__name__, *map(reference, value)]
    if kind is dict:
        return ["dict", *(reference(each) for pair in value.items() for each in pair)]
    if kind is bytes or kind is bytearray:
        return [kind.__name__, value.decode("latin-1")]
    if kind is int:
        return ["int", hex(value)]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is range or kind is slice:
        return [kind.__name__, *map(reference, (value.start, value.stop, value.step))]
    for name, singleton in SINGLETONS.items():
        if value is singleton:
            return ["singleton", name]
    return _builtin_node(value) or _standard_node(value, reference) or _numpy_node(value)


def _builtin_node(value: Any) -> list[Any] | None:
    """The node of a function or class of builtins, which is the other side's own there."""
    name = getattr(value, "__name__", None) if type(value) in (type, type(len)) else None
    return ["builtin", name] if type(name) is str and vars(builtins).get(name) is value else None


def _standard_node(value: Any, reference: Callable[[Any], Any]) -> list[Any] | None:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind.__module__, str) else ""
    zone = getattr(value, "tzinfo", None) if kind.__module__ == "datetime" else None
    if (
        name not in STANDARD
        or standard_class(name) is not kind
        or not (zone is None or type(zone).__name__ == "timezone")
    ):
        return None
    return ["standard", name, *map(reference, STANDARD[name](value))]


class Decoder:
    """Values out of a table of nodes.

    Args:
        imported: the object of a node that is no plain data.
        own: the containers of this side's message that the other side may name.
        refused: the names of builtin functions that the other side may not name.
    """

    def __init__(
        self,
        nodes: Sequence[Any],
        imported: Callable[[list[Any], Callable[[Any], Any]], Any],
        own: Sequence[Any] = (),
        *,
        refused: frozenset[str] = frozenset(),
    ) -> None:
        if not isinstance(nodes, list) or not all(isinstance(node, list) and node for node in nodes):
            raise BadValue("a message without nodes")
        self.nodes, self._imported, self._own, self._refused = nodes, imported, own, refused
        makers: dict[Any, Callable[[], Any]] = {"list": list, "dict": dict, "set": set}
        self.objects: list[Any] = [makers[node[0]]() if node[0] in makers else None for node in nodes]
        """The object of each node."""
        self._done = [node[0] in makers for node in nodes]
        self._fill()

    def value(self, reference: Any) -> Any:
        """The value of a reference."""
        if not isinstance(reference, list):
            return reference
        place = self._place(reference)
        if not self._done[place]:
            self._resolve(place)
        return self.objects[place]

    def _place(self, reference: list[Any]) -> int:
        if len(reference) != 1 or type(reference[0]) is not int or not 0 <= reference[0] < len(self.nodes):
            raise BadValue("a reference to no node")
        return int(reference[0])

    def _fill(self) -> None:
        """Fills the containers after they are made: lists first, which hash nothing."""
        order = sorted(range(len(self.nodes)), key=lambda place: self.nodes[place][0] != "list")
        for place in order:
            kind, *items = self.nodes[place]
            if kind == "list":
                self.objects[place].extend(map(self.value, items))
            elif kind == "set":
                self.objects[place].update(map(self.value, items))
            elif kind == "dict":
                values = list(map(self.value, items))
                self.objects[place].update(zip(values[::2], values[1::2], strict=True))

    def _resolve(self, first: int) -> None:
        """Makes a node's object behind those of the nodes that it names, however deep they lie."""
        stack, entered = [first], set[int]()
        while stack:
            place = stack[-1]
            missing = [
                other
                for each in self.nodes[place][1:]
                if isinstance(each, list) and len(each) == 1 and not self._done[other := self._place(each)]
            ]
            if self._done[place]:
                stack.pop()
            elif missing:
                if place in entered:
                    raise BadValue("a value that holds itself and cannot")
                entered.add(place)
                stack += missing
            else:
                self.objects[place] = self._new_object(self.nodes[place])
                self._done[place] = True
                stack.pop()

    def _new_object(self, node: list[Any]) -> Any:
        kind, *items = node
        if kind in ("tuple", "frozenset"):
            return (tuple if kind == "tuple" else frozenset)(map(self.value, items))
        if kind in ("bytes", "bytearray"):
            return (bytes if kind == "bytes" else bytearray)(items[0].encode("latin-1"))
        if kind == "int":
            return int(items[0], 16)
        if kind == "complex":
            return complex(*items)
        if kind in ("range", "slice"):
            return (range if kind == "range" else slice)(*map(self.value, items))
        if kind == "singleton":
            return SINGLETONS[items[0]]
        if kind == "builtin":
            if items[0] in self._refused:
                raise BadValue(f"the builtin function {items[0]} of the other side")
            return vars(builtins)[items[0]]
        if kind == "standard":
            return _standard_object(items[0], [self.value(each) for each in items[1:]])
        if kind == "numpy":
            return _numpy_object(*items)
        if kind == "own":
            return self._own[items[0]]
        return self._imported(node, self.value)


def standard_class(name: str) -> Any:
    """A class of the standard library, where its module is loaded."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)


def _standard_object(name: str, arguments: list[Any]) -> Any:
    if name not in STANDARD:
        raise BadValue("a class that has no plain form")
    __import__(name.rpartition(".")[0])
    return standard_class(name)(*arguments)


def _numpy_node(value: Any) -> list[Any] | None:
    """An array or a scalar of numbers of numpy."""
    numpy = sys.modules.get("numpy")
    kind = type(value)
    if numpy is None or not (kind is getattr(numpy, "ndarray", None) or kind.__module__ == "numpy"):
        return None
    if kind is not numpy.ndarray and not isinstance(value, numpy.generic):
        return None
    if value.dtype.kind not in NUMPY_KINDS:
        return None
    shape = ",".join(map(str, value.shape))
    return ["numpy", value.dtype.str, kind is numpy.ndarray, shape, value.tobytes().decode("latin-1")]


def _numpy_object(dtype: str, is_array: bool, shape: str, data: str) -> Any:
    import numpy

    kind = numpy.dtype(dtype)
    if kind.kind not in NUMPY_KINDS:
        raise BadValue("an array of no numbers")
    sizes = [int(size) for size in shape.split(",") if size]
    array = numpy.frombuffer(data.encode("latin-1"), kind).reshape(sizes).copy()
    return array if is_array else array[()]


def is_mutable(value: Any) -> bool:
    """Whether a container that is passed by value may come back with other contents."""
    return type(value) in MUTABLE or type(value).__name__ in (
        "ndarray",
        "deque",
        "defaultdict",
        "Counter",
        "OrderedDict",
    )


def replace_contents(container: Any, new: Any) -> None:
    """Gives a container the contents of another of its kind, as a function that changed its argument left it."""
    if type(new) is not type(container):
        raise BadValue("a container came back as another kind")
    if isinstance(container, list | bytearray):
        container[:] = new
    elif hasattr(container, "clear"):
        container.clear()
        (container.extend if hasattr(container, "extend") else container.update)(new)
    else:
        container[...] = new
