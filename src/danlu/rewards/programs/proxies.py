"""The judge's side of the pipe: proxies of the answer's objects, which ask the program for operators.

The decision of a test is computed here. An object of the answer is equal to no plain data and not ordered with it,
whatever its methods say; one of a class that is derived from a plain class counts as the plain value in it. Between two
objects of the answer its own `__eq__` is asked, and believed unless it also says yes to a text that nobody can know.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import json
import marshal
import numbers
import os
import random
import secrets
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from danlu.rewards.programs.values import (
    NUMPY_KINDS,
    REACHING,
    SPECIAL,
    BadValue,
    Decoder,
    Encoder,
    is_mutable,
    replace_contents,
)

LARGEST_FRAME = 16 * 2**20
PLAIN = {each.__name__: each for each in (str, int, float, bytes, list, tuple, set, frozenset, dict)}
IMMUTABLE = ("str", "int", "float", "bytes", "tuple", "frozenset")
ORDERINGS = {"__lt__": "__gt__", "__le__": "__ge__", "__gt__": "__lt__", "__ge__": "__le__"}
TO_NUMBERS = (
    "__abs__",
    "__float__",
    "__int__",
    "__round__",
    "__complex__",
    "__index__",
    "__trunc__",
    "__floor__",
    "__ceil__",
)
QUERIES = ("__len__", "__getitem__", "__iter__", *TO_NUMBERS)
"""Operators that read an object's content: its plain value answers where its class derives from an immutable one."""
COMPARING: dict[str, Callable[[Any, Any], Any]] = {
    "__sub__": lambda result, number: result + number,
    "__rsub__": lambda result, number: number - result,
    "__truediv__": lambda result, number: result * number,
    "__rtruediv__": lambda result, number: result / number,
}
"""Operators by which tests compare numbers, with a function that recovers the object's value from the result."""
OPERATORS = {"__iter__": iter, "__next__": next, "__len__": len, "__bool__": bool, "__str__": str}
"""Operations of an answer on an object of the tests besides calling it; others are called by their names."""
BINARY = "__getitem__ __setitem__ __contains__ __eq__ __lt__ __le__ __gt__ __ge__ __add__ __radd__ __sub__ __rsub__ "
BINARY_OPERATORS = (BINARY + "__mul__ __rmul__ __enter__ __exit__").split()
HIDDEN_PREFIXES = ("_", "gi_", "cr_", "ag_", "f_", "tb_", "co_", "func_")
"""Prefixes of attributes by which an answer would reach the tests from an object of theirs."""
NO_IMPORTS = ("unittest", "pytest", "_pytest", "danlu", "test_answer", "__main__", "solution")


class Answer:
    """An answer's program: requests go over a socket one at a time, each with its reply.

    Args:
        descriptor: that of the socket. lost: is called with the reason where the program has ended or sends no valid
            message, and does not return.
    """

    def __init__(self, descriptor: int, lost: Callable[[str], NoReturn]) -> None:
        self._descriptor, self._lost = descriptor, lost
        self._proxies: dict[int, Any] = {}
        self._exception_classes: dict[int, type[BaseException]] = {}
        self._exported: list[Any] = []
        self._export_numbers: dict[int, int] = {}

    def wait_until_ready(self) -> None:
        """Returns when the program's process stands by, before anything of the answer has run."""
        self._receive()

    def request(self, operation: str, *arguments: Any) -> Any:
        """Sends a request to the program and returns its reply; raises the exception that its code raises.

        Containers that it has changed are changed here.
        """
        encoder = self._send(operation, list(arguments))
        while True:
            message = self._receive()
            if message[0] == "ask":
                self._serve(message)
                continue
            value = self._taken(message[1:], encoder)
            if message[0] == "error":
                raise value if isinstance(value, BaseException) else BadValue("no exception")
            return value

    def special(self, proxy: Proxy, name: str, values: tuple[Any, ...]) -> Any:
        """Returns the result of a method of an object's class."""
        return self.request("special", proxy, name, list(values))

    def _send(self, head: str, value: Any) -> Encoder:
        encoder = Encoder(self._export, {})
        reference = encoder.add(value)
        self._write(marshal.dumps([head, encoder.nodes, reference]))
        return encoder

    def _taken(self, parts: list[Any], encoder: Encoder) -> Any:
        """Returns the value of a message, after applying its changes to the containers that were sent."""
        try:
            nodes, reference, changed, printed = parts
            decoder = Decoder(nodes, self._import, encoder.kept, refused=REACHING)
            if printed:
                sys.stdout.write(printed)
            for place, contents in changed:
                if is_mutable(encoder.kept[place]):
                    replace_contents(encoder.kept[place], decoder.value(contents))
            return decoder.value(reference)
        except Exception as error:
            self._lost(f"the program sent no value: {type(error).__name__}: {error}")

    def _serve(self, message: list[Any]) -> None:
        """Carries out the answer's request on an object of the tests."""
        _, number, operation, *parts = message
        values = self._taken(parts, Encoder(self._export, {}))
        try:
            reply = ["return", self._done(number, operation, values)]
        except Exception as error:
            reply = ["raise", error]
        self._send(reply[0], reply[1])

    def _done(self, number: int, operation: str, values: list[Any]) -> Any:
        if operation == "input":
            return builtins.input(*values)
        own = self._exported[number]
        if operation == "call":
            return own(*values[0], **values[1])
        if operation in ("getattr", "setattr"):
            is_closed = isinstance(own, types.ModuleType | type | types.FunctionType | types.GeneratorType)
            if is_closed or values[0].startswith(HIDDEN_PREFIXES):
                raise AttributeError(values[0])
            return (getattr if operation == "getattr" else setattr)(own, *values)
        if operation in OPERATORS:
            return OPERATORS[operation](own)  # type: ignore[operator]
        if operation not in BINARY_OPERATORS:
            raise AttributeError(operation)
        return getattr(type(own), operation)(own, *values)

    def _export(self, value: Any, reference: Callable[[Any], Any]) -> list[Any]:
        if isinstance(value, Proxy):
            return ["handle", object.__getattribute__(value, "_number")]
        number = getattr(value, "_danlu_number", None) if isinstance(value, type) else None
        if number is not None:
            return ["handle", number]
        if isinstance(value, BaseException):
            raised = next(each for each in type(value).__mro__ if _is_builtin(each) or hasattr(each, "_danlu_number"))
            return ["exception", reference(raised), *map(reference, value.args)]
        if isinstance(value, types.TracebackType):
            return ["builtin", "None"]
        if id(value) not in self._export_numbers:
            self._export_numbers[id(value)] = len(self._exported)
            self._exported.append(value)
        return ["object", self._export_numbers[id(value)], getattr(value, "__name__", "object")]

    def _import(self, node: list[Any], value: Callable[[Any], Any]) -> Any:
        kind, *items = node
        if kind == "handle":
            return self._proxy(*items)
        if kind == "mine":
            return self._exported[items[0]]
        if kind == "raised":
            return _exception(self, items[0], value(items[1]), value(items[2]), tuple(map(value, items[3:])))
        if kind == "exception class":
            return self._exception_class(
                int(items[0]), str(items[1]), str(items[2]), [value(each) for each in items[3:]]
            )
        if kind == "module":
            return _module(items[1]) or self._proxy(items[0], "module", "", "")
        raise BadValue(f"a node of kind {kind}")

    def _proxy(self, number: int, name: str, nature: str, specials: str) -> Any:
        if nature == "coroutine" or name == "async_generator_asend":
            return self._awaited(self._proxy(number, "object", "", ""))
        if number not in self._proxies:
            proxy = object.__new__(_proxy_class(name, nature, specials))
            object.__setattr__(proxy, "_answer", self)
            object.__setattr__(proxy, "_number", int(number))
            self._proxies[number] = proxy
        return self._proxies[number]

    async def _awaited(self, proxy: Any) -> Any:
        return self.request("run", proxy)

    def _exception_class(self, number: int, name: str, module: str, bases: list[Any]) -> type[BaseException]:
        """A class that stands here for one of the answer's, which `except` and `assertRaises` want to be a real one."""
        if number not in self._exception_classes:
            root = module.partition(".")[0]
            if root in sys.stdlib_module_names and root not in NO_IMPORTS:
                real = getattr(sys.modules.get(module), name, None)
                if isinstance(real, type) and issubclass(real, BaseException):
                    return real
            own = {"_danlu_number": number, "__module__": "answer"}
            try:
                error_class = type(str(name), tuple(bases) or (Exception,), own)
            except TypeError:
                error_class = type(str(name), (Exception,), own)
            error_class.__str__ = _text_of_exception  # type: ignore[method-assign,assignment]
            error_class.__getattr__ = _attribute_of_exception  # type: ignore[attr-defined]
            self._exception_classes[number] = error_class
        return self._exception_classes[number]

    def _receive(self) -> list[Any]:
        size = int.from_bytes(self._read(8), "little")
        if size > LARGEST_FRAME:
            self._lost(f"the program sent a value of {size:,} bytes")
        try:
            message = json.loads(self._read(size))
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, list) or not message:
            self._lost("the program sent what is no message")
        return message  # type: ignore[no-any-return]

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                chunk = os.read(self._descriptor, min(size - len(data), 1 << 20))
            except ConnectionError:
                chunk = b""
            if not chunk:
                self._lost("the program ended")
            data += chunk
        return bytes(data)

    def _write(self, message: bytes) -> None:
        data = memoryview(len(message).to_bytes(8, "little") + message)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except (BrokenPipeError, ConnectionError):
            self._lost("the program ended")


class Proxy:
    """An object of the answer, as the tests hold it."""

    __slots__ = ("_answer", "_number")

    _answer: Answer
    _number: int
    _name, _nature, _specials = "", "", frozenset[str]()

    def __getattr__(self, name: str) -> Any:
        if self._nature in IMMUTABLE and not name.startswith("_") and hasattr(PLAIN[self._nature], name):
            return getattr(_plain(self), name)
        return self._answer.request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._answer.request("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._answer.request("delattr", self, name)

    def __eq__(self, other: object) -> Any:
        if self is other:
            return True
        if not isinstance(other, Proxy) or self._nature in PLAIN or other._nature in PLAIN:
            return _plain(self) == _plain(other) if self._nature in PLAIN else NotImplemented
        return "__eq__" in self._specials and _believed(self, "__eq__", other)

    def __hash__(self) -> int:
        if self._nature in PLAIN:
            return hash(_plain(self))
        own = "__eq__" in self._specials
        return int(self._answer.request("builtin", "hash", [self])) if own else object.__hash__(self)

    def __bool__(self) -> bool:
        if self._nature in PLAIN:
            return bool(_plain(self))
        asked = self._specials & {"__bool__", "__len__"}
        return not asked or self._answer.request("builtin", "bool", [self]) is True

    def __str__(self) -> str:
        return str(_plain(self) if self._nature == "str" else self._answer.request("builtin", "str", [self]))

    def __repr__(self) -> str:
        return str(self._answer.request("builtin", "repr", [self]))

    def __format__(self, form: str) -> str:
        return format(_plain(self), form) if self._nature in PLAIN else format(str(self), form)

    def __dir__(self) -> list[str]:
        return list(self._answer.request("builtin", "dir", [self]))

    def __copy__(self) -> Any:
        return self._answer.request("copy", self, False)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._answer.request("copy", self, True)

    def __instancecheck__(self, instance: Any) -> bool:
        is_its_own = isinstance(instance, Proxy) or hasattr(type(instance), "_danlu_number")
        return is_its_own and self._answer.request("builtin", "isinstance", [instance, self]) is True

    def __subclasscheck__(self, subclass: Any) -> bool:
        is_its_own = isinstance(subclass, Proxy) or hasattr(subclass, "_danlu_number")
        return is_its_own and self._answer.request("builtin", "issubclass", [subclass, self]) is True

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type if self._nature == "class" else PLAIN.get(self._nature, type(self))


def _proxy_class(name: str, nature: str, specials: str) -> type[Proxy]:
    """A class of proxies that has the operators which the object's class has, and no others."""
    key = (name, nature, specials)
    if key not in _CLASSES:
        asked_elsewhere = ("__eq__", "__hash__", "__bool__")
        names = [each for each in SPECIAL.split() if each in specials.split() and each not in asked_elsewhere]
        methods: dict[str, Any] = {each: _method(each) for each in names}
        own = {"__slots__": (), "_name": name, "_nature": nature, "_specials": frozenset(specials.split())}
        _CLASSES[key] = type(name, (Proxy,), {**own, **methods})
    return _CLASSES[key]


_CLASSES: dict[tuple[str, str, str], type[Proxy]] = {}


def _method(name: str) -> Callable[..., Any]:
    """An operator of proxies."""
    if name == "__call__":
        return lambda self, /, *positional, **named: self._answer.request("call", self, list(positional), named)
    if name in ORDERINGS:
        return lambda self, other: _ordered(self, name, other)
    if name == "__contains__":
        return _contains
    return lambda self, *values: _operated(self, name, values)


def _plain(value: Any) -> Any:
    """The plain value of a proxy of a class that is derived from a plain one; anything else as it is."""
    if not isinstance(value, Proxy) or value._nature not in PLAIN:
        return value
    plain = value._answer.request("base", value)
    if type(plain) is not PLAIN[value._nature]:
        value._answer._lost("the program sent another value than it announced")
    return plain


def _ordered(proxy: Proxy, name: str, other: Any) -> Any:
    """An ordering: of plain values here, of two objects of the answer by the program, and of no others."""
    if proxy._nature in PLAIN:
        return getattr(_plain(proxy), name)(_plain(other))
    if isinstance(other, Proxy) and other._nature not in PLAIN:
        return proxy._answer.special(proxy, name, (other,))
    return NotImplemented


def _contains(proxy: Proxy, item: Any) -> bool:
    """Whether something is in an object: looked for here where it can be iterated over."""
    if proxy._nature in PLAIN:
        return item in _plain(proxy)
    if "__iter__" in proxy._specials and not isinstance(item, Proxy):
        return any(each is item or each == item for each in proxy)  # type: ignore[attr-defined]
    return _believed(proxy, "__contains__", item)


def _believed(proxy: Proxy, name: str, other: Any) -> bool:
    """Returns the program's comparison of its object with another, unless it says the same of a value that nobody can
    know.
    """
    unknown = random.getrandbits(61) if type(other) is int else secrets.token_hex(16)
    try:
        says_yes = proxy._answer.special(proxy, name, (unknown,))
    except Exception:
        says_yes = False
    return says_yes is not True and proxy._answer.special(proxy, name, (other,)) is True


def _operated(proxy: Proxy, name: str, values: tuple[Any, ...]) -> Any:
    """Returns the result of an operator.

    A difference or quotient with a number is the way in which tests compare nearly equal values, and an answer could
    say that every difference is 0. It is asked for twice, and both results have to agree; where they are objects of the
    answer's again, no number is made of them.
    """
    if name in QUERIES and proxy._nature in IMMUTABLE and hasattr(PLAIN[proxy._nature], name):
        return getattr(_plain(proxy), name)(*values)
    compares = name in COMPARING and proxy._nature not in PLAIN and _is_numeric(values[0])
    result = _compared(proxy, name, values[0]) if compares else proxy._answer.special(proxy, name, values)
    if compares or any(each is known for each in (proxy, *values) for known in _DIFFERENCES):
        if isinstance(result, Proxy):
            _DIFFERENCES.append(result)
        elif not compares and _is_numeric(result):
            raise TypeError("no number is made of the difference between an object of the answer and a number")
    return result


def _is_numeric(value: Any) -> bool:
    """Whether the value is a number of Python or numpy, or an array."""
    return isinstance(value, numbers.Number) or type(value).__module__ == "numpy"


def _compared(proxy: Proxy, name: str, other: Any) -> Any:
    """Computes a difference to a number or an array, or a quotient.

    The program is asked about another number first, which reveals little about this one, so that it has to decide the
    value of its object before it sees this one.
    """
    other = other.item() if type(other).__module__ == "numpy" and not getattr(other, "shape", ()) else other
    moved = _moved(other)
    try:
        first = proxy._answer.special(proxy, name, (moved,))
    except Exception as error:  # of an object that has no difference to that one
        first = error
    result = proxy._answer.special(proxy, name, (other,))
    if _is_numeric(result) or isinstance(result, list | tuple):
        value = COMPARING[name](_for_arithmetic(result), _for_arithmetic(other))
        same = COMPARING[name](_for_arithmetic(first), _for_arithmetic(moved))
        agrees = abs(value - same) <= 1e-6 * (1 + abs(_for_arithmetic(other)))
        if not (agrees.all() if hasattr(agrees, "all") else agrees):
            raise AssertionError(f"{name} of the object says the same for unlike numbers")
    return result


def _moved(number: Any) -> Any:
    """Another number of the same kind, or an array."""
    if isinstance(number, int):
        return int(number) + random.randrange(1, 1000) * (1 + abs(number))
    if getattr(number, "shape", ()):
        import numpy

        return number + numpy.random.default_rng().uniform(1.0, 1000.0, number.shape) * (1 + abs(number))
    distance = (1 + abs(number)) * (random.uniform(1.0, 1000.0) if isinstance(number, float | complex) else 1)
    return number + distance * (1 if isinstance(number, float | complex) else random.randrange(1, 1000))


def _for_arithmetic(value: Any) -> Any:
    """Returns a number that can be added to any other, or an array. Raises TypeError for anything else."""
    if isinstance(value, int | float | complex):
        return value
    if isinstance(value, numbers.Number):
        return float(value)  # type: ignore[arg-type]
    if not (isinstance(value, list | tuple) or type(value).__module__ == "numpy"):
        raise TypeError("a number is known for one of two differences only")
    import numpy

    array = numpy.asarray(value)
    if array.dtype.kind not in NUMPY_KINDS:
        raise TypeError("an array of no numbers")
    return array


_DIFFERENCES: list[Proxy] = []
"""The results of differences with numbers that are objects of the answer."""


def _is_builtin(kind: type) -> bool:
    return vars(builtins).get(kind.__name__) is kind


def _exception(answer: Answer, number: int, kind: Any, text: str, values: tuple[Any, ...]) -> BaseException:
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise BadValue("an exception of no class")
    try:
        error = kind(*values) if _is_builtin(kind) else kind.__new__(kind, *values)
    except Exception:
        error = Exception(text)
    if hasattr(kind, "_danlu_number"):
        error.args = values
        vars(error).update(_danlu_text=text, _danlu_proxy=answer._proxy(number, kind.__name__, "", ""))
    return error


def _text_of_exception(error: BaseException) -> str:
    return str(vars(error).get("_danlu_text", ", ".join(map(str, error.args))))


def _attribute_of_exception(error: BaseException, name: str) -> Any:
    if "_danlu_proxy" not in vars(error) or name.startswith("_"):
        raise AttributeError(name)
    return getattr(vars(error)["_danlu_proxy"], name)


def _module(name: str) -> types.ModuleType | None:
    """The judge's own module of a name, where it has one."""
    if name.partition(".")[0] in NO_IMPORTS or importlib.util.find_spec(name.partition(".")[0]) is None:
        return None
    return importlib.import_module(name)
