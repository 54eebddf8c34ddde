"""The inputs of a decoder's linear layers over calibration tokens, one decoder layer in memory at a time.

All packs go through a layer before the next one is read. A pack's hidden states in front of the current layer are kept.

T tokens of a pack · D model width · I inputs of a linear layer
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from danlu.core.errors import ModelError
from danlu.core.layer_types import Attend
from danlu.core.shard_box import ShardBox
from danlu.core.types import Batch, Pack
from danlu.data.batch import collate
from danlu.models.attend import attend_for
from danlu.models.config import ModelConfig
from danlu.models.decoder import Layer, layer_of
from danlu.models.loading import load_boxes
from danlu.models.modules import Embedding, GroupedLinear, Linear
from danlu.models.rope import Rotation, rotary_tables
from danlu.numerics.quantizers.statistics import Need, Statistics, StatisticsSum


@dataclass
class CalibrationPack:
    """A pack with its hidden states [T, D] in front of the current layer."""

    batch: Batch
    attend: Attend
    hidden: Tensor


@dataclass
class Calibration:
    """The packs of calibration, which go through a model layer by layer."""

    config: ModelConfig
    packs: list[CalibrationPack]
    digest: str
    """The hash of all tokens and documents, in their order."""

    @classmethod
    def of(
        cls, config: ModelConfig, folder: Path, packs: Sequence[Pack], *, dtype: torch.dtype, device: torch.device
    ) -> Calibration:
        """The packs in front of the first layer of the model in `folder`; dtype: of activations.

        Raises ModelError for a model with layers that hand values to later ones, and as `loading.load` does.
        """
        if config.carries_values:
            raise ModelError(
                f"{folder}: its layers read keys or embeddings next to the residual stream, and calibration goes "
                "through a model layer by layer. Use `quantization: nearest`, which needs no calibration"
            )
        with torch.device("meta"):
            embedding = Embedding(config)
        load_module(embedding, "embed_tokens", folder, config, device)
        digest, ready = hashlib.sha256(), list[CalibrationPack]()
        for pack in packs:
            batch = collate([pack], device)
            digest.update(batch.tokens.cpu().numpy().tobytes() + repr(batch.boundaries).encode())
            with torch.no_grad():
                hidden = embedding(batch.tokens, dtype)
            ready.append(CalibrationPack(batch, attend_for(batch), hidden))
        return cls(config, ready, digest.hexdigest())

    @property
    def tokens(self) -> int:
        """Tokens of all packs."""
        return sum(len(pack.batch.tokens) for pack in self.packs)

    @torch.no_grad()
    def output(self, layer: Layer, pack: CalibrationPack, hidden: Tensor | None = None) -> Tensor:
        """The layer's output [T, D] for a pack, or for other hidden states of it."""
        x = pack.hidden if hidden is None else hidden
        out: Tensor = layer(x, self._rotations(pack, x.dtype), pack.attend)
        return out

    def advance(self, layer: Layer) -> None:
        """Replaces each pack's hidden states by the layer's output.

        Raises ModelError where an output is not finite.
        """
        for pack in self.packs:
            pack.hidden = self.output(layer, pack)
            if not bool(torch.isfinite(pack.hidden).all()):
                raise ModelError(
                    "calibration: the outputs of a layer are not finite. Calibrate with `precision: fp32`, or use a "
                    "sound model"
                )

    def _rotations(self, pack: CalibrationPack, dtype: torch.dtype) -> tuple[Rotation, ...]:
        positions, lengths = pack.batch.positions, pack.batch.document_lengths
        return tuple(rotary_tables(rope, positions, lengths).to(dtype) for rope in self.config.ropes)

    def statistics(self, layer: Layer, names: Sequence[str], needs: Collection[Need]) -> LayerStatistics:
        """The statistics of the inputs that linear layers of `layer` share.

        names: of modules below the layer, which are called with the same inputs.
        """
        first = layer.get_submodule(names[0])
        assert isinstance(first, Linear | GroupedLinear)
        count = first.stored_weight.shape[0] if isinstance(first, GroupedLinear) else 1
        sums = [StatisticsSum(first.shape[1], needs) for _ in range(count)]

        def take(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            if isinstance(module, GroupedLinear):
                rows, counts = arguments[:2]
                for each, part in zip(sums, rows.split(counts.tolist()), strict=True):
                    each.add(part)
            else:
                sums[0].add(arguments[0])
            raise _Captured

        self._run_to(layer, first.register_forward_pre_hook(take))
        return [each.statistics() for each in sums]

    def norm_statistics(self, layer: Layer, name: str, needs: Collection[Need]) -> Statistics:
        """The statistics of a norm's outputs."""
        total = StatisticsSum(self.config.hidden_size, needs)

        def take(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            total.add(output)
            raise _Captured

        self._run_to(layer, layer.get_submodule(name).register_forward_hook(take))
        statistics = total.statistics()
        assert statistics is not None, "a pack has tokens"
        return statistics

    def _run_to(self, layer: Layer, handle: RemovableHandle) -> None:
        """Runs the layer over all packs up to a hook that raises `_Captured`, which is removed then."""
        with handle:
            for pack in self.packs:
                with suppress(_Captured):
                    self.output(layer, pack)


LayerStatistics = list[Statistics | None]
"""The statistics of a linear layer's inputs, or of those of each expert; None of an expert without tokens."""


class _Captured(Exception):
    """The inputs that were asked for have come: the rest of the layer need not run."""


def load_module(module: nn.Module, prefix: str, folder: Path, config: ModelConfig, device: torch.device) -> None:
    """Gives a module on the meta device its weights from a model folder, in float32.

    prefix: its name in the decoder. Raises ModelError as `loading.load` does.
    """
    targets = {}
    for name, parameter in list(module.named_parameters()):
        memory = torch.empty(parameter.shape)
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, nn.Parameter(memory, requires_grad=False))
        targets[f"{prefix}.{name}"] = (memory, ShardBox.full(memory.shape))
    load_boxes(folder, config, targets)
    module.to(device)


def load_layer(config: ModelConfig, number: int, folder: Path, device: torch.device) -> Layer:
    """Reads one decoder layer with weights in float32. Raises ModelError as `loading.load` does."""
    with torch.device("meta"):
        layer = layer_of(config, number)
    load_module(layer, f"layers.{number}", folder, config, device)
    return layer


@dataclass
class Trace:
    """The tensors that modules of a layer read and write in one pass of a pack."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Name of a module below the layer -> its first argument, in the order of the calls."""
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def sharing(self, names: Collection[str]) -> Iterator[list[str]]:
        """Yields those of `names` that read the same tensor together, in the order of the forward pass."""
        groups: dict[int, list[str]] = {}
        for name, x in self.inputs.items():
            if name in names:
                groups.setdefault(id(x), []).append(name)
        yield from groups.values()

    def readers(self, name: str) -> list[str]:
        """The modules that read a module's output itself."""
        return [reader for reader, x in self.inputs.items() if x is self.outputs.get(name)]


@contextmanager
def recorded_arguments(module: nn.Module) -> Iterator[list[tuple[Any, Mapping[str, Any]]]]:
    """Records (arguments, named arguments) of a module's calls within the block."""
    calls: list[tuple[Any, Mapping[str, Any]]] = []

    def take(_: nn.Module, arguments: Any, named: Mapping[str, Any]) -> None:
        calls.append((arguments, named))

    handle = module.register_forward_pre_hook(take, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def trace(layer: Layer, run: Callable[[], object]) -> Trace:
    """Records the tensors that modules of a layer read and write while `run` passes one pack through it."""
    seen = Trace()

    def hooks(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(_: nn.Module, arguments: Any) -> None:
            seen.inputs.setdefault(name, arguments[0])

        def behind(_: nn.Module, arguments: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                seen.outputs.setdefault(name, output)

        return before, behind

    with ExitStack() as closing:
        for name, module in layer.named_modules():
            if name:
                before, behind = hooks(name)
                closing.callback(module.register_forward_pre_hook(before).remove)
                closing.callback(module.register_forward_hook(behind).remove)
        run()
    return seen
