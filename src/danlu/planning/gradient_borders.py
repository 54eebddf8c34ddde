"""The borders of a rank's sublayers that gradients cross, by the names of its trained parameters. Imports no torch.

Halves of layers are numbered: attention of the first layer here, its feed-forward network, attention of the second one,
and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from danlu.memory.layer_plan import LayerPlan
from danlu.models.chunks import Chunks
from danlu.models.config import ModelConfig
from danlu.models.tensor_cut import OF_EACH_LAYER

HALVES = ("attention", "mlp")
_NOT_IN_FRONT = tuple(f"{name}." for name in ("layers", "norm", "lm_head", *OF_EACH_LAYER))
"""The beginnings of parameters that the first layer's input does not depend on."""


@dataclass(frozen=True)
class TrainedNames:
    """The names of the parameters that a rank trains."""

    names: tuple[str, ...]

    def within(self, module: str) -> bool:
        """Whether a module has some of them."""
        return module in self._owners

    def of(self, module: str) -> list[str]:
        """The names of those in a module, within it."""
        prefix = f"{module}."
        return [name.removeprefix(prefix) for name in self.names if name.startswith(prefix)]

    @cached_property
    def outside(self) -> bool:
        """Whether one is in front of all layers: the embedding, or something on it."""
        return any(not name.startswith(_NOT_IN_FRONT) for name in self.names)

    @cached_property
    def _owners(self) -> frozenset[str]:
        owners = set[str]()
        for name in self.names:
            owner = name.rpartition(".")[0]
            while owner and owner not in owners:
                owners.add(owner)
                owner = owner.rpartition(".")[0]
        return frozenset(owners)


def gives_inputs(plan: Sequence[LayerPlan]) -> list[bool]:
    """Whether each layer runs once more for the input of the next one: in a segment, all but the last."""
    last_layers = {entry.segment: entry.layer for entry in plan}
    return [entry.segment is not None and entry.layer != last_layers[entry.segment] for entry in plan]


def halves_with_gradients(trained: TrainedNames, chunks: Chunks, config: ModelConfig) -> tuple[set[int], set[int]]:
    """The halves of layers here with a gradient at their entrances, and those with one at their exits.

    Both halves of a parallel layer read its input: what is trained in its attention is not in front of its MLP.
    """
    in_front = trained.outside
    entrances: set[int] = set()
    exits: set[int] = set()
    for place, layer in enumerate(chunks.local_layers):
        in_front |= chunks.of_layer(layer) > 0  # what comes from another stage always has a gradient
        spec, of_layer, name = config.layers[layer], in_front, f"layers.{layer}"
        for number, half in enumerate(HALVES, 2 * place):
            norm = "attention" if spec.norms == "shared" else half
            enters = (of_layer if spec.parallel else in_front) or trained.within(f"{name}.{norm}_norm")
            leaves = enters or trained.within(f"{name}.{half}")
            entrances |= {number} if enters else set()
            exits |= {number} if leaves else set()
            in_front |= leaves or _trained_behind(trained, name, half)
    return entrances, exits


def first_half_with_gradient(trained: TrainedNames, chunks: Chunks) -> tuple[int, bool]:
    """`first_with_gradient` and `trained_between` of `traffic.decoder_regions`, of the layers here."""
    if not chunks.has_first or trained.outside:  # what comes from another stage always has a gradient
        return 0, False
    halves = [(f"layers.{layer}", half) for layer in chunks.layers[0] for half in HALVES]
    for number, (layer, half) in enumerate(halves):
        if trained.within(f"{layer}.{half}_norm"):
            return number, True
        if trained.within(f"{layer}.{half}"):
            return number + 1, False
        if _trained_behind(trained, layer, half):
            return number + 1, True
    return len(halves), True


def _trained_behind(trained: TrainedNames, layer: str, half: str) -> bool:
    behind = [f"{layer}.after_{half}", f"{layer}.post_{half}_norm"]
    if half == "mlp":
        behind += [f"{layer}.per_layer", f"{layer}.post_per_layer_norm", *OF_EACH_LAYER]
    return any(map(trained.within, behind))
