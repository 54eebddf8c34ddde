"""Engines over stand-in servers, and what a trainer of the same model says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from builders.reference_attention import ReferenceAttention
from builders.rollout_servers import TIMEOUT_S, VLLM, SGLang, StandIn, open_gloo_group
from builders.tiny_adapters import adapter_set, perturb
from danlu.adapters.peft_folder import write_adapter
from danlu.core.http_client import HTTPClient
from danlu.models.decoder import Decoder
from danlu.recipe.sections.adapters import Lora
from danlu.remote_engines.fleet import ServerFleet
from danlu.remote_engines.hand_over import FolderHandOver, GroupHandOver, HandOver
from danlu.remote_engines.http_engine import HTTPEngine
from danlu.remote_engines.server_interface import RolloutServer, ServerOptions
from danlu.remote_engines.sglang import SGLangServer
from danlu.remote_engines.vllm import VLLMServer

KINDS = {"vllm": VLLM, "sglang": SGLang}
BUCKET_BYTES = 20_000  # several buckets for the small decoders of the tests


def servers_of(kind: str, options: ServerOptions) -> ServerFleet:
    """The only server of an engine, as `rollout.engine: vllm` and `sglang` have it."""

    def connect(client: HTTPClient) -> RolloutServer:
        if kind == "vllm":
            return VLLMServer(client, bucket_bytes=BUCKET_BYTES, open_group=open_gloo_group)
        return SGLangServer(client)

    return ServerFleet(options.clients, connect, reloads=False)


def only_server(engine: HTTPEngine) -> Any:
    (server,) = engine.servers.connected
    return server


def hand_over_of(route: str, model: Decoder, folder: Path) -> HandOver:
    if route == "group":
        hand_over = GroupHandOver(model.config, "127.0.0.1", 1)
        hand_over._bucket_bytes = BUCKET_BYTES
        return hand_over
    hand_over = FolderHandOver(model.config, folder, 1)
    hand_over._bucket_bytes = BUCKET_BYTES
    return hand_over


@contextmanager
def serving(
    kind: str,
    model: Decoder,
    *,
    hand_over: HandOver | None = None,
    decode: Any = None,
    grammars: Any = None,
    **settings: Any,
) -> Iterator[tuple[HTTPEngine, StandIn]]:
    """An engine and the stand-in behind it, which serves `model` itself; settings are of both."""
    options = {name: settings.pop(name) for name in ("reconnect_s", "connections") if name in settings}
    stand_in = KINDS[kind](model, **settings)
    engine = None
    try:
        options = ServerOptions((stand_in.url,), timeout_s=TIMEOUT_S, **{"reconnect_s": 0.2, **options})
        servers = servers_of(kind, options)
        engine = HTTPEngine(servers, options, model.config, hand_over=hand_over, decode=decode, grammars=grammars)
        yield engine, stand_in
    finally:
        stand_in.answer_gate.set()
        stand_in.served.resume()
        stand_in.served.go_on()
        if engine is not None:
            engine.close()
        stand_in.close()


def scores(model: Decoder, use: Callable[[str | None], None] = lambda adapter: None) -> Any:
    """A trainer's log-probabilities of answers, by a full pass for each sequence; see `canary.Score`."""

    def score(sequences: Sequence[Sequence[int]], starts: Sequence[int], adapter: str | None) -> list[list[float]]:
        use(adapter)
        rows = []
        for tokens, start in zip(sequences, starts, strict=True):
            ids = torch.tensor(tokens)
            with torch.no_grad():
                hidden = model(ids, torch.arange(len(ids)), ReferenceAttention((0, len(ids))))
                logprobs = model.logits(hidden[start - 1 : -1]).log_softmax(-1)
            rows.append(logprobs.gather(-1, ids[start:, None])[:, 0].tolist())
        return rows

    return score


def answer_in_part(engine: HTTPEngine, stand_in: StandIn, tokens: int = 3) -> None:
    """Sends what waits; the stand-in works on it until each answer has so many tokens, and waits there."""
    served = stand_in.served
    served.stop_after = tokens
    engine._dispatch()
    deadline = time.monotonic() + TIMEOUT_S
    sent = engine._in_flight._answers
    ids = [name for request_id in sent for name in (request_id, f"cmpl-{request_id}-0")]
    while sum(served.progress.get(name, 0) == tokens for name in ids) < len(sent):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def adapter_writer(model: Decoder, seed: int, size: float = 0.3) -> Callable[[Path], None]:
    """Writes an adapter of a model with numbers as after training."""
    adapters = adapter_set(model)
    adapters.add("policy", Lora(rank=2, targets=["q_proj", "down_proj"]))
    adapters.train_only("policy")
    perturb(adapters, "policy", seed=seed, size=size)

    def write(folder: Path) -> None:
        write_adapter(adapters, "policy", folder, base="base", base_fingerprint=None)

    return write
