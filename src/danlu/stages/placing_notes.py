"""Lines for the console on how a decoder was placed: kernels, quantized weights, experts without an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from danlu.assembly.base_model import stored_method, weight_layouts
from danlu.assembly.parallelize import Placed, Subject
from danlu.assembly.recipe_adapters import adapter_warnings
from danlu.core.layer_types import TRAINED
from danlu.models.block_scaled import CODED_METHODS, METHODS, quantization_method
from danlu.models.hf_folder import CONFIG, read_json, resolve_folder
from danlu.models.modules import GroupedLinear
from danlu.numerics.dtypes import DTYPES
from danlu.numerics.quantized_weight import QuantizedModule
from danlu.recipe import sections
from danlu.recipe.sections import Model

EXPERTS_STAY_WIDE = (
    "model.path: this folder has its linear layers quantized, but not the matrices of experts, which are most of the "
    "model and kept in the type of activations. The original model with `quantization: nf4` takes less"
)

EXPERTS_WITHOUT_ADAPTER = (
    "adapter.targets: no adapter sits on the experts, which are most of this model: `experts` among the targets puts "
    "one on each of their matrices"
)


def placing_notes(model: Model, precision: str, placed: Placed) -> Iterator[str]:
    """The notes on the placed model of a recipe, in the order in which they are shown."""
    subject = placed.subject
    yield from adapter_warnings(model)
    yield from placed.notes
    if any(isinstance(module, QuantizedModule) for module in subject.model.modules()):
        from danlu.numerics.four_bit_weight import unpack_kernels

        yield from (kernel.note for kernel in unpack_kernels(subject.model, DTYPES[precision]))
    if subject.model.config.has_experts:
        yield from _expert_notes(subject)
    if model.path is not None:
        yield from _storage_notes(resolve_folder(model.path), precision, is_trained=subject.adapters is None)


def _storage_notes(folder: Path, precision: str, *, is_trained: bool) -> Iterator[str]:
    """Notes on weights that a folder stores in few bits."""
    named = quantization_method(read_json(folder / CONFIG))
    if named not in (*METHODS, *CODED_METHODS):
        return
    if stored_method(folder) is None:
        yield f"model.path: {CONFIG} names {named}, but all weights are dense: they are read as they are"
        return
    if is_trained:  # the result is larger than the folder it starts from
        dtype = "bfloat16" if precision == "bf16" else "float32"
        yield f"model.path: weights stored as {named} are dequantised; the result has them in {dtype}"
    layouts = weight_layouts(folder)
    if layouts is not None and layouts.quantizes_activations:
        yield (
            f"model.path: {CONFIG} quantizes activations too, for kernels that serve the model; here they are computed "
            f"in {precision}"
        )


def _expert_notes(subject: Subject) -> Iterator[str]:
    """Parts of quantization and adapters that do not reach the experts of a model with experts."""
    modules = list(subject.model.modules())
    is_quantized = any(isinstance(module, QuantizedModule) for module in modules)
    experts_are = any(isinstance(module, GroupedLinear) and module.quantized is not None for module in modules)
    if is_quantized and not experts_are:
        yield EXPERTS_STAY_WIDE
    added = None if subject.adapters is None else subject.adapters.added.get(TRAINED)
    is_low_rank = added is not None and isinstance(added.section, sections.LowRank)
    if added is not None and is_low_rank and not any(site.experts is not None for site in added.sites):
        yield EXPERTS_WITHOUT_ADAPTER
