"""Chat templates in a process of their own: memory that a conversation makes a template use is not taken from this one.

A limit on memory applies to a whole process. In a process that also serves or trains, any other allocation at that
moment would fail. Data is rendered by the processes that tokenise it (`danlu.data.worker_pool`), which do nothing else;
this is for conversations that come one by one: those of a server's clients, and of episodes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date as Date
from typing import Any, NamedTuple

from danlu.core.errors import DataError
from danlu.data import resource_limits
from danlu.data.chat_template import ChatTemplate, Turn
from danlu.data.worker_pool import WorkerPool


class TemplateSource(NamedTuple):
    """The source of a template; see `ChatTemplate`."""

    source: str
    special_tokens: tuple[tuple[str, Any], ...]
    name: str
    date: Date | None


class _Rendering(NamedTuple):
    """A conversation to be rendered; without turns, the question whether the template shows tools."""

    template: TemplateSource
    turns: Sequence[Turn] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    prompt: bool = False


@dataclass(frozen=True)
class _Render:
    """The job of the process, for `WorkerPool`."""

    memory_bytes: int

    def start(self) -> Callable[[_Rendering], str | bool]:
        templates: dict[str, ChatTemplate] = {}
        resource_limits.MEMORY_BYTES = self.memory_bytes

        def render(task: _Rendering) -> str | bool:
            key = repr(task.template)
            if key not in templates:
                source, special_tokens, name, date = task.template
                templates[key] = ChatTemplate(source, dict(special_tokens), (), name, date)
            template = templates[key]
            return template.takes_tools if task.turns is None else template.render(task.turns, task.tools, task.prompt)

        return render


class TemplateProcess:
    """The process, which starts with the first conversation, and again with the next where one has ended it.

    Conversations are rendered one after the other, whichever thread they come from.

    memory_bytes: the memory by which the process may grow while one is rendered.
    """

    def __init__(self, memory_bytes: int = resource_limits.MEMORY_BYTES) -> None:
        self._pool = WorkerPool(
            _Render(memory_bytes), 1, ending=" by a chat template: shorten the conversation, or correct it"
        )
        self._lock = threading.Lock()

    def render(
        self,
        template: ChatTemplate,
        turns: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt: bool = False,
    ) -> str:
        """Renders as `ChatTemplate.render` does, and raises DataError as it does."""
        text = self._run(_Rendering(_source_of(template), turns, tools, prompt))
        assert isinstance(text, str), "conversations become texts"
        return text

    def takes_tools(self, template: ChatTemplate) -> bool:
        """Answers as `ChatTemplate.takes_tools` does."""
        return self._run(_Rendering(_source_of(template))) is True

    def close(self) -> None:
        """Ends the process."""
        self._pool.close()

    def _run(self, task: _Rendering) -> str | bool:
        try:
            with self._lock:
                return self._pool.run(task)
        except RecursionError:
            raise DataError("the conversation is nested too deeply to be rendered") from None


@functools.cache
def template_process() -> TemplateProcess:
    """The one of this process. It ends with this one."""
    return TemplateProcess()


def _source_of(template: ChatTemplate) -> TemplateSource:
    return TemplateSource(template.source, tuple(template.special_tokens.items()), template.name, template.date)
