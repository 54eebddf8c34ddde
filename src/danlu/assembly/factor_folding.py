"""Factors on the inputs of linear layers that a norm, or a linear layer before them, takes the other half of.

Inputs x / s of a weight W s give the outputs of x and W. Both halves are folded into weights, so that nothing remains
of them at inference: AWQ and SmoothQuant differ in how s is found. Gemma's norms multiply by 1 + w, and w changes so
that 1 + w is divided. That outputs stay what they were is checked for each fold.

O, I outputs and inputs · E experts · T tokens
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from danlu.assembly.calibration import Calibration, Trace, recorded_arguments
from danlu.models.attention import Attention
from danlu.models.decoder import Layer
from danlu.models.experts import MoE, Router
from danlu.models.modules import MLP, GroupedLinear, LayerNorm, Linear, RMSNorm
from danlu.numerics.format import Format, encode
from danlu.numerics.quantizers.awq import candidate_factors, weight_share
from danlu.numerics.quantizers.statistics import Need, Statistics

SEARCH_TOKENS = 16384
"""Tokens that a module is run with for each ratio of AWQ's search, at least one pack."""
_TOLERANCE = 1e-4
"""The largest change of a layer's outputs by a fold, relative to the largest output, in float32."""

Reader = Linear | GroupedLinear | Router


@dataclass(frozen=True)
class Fold:
    """A place where factors may be folded: into a norm or linear layer, and all layers that read its output."""

    source: str
    """Name of the module of the layer that takes 1 / s."""
    readers: tuple[str, ...]
    """Names of those that take s."""
    inspected: str
    """Name of the module that shows the error of the readers' weights at its output; "" is the layer itself."""

    @property
    def name(self) -> str:
        """The fold in messages."""
        return f"{self.source} -> {', '.join(self.readers)}"


def folds_of(layer: Layer, seen: Trace) -> Iterator[Fold]:
    """Yields the folds of a layer in the order of its forward pass, that of norms and of linear layers.

    Attention's values are folded into its output projection only where each query head has a value head of its own:
    else a value feeds several inputs of the projection.
    """
    for norm in ("attention_norm", "mlp_norm"):
        if norm not in seen.outputs:
            continue
        readers = _readers(layer, seen, norm)
        halves = {name.partition(".")[0] for name in readers}
        if readers:
            yield Fold(norm, tuple(readers), halves.pop() if len(halves) == 1 else "")
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, Attention) and _each_query_has_a_value(attention):
        yield Fold("attention.v_proj", ("attention.o_proj",), "attention.o_proj")
    if isinstance(mlp, MLP) and mlp.gate_proj is not None:
        yield Fold("mlp.up_proj", ("mlp.down_proj",), "mlp.down_proj")


def _each_query_has_a_value(attention: Attention) -> bool:
    return attention.v_proj is not None and attention.v_proj.shape[0] == attention.o_proj.shape[1]


def norm_folds_of(layer: Layer, seen: Trace) -> Iterator[Fold]:
    """Yields the folds into norms alone, as SmoothQuant has them."""
    return (fold for fold in folds_of(layer, seen) if isinstance(layer.get_submodule(fold.source), RMSNorm | LayerNorm))


def _readers(layer: Layer, seen: Trace, norm: str) -> list[str]:
    """The linear layers, routers and experts that read a norm's output."""
    readers = []
    for name in seen.readers(norm):
        module = layer.get_submodule(name)
        if isinstance(module, Linear | Router):
            readers.append(name)
        elif isinstance(module, MoE) and module.input_norm is None:
            readers += [f"{name}.experts.{matrix}" for matrix in ("gate_proj", "up_proj")]
    return list(dict.fromkeys(readers))


def statistics_of(layer: Layer, calibration: Calibration, fold: Fold, needs: Collection[Need]) -> Statistics:
    """The statistics of what the readers of a fold read."""
    if isinstance(layer.get_submodule(fold.source), RMSNorm | LayerNorm):
        return calibration.norm_statistics(layer, fold.source, needs)
    (statistics,) = calibration.statistics(layer, fold.readers, needs)
    assert statistics is not None, "a pack has tokens"
    return statistics


def apply(layer: Layer, fold: Fold, factors: Tensor, dtype: torch.dtype) -> None:
    """Divides the source by factors [I], and multiplies the readers' columns by them.

    dtype: the type in which norms and biases are written; they are rounded to it here, so that readers see the same.
    """
    source = layer.get_submodule(fold.source)
    with torch.no_grad():
        for name in fold.readers:
            _weight(layer.get_submodule(name)).mul_(factors)
        if isinstance(source, Linear):
            source.stored_weight.div_(factors.unsqueeze(1))
            if source.bias is not None:
                source.bias.copy_((source.bias / factors).to(dtype))
            return
        assert isinstance(source, RMSNorm | LayerNorm), f"{fold.source} takes no factors"
        offset = source.offset if isinstance(source, RMSNorm) else 0.0
        source.weight.copy_(((source.weight + offset) / factors - offset).to(dtype))
        if isinstance(source, LayerNorm) and source.bias is not None:
            source.bias.copy_((source.bias / factors).to(dtype))


def fold_checked(layer: Layer, calibration: Calibration, fold: Fold, factors: Tensor, dtype: torch.dtype) -> str | None:
    """Applies factors, or leaves the layer as it is where its outputs would change; returns then why.

    They change where something else reads the source too, or a function between source and readers is not linear.
    """
    if not bool((torch.isfinite(factors) & (factors > 0)).all()):
        return f"{fold.name}: left alone, its factors are not all positive numbers"
    pack = calibration.packs[0]
    kept = {name: value.clone() for name, value in layer.named_parameters()}
    x = pack.hidden.float()
    before = calibration.output(layer, pack, x)
    apply(layer, fold, factors, torch.float32)
    change = float((calibration.output(layer, pack, x) - before).abs().max() / before.abs().max().clamp_min(1e-30))
    with torch.no_grad():
        for name, value in layer.named_parameters():
            value.copy_(kept[name])
    if not change <= _TOLERANCE:
        return f"{fold.name}: left alone, factors would change the layer's outputs by {change:.1e}"
    apply(layer, fold, factors, dtype)
    return None


def searched_factors(
    layer: Layer,
    calibration: Calibration,
    fold: Fold,
    magnitude: Tensor,
    form_of: Callable[[str], Format | None],
) -> Tensor:
    """Returns the factors [I] with which rounded readers change the inspected module's output least (AWQ, eq. 5).

    magnitude [I]: the mean of |x| of the readers' inputs. form_of: the format of a reader by its name; None of one that
    stays as it is.
    """
    inspected = layer.get_submodule(fold.inspected)
    calls = _calls(layer, calibration, inspected)
    wanted = [_first(inspected(*arguments, **named)) for arguments, named in calls]
    weights = [(_weight(layer.get_submodule(name)), form_of(name)) for name in fold.readers]
    kept = [weight.clone() for weight, _ in weights]
    rounded = [(original, form) for original, (_, form) in zip(kept, weights, strict=True) if form is not None]
    share = weight_share([weight for weight, _ in rounded], rounded[0][1]) if rounded else torch.ones_like(magnitude)
    best, least = torch.ones_like(magnitude), torch.inf
    with torch.no_grad():
        for _, factors in candidate_factors(magnitude, share):
            for (weight, form), original in zip(weights, kept, strict=True):
                if form is not None:
                    weight.copy_(encode(original * factors, form).decode() / factors)
            error = sum(
                float((_first(inspected(*arguments, **named)) - goal).float().square().sum(dtype=torch.float64))
                for (arguments, named), goal in zip(calls, wanted, strict=True)
            )
            if error < least:
                best, least = factors, error
        for (weight, _), original in zip(weights, kept, strict=True):
            weight.copy_(original)
    return best


@torch.no_grad()
def _calls(layer: Layer, calibration: Calibration, inspected: nn.Module) -> list[Any]:
    """The arguments of the inspected module's calls over the first packs, `SEARCH_TOKENS` of them."""
    tokens = 0
    with recorded_arguments(inspected) as calls:
        for pack in calibration.packs:
            if tokens and tokens + len(pack.hidden) > SEARCH_TOKENS:
                break
            calibration.output(layer, pack)
            tokens += len(pack.hidden)
    return calls


def _first(output: Any) -> Tensor:
    first: Tensor = output if isinstance(output, Tensor) else output[0]
    return first.detach()


def _weight(module: nn.Module) -> Tensor:
    """The weight [O, I] of a reader, or [E, O, I]."""
    if isinstance(module, Linear | GroupedLinear):
        return module.stored_weight
    assert isinstance(module, Router), f"{type(module).__name__} has no weight to scale"
    return module.weight


def largest_weight(layer: Layer, names: Sequence[str]) -> Tensor:
    """Returns the greatest |w| of each input over readers, [I] float32."""
    largest = [_weight(layer.get_submodule(name)).abs().float().flatten(0, -2).amax(0) for name in names]
    return torch.stack(largest).amax(0)
