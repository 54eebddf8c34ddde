"""PPO's value model where it is not a head on the policy: an adapter on the policy's base, or a decoder of its own.

It is trained together with the policy; the head that makes a value of a hidden state belongs to the objective.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from danlu.assembly.parameters import own_name
from danlu.core.layer_types import TRAINED, Attend
from danlu.core.types import Batch
from danlu.memory.recomputed_function import recomputed_within
from danlu.models.decoder import Decoder
from danlu.recipe.value import VALUE
from danlu.stages.outputs import DecoderOutputs
from danlu.stages.roles import DecoderPass

if TYPE_CHECKING:
    from danlu.adapters.adapter_set import AdapterSet


@dataclass(frozen=True, kw_only=True)
class Critic(DecoderPass):
    """A model of values: a decoder, or the policy's with another adapter than the policy's. Its head is [1, D]."""

    adapters: AdapterSet | None = None  # of the policy, with that of the critic; None: `model` is the critic's own

    def __call__(
        self, batch: Batch, filled: Batch, attend: Attend, gradient_scale: float, x: Tensor | None = None
    ) -> DecoderOutputs:
        """Computes the critic's outputs for `batch`, which goes through it as `filled`; unlike those of frozen models
        they carry gradients. x: the output of the chunk before the last one, where the critic is in several."""
        with self._as_critic():
            return self.outputs(batch, filled, attend, x, gradient_scale)

    def hidden_states(self, batch: Batch, filled: Batch, attend: Attend, chunk: int, x: Tensor | None) -> Tensor:
        """Those behind a chunk before the last one: see `DecoderPass.hidden`."""
        with self._as_critic():
            return self.hidden(batch, filled, attend, chunk, x)

    def tensors(self) -> dict[str, Tensor]:
        """The critic's trained tensors without its head, by name and live."""
        return critic_tensors(self.adapters, self.model if self.adapters is None else None)

    def _as_critic(self) -> AbstractContextManager[None]:
        """A context in which the model has the critic's adapter, also where its activations are recomputed."""
        return nullcontext() if self.adapters is None else recomputed_within(self._switched_on)

    def _switched_on(self) -> AbstractContextManager[None]:
        assert self.adapters is not None
        below = [name for name in self.adapters.active if name not in (TRAINED, VALUE)]
        return self.adapters.switched_to([*below, VALUE])


def critic_folder(result: Path) -> Path:
    """The folder of the value model, next to the result of a run."""
    return result.with_name(f"{result.name}-value")


def critic_tensors(adapters: AdapterSet | None, own: Decoder | None) -> dict[str, Tensor]:
    """The trained tensors of a critic without its head, by name and live."""
    if own is not None:
        return {own_name(name): parameter.detach() for name, parameter in own.named_parameters()}
    if adapters is None or VALUE not in adapters.added:
        return {}
    return {name: parameter.detach() for name, parameter in adapters.tensors(VALUE).items()}
