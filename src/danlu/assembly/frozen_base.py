"""A frozen base with adapters: loaded weight by weight, each made small before the next one is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.build import BuildContext
from danlu.adapters.dropout import DropoutState
from danlu.adapters.targets import ROW_GROUPS
from danlu.assembly.base_model import weight_layouts
from danlu.assembly.stored_base import refuse_quantized
from danlu.core.layer_types import Site
from danlu.core.shard_box import ShardBox
from danlu.models.block_scaled import Codes, StoredBlocks
from danlu.models.config import ModelConfig, is_matrix
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import read_config
from danlu.models.initialize import named_generator
from danlu.models.loading import check_prequantized, load_into, meta_decoder
from danlu.models.modules import GroupedLinear, Linear
from danlu.models.sites import adapter_name, sites_of
from danlu.numerics.eight_bit_weight import weight_for_eight_bits
from danlu.numerics.format import MXFP4, MXFP8, NVFP4, Format, Scaled, ScaleKind
from danlu.numerics.four_bit_weight import FourBitWeight
from danlu.numerics.packing import unpack
from danlu.numerics.quantized_weight import QuantizedWeightModule, StackedWeight
from danlu.numerics.scaled_weight import ScaledWeight
from danlu.recipe import sections

_ADVICE = "Leave out `quantization`, or name the original model"


@dataclass(frozen=True)
class Adapted:
    """A decoder and the AdapterSet that fills its slots."""

    model: Decoder
    adapters: AdapterSet


class LayerHook(Protocol):
    """A hook that processes a model while its weights are loaded."""

    @property
    def boxes(self) -> Mapping[str, ShardBox]: ...  # of parameters of which only that box is read

    def layer_loaded(self, name: str) -> None: ...  # it has all of its weights; what is freed makes room for the next


LayerHookFactory = Callable[[Adapted], LayerHook]
"""Makes the hook of a model before its weights are loaded."""


def adapters_of(
    model: Decoder,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    encode: Callable[[str], Sequence[int]] | None = None,
    quantization: Any = None,
) -> AdapterSet:
    """Makes an empty AdapterSet for a decoder, and freezes its parameters.

    encode: text to token ids, for prompts that start as a text. quantization: section of the base's, for LoftQ.
    """
    build_context = BuildContext(partial(named_generator, seed), DropoutState(seed), torch.device(device), encode)
    rounded = None if quantization is None else partial(_rounded, quantization)
    return AdapterSet(
        model,
        adapter_sites(model),
        partial(adapter_name, config=model.config),
        build_context,
        head_as_linear=model.head_as_linear,
        quantize_dequantize=rounded,
    )


def adapter_sites(model: Decoder) -> list[Site]:
    """Returns the places of `models.sites.sites_of` with the decoder's modules, and the shapes that these have.

    The site of a tied head has no module yet: `Decoder.head_as_linear` makes it.
    """
    sites = []
    for site in sites_of(model.config):
        if site.layer is None:
            module = model.lm_head if site.group == "head" else model.get_submodule(site.name)
            sites.append(replace(site, module=module))
        else:
            linear = model.get_submodule(site.name)
            assert isinstance(linear, Linear | GroupedLinear)
            sites.append(replace(site, shape=linear.shape, module=linear))
    return sites


def load_frozen(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: Any = None,
    seed: int = 0,
    new: Mapping[str, Any] | None = None,
    token_ids: Mapping[str, Sequence[int]] = MappingProxyType({}),
    encode: Callable[[str], Sequence[int]] | None = None,
    saved_factors: Mapping[str, Mapping[str, Tensor]] | None = None,
    layer_hook_factory: LayerHookFactory | None = None,
    config: ModelConfig | None = None,
    keep_blocks: bool = False,
    answers: bool = False,
) -> Adapted:
    """Loads the model of a folder, frozen: matrices in `dtype` or quantized; norms, biases and routers in float32.

    A matrix in the type of activations multiplies to the same bits as a float32 one, which is rounded to that type for
    each product. Peak memory is the result plus one weight as it is stored.

    Args:
        quantization: section of the recipe for the linear layers (not the head), experts included, each of which is
            quantized by itself; None keeps the stored form: codes and scales of a folder in few bits stay as they are.
        new: adapters to make, by name, with their sections; their start may come out of the weights.
        token_ids: the tokens with rows of embedding and head that new adapters train, by the adapters' names.
        saved_factors: the tensors that an earlier run saved of some of the new adapters, by name.
        layer_hook_factory: makes the hook that shards each layer as soon as it is whole. No adapter may be added or
            removed then.
        config: the folder's with another task, where the model is not for the one that it was written for.
        keep_blocks: keep the codes of FP8 with a scale for each block, and of MXFP4, too; else they are dequantised.
        answers: the model only answers, so that a folder for activations in 8 bits, token by token, is multiplied so.
    Raises ModelError as `models.loading.load` does, and for a folder that is quantized already.
    """
    config = config or read_config(folder)
    if quantization is not None:
        refuse_quantized(folder, _ADVICE)
    model = meta_decoder(config)
    adapters = adapters_of(model, seed=seed, device=device, encode=encode, quantization=quantization)
    for name, section in (new or {}).items():
        adapters.activate()  # each is alone on the base; whoever wants them stacked says so afterwards
        adapters.add(name, section, token_ids=dict.fromkeys(ROW_GROUPS, token_ids.get(name, ())))
    for name, factors in (saved_factors or {}).items():
        adapters.load_initial_factors(name, factors)
    whole = adapters.fully_trained()
    linears = {site.name: site.module for site in adapters.sites if site.layer is not None}

    def take(parameter: str, value: Tensor) -> Tensor | None:
        """Takes a value for `load_into`: quantizes it, converts it, or keeps it in float32."""
        owner, _, attribute = parameter.rpartition(".")
        if attribute == "weight" and value.ndim == 2:
            value = adapters.prepare_weight(owner, value)
        if attribute == "weight" and quantization is not None and owner in linears and parameter not in whole:
            linear: Linear | GroupedLinear = linears[owner]
            if isinstance(linear, GroupedLinear):
                linear.store(quantize_stack(value, quantization, parameter))
            else:
                linear.store(quantize_weight(value, quantization, parameter))
            return None
        return value.to(dtype if is_matrix(parameter, value.ndim) and parameter not in whole else torch.float32)

    adapted = Adapted(model, adapters)
    layer_hook = None if layer_hook_factory is None else layer_hook_factory(adapted)

    def layer_loaded(layer: str) -> None:
        if layer_hook is not None:
            adapters.finish_loading(f"layers.{layer}.")
            layer_hook.layer_loaded(layer)

    layouts = weight_layouts(folder)
    keeps = quantization is None and (layouts is not None or keep_blocks)
    load_into(
        model,
        folder,
        device=device,
        take=take,
        unpack=partial(_unpack, device),
        stack=lambda name, matrices: StackedWeight(
            cast(Sequence[QuantizedWeightModule], matrices), where=f"{folder}: {name}"
        ),
        layer_loaded=layer_loaded,
        boxes={} if layer_hook is None else layer_hook.boxes,
        layouts=layouts,
        keep=partial(_kept, dtype, device, answers and layouts is not None and layouts.rounds_activations)
        if keeps
        else None,
        may_keep={f"{name}.weight" for name in linears} - whole - adapters.changed_by_initialization(),
    )
    adapters.finish_loading()
    return adapted


def check_frozen(folder: Path, quantization: Any = None, config: ModelConfig | None = None) -> None:
    """Raises ModelError as `load_frozen` would, for everything that shows without reading weights."""
    if quantization is not None:
        refuse_quantized(folder, _ADVICE)
    check_prequantized(
        folder,
        config or read_config(folder),
        lambda name, tensors, where: FourBitWeight.from_tensors(name, tensors, where=where).shape,
        layouts=weight_layouts(folder),
    )


def quantize_weight(weight: Tensor, section: Any, name: str = "a matrix") -> QuantizedWeightModule:
    """Quantizes a matrix [O, I] as a section of the recipe says; a float64 one by way of float32."""
    if weight.dtype == torch.float64:
        weight = weight.float()
    if isinstance(section, sections.Nf4 | sections.Fp4):
        return FourBitWeight.quantize(weight, kind=section.kind, block=section.block, double=section.double, where=name)
    return ScaledWeight.quantize(weight, format_of(section), where=name)


def format_of(section: Any) -> Format:
    """Returns the format of a section of the recipe, of all kinds but nf4 and fp4."""
    block = (1, section.group)
    match section:
        case sections.Int8() | sections.Int4():
            return Format(section.kind, block, narrow_range=True)
        case sections.Int3() | sections.Int2():  # the lowest code is one of 8, or of 4: it is needed
            return Format(section.kind, block)
        case sections.Fp8():
            return Format("e4m3", block)
        case sections.Mxfp8():
            return MXFP8
        case sections.Mxfp4():
            return MXFP4
        case sections.Nvfp4():
            return NVFP4
    raise AssertionError(f"no format is known for {type(section).__name__}")


def quantize_stack(weight: Tensor, section: Any, name: str = "a stack of matrices") -> StackedWeight:
    """Quantizes matrices [E, O, I] as `quantize_weight` does, each by itself."""
    matrices = [quantize_weight(matrix, section, f"{name}[{index}]") for index, matrix in enumerate(weight.unbind())]
    return StackedWeight(matrices, where=name)


def _rounded(section: Any, weight: Tensor) -> Tensor:
    return quantize_weight(weight, section).dense(torch.float32)


def _kept(
    dtype: torch.dtype,
    device: torch.device | str,
    rounds_activations: bool,
    codes: Codes | StoredBlocks,
    rows: Sequence[slice],
) -> list[ScaledWeight]:
    """The parts of a weight by its own codes and scales; rounds_activations: multiplied with activations in 8
    bits."""
    scaled = of_blocks(codes) if isinstance(codes, StoredBlocks) else cast(Scaled, codes)
    parts = [scaled] if len(rows) == 1 else [scaled.box(part, slice(0, scaled.shape[1])) for part in rows]
    kind = (weight_for_eight_bits(scaled) if rounds_activations else None) or ScaledWeight
    return [kind.of(part, dtype).to(device) for part in parts]


def of_blocks(stored: StoredBlocks) -> Scaled:
    """A matrix of a published folder in MXFP4, or in FP8 with a scale for each block, by the same codes."""
    scales = stored.scales
    if stored.is_mxfp4:
        codes = unpack(stored.values.flatten(1), 4, 2 * stored.values.shape[1] * stored.values.shape[2])
        return Scaled(codes, scales, Format("e2m1", stored.block, "e8m0", rounding="floor"))
    if scales.dtype == torch.float8_e8m0fnu:
        return Scaled(stored.values, scales.view(torch.uint8), Format("e4m3", stored.block, "e8m0"))
    kinds: dict[torch.dtype, ScaleKind] = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
    return Scaled(stored.values, scales, Format("e4m3", stored.block, kinds.get(scales.dtype, "float32")))


def _unpack(
    device: torch.device | str, name: str, tensors: Mapping[str, Tensor], where: str, rows: Sequence[int]
) -> list[FourBitWeight]:
    whole = FourBitWeight.from_tensors(name, tensors, where=where).to(device)
    return [whole] if len(rows) == 1 else whole.split(rows, where=f"{where}: {name}")
