"""The weights of `danlu serve --rollouts`, which a trainer replaces and compares.

Methods that change something are called in the engine's thread, between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from danlu.adapters.adapter_config import open_adapter
from danlu.assembly.base_model import weight_layouts
from danlu.assembly.frozen_base import adapters_of
from danlu.core.errors import ModelError
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.inference.engine_adapters import ReplaceableAdapters
from danlu.inference.load_engine import engine_of
from danlu.inference.load_model import LoadedModel
from danlu.models.config import parameter_shapes
from danlu.models.decoder import Decoder
from danlu.models.hf_layout import HFTensor, hf_tensors
from danlu.models.loading import stored_values
from danlu.remote_engines.danlu_protocol import float_digest

if TYPE_CHECKING:
    from torch import Tensor

UNKNOWN = "as started"
"""The label of weights that no trainer has named."""
INCOMPLETE = "incomplete"
"""The label of weights of which only some were replaced."""


@dataclass
class ServedWeights:
    """The weights of a server's model, with the engine that answers with them.

    dtype: of activations. adapters: of the engine.
    """

    engine: EmbeddedEngine
    model: Decoder
    dtype: torch.dtype
    adapters: ReplaceableAdapters
    _labels: dict[int, str] = field(default_factory=dict)
    """Labels by the engine's versions, which count the replacements of weights since the server was started."""

    def label_of(self, version: int) -> str:
        """The label of the weights that a token was drawn with."""
        return self._labels.get(version, UNKNOWN)

    def description(self) -> dict[str, Any]:
        """Facts that a trainer has to know, as JSON."""
        return {
            "label": self.label_of(self.engine.version),
            "vocab_size": self.model.config.vocab_size,
            "context": self.engine.longest,
            "dtype": str(self.dtype).removeprefix("torch."),
            "exact": self.engine.exact,
            "asleep": self.engine.is_asleep,
            "paused": self.engine.is_paused,
            "torch": torch.__version__,
        }

    def name(self, label: str) -> None:
        """Gives the weights that are loaded a label."""
        self._labels[self.engine.version] = label

    def load_folder(self, folder: Path, label: str) -> None:
        """Replaces all weights by those of a model folder, and labels them.

        Raises ModelError for a folder with other tensors than the model's, before anything is replaced, and for
        weights that are not finite.
        """
        if not folder.is_dir():
            raise ModelError(
                f"{folder}: no such folder on the server's machine: trainer and server have to see the weights under "
                "the same path (exchange_folder), or the trainer sends them: rollout.server.push: true"
            )
        parameters = dict(self.model.named_parameters())
        packed = [name for name in parameter_shapes(self.model.config) if name not in parameters]
        if packed or self.adapters.below:
            why = "its base is quantized" if packed else "adapters are on top of its weights"
            raise ModelError(f"whole weights cannot be replaced in this server: {why}. Serve the model that is trained")
        values = stored_values(folder, self.model.config, layouts=weight_layouts(folder))
        first = next(values)  # the headers of all files are checked with it
        self._replaced(INCOMPLETE)
        if self.engine.exact:  # which training is with weights in float32, norms' for example
            self.adapters.cast_base(torch.float32)
        self.engine.update(self.engine.version, chain([first], values))
        self.name(label)

    def load_adapter(self, name: str, folder: Path) -> None:
        """Puts an adapter in place of one of that name. Its weights have no label until they are given one.

        Raises ModelError for a folder that holds none, or one of another base.
        """
        if not folder.is_dir():
            raise ModelError(
                f"{folder}: no such folder on the server's machine: trainer and server have to see the adapter under "
                "the same path (exchange_folder), or the trainer sends it: rollout.server.push: true"
            )
        opened = open_adapter(folder)
        self.adapters.cast_base(self.dtype)  # as a frozen base has it in training
        self.adapters.put(name, opened)
        self._replaced(UNKNOWN)

    def digests(self, names: Sequence[str]) -> dict[str, str]:
        """SHA-256 of tensors as model folders name them, in float32; without those that the server has otherwise."""
        wanted = set(names)
        values = ((tensor, self._value(tensor)) for tensor in hf_tensors(self.model.config) if tensor.name in wanted)
        return {tensor.name: float_digest(value) for tensor, value in values if value is not None}

    def _replaced(self, label: str) -> None:
        """Counts one more version, with no cache of the ones before."""
        self.engine.update(self.engine.version + 1)
        self.name(label)

    def _value(self, tensor: HFTensor) -> Tensor | None:
        parameters = dict(self.model.named_parameters())
        if not all(name in parameters for name in tensor.parameters):
            return None
        return tensor.assembled(lambda name: parameters[name].detach())


def served_weights(loaded: LoadedModel, options: EngineOptions) -> ServedWeights:
    """Makes an engine with weights that a trainer may replace.

    Adapters that the model was loaded with stay, below those that come. Raises the errors of `engine_of`.
    """
    stacks = loaded.stacks
    if stacks is None:
        adapters = ReplaceableAdapters(adapters_of(loaded.model, device=loaded.model.embed_tokens.weight.device))
    else:
        adapters = ReplaceableAdapters(stacks.adapters, stacks.names[0])
    engine = engine_of(loaded, options, adapters)
    return ServedWeights(engine, loaded.model, loaded.dtype, adapters)
