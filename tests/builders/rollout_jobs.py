"""Engines for rollout processes of tests: over a small random decoder, and one that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from builders.small_config import small_config
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.request import Request
from danlu.models.decoder import Decoder

CONFIG = small_config()


def small_decoder_of(seed: int) -> Decoder:
    """With weights that are large enough that text varies."""
    decoder = Decoder(CONFIG)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return decoder.requires_grad_(False)


class FailingEngine(EmbeddedEngine):
    """Fails when it is asked the request with a number."""

    dies_at: int | None = None

    def submit(self, request: Request, *arguments: Any, **more: Any) -> None:
        if request.number == self.dies_at:
            raise ValueError(f"at {request.number}")
        super().submit(request, *arguments, **more)

    def restore(self, state: dict[str, Any], *arguments: Any) -> None:
        if any(entry["request"]["number"] == self.dies_at for entry in state["requests"]):
            raise ValueError(f"at {self.dies_at}")
        super().restore(state, *arguments)


@dataclass(frozen=True)
class SmallDecoderJob:
    """A `rollout_worker.EngineJob`. dies_at: the request at which its process ends."""

    dies_at: int | None = None

    @contextmanager
    def __call__(self) -> Iterator[EmbeddedEngine]:
        torch.set_num_threads(1)
        engine = FailingEngine(small_decoder_of(0))
        engine.dies_at = self.dies_at
        yield engine
