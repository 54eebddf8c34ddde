"""Adapters that are loaded and dropped while a server runs, by vLLM's endpoints."""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from danlu.adapters.adapter_config import AdapterFolder, adapter_stack, open_adapter
from danlu.assembly.base_model import check_base, find_base
from danlu.core.errors import ModelError
from danlu.inference.engine_adapters import LoadableAdapters
from danlu.inference.generation_config import end_tokens
from danlu.inference.load_model import load_chat_tokenizer
from danlu.inference.resolve_model import adapter_tokenizer_folder
from danlu.serving.api_endpoints import as_api_errors, in_thread, read_request
from danlu.serving.openai_api import ApiError, Body
from danlu.serving.served_models import ServedModel, ServedModels, served_model

if TYPE_CHECKING:
    from danlu.inference.chat_tokenizer import ChatTokenizer
    from danlu.inference.embedded import EmbeddedEngine
    from danlu.inference.resolve_model import ResolvedModel
    from danlu.serving.engine_thread import EngineThread

LOOK_AGAIN_S = 0.05
"""Seconds between two looks whether a dropped adapter still answers."""


class LoadBody(Body):
    """POST /v1/load_lora_adapter, as vLLM has it."""

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False
    """Whether it takes the place of one of that name, which goes on with the answers that it has begun."""


class UnloadBody(Body):
    """POST /v1/unload_lora_adapter, as vLLM has it."""

    lora_name: str = Field(min_length=1)


@dataclass
class AdapterLoader:
    """Loads adapters into the engine of a server.

    Attributes:
        root: the folder below which they have to lie.
        chat_template: a file in place of their tokenizers' own templates.
        reasoning: see `served_models`.
    """

    resolved: ResolvedModel
    engine: EmbeddedEngine
    adapters: LoadableAdapters
    base_tokenizer: ChatTokenizer
    root: Path
    chat_template: Path | None = None
    reasoning: bool = True
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def read(self, path: str) -> tuple[AdapterFolder, ChatTokenizer]:
        """Reads the config of an adapter, and its tokenizer or the base's.

        Raises ApiError for a folder that is not there, or not below the root; ModelError for one of another base.
        """
        given = Path(path).expanduser()
        folder = (given if given.is_absolute() else self.root / given).resolve()
        if not folder.is_relative_to(self.root.resolve()):
            raise ApiError(
                f"lora_path: {path} is not below {self.root}, the server's --adapters-root", param="lora_path"
            )
        if not folder.is_dir():
            raise ApiError(f"lora_path: no folder {folder} on the server's machine", param="lora_path", status=404)
        stack = adapter_stack(folder)
        if len(stack) > 1:
            raise ModelError(f"{folder}: trained on top of another adapter: start the server with it (--adapter)")
        (adapter,) = stack
        check_base(adapter, self.resolved.base or find_base(self.resolved.folder))
        config = self.engine.config
        if beyond := [token.text for token in adapter.tokens(config.vocab_rows) if token.id >= config.vocab_size]:
            raise ModelError(
                f"{folder}: was trained with the new token {beyond[0]!r}, for which the model that is served has no "
                "row: start the server with the adapter (--adapter)"
            )
        tokenizer_folder = adapter_tokenizer_folder((adapter,), self.resolved.folder)
        if tokenizer_folder == self.resolved.folder:
            return open_adapter(adapter.path), self.base_tokenizer
        tokenizer = load_chat_tokenizer(tokenizer_folder, self.chat_template, model=self.resolved.folder)
        return open_adapter(adapter.path), tokenizer

    def load(self, name: str, folder: AdapterFolder, tokenizer: ChatTokenizer) -> ServedModel:
        """Loads an adapter, in the engine's thread. Raises ModelError for one that does not fit the base."""
        # Of its own: what the cache has of an earlier one of that name is not its.
        in_engine = f"{name}#{next(self._numbers)}"
        self.adapters.put(in_engine, folder)
        stops = end_tokens(tokenizer.tokenizer, self.engine.config, self.resolved.folder, folder.path)
        virtual = len(self.adapters.virtual_token_ids(in_engine))
        config, folders = self.engine.config, (self.resolved.tokenizer_folder, self.resolved.folder)
        return served_model(name, in_engine, tokenizer, stops, virtual, config, folders, reasoning=self.reasoning)

    def drop(self, in_engine: str) -> bool:
        """Drops an adapter where no answer needs it any more; returns whether that is so. In the engine's thread."""
        if self.engine.uses(in_engine):
            return False
        self.adapters.drop(in_engine)
        return True


class AdapterEndpoints:
    """The endpoints."""

    def __init__(self, models: ServedModels, engine: EngineThread, loader: AdapterLoader) -> None:
        self._models, self._engine, self._loader = models, engine, loader
        self._loaded: dict[str, ServedModel] = {}
        self._drops: set[asyncio.Task[None]] = set()
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    def close(self) -> None:
        """Ends the thread that reads folders."""
        self._reading.shutdown(wait=False, cancel_futures=True)

    async def load(self, request: Request) -> Response:
        body = await read_request(LoadBody, request)
        name = body.lora_name
        if name in self._models.names and not (body.load_inplace and name in self._loaded):
            raise ApiError(f"lora_name: {name} is there already; drop it first, or load_inplace", param="lora_name")
        loaded: list[ServedModel] = []
        with as_api_errors("lora_path"):
            folder, tokenizer = await in_thread(self._reading, lambda: self._loader.read(body.lora_path))
            await self._engine.do(lambda: loaded.append(self._loader.load(name, folder, tokenizer)))
        before = self._loaded.get(name)
        (self._loaded[name],) = loaded
        self._models.put(loaded[0])
        if before is not None:
            self._drop_later(before)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        name = (await read_request(UnloadBody, request)).lora_name
        if name not in self._loaded:
            known = f"there are {', '.join(self._loaded)}" if self._loaded else "there are none"
            raise ApiError(f"lora_name: no {name!r:.100} was loaded; {known}", param="lora_name", status=404)
        self._models.remove(name)
        self._drop_later(self._loaded.pop(name))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _drop_later(self, model: ServedModel) -> None:
        """Drops an adapter when the answers that it has begun are complete."""
        task = asyncio.ensure_future(self._drop(model))
        self._drops.add(task)
        task.add_done_callback(self._drops.discard)

    async def _drop(self, model: ServedModel) -> None:
        assert model.adapter is not None, "it is an adapter"
        name, dropped = model.adapter, list[bool]()
        while not any(dropped):
            try:
                await self._engine.do(lambda: dropped.append(self._loader.drop(name)))
            except Exception:  # the engine has ended, and all of its adapters with it
                return
            await asyncio.sleep(LOOK_AGAIN_S)
