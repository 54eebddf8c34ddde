"""Adapter folders of LoRA and DoRA against PEFT: ours loaded there, theirs loaded here, and the same logits."""

from __future__ import annotations

import copy
import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from builders.adapter_folders import changed
from builders.peft_reference import TOKENS, hugging_face, perturbed_adapter, save_adapter, theirs
from builders.tiny_adapters import adapter_set, logits, perturb
from builders.tiny_run import tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from danlu.adapters.adapter_config import init_taken_from_base, open_adapter
from danlu.adapters.peft_folder import CONFIG, WEIGHTS, add_adapter, write_adapter
from danlu.adapters.peft_values import PREFIX
from danlu.assembly.frozen_base import load_frozen
from danlu.core.errors import ModelError
from danlu.models.loading import load
from danlu.recipe import sections

CASES: list[tuple[str, Any]] = [
    ("llama", sections.Lora()),
    ("llama", sections.Lora(targets=["attention"], rank=3, scaling="rslora", dropout=0.1)),
    ("llama", sections.Lora(rank_pattern={"q_proj": 2, "layers.1.*up_proj": 5}, alpha_pattern={"v_proj": 3})),
    ("llama", sections.Lora(targets=["q_proj", "embed_tokens", "lm_head"], modules_to_save=["norm"])),
    ("llama", sections.Lora(bias="all", modules_to_save=["lm_head", "embed_tokens"])),
    ("llama", sections.Lora(targets=["layers.0.attention.q_proj", "layers.1.mlp.up_proj"])),
    ("llama", sections.Dora(rank=3)),
    ("llama", sections.Dora(init="pissa", scaling="rslora")),
    ("llama", sections.Pissa()),
    ("llama", sections.Olora(rank=4, scaling="rslora")),
    ("llama", sections.LoraFa()),
    ("phi3", sections.Lora()),
    ("phi3", sections.Lora(targets=["q_proj", "up_proj"], rank_pattern={"q_proj": 3})),
    ("phi3", sections.Dora()),
    ("phi3", sections.Pissa(scaling="rslora")),
    ("gemma2", sections.Lora(targets=["all-linear", "embed_tokens"])),
    ("tied", sections.Lora(modules_to_save=["embed_tokens"])),
    ("tied", sections.Lora(targets=["all-linear", "lm_head"])),
    ("qwen3.5", sections.Lora(rank=3)),
    ("qwen3.5", sections.Lora(rank=2, targets=["gate_proj", "v_proj"])),
    ("qwen3.5", sections.Dora(rank=2)),
    ("qwen3.5", sections.Pissa(rank=3)),
    ("qwen3.5", sections.Vera(rank=3)),
    ("qwen3.5", sections.Ia3(targets=["attention", "down_proj"], feedforward=["down_proj"])),
    ("qwen3-next", sections.Lora(rank=3, targets=["attention"])),
    ("qwen3-next", sections.Lora(rank=2, targets=[f"layers.0.attention.{name}_proj" for name in ("v", "gate", "b")])),
    ("qwen3-next", sections.Dora(rank=2, targets=["attention"])),
    ("llama", sections.Vera(rank=16, modules_to_save=["lm_head"])),
    ("mixtral", sections.Lora(targets=["attention", "experts"], rank=3, rank_pattern={"experts.down_proj": 2})),
    ("mixtral", sections.Lora(targets=["experts.up_proj"], scaling="rslora")),
    ("mixtral", sections.Lora(targets=["layers.1.mlp.experts.down_proj", "layers.0.mlp.experts.gate_proj"], rank=2)),
    ("gpt-oss", sections.Lora(targets=["all-linear", "experts"], rank=3, alpha_pattern={"experts.gate_proj": 5})),
    # A dense layer and shared experts beside experts of the same names.
    ("glm4-moe", sections.Lora(rank=3, rank_pattern={"shared_experts.up_proj": 2}, alpha_pattern={"0.mlp.up_proj": 7})),
    ("glm4-moe", sections.Lora(targets=["all-linear", "experts"], rank=2, dropout=0.0)),
    ("granite-4", sections.Lora(targets=["all-linear", "experts"], rank=2)),  # in a module of another name
    # Experts next to the module of a dense network; layers with and without a v_proj.
    ("gemma4", sections.Lora(targets=["all-linear", "experts"], rank=2)),
    # Layers without keys of their own, and the products of layers' own embeddings.
    ("gemma4-e2b", sections.Lora(rank=2, dropout=0.0)),
    # A head with a bias, which is trained with the whole head, and adapted beside its bias.
    ("phimoe", sections.Lora(targets=["attention", "experts"], rank=2, modules_to_save=["lm_head"])),
    ("phimoe", sections.Lora(targets=["q_proj", "lm_head"], rank=2, bias="adapted")),
]


@pytest.mark.parametrize(("family", "section"), CASES)
def test_peft_computes_what_danlu_wrote(bases: dict[str, Path], tmp_path: Path, family: str, section: Any) -> None:
    adapters, ours, base = perturbed_adapter(bases[family], section, size=0.05)
    write_adapter(adapters, "mine", tmp_path, base=str(bases[family]), base_fingerprint=None)
    assert not any("mine" in key for key in load_file(tmp_path / WEIGHTS))
    with_peft = theirs(peft.PeftModel.from_pretrained(hugging_face(bases[family]), tmp_path))
    torch.testing.assert_close(with_peft, ours, rtol=1e-5, atol=1e-5)
    assert (ours - base).abs().max() > 1e-2  # the negative control: without the adapter they are far apart

    again = load(bases[family])
    fresh = adapter_set(again)
    add_adapter(fresh, "back", open_adapter(tmp_path))
    torch.testing.assert_close(
        logits(again, TOKENS, virtual_token_ids=fresh.virtual_token_ids), ours, rtol=1e-5, atol=1e-5
    )


# PEFT takes their start out of the base each time it loads them.
STARTS_OUT_OF_BASE: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": "all-linear", "init_lora_weights": "pissa"}),
    ("llama", {"target_modules": "all-linear", "init_lora_weights": "olora", "r": 3, "lora_alpha": 5}),
    ("llama", {"target_modules": ["q_proj"], "init_lora_weights": "OLoRA", "use_rslora": True, "lora_alpha": 5}),
    ("llama", {"target_modules": "all-linear", "init_lora_weights": "pissa", "use_dora": True, "r": 3}),
    ("llama", {"target_modules": ["q_proj", "lm_head", "embed_tokens"], "init_lora_weights": "pissa"}),
    (
        "llama",
        {
            "target_modules": ["q_proj", "down_proj"],
            "init_lora_weights": "pissa",
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"1.*.down_proj": 3},
            "use_rslora": True,
        },
    ),
    ("llama", {"target_modules": ["k_proj", "q_proj"], "init_lora_weights": "pissa", "r": 20}),  # k_proj is [16, 32]
    ("phi3", {"target_modules": ["qkv_proj", "down_proj"], "init_lora_weights": "olora"}),
    ("gemma2", {"target_modules": "all-linear", "init_lora_weights": "pissa"}),
    ("tied", {"target_modules": ["o_proj", "embed_tokens"], "init_lora_weights": "olora"}),
    ("qwen3.5", {"target_modules": ["q_proj", "in_proj_qkv", "in_proj_z"], "init_lora_weights": "pissa", "r": 3}),
]
PEFT_CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": "all-linear"}),
    ("gemma4-e2b", {"target_modules": "all-linear"}),
    ("llama", {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, "r": 4, "lora_alpha": 5}),
    ("llama", {"target_modules": r".*\.1\.mlp\.(up|down)_proj", "use_dora": True}),
    (
        "llama",
        {"target_modules": ["q_proj", "down_proj"], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"1.*.q_proj": 9}},
    ),
    ("llama", {"target_modules": ["q_proj"], "bias": "all"}),
    ("llama", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    ("llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}),
    ("phi3", {"target_modules": ["qkv_proj"], "use_dora": True}),
    ("gemma2", {"target_modules": "all-linear"}),
    ("qwen3.5", {"target_modules": "all-linear", "r": 3}),
    ("qwen3.5", {"target_modules": ["q_proj", "in_proj_qkv"], "use_dora": True, "r": 3}),
    # With `target_parameters`: factors of experts' stacked matrices, those of gate and up in common.
    ("mixtral", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"], "r": 3}),
    (
        "mixtral",
        {
            "target_modules": [],
            "target_parameters": ["experts.down_proj", "experts.gate_up_proj"],
            "rank_pattern": {"experts.down_proj": 2},
            "use_rslora": True,
        },
    ),
    ("mixtral", {"target_modules": ["o_proj", "w1", "w2", "w3"], "r": 2}),  # experts as transformers 4 named them
    ("gpt-oss", {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "1.mlp.experts.down_proj"]}),
    ("glm4-moe", {"target_modules": ["q_proj"], "target_parameters": ["shared_experts.up_proj.weight"], "r": 2}),
    ("qwen3-next", {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"], "r": 3}),
    ("qwen3-next", {"target_modules": ["in_proj_qkvz", "in_proj_ba"], "use_dora": True, "r": 3}),
    ("phimoe", {"target_modules": ["q_proj", "lm_head"], "bias": "lora_only"}),
    ("phimoe", {"target_modules": ["o_proj"], "modules_to_save": ["lm_head"]}),
    ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    ("tied", {"target_modules": ["q_proj", "embed_tokens"]}),
    ("tied", {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
    ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    # Every value of init_lora_weights that PEFT loads again to the same numbers.
    ("llama", {"target_modules": "all-linear", "init_lora_weights": False}),
    ("llama", {"target_modules": "all-linear", "init_lora_weights": "gaussian"}),
    ("llama", {"target_modules": "all-linear", "init_lora_weights": "orthogonal"}),
    ("llama", {"target_modules": "all-linear", "init_lora_weights": "eva"}),
    ("llama", {"target_modules": "all-linear", "init_lora_weights": "lora_ga"}),
    ("llama", {"target_modules": ["q_proj", "down_proj", "embed_tokens"], "init_lora_weights": "mica", "r": 4}),
    *STARTS_OUT_OF_BASE,
]


@pytest.mark.filterwarnings("ignore:`init_lora_weights` is 'eva' but", "ignore:You are using LoRA-GA")
@pytest.mark.parametrize(("family", "config"), PEFT_CONFIGS)
def test_danlu_computes_what_peft_wrote(
    bases: dict[str, Path], tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    expected = saved_by_peft(bases[family], tmp_path, **config)
    before = logits(load(bases[family]), TOKENS)
    torch.testing.assert_close(read_by_danlu(bases[family], tmp_path), expected, rtol=1e-5, atol=1e-5)
    assert (before - expected).abs().max() > 1e-2
    if (family, config) in STARTS_OUT_OF_BASE:  # the control: read as adapters that leave the base alone
        leave_the_start_in_the_base(tmp_path)
        assert (read_by_danlu(bases[family], tmp_path) - expected).abs().max() > 1e-2


def leave_the_start_in_the_base(folder: Path) -> None:
    """Makes a written adapter one that has nothing to take out of its base."""
    tensors = load_file(folder / WEIGHTS)
    save_file({key: one for key, one in tensors.items() if ".base_layer." not in key}, folder / WEIGHTS)
    smaller = {key: len(one) for key, one in tensors.items() if key.endswith("lora_A.weight") and len(one) == 16}
    ranks = {key.removeprefix(PREFIX).removesuffix(".lora_A.weight"): rank for key, rank in smaller.items()}
    changed(folder, CONFIG, init_lora_weights=True, **({"rank_pattern": ranks} if ranks else {}))


def saved_by_peft(base: Path, folder: Path, **config: Any) -> Tensor:
    """Has PEFT write an adapter with numbers as after training; the logits of PEFT's own reload."""
    torch.manual_seed(0)
    model = peft.get_peft_model(hugging_face(base), peft.LoraConfig(task_type="CAUSAL_LM", **copy.deepcopy(config)))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    save_adapter(model, folder)
    return theirs(peft.PeftModel.from_pretrained(hugging_face(base), folder))


def read_by_danlu(base: Path, folder: Path) -> Tensor:
    model = load(base)
    adapters = adapter_set(model)
    add_adapter(adapters, "theirs", open_adapter(folder))
    return logits(model, TOKENS)


def test_a_start_is_taken_out_of_the_base_as_it_is_stored(bases: dict[str, Path], tmp_path: Path) -> None:
    """Also where an adapter of our own has taken its own start out before, and is switched off."""
    expected = saved_by_peft(bases["llama"], tmp_path, target_modules=["q_proj", "up_proj"], init_lora_weights="pissa")
    model = load(bases["llama"])
    adapters = adapter_set(model)
    adapters.add("ours", sections.Olora(rank=5))
    adapters.train_only("ours")
    perturb(adapters, "ours")
    adapters.activate()
    add_adapter(adapters, "theirs", open_adapter(tmp_path))
    torch.testing.assert_close(logits(model, TOKENS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("init", ["pissa_niter_4", "corda", "loftq"])
def test_a_start_that_cannot_be_found_again_is_refused(bases: dict[str, Path], tmp_path: Path, init: str) -> None:
    folder = changed(written(bases, tmp_path), CONFIG, init_lora_weights=init)
    said = f"{CONFIG}: init_lora_weights is '{init}': the start was taken out .*path_initial_model_for_weight_conv"
    with pytest.raises(ModelError, match=said):
        add_adapter(adapter_set(load(bases["llama"])), "one", open_adapter(folder))


def test_every_start_that_peft_knows_is_judged() -> None:
    """A value that a new PEFT adds must be looked at here before adapters with it are read."""
    (field,) = (one for one in dataclasses.fields(peft.LoraConfig) if one.name == "init_lora_weights")
    words = [one for part in typing.get_args(typing.get_type_hints(peft.LoraConfig)[field.name])
             for one in typing.get_args(part)]  # fmt: skip
    assert "pissa" in words and "loftq" in words
    for init in (word.replace("[number of iters]", "4") for word in words):
        if init.startswith(("pissa_", "corda", "loftq")):
            with pytest.raises(ModelError, match="cannot be found again"):
                init_taken_from_base({"init_lora_weights": init}, "file")
        else:
            init_taken_from_base({"init_lora_weights": init}, "file")


def test_peft_converts_what_cannot_be_found_again(bases: dict[str, Path], tmp_path: Path) -> None:
    """The way out that the message names."""
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights="pissa_niter_4", r=4, lora_alpha=8
    )
    model = peft.get_peft_model(hugging_face(bases["llama"]), config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "before")
    model.peft_config["default"].init_lora_weights = "pissa_niter_4"
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    expected = theirs(model)
    model.save_pretrained(tmp_path / "out", path_initial_model_for_weight_conversion=str(tmp_path / "before"))
    torch.testing.assert_close(read_by_danlu(bases["llama"], tmp_path / "out"), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"init_lora_weights": "principal"},
            "init_lora_weights is 'principal', which PEFT does not know; danlu reads: ",
        ),
        ({"r": "eight"}, "r is 'eight'; expected a whole number above 0"),
        ({"lora_alpha": [1]}, r"lora_alpha is \[1\]; expected a number"),
        ({"lora_alpha": ""}, "lora_alpha is ''; expected a number"),
        ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern: q_proj is 'x'; expected a whole number above 0"),
        ({"alpha_pattern": {"q_proj": [3]}}, r"alpha_pattern: q_proj is \[3\]; expected a number"),
        ({"alpha_pattern": {"q_(": 3}}, "alpha_pattern is .*; expected regular expressions with numbers"),
        ({"use_dora": True}, "q_proj.lora_magnitude_vector is missing: the two files are not of one adapter"),
        ({"lora_dropout": 1.5}, "adapter_config.json: dropout is 1.5: Input should be less than 1"),
        ({"r": 3}, "the factors of model.layers.0.self_attn.q_proj have rank 8, its config says 3"),
        ({"rank_pattern": {"1.*.q_proj": 2}}, "the factors of model.layers.1.self_attn.q_proj have rank 8, its config"),
    ],
)
def test_a_config_that_is_not_of_these_tensors_is_refused(
    bases: dict[str, Path], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    folder = changed(written(bases, tmp_path), CONFIG, **change)
    with pytest.raises(ModelError, match=said):
        add_adapter(adapter_set(load(bases["llama"])), "one", open_adapter(folder))


def test_a_start_out_of_what_is_not_there_as_stored_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    packed = load_frozen(bases["llama"], dtype=torch.float32, quantization=sections.Int8())
    folder = changed(written(bases, tmp_path), CONFIG, init_lora_weights="pissa")
    with pytest.raises(ModelError, match="is a part of model.layers.0.self_attn.q_proj, which is quantized"):
        add_adapter(packed.adapters, "one", open_adapter(folder))
    tied = adapter_set(load(bases["tied"]))
    tied.add("one", sections.Lora(targets=["lm_head"]))
    (tmp_path / "tied").mkdir()
    write_adapter(tied, "one", tmp_path / "tied", base="base", base_fingerprint=None)
    changed(tmp_path / "tied", CONFIG, init_lora_weights="olora")
    with pytest.raises(ModelError, match="out of lm_head, which in this model is the embedding"):
        add_adapter(adapter_set(load(bases["tied"])), "one", open_adapter(tmp_path / "tied"))


def test_a_bias_that_the_config_does_not_name_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    adapters = adapter_set(load(bases["llama"]))
    adapters.add("one", sections.Lora(targets=["q_proj"], bias="all"))
    write_adapter(adapters, "one", tmp_path, base="base", base_fingerprint=None)
    changed(tmp_path, CONFIG, bias="none")
    with pytest.raises(ModelError, match=r"bias is of the base, and adapter_config.json does not say in `bias`"):
        add_adapter(adapter_set(load(bases["llama"])), "one", open_adapter(tmp_path))


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_initial_values_are_pefts_up_to_sign(bases: dict[str, Path], init: str) -> None:
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=init, r=4, lora_alpha=8
    )
    theirs_ = peft.get_peft_model(hugging_face(bases["llama"]), config).base_model.model
    ours = load(bases["llama"])
    adapters = adapter_set(ours)
    adapters.add("one", sections.Lora(init=init, rank=4, alpha=8, targets=["q_proj"]))
    module = adapters.added["one"].modules["layers.0.attention.q_proj"]
    layer = theirs_.model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    sign = torch.sign((a * module.lora_A).sum(1))
    torch.testing.assert_close(module.lora_A * sign[:, None], a, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(module.lora_B * sign, b, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.layers["0"].attention.q_proj.weight, layer.base_layer.weight, rtol=1e-4, atol=1e-6)


def test_random_initial_values_have_pefts_distribution(bases: dict[str, Path]) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["down_proj"], r=8)
    layer = peft.get_peft_model(hugging_face(bases["llama"]), config).base_model.model.model.layers[0].mlp.down_proj
    adapters = adapter_set(load(bases["llama"]))
    adapters.add("one", sections.Lora(rank=8, targets=["down_proj"]))
    ours = adapters.added["one"].modules["layers.0.mlp.down_proj"].lora_A
    for values in (ours, layer.lora_A["default"].weight):
        assert 0.9 / 48**0.5 < values.abs().max() <= 1 / 48**0.5
    assert not adapters.added["one"].modules["layers.0.mlp.down_proj"].lora_B.any()


def written(bases: dict[str, Path], folder: Path, section: Any = None) -> Path:
    adapters = adapter_set(load(bases["llama"]))
    adapters.add("one", section or sections.Lora(targets=["q_proj"]))
    write_adapter(adapters, "one", folder, base="base", base_fingerprint="f")
    return folder


def test_a_folder_of_another_base_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = written(bases, tmp_path)
    wider = tiny_model(hidden_size=48, intermediate_size=48)
    with pytest.raises(ModelError, match=r"q_proj.lora_A.weight is \[8, 32\], this model needs \[8, 48\]: the adapter"):
        add_adapter(adapter_set(wider), "one", open_adapter(folder))
    shallow = tiny_model(num_hidden_layers=1)
    with pytest.raises(ModelError, match="layers.1.self_attn.q_proj, a layer that this model does not have"):
        add_adapter(adapter_set(shallow), "one", open_adapter(folder))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "POLY"}, "peft_type 'POLY' is not supported; supported: .*LORA"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is {'nblocks': 2}, which danlu does not support"),
        ({"target_parameters": ["mlp.experts.up"]}, "target_parameters has 'mlp.experts.up'; of stacked parameters"),
        ({"target_parameters": "experts.down_proj"}, "target_parameters is .*; expected names of parameters"),
    ],
)
def test_what_danlu_does_not_compute_is_refused(
    bases: dict[str, Path], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    folder = written(bases, tmp_path)
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(values | change))
    with pytest.raises(ModelError, match=said):
        add_adapter(adapter_set(load(bases["llama"])), "one", open_adapter(folder))


def test_broken_folders_are_told(bases: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no adapter here \(adapter_config.json is missing\)"):
        open_adapter(tmp_path)
    folder = written(bases, tmp_path)
    adapters = adapter_set(load(bases["llama"]))
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="adapter_model.safetensors: cannot be read"):
        add_adapter(adapters, "one", open_adapter(folder))
    (folder / WEIGHTS).write_bytes(whole)
    tensors = load_file(folder / WEIGHTS)
    lost = next(key for key in tensors if "lora_B" in key)
    save_file({key: value for key, value in tensors.items() if key != lost}, folder / WEIGHTS)
    with pytest.raises(ModelError, match="lora_B.weight is missing"):
        add_adapter(adapters, "one", open_adapter(folder))
    save_file(tensors | {"base_model.model.model.nothing.weight": torch.zeros(2)}, folder / WEIGHTS)
    with pytest.raises(ModelError, match="model.nothing.weight is no tensor of this model"):
        add_adapter(adapters, "one", open_adapter(folder))
    (folder / CONFIG).write_text("{")
    with pytest.raises(ModelError, match="adapter_config.json: cannot be read as JSON"):
        open_adapter(folder)
