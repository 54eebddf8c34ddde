"""A model folder with quantized weights, written tensor by tensor: in the layout of another tool, or danlu's 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu import __version__
from danlu.assembly.base_model import ORIGIN, ORIGIN_KEY
from danlu.assembly.merging import find_tokenizer
from danlu.core.errors import ModelError
from danlu.core.output_folder import replace_folder
from danlu.data.tokenizer_export import end_of_turn_ids
from danlu.models.config import ModelConfig, is_of_router
from danlu.models.hf_config import config_values as hf_config_values
from danlu.models.hf_folder import CONFIG, GENERATION_CONFIG, fingerprint
from danlu.models.hf_layout import EMBEDDING, HEAD, HFTensor, hf_tensors
from danlu.models.safetensors_io import TensorStream, is_finite
from danlu.models.saving import copy_tokenizer, shard_files, write_index, write_json, write_stop_ids
from danlu.models.sites import sites_of
from danlu.numerics.format import Format, Scaled
from danlu.numerics.weight_layout_config import Export, config_values, export_problem
from danlu.numerics.weight_layouts import WRITTEN_SUFFIXES, write_weight

_SHARD_BYTES = 5_000_000_000


@dataclass
class FolderStreams:
    """The files of weights of a folder that is being written."""

    of_tensor: dict[str, TensorStream] = field(default_factory=dict)
    """The file of each tensor of the model."""

    @property
    def bytes(self) -> int:
        """Bytes of all weights that were written."""
        return sum(stream.bytes for stream in set(self.of_tensor.values()))

    def add_dense(self, name: str, value: Tensor) -> None:
        """Writes a weight that is not quantized. Raises ModelError where it is not finite."""
        if not is_finite(value):
            raise ModelError(f"{name}: not finite as {value.dtype}; the model is not written. Choose a wider --dtype")
        self.of_tensor[name].add(name, value)


@contextmanager
def streamed_folder(
    folder: Path,
    target: Path,
    config: ModelConfig,
    sized: Sequence[tuple[HFTensor, int]],
    *,
    dtype: torch.dtype,
    quantization: Mapping[str, Any],
    names_of: Callable[[HFTensor], Sequence[str]],
    shard_bytes: int = _SHARD_BYTES,
) -> Iterator[FolderStreams]:
    """A folder made of the model in `folder`: config, tokenizer and generation config; the block writes the weights.

    sized: the tensors in their order, with bytes. quantization: `quantization_config` of config.json.
    names_of: every name that a tensor's parts may be written under.

    The folder appears whole or not at all. Raises ResourceError where the disk is full.
    """
    tokenizer_folder = find_tokenizer([folder])
    if tokenizer_folder is not None:
        stop_ids = end_of_turn_ids(str(tokenizer_folder))
        config = replace(config, eos_token_ids=tuple(dict.fromkeys([*config.eos_token_ids, *stop_ids])))
    values = hf_config_values(config, torch_dtype=str(dtype).removeprefix("torch."))
    values["quantization_config"] = dict(quantization)
    with replace_folder(target, sum(size for _, size in sized), own_file=CONFIG) as fresh:
        write_json(fresh / CONFIG, values)
        write_json(fresh / ORIGIN, {"version": __version__, ORIGIN_KEY: fingerprint(folder)})
        if tokenizer_folder is not None:
            copy_tokenizer(tokenizer_folder, fresh)
        if (folder / GENERATION_CONFIG).is_file():
            (fresh / GENERATION_CONFIG).write_bytes((folder / GENERATION_CONFIG).read_bytes())
        if tokenizer_folder is not None:
            write_stop_ids(fresh, config.eos_token_ids)
        streams = FolderStreams()
        with ExitStack() as closing:
            for file, shard in shard_files(sized, shard_bytes).items():
                names = [name for tensor in shard for name in names_of(tensor)]
                stream = closing.enter_context(TensorStream(fresh / file, names))
                streams.of_tensor |= {tensor.name: stream for tensor in shard}
            yield streams
        files = list(dict.fromkeys(streams.of_tensor.values()))
        if len(files) > 1:
            write_index(fresh, {name: stream.file.name for stream in files for name in stream.names}, streams.bytes)


class ExportedModel:
    """The tensors of a model's folder in the layout of another tool.

    quantized: the decoder's parameters that have codes. rounds_activations: products are to take activations as 8-bit
    integers. Raises ModelError for a tensor on disk that cannot be made of
    whole rows of codes, and where the layout does not hold the format.
    """

    def __init__(
        self,
        config: ModelConfig,
        form: Format,
        export: Export,
        quantized: Sequence[str],
        *,
        rounds_activations: bool = False,
    ) -> None:
        self.config, self.form, self.export = config, form, export
        self.rounds_activations = rounds_activations
        self.tensors = hf_tensors(config)
        chosen = set(quantized)
        self.names = {tensor.name for tensor in self.tensors if chosen & set(tensor.parameters)}
        """The tensors on disk that are quantized."""
        for tensor in self.tensors:
            if tensor.name in self.names:
                self._check(tensor, chosen)

    def _check(self, tensor: HFTensor, chosen: set[str]) -> None:
        is_of_rows = len(tensor.shape) == 2 and all(
            part.is_plain and part.parameter in chosen and part.box.sizes[-1] == tensor.shape[1]
            for part in tensor.parts
        )
        experts = (
            " Leave experts as they are (experts: false), or use" if ".experts." in tensor.parameters[0] else " Use"
        )
        if not is_of_rows:
            raise ModelError(
                f"export: {self.export}: {tensor.name} has several weights in an order that no codes are stored in."
                f"{experts} export: dense"
            )
        problem = export_problem(self.form, self.export, (tensor.shape[0], tensor.shape[1]))
        if problem is not None:
            raise ModelError(f"export: {self.export}: {tensor.name}: {problem}")
        if len(tensor.parts) > 1 and self.form.scale == "e4m3":
            raise ModelError(
                f"export: {self.export}: {tensor.name} is made of {len(tensor.parts)} weights, each with a scale of "
                "its own tensor, and has room for one. Use export: mxfp4, or dense"
            )

    def skipped(self) -> list[str]:
        """The linear modules on disk that are not quantized."""
        linears = ({f"{site.name}.weight" for site in sites_of(self.config)} | {HEAD}) - {EMBEDDING}
        modules = [
            tensor.name.removesuffix(".weight")
            for tensor in self.tensors
            if tensor.name not in self.names
            and tensor.name.endswith(".weight")
            and (tensor.parameters[0] in linears or is_of_router(tensor.parameters[0]))
        ]
        return list(dict.fromkeys(["lm_head", *modules]))

    def write(
        self,
        folder: Path,
        target: Path,
        *,
        dtype: torch.dtype,
        value: Callable[[str], Tensor],
        scaled: Callable[[str], Scaled],
    ) -> int:
        """Writes the folder, made of the model in `folder`; returns the bytes of its weights.

        dtype: of what is not quantized. value, scaled: a parameter by its name in the decoder, and its codes.
        """
        sized = [(tensor, self._bytes(tensor, dtype)) for tensor in self.tensors]
        quantization = config_values(
            self.export, self.form, skip=self.skipped(), rounds_activations=self.rounds_activations
        )
        with streamed_folder(
            folder, target, self.config, sized, dtype=dtype, quantization=quantization, names_of=self._names_of
        ) as streams:
            for tensor in self.tensors:
                if tensor.name in self.names:
                    whole = _of_rows(tensor, scaled)
                    rounds = self.rounds_activations
                    parts = write_weight(tensor.name, whole, self.export, dtype=dtype, rounds_activations=rounds)
                    for name, part in parts.items():
                        streams.of_tensor[tensor.name].add(name, part)
                else:
                    streams.add_dense(tensor.name, tensor.assembled(value).to(dtype))
        return streams.bytes

    def _names_of(self, tensor: HFTensor) -> list[str]:
        if tensor.name not in self.names:
            return [tensor.name]
        return [f"{tensor.name.removesuffix('.weight')}.{suffix}" for suffix in WRITTEN_SUFFIXES]

    def _bytes(self, tensor: HFTensor, dtype: torch.dtype) -> int:
        """Bytes on disk, rounded up: codes, and eight for the scale and zero of a block."""
        count = tensor.shape[0] * tensor.shape[-1] if len(tensor.shape) == 2 else torch.Size(tensor.shape).numel()
        if tensor.name not in self.names:
            return count * dtype.itemsize
        rows, columns = self.form.blocks(tensor.shape[0], tensor.shape[1])
        return count * self.form.bits // 8 + 8 * rows * columns + 4 * tensor.shape[1] + 4096


def _of_rows(tensor: HFTensor, scaled: Callable[[str], Scaled]) -> Scaled:
    """The codes of a tensor on disk, of the rows of one parameter or of several."""
    parts = []
    for part in sorted(tensor.parts, key=lambda part: part.offsets[0]):
        whole, box = scaled(part.parameter), part.box
        for start in box.offsets[:-2]:  # of experts
            whole = _matrix(whole, start)
        first, height = box.offsets[-2], box.sizes[-2]
        if height != whole.shape[-2]:
            whole = whole.box(slice(first, first + height), slice(0, whole.shape[-1]))
        parts.append(whole)
    if len(parts) == 1:
        return parts[0]
    if len({part.format for part in parts}) > 1 or any(
        part.shape[0] % part.format.block_of(*part.shape)[0] for part in parts
    ):
        raise ModelError(f"{tensor.name}: its weights have blocks that are cut. Use export: dense")

    def together(values: list[Tensor | None]) -> Tensor | None:
        return None if values[0] is None else torch.cat([each for each in values if each is not None])

    codes, scales = together([part.codes for part in parts]), together([part.scales for part in parts])
    assert codes is not None and scales is not None
    return replace(parts[0], codes=codes, scales=scales, zeros=together([part.zeros for part in parts]))


def _matrix(stack: Scaled, index: int) -> Scaled:
    """One of stacked matrices."""
    zeros, tensor_scale = (None if each is None else each[index] for each in (stack.zeros, stack.tensor_scale))
    return Scaled(stack.codes[index], stack.scales[index], stack.format, zeros, tensor_scale)
