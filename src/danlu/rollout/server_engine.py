"""The engine over a rollout server, put together: which server, and how weights reach it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from danlu.errors import RecipeError
from danlu.models.config import ModelConfig
from danlu.rollout.hand_over import AdapterHandOver, FolderHandOver, GroupHandOver, HandOver
from danlu.rollout.http_engine import HTTPEngine
from danlu.rollout.server_interface import RolloutServer, ServerOptions
from danlu.rollout.sglang import SGLangServer
from danlu.rollout.stopping import Decode
from danlu.rollout.vllm import VLLMServer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class HandedAdapter:
    """The adapter that is handed over alone."""

    name: str
    write: Callable[[Path], None]
    """Writes it as a PEFT folder into an empty folder."""


def server_engine(
    kind: Literal["vllm", "sglang"],
    options: ServerOptions,
    config: ModelConfig,
    *,
    adapter: HandedAdapter | None = None,
    dtype: torch.dtype | None = None,
    decode: Decode | None = None,
    version: int = 0,
) -> HTTPEngine:
    """An engine over the server of `options`, checked.

    Args:
        adapter: with `hand_over: adapter`, what is handed over. Its name must not be that of the server's base.
        dtype: of the weights that are handed over; by default that which they are in.
        decode: token ids to text; see `HTTPEngine`.
        version: of the weights that the server has now, which are taken for the trainer's: a canary tells.

    Raises RecipeError for options that lack what their way of handing over needs, and what `HTTPEngine` raises.
    """
    hand_over = _hand_over(options, config, adapter, dtype)
    server: RolloutServer
    if kind == "vllm":
        server = VLLMServer(options.client, bucket_bytes=options.bucket_mib << 20)
    else:
        server = SGLangServer(options.client)
    return HTTPEngine(server, options, config, hand_over=hand_over, decode=decode, version=version)


def _hand_over(
    options: ServerOptions, config: ModelConfig, adapter: HandedAdapter | None, dtype: torch.dtype | None
) -> HandOver:
    if options.hand_over == "group":
        return GroupHandOver(config, options.group_address, options.bucket_mib, dtype)
    if options.exchange_folder is None:
        raise RecipeError(f"exchange_folder: missing; hand_over: {options.hand_over} lays files there for the server")
    folder = options.exchange_folder.resolve()  # the server's working folder is another
    if options.hand_over == "folder":
        return FolderHandOver(config, folder, options.bucket_mib, dtype)
    if adapter is None:
        raise RecipeError("hand_over: adapter: there is no adapter to hand over. Use folder or group")
    return AdapterHandOver(adapter.name, folder, adapter.write)
