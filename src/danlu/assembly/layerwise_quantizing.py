"""Quantizing a decoder layer by layer after training: factors, then each linear layer's codes, then the next layer.

The inputs of a linear layer are those that come out of everything before it as it is quantized already, also within a
decoder layer. Each finished layer is a file in a folder of work, with the hidden states behind it: a run that was
killed goes on at the next layer, and ends with the same bytes.

O, I outputs and inputs · E experts
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu.assembly import factor_folding
from danlu.assembly.calibration import Calibration, LayerStatistics, Trace, load_layer, trace
from danlu.core.errors import ModelError
from danlu.models.config import ModelConfig
from danlu.models.decoder import Layer
from danlu.models.hf_folder import fingerprint
from danlu.models.modules import GroupedLinear, Linear
from danlu.models.sites import sites_of
from danlu.numerics.format import Format, Scaled, encode
from danlu.numerics.quantizers.quantizer import Nearest, Quantizer, check_finite
from danlu.numerics.quantizers.smooth_quant import smoothing_factors
from danlu.numerics.quantizers.statistics import Statistics

_PROGRESS = "progress.json"
Progress = Callable[[int, int], None]
"""Called with how many layers are done, and how many there are."""


@dataclass(frozen=True)
class Method:
    """How a model is quantized: factors that are folded first, then a quantizer of each matrix."""

    quantizer: Quantizer
    form: Format
    smoothing: float | None = None
    """SmoothQuant's alpha; None: without it."""
    scaling: bool = False
    """AWQ's search for factors."""
    experts: bool = True


@dataclass
class LayerResult:
    """A decoder layer as it is quantized."""

    quantized: dict[str, Scaled] = field(default_factory=dict)
    """The codes [O, I], or [E, O, I] of experts, by the parameter's name in the decoder."""
    others: dict[str, Tensor] = field(default_factory=dict)
    """The parameters that stay as they are, folded factors included, in float32."""
    notes: list[str] = field(default_factory=list)
    """Messages on parts that are not quantized as the method has it."""


def quantized_sites(config: ModelConfig, number: int, *, experts: bool) -> list[str]:
    """The linear layers of a decoder layer that are quantized, by their names below it; not the gate of one number
    with which a token weighs its shared experts."""
    prefix = f"layers.{number}."
    sites = [site for site in sites_of(config) if site.name.startswith(prefix)]
    chosen = [site for site in sites if (site.is_linear or (experts and site.experts is not None))]
    return [site.name.removeprefix(prefix) for site in chosen if site.shape[0] > 1]


class LayerwiseQuantizer:
    """Quantizes the layers of the model in `folder` one after the other.

    calibration: None for a method that needs none. dtype: the type of weights that are not quantized.
    work: the folder of finished layers.

    Raises ModelError for weights that are not finite.
    """

    def __init__(
        self,
        config: ModelConfig,
        folder: Path,
        method: Method,
        calibration: Calibration | None,
        work: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        needs_data = bool(method.quantizer.needs) or method.smoothing is not None or method.scaling
        assert calibration is not None or not needs_data, "this method needs calibration"
        self._config, self._folder, self._method, self._calibration = config, folder, method, calibration
        self._dtype, self._device, self._work = dtype, device, work
        self._key = self._described()

    def run(self, progress: Progress = lambda done, total: None) -> int:
        """Quantizes the layers that are not done yet; returns how many were."""
        total = len(self._config.layers)
        done = self._done()
        progress(done, total)
        for number in range(done, total):
            result = self._quantized(number)
            self._keep(number, result)
            progress(number + 1, total)
        return done

    def finished(self) -> int:
        """The number of layers that the folder of work has."""
        done = 0
        while self._file("layer", done).is_file():
            done += 1
        return done

    def result(self, number: int) -> LayerResult:
        """A finished layer, read from the folder of work."""
        return _unpacked(torch.load(self._file("layer", number), weights_only=True), self._method.form)

    def _described(self) -> str:
        """A digest of everything that the layers' bytes depend on."""
        calibration = None if self._calibration is None else self._calibration.digest
        dtypes = [str(self._dtype)]
        if self._calibration is not None:
            dtypes.append(str(self._calibration.packs[0].hidden.dtype))
        parts = [fingerprint(self._folder), repr(self._method), calibration, dtypes, self._device.type]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _file(self, kind: str, number: int) -> Path:
        return self._work / f"{kind}-{number}.pt"

    def _done(self) -> int:
        """The number of finished layers of this very run; files of another are deleted."""
        self._work.mkdir(parents=True, exist_ok=True)
        progress = self._work / _PROGRESS
        if not progress.is_file() or progress.read_text() != self._key:
            for file in self._work.iterdir():
                file.unlink()
            progress.write_text(self._key)
        done = self.finished()
        if done and self._calibration is not None and done < len(self._config.layers):
            states = torch.load(self._file("hidden", done - 1), weights_only=True)
            for pack, hidden in zip(self._calibration.packs, states, strict=True):
                pack.hidden = hidden.to(self._device)
        return done

    def _keep(self, number: int, result: LayerResult) -> None:
        """Writes a finished layer; its hidden states first, so that a layer's file is the sign that both are there."""
        if self._calibration is not None and number + 1 < len(self._config.layers):
            _write(self._file("hidden", number), [pack.hidden.cpu() for pack in self._calibration.packs])
        _write(self._file("layer", number), _packed(result))
        self._file("hidden", number - 1).unlink(missing_ok=True)

    def _quantized(self, number: int) -> LayerResult:
        """Quantizes one layer, and moves the hidden states behind it."""
        method, calibration, result = self._method, self._calibration, LayerResult()
        layer = load_layer(self._config, number, self._folder, self._device)
        names = quantized_sites(self._config, number, experts=method.experts)
        for name in names:
            check_finite(_linear(layer, name).stored_weight, f"layers.{number}.{name}")
        groups: list[list[str]] = [[name] for name in names]
        if calibration is not None:
            seen = trace(layer, lambda: calibration.output(layer, calibration.packs[0]))
            result.notes += [f"layers.{number}.{note}" for note in self._folded(layer, calibration, seen, names)]
            groups = list(seen.sharing(names))
            unseen = [name for name in names if name not in seen.inputs]
            result.notes += [
                f"layers.{number}.{name}: no input of calibration reached it, rounded to the nearest" for name in unseen
            ]
            groups += [[name] for name in unseen]
        for group in groups:
            statistics: LayerStatistics | None = None
            if calibration is not None and method.quantizer.needs and not (set(group) & set(unseen)):
                statistics = calibration.statistics(layer, group, method.quantizer.needs)
            for name in group:
                scaled, notes = self._solved(layer, name, statistics)
                result.notes += [f"layers.{number}.{name}: {note}" for note in notes]
                result.quantized[f"layers.{number}.{name}.weight"] = _on_cpu(scaled)
        if calibration is not None:
            calibration.advance(layer)
        for name, value in layer.named_parameters():
            if (whole := f"layers.{number}.{name}") not in result.quantized:
                result.others[whole] = value.detach().cpu()
        return result

    def _folded(self, layer: Layer, calibration: Calibration, seen: Trace, names: Sequence[str]) -> list[str]:
        """Folds the method's factors into a layer; returns notes on those that it leaves alone."""
        notes = []
        if self._method.smoothing is not None:
            for fold in factor_folding.norm_folds_of(layer, seen):
                statistics = factor_folding.statistics_of(layer, calibration, fold, {"largest"})
                assert statistics.largest is not None
                weight = factor_folding.largest_weight(layer, fold.readers)
                factors = smoothing_factors(statistics.largest, weight, self._method.smoothing)
                notes.append(factor_folding.fold_checked(layer, calibration, fold, factors, self._dtype))
        if self._method.scaling:
            for fold in factor_folding.folds_of(layer, seen):
                statistics = factor_folding.statistics_of(layer, calibration, fold, {"magnitude"})
                assert statistics.magnitude is not None
                factors = factor_folding.searched_factors(
                    layer,
                    calibration,
                    fold,
                    statistics.magnitude,
                    lambda name: self._method.form if name in names else None,
                )
                notes.append(factor_folding.fold_checked(layer, calibration, fold, factors, self._dtype))
        return [note for note in notes if note is not None]

    def _solved(self, layer: Layer, name: str, statistics: LayerStatistics | None) -> tuple[Scaled, list[str]]:
        """Quantizes one linear layer, or all experts of one, and puts the numbers of the codes into its place."""
        linear = _linear(layer, name)
        weight, form = linear.stored_weight.detach(), self._method.form
        quantizer = self._method.quantizer
        notes: list[str] = []
        if statistics is None:
            scaled = encode(weight, form)
        elif isinstance(linear, GroupedLinear):
            empty = sum(each is None for each in statistics)
            if empty:
                notes.append(
                    f"{empty} of {len(statistics)} experts got no token of calibration, rounded to the nearest"
                )
            solved = [
                self._solve(Nearest() if own is None else quantizer, matrix, own, f"{name}[{expert}]")
                for expert, (matrix, own) in enumerate(zip(weight, statistics, strict=True))
            ]
            scaled = _stacked(solved)
        else:
            scaled = self._solve(quantizer, weight, statistics[0], name)
        with torch.no_grad():
            linear.stored_weight.copy_(scaled.decode(self._dtype))
        return scaled, notes

    def _solve(self, quantizer: Quantizer, weight: Tensor, statistics: Statistics | None, where: str) -> Scaled:
        try:
            return quantizer.solve(weight, statistics or Statistics(0), self._method.form)
        except ModelError as error:
            raise ModelError(f"{where}: {error}") from None


def _linear(layer: Layer, name: str) -> Linear | GroupedLinear:
    linear = layer.get_submodule(name)
    assert isinstance(linear, Linear | GroupedLinear), f"{name} is no linear layer"
    return linear


def _stacked(matrices: Sequence[Scaled]) -> Scaled:
    first = matrices[0]

    def stacked(values: Sequence[Tensor | None]) -> Tensor | None:
        return None if values[0] is None else torch.stack([value for value in values if value is not None])

    codes, scales = stacked([each.codes for each in matrices]), stacked([each.scales for each in matrices])
    assert codes is not None and scales is not None
    zeros, tensor_scale = stacked([each.zeros for each in matrices]), stacked([each.tensor_scale for each in matrices])
    return Scaled(codes, scales, first.format, zeros, tensor_scale)


def _tensors(scaled: Scaled) -> dict[str, Tensor | None]:
    return {
        "codes": scaled.codes, "scales": scaled.scales, "zeros": scaled.zeros, "tensor_scale": scaled.tensor_scale
    }  # fmt: skip


def _on_cpu(scaled: Scaled) -> Scaled:
    tensors = {name: None if value is None else value.cpu() for name, value in _tensors(scaled).items()}
    return Scaled(format=scaled.format, **tensors)  # type: ignore[arg-type]


def _packed(result: LayerResult) -> dict[str, Any]:
    """The result as a mapping of tensors and texts alone, which `torch.load` reads without running code."""
    return {
        "quantized": {name: _tensors(scaled) for name, scaled in result.quantized.items()},
        "others": result.others,
        "notes": result.notes,
    }


def _unpacked(content: Mapping[str, Any], form: Format) -> LayerResult:
    quantized = {name: Scaled(format=form, **tensors) for name, tensors in content["quantized"].items()}
    return LayerResult(quantized, content["others"], content["notes"])


def _write(file: Path, content: Any) -> None:
    """Writes a file that is there whole or not at all."""
    unfinished = file.with_suffix(".writing")
    torch.save(content, unfinished)
    os.replace(unfinished, file)
