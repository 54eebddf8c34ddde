"""Layers quantized one after the other: what their inputs are, what folds keep, and that a killed run ends alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.tiny_run import saved_models, tiny_model
from torch import Tensor

from danlu.assembly import factor_folding
from danlu.assembly.calibration import Calibration, load_layer, trace
from danlu.assembly.factor_folding import Fold, fold_checked, folds_of
from danlu.assembly.layerwise_quantizing import LayerwiseQuantizer, Method
from danlu.core.errors import ModelError
from danlu.core.types import Pack, Sample
from danlu.models.decoder import Layer
from danlu.models.hf_folder import read_config
from danlu.models.modules import RMSNorm
from danlu.models.saving import save
from danlu.numerics.format import Format, encode
from danlu.numerics.quantizers.awq import Awq
from danlu.numerics.quantizers.gptq import Gptq
from danlu.numerics.quantizers.quantizer import Nearest

CPU = torch.device("cpu")
FORM = Format("int4", (1, 16))
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "hidden_size": 64, "intermediate_size": 96},
    "gemma2": {
        "model_type": "gemma2",
        "hidden_size": 64,
        "head_dim": 16,
        "intermediate_size": 96,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    },
    "mixtral": {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return saved_models(tmp_path_factory.mktemp("models"), FAMILIES)


def packs_of(count: int, tokens: int = 32, vocabulary: int = 64) -> list[Pack]:
    numbers = np.random.default_rng(3).integers(0, vocabulary, (count, tokens), dtype=np.int32)
    weights = np.ones(tokens, dtype=np.float32)
    weights[0] = 0
    return [Pack((Sample(row, weights, "row"),)) for row in numbers]


def calibration_of(folder: Path, packs: list[Pack]) -> Calibration:
    return Calibration.of(read_config(folder), folder, packs, dtype=torch.float32, device=CPU)


def quantizer_of(folder: Path, method: Method, work: Path, packs: list[Pack] | None = None) -> LayerwiseQuantizer:
    calibration = None if packs is None else calibration_of(folder, packs)
    return LayerwiseQuantizer(read_config(folder), folder, method, calibration, work, dtype=torch.float32, device=CPU)


def first_layer(folder: Path, calibration: Calibration) -> tuple[Layer, list[Fold]]:
    layer = load_layer(calibration.config, 0, folder, CPU)
    seen = trace(layer, lambda: calibration.output(layer, calibration.packs[0]))
    return layer, list(folds_of(layer, seen))


def factors_of(layer: Layer, fold: Fold) -> Tensor:
    inputs = layer.get_submodule(fold.readers[0])
    width = inputs.weight.shape[-1]
    return torch.rand(width, generator=torch.Generator().manual_seed(1)) * 3 + 0.3


@pytest.mark.parametrize("family", FAMILIES)
def test_folds_keep_a_layers_outputs(folders: dict[str, Path], family: str) -> None:
    calibration = calibration_of(folders[family], packs_of(1))
    pack = calibration.packs[0]
    layer, folds = first_layer(folders[family], calibration)
    sources = [fold.source for fold in folds]
    assert sources[:2] == ["attention_norm", "mlp_norm"]
    assert "attention.v_proj" not in sources  # two query heads have one value head
    expected = calibration.output(layer, pack)
    for fold in folds:
        before = {name: value.clone() for name, value in layer.named_parameters()}
        assert fold_checked(layer, calibration, fold, factors_of(layer, fold), torch.float32) is None
        assert any(not value.equal(before[name]) for name, value in layer.named_parameters())
        torch.testing.assert_close(calibration.output(layer, pack), expected, rtol=1e-5, atol=1e-5)


def test_gemmas_norms_are_one_plus_their_weight(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the one, outputs change, and the fold is left alone with a note."""
    calibration = calibration_of(folders["gemma2"], packs_of(1))
    layer, folds = first_layer(folders["gemma2"], calibration)
    expected = calibration.output(layer, calibration.packs[0])

    def without_offset(layer: Layer, fold: Fold, factors: Tensor, dtype: torch.dtype) -> None:
        norm = layer.get_submodule(fold.source)
        assert isinstance(norm, RMSNorm)
        norm.weight.data.div_(factors)
        for name in fold.readers:
            layer.get_submodule(name).weight.data.mul_(factors)

    monkeypatch.setattr(factor_folding, "apply", without_offset)
    note = fold_checked(layer, calibration, folds[0], factors_of(layer, folds[0]), torch.float32)
    assert note is not None and "would change the layer's outputs" in note
    assert calibration.output(layer, calibration.packs[0]).equal(expected)


def test_values_fold_into_the_output_projection_where_each_head_has_its_own(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    _, shared = first_layer(folders["llama"], calibration_of(folders["llama"], packs_of(1)))
    assert shared and not any(fold.source == "attention.v_proj" for fold in shared)  # two query heads read a value
    save(tiny_model(**FAMILIES["llama"], num_key_value_heads=4, num_attention_heads=4), tmp_path / "model")
    calibration = calibration_of(tmp_path / "model", packs_of(1))
    layer, folds = first_layer(tmp_path / "model", calibration)
    fold = next(fold for fold in folds if fold.source == "attention.v_proj")
    expected = calibration.output(layer, calibration.packs[0])
    assert fold_checked(layer, calibration, fold, factors_of(layer, fold), torch.float32) is None
    torch.testing.assert_close(calibration.output(layer, calibration.packs[0]), expected, rtol=1e-5, atol=1e-5)


def test_statistics_are_those_of_all_packs(folders: dict[str, Path]) -> None:
    packs = packs_of(3)
    calibration = calibration_of(folders["llama"], packs)
    layer = load_layer(calibration.config, 0, folders["llama"], CPU)
    (statistics,) = calibration.statistics(layer, ["attention.q_proj"], {"hessian", "magnitude", "largest"})
    assert layer.attention_norm is not None and statistics is not None
    x = torch.cat([layer.attention_norm(pack.hidden) for pack in calibration.packs]).detach()
    assert statistics.tokens == len(x)
    torch.testing.assert_close(statistics.hessian, x.T @ x / len(x))
    torch.testing.assert_close(statistics.magnitude, x.abs().mean(0))
    torch.testing.assert_close(statistics.largest, x.abs().amax(0))


def test_inputs_come_from_what_is_quantized_already(folders: dict[str, Path], tmp_path: Path) -> None:
    packs, form = packs_of(2), replace(FORM, element="int2")
    method = Method(Gptq(act_order=False), form)
    run = quantizer_of(folders["llama"], method, tmp_path / "work", packs)
    run.run()
    first, second = run.result(0), run.result(1)
    calibration = calibration_of(folders["llama"], packs)

    def solved(layer: Layer, name: str) -> Tensor:
        (statistics,) = calibration.statistics(layer, [name], {"hessian"})
        assert statistics is not None
        return Gptq(act_order=False).solve(layer.get_submodule(name).weight, statistics, form).codes

    plain = load_layer(calibration.config, 0, folders["llama"], CPU)
    codes = first.quantized["layers.0.mlp.down_proj.weight"].codes
    assert not solved(plain, "mlp.down_proj").equal(codes)  # the control: of inputs of the layer as it was
    for name, scaled in first.quantized.items():
        module = plain.get_submodule(name.removeprefix("layers.0.").removesuffix(".weight"))
        if "down_proj" not in name:
            module.weight.data.copy_(scaled.decode())
    assert solved(plain, "mlp.down_proj").equal(codes)
    plain.mlp.down_proj.weight.data.copy_(first.quantized["layers.0.mlp.down_proj.weight"].decode())
    calibration.advance(plain)
    after = load_layer(calibration.config, 1, folders["llama"], CPU)
    assert solved(after, "attention.q_proj").equal(second.quantized["layers.1.attention.q_proj.weight"].codes)


@pytest.mark.parametrize(
    "method",
    [
        Method(Gptq(), FORM, smoothing=0.5),
        pytest.param(Method(Awq(), FORM, scaling=True), marks=pytest.mark.slow),
        Method(Nearest(), FORM),
    ],
    ids=["smoothquant-gptq", "awq", "nearest"],
)
def test_a_killed_run_ends_with_the_same_bytes(tmp_path: Path, method: Method) -> None:
    folder, packs = tmp_path / "model", packs_of(2)
    save(tiny_model(**FAMILIES["llama"], num_hidden_layers=3), folder)
    whole = quantizer_of(folder, method, tmp_path / "whole", packs)
    assert whole.run() == 0

    class Killed(Exception):
        pass

    def killed(done: int, total: int) -> None:
        if done == 2:
            raise Killed

    with pytest.raises(Killed):
        quantizer_of(folder, method, tmp_path / "killed", packs).run(killed)
    resumed = quantizer_of(folder, method, tmp_path / "killed", packs)
    assert resumed.run() == 2
    for number in range(len(read_config(folder).layers)):
        expected, actual = whole.result(number), resumed.result(number)
        assert expected.quantized.keys() == actual.quantized.keys()
        for name, scaled in expected.quantized.items():
            assert scaled.codes.equal(actual.quantized[name].codes)
            assert scaled.scales.equal(actual.quantized[name].scales)
        for name, value in expected.others.items():
            assert value.equal(actual.others[name])
    # With other rows nothing of it is taken over.
    assert quantizer_of(folder, method, tmp_path / "killed", packs_of(1)).run() == 0


def test_experts_without_tokens_are_told_and_rounded_to_the_nearest(folders: dict[str, Path], tmp_path: Path) -> None:
    run = quantizer_of(folders["mixtral"], Method(Gptq(), FORM), tmp_path / "work", packs_of(1, tokens=4))
    run.run()
    result = run.result(0)
    notes = [note for note in result.notes if "experts got no token of calibration" in note]
    assert len(notes) == 3, result.notes
    name = "mlp.experts.up_proj"
    weight = load_layer(read_config(folders["mixtral"]), 0, folders["mixtral"], CPU).get_submodule(name).weight
    scaled = result.quantized[f"layers.0.{name}.weight"]
    rounded = [own.equal(other) for own, other in zip(scaled.codes, encode(weight, FORM).codes, strict=True)]
    assert 0 < sum(rounded) < len(rounded)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = tiny_model(**FAMILIES["llama"])
    save(model, tmp_path / "model")
    method = Method(Nearest(), FORM)
    run = quantizer_of(tmp_path / "model", method, tmp_path / "work")
    config = read_config(tmp_path / "model")
    layer = load_layer(config, 0, tmp_path / "model", CPU)
    layer.mlp.up_proj.weight.data[0, 0] = torch.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("danlu.assembly.layerwise_quantizing.load_layer", lambda *arguments: layer)
        with pytest.raises(ModelError, match=r"layers\.0\.mlp\.up_proj: holds NaN or infinite"):
            run.run()
