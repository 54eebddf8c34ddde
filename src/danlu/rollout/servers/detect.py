"""Which kind of rollout server listens at an address, found by asking."""

from __future__ import annotations

from dataclasses import dataclass

from danlu.errors import ModelError
from danlu.http_client import HTTPClient, RequestRefused
from danlu.rollout.servers.danlu_protocol import PREFIX
from danlu.rollout.servers.danlu_server import DanluServer
from danlu.rollout.servers.server_interface import RolloutServer
from danlu.rollout.servers.sglang import SGLangServer
from danlu.rollout.servers.vllm import VLLMServer


@dataclass(frozen=True)
class Demands:
    """What a trainer asks of a server of any kind.

    exact, push: as in `DanluServer`. bucket_bytes: as in `VLLMServer`.
    """

    exact: str | None = None
    push: bool = False
    bucket_bytes: int = 1 << 29


def detect_server(client: HTTPClient, demands: Demands) -> RolloutServer:
    """The server at an address, not checked yet. Nothing but questions is asked.

    Raises ModelError for one that is of no kind known here, or that cannot do what is demanded, and ConnectionLost.
    """
    url = client.url
    info = _answer(client, f"{PREFIX}/info")
    if isinstance(info, dict) and info.get("server") == "danlu":
        return DanluServer(client, exact=demands.exact, push=demands.push)
    name = _other_kind(client)
    if demands.exact is not None:
        raise ModelError(
            f"{url}: {name} has kernels of its own, which do not round as the trainer's do. Use danlu serve --rollouts "
            "--numerics exact there, or numerics: fast"
        )
    if demands.push:
        raise ModelError(
            f"{url}: {name} takes no files over HTTP (rollout.server.push): let it read a folder that both see"
        )
    if name == SGLangServer.name:
        return SGLangServer(client)
    return VLLMServer(client, bucket_bytes=demands.bucket_bytes)


def _other_kind(client: HTTPClient) -> str:
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
        return VLLMServer.name
    info = _answer(client, "/server_info")
    if isinstance(info, dict) and "version" in info and "tp_size" in info:
        return SGLangServer.name
    raise ModelError(
        f"{client.url}: neither danlu serve --rollouts nor vLLM nor SGLang answers there, as far as /version and "
        "/server_info tell"
    )


def _answer(client: HTTPClient, path: str) -> object:
    """What GET answers; None where there is no such path. Raises RequestRefused for a key that is wrong."""
    try:
        answer: object = client.get(path)
    except RequestRefused as error:
        if error.status in (401, 403):
            raise
        return None
    return answer
