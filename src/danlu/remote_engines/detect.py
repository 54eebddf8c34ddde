"""Detects the kind of rollout server at an address, by requests to it."""

from __future__ import annotations

from dataclasses import dataclass

from danlu.core.errors import ModelError
from danlu.core.http_client import HTTPClient, RequestRefused
from danlu.core.terminal import print_status
from danlu.remote_engines.danlu_protocol import PREFIX
from danlu.remote_engines.danlu_server import DanluServer
from danlu.remote_engines.server_interface import RolloutServer
from danlu.remote_engines.sglang import SGLangServer
from danlu.remote_engines.vllm import VLLMServer


@dataclass(frozen=True)
class Demands:
    """The trainer's demands on a server of any kind.

    exact, push: as in `DanluServer`. bucket_bytes: as in `VLLMServer`. routes: whether the trainer replays the experts
    that tokens went to; `routes_required`: whether it takes no server without recorded routes.
    """

    exact: str | None = None
    push: bool = False
    bucket_bytes: int = 1 << 29
    routes: bool = False
    routes_required: bool = False


def detect_server(client: HTTPClient, demands: Demands) -> RolloutServer:
    """Returns the server at an address, not checked yet. Only read requests are sent.

    Raises ModelError for one that is of no kind known here, or that cannot meet the demands, and ConnectionLost.
    """
    url = client.url
    info = _answer(client, f"{PREFIX}/info")
    if isinstance(info, dict) and info.get("server") == "danlu":
        return DanluServer(client, exact=demands.exact, push=demands.push, routes=demands.routes)
    server = _other_kind(client, demands)
    name = server.name
    if demands.exact is not None:
        raise ModelError(
            f"{url}: {name} has kernels of its own, which do not round as the trainer's do. Use danlu serve --rollouts "
            "--numerics exact there, or numerics: fast"
        )
    if demands.push:
        raise ModelError(
            f"{url}: {name} takes no files over HTTP (rollout.server.push): let it read a folder that both see"
        )
    if demands.routes_required:
        raise ModelError(
            f"{url}: {name} does not say which experts tokens went to (rollout.routing_replay). Use danlu serve "
            "--rollouts there, or leave the key out: then routers choose again"
        )
    if demands.routes:
        print_status(without_routes(name))
    return server


def without_routes(name: str) -> str:
    """Warns a user with a policy with experts of a server that does not report the experts that tokens went to."""
    return (
        f"rollout: {name} does not say which experts tokens went to, so routers choose again in training; `gap` in "
        "metrics.jsonl says how far that is from the rollout"
    )


def _other_kind(client: HTTPClient, demands: Demands) -> RolloutServer:
    """vLLM or SGLang, whichever answers. Raises ModelError where neither does."""
    cards = _answer(client, "/v1/models")
    data = cards.get("data") if isinstance(cards, dict) else None
    if isinstance(data, list) and any(isinstance(card, dict) and card.get("owned_by") == "danlu" for card in data):
        raise ModelError(
            f"{client.url}: danlu serve was started without --rollouts, so its weights cannot be replaced: start it "
            "with that flag, where nobody but the trainer can reach it"
        )
    version = _answer(client, "/version")
    if isinstance(version, dict) and "version" in version:
        return VLLMServer(client, bucket_bytes=demands.bucket_bytes)
    info = _answer(client, "/server_info")
    if isinstance(info, dict) and "version" in info and "tp_size" in info:
        return SGLangServer(client)
    raise ModelError(
        f"{client.url}: neither danlu serve --rollouts nor vLLM nor SGLang answers there, as far as /version and "
        "/server_info tell"
    )


def _answer(client: HTTPClient, path: str) -> object:
    """Returns the answer to GET; None where there is no such path. Raises RequestRefused for a wrong API key."""
    try:
        answer: object = client.get(path)
    except RequestRefused as error:
        if error.status in (401, 403):
            raise
        return None
    return answer
