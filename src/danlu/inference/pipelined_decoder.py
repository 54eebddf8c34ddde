"""The forward pass of a rollout through a decoder that is split into stages (pipeline parallelism).

Every stage has the same scheduler with the same requests, so all of them know the shape of the chunk before's output.
The stage with the last chunk draws the next tokens and sends them to the others, so that their schedulers go on alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from danlu.core.layer_types import Attend
from danlu.inference.rank_status import PeerFailedError
from danlu.models.decoder import Decoder
from danlu.models.router_replay import NO_ROUTE
from danlu.parallel.pipeline import Messages, Pipeline
from danlu.parallel.schedules import Action

T = TypeVar("T")


class PipelinedDecoder(nn.Module):
    """The chunks of a decoder that this process has, in a pass through the chunks of all stages.

    It is a module so that hooks may stand around a whole pass, with its messages.
    """

    def __init__(self, decoder: Decoder, pipeline: Pipeline) -> None:
        super().__init__()
        self.decoder, self.pipeline = decoder, pipeline

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        dtype: torch.dtype,
        lengths: Tensor | None = None,
    ) -> Tensor | None:
        """Hidden states [T, D] behind the last chunk; None on stages that do not have it. All stages call it.

        Arguments are those of `Decoder.forward`, the same on all stages.
        """
        ((actions, _),) = self.pipeline.evaluation_rounds(1)
        messages = Messages(self.pipeline)
        hidden: dict[int, Tensor] = {}  # by the chunk that it goes into
        for action in actions:
            match action:
                case Action(kind="receive", chunk=int(chunk)):
                    shape = len(tokens), self.decoder.config.hidden_size
                    into = torch.empty(shape, dtype=dtype, device=tokens.device)
                    (hidden[chunk],) = messages.receive(action, (into,))()
                case Action(kind="forward", chunk=int(chunk)):
                    x = hidden.pop(chunk, None)
                    hidden[chunk + 1] = self.decoder(tokens, positions, attend, dtype, lengths, chunk=chunk, x=x)
                case Action(kind="send", chunk=int(chunk)):
                    messages.send(action, (hidden.pop(chunk + 1),))
        messages.finish()
        return hidden.get(self.pipeline.num_chunks)

    def with_routes_elsewhere(self, routes: Tensor) -> Tensor:
        """Routes [T, L, k] int16 of the layers of this stage with those of all stages, each of which calls this."""
        assert NO_ROUTE < 0, "the maximum is what the stage of a layer says"
        return self.pipeline.stages.max(routes.int()).to(routes.dtype)  # gloo and NCCL reduce no int16

    def on_last(self, compute: Callable[[], T]) -> T:
        """Runs `compute` on the stage with the last chunk, and returns its result on all stages.

        Its error is raised there, and PeerFailedError on the other stages. All stages call this.
        """
        stages, last = self.pipeline.stages, self.pipeline.last_stage
        result: tuple[T] | None = None  # None where it has failed
        try:
            if stages.index == last:
                result = (compute(),)
        finally:
            result = stages.broadcast_object(result, last)
        if result is None:
            raise PeerFailedError
        return result[0]
