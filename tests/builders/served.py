"""A server in a thread of its own, on a free port of this machine, and what tests ask it with."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.inference.load_engine import engine_of
from danlu.inference.load_model import LoadedModel, load_chat_tokenizer, load_model
from danlu.inference.resolve_model import ResolvedModel, resolve_model
from danlu.serving.adapter_endpoints import AdapterLoader
from danlu.serving.served_models import ServedModels, served_models
from danlu.serving.served_weights import ServedWeights, served_weights
from danlu.serving.server import Server, ServerOptions, bind, url_of

PATIENCE_S = 20


def wait_until(is_so: Callable[[], bool]) -> None:
    """Raises AssertionError after `PATIENCE_S` seconds."""
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.01)


@dataclass(frozen=True)
class Loaded:
    """A model folder with its adapters, loaded once for several servers."""

    resolved: ResolvedModel
    model: LoadedModel
    served: ServedModels

    @classmethod
    def of(cls, folder: Path, adapters: Sequence[Path] = (), **named: Any) -> Loaded:
        resolved = resolve_model(str(folder), adapters=[str(path) for path in adapters])
        model = load_model(resolved, load_chat_tokenizer(resolved.tokenizer_folder, model=resolved.folder))
        return cls(resolved, model, served_models(resolved, model, **named))

    def engine(self, options: EngineOptions | None = None) -> EmbeddedEngine:
        return engine_of(self.model, options or EngineOptions(cache_gib=0.01))


def model_with(template: str, base: Path, folder: Path) -> Loaded:
    """A model folder with another chat template, and a context for calls of tools and JSON."""
    copied = Path(shutil.copytree(base, folder))
    (copied / "chat_template.jinja").write_text(template)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    return Loaded.of(copied)


@dataclass
class Served:
    """A server that answers. failure: what its thread ended with."""

    server: Server
    url: str
    failure: BaseException | None = None

    def client(self, **options: Any) -> OpenAI:
        """OpenAI's own client, which asks once and gives up soon."""
        return OpenAI(**{"base_url": self.url, "api_key": "none", "max_retries": 0, "timeout": PATIENCE_S, **options})

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    @property
    def blocks_used(self) -> int:
        return self.server.engine.statistics.blocks_used


@contextmanager
def serving_rollouts(
    folder: Path, *, port: int = 0, dtype: str = "auto", exact: bool = False, **options: Any
) -> Iterator[Served]:
    """A server of a model folder whose weights a trainer may replace."""
    resolved = resolve_model(str(folder))
    tokenizer = load_chat_tokenizer(resolved.tokenizer_folder, model=resolved.folder)
    loaded = load_model(resolved, tokenizer, precision=dtype)  # type: ignore[arg-type]
    weights = served_weights(loaded, EngineOptions(cache_gib=0.01, exact=exact, routes=True))
    options = {"weights_root": Path("/"), **options}  # trainers of tests hand weights over in temporary folders
    with serving(served_models(resolved, loaded), weights.engine, weights=weights, port=port, **options) as served:
        yield served


@contextmanager
def serving(
    models: ServedModels,
    engine: EmbeddedEngine,
    *,
    weights: ServedWeights | None = None,
    adapters: AdapterLoader | None = None,
    port: int = 0,
    **options: Any,
) -> Iterator[Served]:
    """Serves until the block ends."""
    listener = bind("127.0.0.1", port)
    settings = ServerOptions(**{"seed": 0, "quiet": True, **options})
    server = Server(models, engine, listener, settings, weights, adapters)
    served = Served(server, url_of(listener))

    def listen() -> None:
        try:
            server.listen()
        except BaseException as error:
            served.failure = error

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        yield served
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server does not end"


def ask(url: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
    """Status and JSON of an answer, asked by hand."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, body, named)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            status, text = response.status, response.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    return status, json.loads(text) if text.startswith(b"{") else text.decode()


def curl(*arguments: str) -> str:
    """What curl prints."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not here")
    command = ["curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", "20", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
