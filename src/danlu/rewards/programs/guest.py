"""The sandboxed side: runs an answer's program, and carries out the judge's requests on its objects.

Nothing in this process decides a verdict: whatever the program does to it, the judge sees data and numbers of objects.
The sandbox gets it, `values`, `limits` and `pod` as code, and nothing else of danlu.
"""

from __future__ import annotations

import _io
import _thread
import builtins
import marshal
import posix  # instead of `os` and `io`: a program may end before these would be imported
import sys

from danlu.rewards.programs.values import REACHING, SPECIAL, Decoder, Encoder, is_mutable, plain_node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

INPUT = builtins.input
MOST_PRINTED = 2**20
"""The most bytes of a program's output that are passed on for each request."""
PRELUDE = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys, time
from bisect import *
from collections import Counter, OrderedDict, defaultdict, deque, ChainMap
from functools import cache, cmp_to_key, lru_cache, reduce
from heapq import *
from itertools import accumulate, chain, combinations, groupby, permutations, product
from math import ceil, comb, cos, exp, fabs, floor, gcd, inf, log, log2, sin, sqrt
from typing import *
"""
"""Imports that solutions of programming contests take for granted, as in the harness of APPS."""


class Channel:
    """Messages over a socket: `marshal` from the judge, JSON to it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def receive(self) -> Any:
        size = int.from_bytes(self._read(8), "little")
        return marshal.loads(self._read(size))

    def send(self, message: Any) -> None:
        text = "".join(json_pieces(message)).encode("ascii")
        data = memoryview(len(text).to_bytes(8, "little") + text)
        while data:
            data = data[posix.write(self._descriptor, data) :]

    def _read(self, size: int) -> bytes:
        chunks = []
        while size:
            chunk = posix.read(self._descriptor, min(size, 1 << 20))
            if not chunk:
                posix._exit(0)  # the judge has seen enough
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)


def json_pieces(value: Any) -> Any:
    """JSON without the module `json`, which takes longer to import than most programs to run."""
    if value is None or value is True or value is False:
        yield {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, str):
        yield _encode_text(value)
    elif isinstance(value, int):
        yield int.__repr__(value)
    elif isinstance(value, float):
        text = float.__repr__(value)
        yield {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text, text)
    else:
        yield "["
        for number, each in enumerate(value):
            if number:
                yield ","
            yield from json_pieces(each)
        yield "]"


def _text_encoder() -> Callable[[str], str]:
    try:
        from _json import encode_basestring_ascii  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        from json.encoder import py_encode_basestring_ascii as encode_basestring_ascii
    return encode_basestring_ascii  # type: ignore[no-any-return,unused-ignore]


_encode_text = _text_encoder()


class JudgeObject:
    """An object of the tests in the answer's hands: a function to call, an iterator, an instance of their classes."""

    def __init__(self, guest: Guest, number: int, name: str) -> None:
        vars(self).update(_guest=guest, _number=number, __name__=name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._guest.ask_judge(self._number, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._guest.ask_judge(self._number, "setattr", name, value)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._guest.ask_judge(self._number, "call", list(positional), named)

    def __hash__(self) -> int:
        return hash(self._number)


def _add_operators() -> None:
    def method(name: str) -> Callable[..., Any]:
        return lambda self, *values: self._guest.ask_judge(self._number, name, *values)

    operators = "__len__ __iter__ __next__ __getitem__ __setitem__ __contains__ __bool__ __str__ __eq__ __lt__ __le__ "
    for name in (
        operators + "__gt__ __ge__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __enter__ __exit__"
    ).split():
        setattr(JudgeObject, name, method(name))


_add_operators()


class Guest:
    """The objects of one program, and the requests about them."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._names: dict[str, Any] = {}
        self._judge_objects: dict[int, JudgeObject] = {}
        self._judge_numbers: dict[int, int] = {}
        self._lock = _thread.RLock()
        self._printed = _io.TextIOWrapper(_io.BytesIO(), encoding="utf-8", errors="replace", write_through=True)

    def serve(self) -> None:
        """Answers requests until the judge has no more."""
        sys.stdout = self._printed
        builtins.input = self._input
        while True:
            self._answer(self._channel.receive())

    def ask_judge(self, number: int, operation: str, *arguments: Any) -> Any:
        """Asks the judge about one of its objects, and returns the reply; the judge may ask something itself before
        that.
        """
        with self._lock:
            self._send(["ask", number, operation], list(arguments))
            while True:
                message = self._channel.receive()
                if message[0] in ("return", "raise"):
                    value = self._decoder(message[1]).value(message[2])
                    if message[0] == "raise":
                        raise value
                    return value
                self._answer(message)

    def _input(self, prompt: object = "") -> str:
        return str(self.ask_judge(-1, "input", str(prompt)))

    def _answer(self, message: Any) -> None:
        operation, nodes, reference, *_ = message
        decoder = self._decoder(nodes)
        arguments = decoder.value(reference)
        try:
            head, value = ["value"], getattr(self, f"_do_{operation}")(*arguments)
        except BaseException as error:
            head, value = ["error"], error
        self._send(head, value, decoder)

    def _send(self, head: list[Any], value: Any, decoder: Decoder | None = None) -> None:
        """Sends a value, the containers of the judge with changed contents, and the output printed since."""
        objects = [] if decoder is None else decoder.objects
        try:
            known = {id(each): place for place, each in enumerate(objects) if is_mutable(each)}
            encoder = Encoder(self._export, known, handles=REACHING)
            reference = encoder.add(value)
            changed = [[place, encoder.add(_Contents(objects[place]))] for place in _changed(decoder)]
            message = [*head, encoder.nodes, reference, changed, self._take_printed()]
        except BaseException as error:
            encoder = Encoder(self._export, {})
            reference = encoder.add(RuntimeError(f"no value can be made of it: {type(error).__name__}"))
            message = ["error", encoder.nodes, reference, [], ""]
        self._channel.send(message)

    def _take_printed(self) -> str:
        buffer = self._printed.buffer
        data = buffer.getvalue()  # type: ignore[attr-defined]
        if not data:
            return ""
        buffer.seek(0)
        buffer.truncate()
        return str(data[:MOST_PRINTED].decode(errors="replace"))

    def _decoder(self, nodes: Any) -> Decoder:
        return Decoder(nodes, self._import)

    def _import(self, node: list[Any], value: Callable[[Any], Any]) -> Any:
        kind, *items = node
        if kind == "handle":
            return self._objects[items[0]]
        if kind == "exception":
            return value(items[0])(*map(value, items[1:]))
        number, name = items
        if number not in self._judge_objects:
            remote = self._judge_objects[number] = JudgeObject(self, number, name)
            self._judge_numbers[id(remote)] = number
        return self._judge_objects[number]

    def _export(self, value: Any, reference: Callable[[Any], Any]) -> list[Any]:
        """Returns a node for an object of the answer: its number, and the facts that the judge needs to stand in for
        it.
        """
        if type(value) is _Contents:
            return value.node(reference)
        if id(value) in self._judge_numbers:
            return ["mine", self._judge_numbers[id(value)]]
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        kind = type(value)
        if isinstance(value, BaseException):
            return ["raised", number, reference(kind), reference(_text_of(value)), *map(reference, value.args)]
        if issubclass(kind, type):
            return self._class_node(number, value, reference)
        if kind is type(sys):
            return ["module", number, value.__name__]
        nature = "coroutine" if kind.__name__ == "coroutine" else _plain_base(kind)
        return ["handle", number, kind.__name__, nature, _specials(kind)]

    def _class_node(self, number: int, value: Any, reference: Callable[[Any], Any]) -> list[Any]:
        if not issubclass(value, BaseException):
            return ["handle", number, value.__name__, "class", _specials(type(value))]
        bases = [reference(base) for base in value.__bases__ if issubclass(base, BaseException)]
        return ["exception class", number, value.__name__, value.__module__, *bases]

    def _do_load(self, code: str, contest: bool) -> None:
        module = type(sys)("solution")
        sys.modules["solution"] = module
        self._names = vars(module)
        if contest:
            exec(PRELUDE, self._names)
        exec(compile(code, "<answer>", "exec"), self._names)

    def _do_names(self, names: list[str]) -> dict[str, Any]:
        if names == ["*"]:
            return {name: value for name, value in self._names.items() if not name.startswith("_")}
        return {name: self._names[name] for name in names if name in self._names}

    def _do_functions(self) -> list[str]:
        """The names of the program's own functions and classes, in order."""
        return [
            name
            for name, value in self._names.items()
            if getattr(value, "__module__", None) == "solution" and callable(value) and not name.startswith("_")
        ]

    def _do_call(self, function: Any, positional: list[Any], named: dict[str, Any]) -> Any:
        return function(*positional, **named)

    def _do_getattr(self, value: Any, name: str) -> Any:
        return getattr(value, name)

    def _do_setattr(self, value: Any, name: str, new: Any) -> None:
        setattr(value, name, new)

    def _do_delattr(self, value: Any, name: str) -> None:
        delattr(value, name)

    def _do_special(self, value: Any, name: str, arguments: list[Any]) -> Any:
        return getattr(type(value), name)(value, *arguments)

    def _do_builtin(self, name: str, arguments: list[Any]) -> Any:
        return getattr(builtins, name)(*arguments)

    def _do_base(self, value: Any) -> Any:
        """The plain value in an object of a class that is derived from a plain one."""
        base = getattr(builtins, _plain_base(type(value)))
        if base in (list, tuple, set, frozenset):
            return base(base.__iter__(value))
        return dict(dict.items(value)) if base is dict else _plain_copy(base, value)

    def _do_copy(self, value: Any, is_deep: bool) -> Any:
        import copy

        return copy.deepcopy(value) if is_deep else copy.copy(value)

    def _do_run(self, value: Any) -> Any:
        """Runs a coroutine and returns its result."""
        import asyncio

        return asyncio.run(_awaited(value))

    def _do_script(self, code: str, given: str, limit: int) -> list[Any]:
        """Runs a program that reads its input; returns whether it ended without an error, and its output."""
        with open("input", "w+b", buffering=0) as source, open("output", "w+b", buffering=0) as target:
            source.write(given.encode(errors="surrogateescape"))
            source.seek(0)
            child = posix.fork()
            if not child:
                run_script(code, source.fileno(), target.fileno())
            _, status = posix.waitpid(child, 0)
            target.seek(0)
            return [status == 0, target.read(limit).decode(errors="replace")]


class _Contents:
    """A container of the judge's, to be encoded with its present contents."""

    def __init__(self, container: Any) -> None:
        self.container = container

    def node(self, reference: Callable[[Any], Any]) -> list[Any]:
        return plain_node(self.container, reference) or []


def _changed(decoder: Decoder | None) -> list[int]:
    """The places of the containers in a request that hold something else now."""
    if decoder is None:
        return []
    places = {id(each): place for place, each in enumerate(decoder.objects)}

    def reference(value: Any) -> Any:
        if value is None or type(value) in (bool, str, float, int):
            return value if id(value) not in places or type(value) is not int else [places[id(value)]]
        return [places.get(id(value), -1)]

    return [
        place
        for place, each in enumerate(decoder.objects)
        if is_mutable(each) and plain_node(each, reference) != list(decoder.nodes[place])
    ]


def _plain_copy(base: type, value: Any) -> Any:
    """The plain value in an object, without a method of the answer's."""
    if base in (int, float):
        return base.__pos__(value)  # type: ignore[attr-defined]
    return base.__getitem__(value, slice(None))  # type: ignore[attr-defined,index,unused-ignore]


def _plain_base(kind: type) -> str:
    """The plain class that a class is derived from; empty where it is derived from none."""
    plain = (str, int, float, bytes, list, tuple, set, frozenset, dict)
    return next((base.__name__ for base in kind.__mro__ if base in plain), "")


def _specials(kind: type) -> str:
    own = [name for name in SPECIAL.split() if getattr(kind, name, None) is not getattr(object, name, None)]
    return " ".join(name for name in own if getattr(kind, name, None) is not None)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:10_000]
    except BaseException:
        return ""


async def _awaited(value: Any) -> Any:
    return await value


def run_script(code: str, source: int, target: int) -> None:
    """Runs a program as `__main__` with an input and an output, in a process of its own that ends with it."""
    status = 1
    try:
        posix.dup2(source, 0)
        posix.dup2(target, 1)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        builtins.input = INPUT
        module = type(sys)("__main__")
        sys.modules["__main__"] = module
        exec(PRELUDE, vars(module))
        try:  # noqa: SIM105  # contextlib takes its time to import
            exec(compile(code, "<answer>", "exec"), vars(module))
        except SystemExit:
            pass
        sys.stdout.flush()
        status = 0
    except BaseException:
        pass  # whatever the answer raises, its exit status tells the judge that it failed
    finally:
        posix._exit(status)


def serve(descriptor: int, folder: str) -> None:
    """Runs a program in a folder, as the judge at the other end of a socket asks for it; does not return."""
    try:
        posix.chdir(folder)
        posix.environ[b"HOME"] = posix.environ[b"TMPDIR"] = posix.getcwdb()
        channel = Channel(descriptor)
        channel.send(["ready"])
        Guest(channel).serve()
    finally:
        posix._exit(1)
