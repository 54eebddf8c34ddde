"""What a run starts from."""

from __future__ import annotations

from typing import Any, Literal

from danlu.recipe.sections.base import Section


class Model(Section):
    """Where the weights start."""

    short = "path"
    one_of = ("path", "preset", "config")

    path: str | None = None
    """A folder in Hugging Face form, a finished danlu run, or a hub id (read from the local cache when offline)."""
    preset: Literal["tiny", "small", "lenet5"] | None = None
    """A model from scratch: Llama-shaped, tiny (about 5M parameters) or small (about 58M), with the vocabulary of the
    tokenizer; for stage classify, lenet5 (61,706 parameters)."""
    config: str | dict[str, Any] | None = None
    """From scratch: a config.json (path) or its content. Weights are drawn from (seed, parameter name)."""
    tokenizer: str | None = None
    """Tokenizer folder or hub id; by default the one in `path`."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's own chat template."""
    chat_template_date: str | None = None
    """The day (2026-11-22) that a chat template which writes the date (`strftime_now`) takes for today. By default the
    day on which the run begins, which the run's recipe then holds: a resumed run goes on with it."""
    adapters: list[str] = []
    """Adapter folders (danlu's or PEFT's, or finished runs) to start from, one upon the other. Without `adapter` they
    are merged and the whole model is trained; with `adapter: continue` the last one is trained on; with any other
    `adapter` they stay as they are below the new one."""
