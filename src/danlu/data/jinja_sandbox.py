"""The Jinja environment that chat templates run in: transformers' filters and globals in an immutable sandbox.

In addition to the limits of `resource_limits`, passes through loops and macros are counted, and products are bounded.
Importing this file imports Jinja (60 ms), which a run on cached tokens does without.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date as Date
from datetime import datetime, time
from typing import Any

from jinja2 import ext, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from danlu.data import resource_limits
from danlu.data.resource_limits import OutOfBounds


class Generation(ext.Extension):
    """`{% generation %}` marks are accepted and not needed: spans come from rendering the turns themselves."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own declaration

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class PlainNamespace(Namespace):
    """A namespace that takes no names with an underscore in front: they could reach Python's own attributes of an
    object.
    """

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *pairs = args  # so that a template may name an attribute "self"
        for name in (values := dict(*pairs, **kwargs)):
            PlainNamespace._check(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        PlainNamespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: str) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace has no attribute {name}: it begins with an underscore")


class Sandbox(ImmutableSandboxedEnvironment):
    """Counts passes through loops and macros, and refuses products that no conversation needs."""

    steps_left = 0
    intercepted_binops = frozenset(("*", "**"))

    @property
    def step(self) -> bool:
        self.steps_left -= 1
        if self.steps_left < 0:
            raise OutOfBounds("it goes through its loops without end")
        return True

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [operand.bit_length() // 4 if isinstance(operand, int) else 0 for operand in (left, right)]
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            size = sizes[0] * abs(right)
        elif isinstance(left, int) and isinstance(right, int):
            size = sum(sizes)
        elif isinstance(left, int) or isinstance(right, int):
            count, repeated = (left, right) if isinstance(left, int) else (right, left)
            size = count * len(repeated) if hasattr(repeated, "__len__") else 0
        else:
            size = 0
        if size > resource_limits.CHARACTERS:
            raise OutOfBounds(f"it makes something of {size:,} characters")
        return super().call_binop(context, operator, left, right)


def sandboxed_environment(date: Date | None) -> Any:
    """Returns the environment. `date`: the day that `strftime_now` writes, at midnight; None for the time of
    the call.
    """

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def draw(*_: Any, **__: Any) -> None:
        raise TemplateError("it draws at random (random, lipsum), so a row would not give the same tokens twice")

    def strftime_now(form: str) -> str:
        return (datetime.now() if date is None else datetime.combine(date, time())).strftime(form)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes HTML characters, which a model would then learn to write.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["namespace"] = PlainNamespace
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.filters["random"] = environment.globals["lipsum"] = draw
    return environment


def count_passes(template: Any) -> Any:
    """A parsed template in which each pass through a loop or a macro is counted."""

    def step() -> Any:
        return nodes.EnvironmentAttribute("step")

    for node in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        node.body.insert(0, nodes.ExprStmt(step()).set_lineno(node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(step(), node.test).set_lineno(node.lineno)  # a pass that is filtered out counts too
    template.set_environment(template.environment)
    return template
