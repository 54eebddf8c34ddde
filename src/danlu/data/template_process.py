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
from typing import Any

from danlu.core.errors import DataError
from danlu.data import resource_limits
from danlu.data.chat_template import ChatTemplate, Turn
from danlu.data.worker_pool import WorkerPool


@dataclass(frozen=True)
class _RenderJob:
    """The job of the process, for `WorkerPool`: the arguments of a `ChatTemplate`, and of its `render`; without those,
    whether the template shows tools."""

    memory_bytes: int

    def start(self) -> Callable[[tuple[Any, ...]], str | bool]:
        templates: dict[str, ChatTemplate] = {}
        resource_limits.MEMORY_BYTES = self.memory_bytes

        def render(task: tuple[Any, ...]) -> str | bool:
            source, *conversation = task
            key = repr(source)
            if key not in templates:
                templates[key] = ChatTemplate(*source)
            return templates[key].render(*conversation) if conversation else templates[key].takes_tools

        return render


class TemplateProcess:
    """The process, which starts with the first conversation, and again with the next where one has ended it.

    Conversations are rendered one after the other, whichever thread they come from.

    memory_bytes: the memory by which the process may grow while one is rendered.
    """

    def __init__(self, memory_bytes: int = resource_limits.MEMORY_BYTES) -> None:
        self._pool = WorkerPool(
            _RenderJob(memory_bytes), 1, ending=" by a chat template: shorten the conversation, or correct it"
        )
        self._lock = threading.Lock()

    def render(
        self,
        template: ChatTemplate,
        turns: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders as `ChatTemplate.render` does, and raises DataError as it does."""
        text = self._run(template, turns, tools, prompt, kwargs)
        assert isinstance(text, str), "conversations become texts"
        return text

    def takes_tools(self, template: ChatTemplate) -> bool:
        """Answers as `ChatTemplate.takes_tools` does."""
        return self._run(template) is True

    def close(self) -> None:
        """Ends the process."""
        self._pool.close()

    def _run(self, template: ChatTemplate, *conversation: Any) -> str | bool:
        source = (template.source, template.special_tokens, (), template.name, template.date, template.kwargs)
        try:
            with self._lock:
                return self._pool.run((source, *conversation))
        except RecursionError:
            raise DataError("the conversation is nested too deeply to be rendered") from None


@functools.cache
def template_process() -> TemplateProcess:
    """The one of this process. It ends with this one."""
    return TemplateProcess()
