"""`danlu.load`: a model that generates, chats and scores texts, from a Python program or a notebook."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from danlu.cli.model_flags import ModelFlags, SamplingFlags, check_utf8, model_problems
from danlu.core.errors import DataError, RecipeError
from danlu.data.raw_rows import RawRow
from danlu.inference.engine import EngineOptions
from danlu.inference.prompt_rows import PromptRow, encode_rows, prompt_row
from danlu.inference.request import Request, SamplingOptions
from danlu.inference.resolve_model import resolve_model

if TYPE_CHECKING:
    from danlu.inference.embedded import EmbeddedEngine
    from danlu.inference.load_model import LoadedModel
    from danlu.inference.request import Completion
    from danlu.inference.resolve_model import ResolvedModel


class TokenLogprob(NamedTuple):
    """A token of a text and its log-probability."""

    id: int
    text: str
    """The token by itself; empty for one without text, and with U+FFFD for a part of a character."""
    logprob: float
    """log softmax(logits) over the whole vocabulary, in nats."""


def load(
    path: str | os.PathLike[str],
    *,
    adapter: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str | None = None,
) -> Model:
    """Loads a model to generate, chat and score with.

    Args:
        path: a model or adapter folder, a finished run, or a hub id.
        adapter: an adapter folder or run on top of it. Adapters are merged into the weights where they can be.
        base: of an adapter: the model it sits on, if not where it was trained.
        dtype: auto (as stored), fp32, bf16 or fp16.
        device: auto, cpu or cuda.
        quantization: a kind (nf4, int4, fp8, ...) or none; by default as an adapter was trained, or stored.

    Raises ModelError or DataError for a folder that is no model, ResourceError for a device that is not there, and
    RecipeError for an argument that is wrong.
    """
    if problems := model_problems(dtype, device, quantization):
        raise RecipeError(problems)
    flags = ModelFlags(dtype=dtype, device=device, quantization=quantization)
    adapters = [] if adapter is None else [os.fspath(adapter)]
    resolved = resolve_model(os.fspath(path), None if base is None else os.fspath(base), adapters)
    if len(resolved.stacks) > 1:
        raise RecipeError(f"adapter: {resolved.given_path} is an adapter already, and a model answers with one of them")
    return Model(resolved, flags.load(resolved, flags.load_tokenizer(resolved), merged=True))


class Model:
    """A language model with its tokenizer; made by `load`.

    The same arguments give the same text. Where sampling options are left out, those of the model's
    generation_config.json are taken, else temperature 0.8 and top_p 0.95.
    """

    def __init__(self, resolved: ResolvedModel, loaded: LoadedModel) -> None:
        self._resolved, self._loaded = resolved, loaded
        self._engine: EmbeddedEngine | None = None
        self._options = EngineOptions()

    def __repr__(self) -> str:
        return f"Model({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """The folder of the model, or of its adapter."""
        return self._resolved.given_path

    @overload
    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int = ...,
        temperature: float | None = ...,
        top_p: float | None = ...,
        top_k: int | None = ...,
        min_p: float | None = ...,
        repetition_penalty: float | None = ...,
        stop: str | Sequence[str] = ...,
        seed: int = ...,
    ) -> str: ...
    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        *,
        max_new_tokens: int = ...,
        temperature: float | None = ...,
        top_p: float | None = ...,
        top_k: int | None = ...,
        min_p: float | None = ...,
        repetition_penalty: float | None = ...,
        stop: str | Sequence[str] = ...,
        seed: int = ...,
    ) -> list[str]: ...
    def generate(
        self,
        prompt: str | list[str] | tuple[str, ...],
        *,
        max_new_tokens: int = 256,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: str | Sequence[str] = (),
        seed: int = 0,
    ) -> str | list[str]:
        """Continues a text, or each of several, which are answered together; returns the new text alone.

        The prompt is taken as it is, without a chat template. stop: texts that end the answer before them. The draws of
        a text depend on the seed and its place in the list, not on its neighbours.
        Raises DataError for a prompt that the model cannot continue, RecipeError for an argument that is wrong.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        rows = [_text_row(text, number, len(prompts)) for number, text in enumerate(prompts)]
        sampling = SamplingFlags(temperature, top_p, top_k, min_p, repetition_penalty, _texts(stop), seed)
        texts = [completion.text for completion in self._answer(rows, sampling, max_new_tokens)]
        return texts[0] if isinstance(prompt, str) else texts

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_new_tokens: int = 1024,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: str | Sequence[str] = (),
        seed: int = 0,
    ) -> str:
        """Answers a conversation by the model's chat template.

        messages: role and content of each turn, the last one to be answered; or one user's turn as a text.
        tools: functions that the assistant may call, as templates take them.
        Raises DataError for a conversation that cannot be rendered, or a model without a template.
        """
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
        columns = {"messages": turns, "system": system, "tools": None if tools is None else [*tools]}
        given = {name: value for name, value in columns.items() if value is not None}
        self._loaded.chat_tokenizer.require_chat_template()
        row = prompt_row(RawRow(0, "messages", given))
        sampling = SamplingFlags(temperature, top_p, top_k, min_p, repetition_penalty, _texts(stop), seed)
        return self._answer([row], sampling, max_new_tokens)[0].text

    def logprobs(self, text: str, *, prompt: str = "") -> list[TokenLogprob]:
        """The log-probability of each token of a text that has a token before it.

        prompt: a text before it, with tokens of its own, which are not scored. Without a prompt the beginning-of-text
        token stands before the text where the tokenizer adds one; else the first token has nothing that it follows,
        and is left out.
        Raises DataError for a text that does not fit into the model's context.
        """
        chat_tokenizer, context = self._loaded.chat_tokenizer, self._resolved.config.context_length
        before = chat_tokenizer.encode_prompt(check_utf8(prompt, "prompt")) if prompt else []
        check_utf8(text, "text")
        scored = chat_tokenizer.tokenizer.encode(text) if prompt or not text else chat_tokenizer.encode_prompt(text)
        if not scored or len(before) + len(scored) == 1:
            return []
        if (length := self._resolved.virtual_tokens_per_prompt + len(before) + len(scored)) >= context:
            raise DataError(
                f"text: {length} tokens with all that stands before it, and the model scores fewer than {context} "
                "(max_position_embeddings) at once: score it in parts"
            )
        request = Request(0, (*before, *scored), SamplingOptions(), 1, prompt_logprobs=True)
        (completion,) = self._generate([request])
        assert completion.prompt_logprobs is not None, "they were asked for"
        shown = scored if before else scored[1:]
        values = completion.prompt_logprobs[len(completion.prompt_logprobs) - len(shown) :]
        decode = chat_tokenizer.decode
        return [TokenLogprob(id_, decode([id_]), value) for id_, value in zip(shown, values, strict=True)]

    def _answer(self, rows: Sequence[PromptRow], sampling: SamplingFlags, max_new_tokens: int) -> list[Completion]:
        """Answers each row, in their order. Raises RecipeError for a wrong option, DataError for a wrong row."""
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise RecipeError(f"max_new_tokens: {max_new_tokens!r} is no number of tokens. Use 1 or more")
        if "" in sampling.stops:
            raise RecipeError("stop: an empty text would stop before the first token")
        options, chat_tokenizer = sampling.options(self._resolved), self._loaded.chat_tokenizer
        silent, texts = chat_tokenizer.split_stops(sampling.stops)
        stop_ids = self._loaded.stop_ids | silent
        virtual_tokens = self._resolved.virtual_tokens_per_prompt
        prompts = encode_rows(rows, chat_tokenizer, self._resolved.config, virtual_tokens=virtual_tokens)
        return self._generate(
            [
                Request(number, tokens, options, max_new_tokens, stop_ids=stop_ids, stop_strings=tuple(texts))
                for number, tokens in enumerate(prompts)
            ]
        )

    def _generate(self, requests: Sequence[Request]) -> list[Completion]:
        """The answers of the engine, which is made where there is none yet with room for the requests."""
        # Here: they load torch, and `load` has a wrong argument said before.
        from danlu.inference.load_engine import engine_of, with_room_for

        options = with_room_for(self._loaded, requests, self._options)
        if self._engine is None or options != self._options:
            self._engine, self._options = None, options  # the memory of the old one goes first
            self._engine = engine_of(self._loaded, options)
        try:
            return self._engine.generate(requests)
        except BaseException:
            self._engine = None  # with the requests that it has taken
            raise


def _text_row(text: str, number: int, of: int) -> PromptRow:
    """A prompt as a row. Raises DataError for one that is no text."""
    where = "prompt" if of == 1 else f"prompt {number}"
    if not isinstance(text, str):
        raise DataError(f"{where}: {text!r} is no text. Model.chat takes messages")
    return PromptRow.of_text(check_utf8(text, where), where)


def _texts(stop: str | Iterable[str]) -> list[str]:
    return [stop] if isinstance(stop, str) else [*stop]
