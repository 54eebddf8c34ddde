"""LoRA on experts: what it computes, its gradients, what it merges to, and which targets reach it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders.small_experts import BIASED, MIXTRAL, ODD, QWEN2_MOE, small_decoder, small_moe
from builders.tiny_adapters import adapter_set, logits, perturb
from torch import Tensor, nn

from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.lora import GroupedLowRank
from danlu.adapters.merge import merge_weights, merged_parameter
from danlu.adapters.slot import GroupedSlot
from danlu.adapters.targets import select
from danlu.core.errors import RecipeError
from danlu.models.experts import Experts
from danlu.models.layer_spec import Experts as ExpertsSpec
from danlu.models.modules import GroupedLinear
from danlu.recipe import sections

RANK, SCALE = 3, 0.7


def adapted_experts(spec: ExpertsSpec) -> Experts:
    """The experts of a small mixture in float64, with LoRA on each matrix as after training."""
    experts = small_moe(spec, 10).experts.double()
    generator = torch.Generator().manual_seed(3)
    for module in experts.children():
        assert isinstance(module, GroupedLinear)
        lora = GroupedLowRank(spec.num_experts, module.shape, RANK, SCALE).double()
        for parameter in lora.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)
        slot = GroupedSlot()
        slot["one"], slot.active = lora, ("one",)
        module.adapter = slot
    return experts


def by_rows(experts: Experts, rows: Tensor, counts: Tensor, *, shift: int = 0) -> Tensor:
    """The definition, row by row: (W_e + s B_e A_e) x. shift: the negative control, factors of another expert."""

    def multiplied(module: Any, e: int, x: Tensor) -> Tensor:
        lora = module.adapter["one"]
        other = (e + shift) % len(counts)
        y = (module.weight[e] + SCALE * lora.lora_B[other] @ lora.lora_A[other]) @ x
        return y if module.bias is None else y + module.bias[e]

    results = []
    for x, e in zip(rows, torch.repeat_interleave(torch.arange(len(counts)), counts).tolist(), strict=True):
        gate, up = (multiplied(module, e, x) for module in (experts.gate_proj, experts.up_proj))
        results.append(multiplied(experts.down_proj, e, nn.functional.silu(gate) * up))
    return torch.stack(results)


@pytest.mark.parametrize("spec", [MIXTRAL, BIASED, ODD], ids=["mixtral", "biased", "odd"])
def test_each_row_goes_through_the_factors_of_its_expert(spec: ExpertsSpec) -> None:
    experts = adapted_experts(spec)
    counts = torch.tensor([2, 0, 3, *[1] * (spec.num_experts - 3)])
    rows = torch.randn(int(counts.sum()), 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    lora = [parameter for name, parameter in experts.named_parameters() if "lora" in name]
    weight = torch.linspace(-1, 1, 10, dtype=torch.float64)
    ours = experts(rows, counts)
    torch.testing.assert_close(ours, by_rows(experts, rows, counts), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(ours, by_rows(experts, rows, counts, shift=1), rtol=0.1)
    expected = torch.autograd.grad((by_rows(experts, rows, counts) @ weight).sum(), lora)
    found = torch.autograd.grad((ours @ weight).sum(), lora)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
        assert not one[1].any() and one[0].any()  # zero, not none, for the expert without rows


def perturbed(spec: ExpertsSpec, *targets: str) -> tuple[AdapterSet, Tensor, Tensor]:
    """(adapters, logits with them, those of the base)."""
    model = small_decoder(spec)
    before = logits(model)
    adapters = adapter_set(model)
    adapters.add("one", sections.Lora(targets=list(targets), rank=4))
    assert torch.equal(logits(model), before)  # B is zero
    adapters.train_only("one")
    perturb(adapters, "one", size=0.1)
    return adapters, logits(model), before


@pytest.mark.parametrize("spec", [MIXTRAL, QWEN2_MOE], ids=["mixtral", "qwen2-moe"])
def test_merged_is_unmerged_and_switched_off_is_the_base(spec: ExpertsSpec) -> None:
    adapters, apart, before = perturbed(spec, "experts", "q_proj")
    assert (apart - before).abs().max() > 0.02
    with adapters.disabled():
        assert torch.equal(logits(adapters.model), before)  # type: ignore[arg-type]
    name = "layers.0.mlp.experts.up_proj.weight"
    merged = merged_parameter(adapters, name).clone()
    merge_weights(adapters)
    torch.testing.assert_close(logits(adapters.model), apart, rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]
    assert torch.equal(adapters.base_parameters()[name], merged)


def test_adapters_are_stacked() -> None:
    adapters, first, _ = perturbed(MIXTRAL, "experts.down_proj")
    adapters.add("two", sections.Lora(targets=["experts"], rank=2))
    adapters.train_only("two")
    perturb(adapters, "two", seed=2, size=0.1)
    both = logits(adapters.model)  # type: ignore[arg-type]
    adapters.activate("two", "one")
    torch.testing.assert_close(logits(adapters.model), both, rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]
    adapters.remove("two")
    assert torch.equal(logits(adapters.model), first) and not torch.allclose(first, both, atol=1e-3)  # type: ignore[arg-type]


def test_first_values_are_those_of_one_layer() -> None:
    lora = GroupedLowRank(16, (6, 48), RANK, SCALE)
    lora.reset_parameters(torch.Generator().manual_seed(0))
    assert 0.95 / 48**0.5 < lora.lora_A.abs().max() <= 1 / 48**0.5 and not lora.lora_B.any()
    assert not torch.equal(lora.lora_A[0], lora.lora_A[1])
    lora.reset_parameters(torch.Generator().manual_seed(0), gaussian=True)
    assert abs(lora.lora_A.std().item() * RANK - 1) < 0.05


def test_which_targets_reach_experts() -> None:
    sites = adapter_set(small_decoder(QWEN2_MOE)).sites
    names = {
        target: {site.name.removeprefix("layers.0.") for site in select(sites, [target]) if site.layer == 0}
        for target in ("all-linear", "mlp", "down_proj", "experts", "experts.gate_up_proj", ".*experts.*down_proj")
    }
    assert not any("experts" in name for target in ("all-linear", "mlp", "down_proj") for name in names[target])
    assert names["mlp"] == {f"mlp.shared.{name}_proj" for name in ("gate", "up", "down")}
    assert names["experts"] == {f"mlp.experts.{name}_proj" for name in ("gate", "up", "down")}
    assert names["experts.gate_up_proj"] == {f"mlp.experts.{name}_proj" for name in ("gate", "up")}
    assert names[".*experts.*down_proj"] == {"mlp.experts.down_proj"}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (sections.Dora(targets=["experts"]), "adapter.targets: dora cannot sit on the stacked matrices of experts"),
        (sections.Pissa(targets=["experts"]), "adapter.targets: init: pissa cannot sit on the stacked"),
        (sections.Vera(targets=["experts"]), "adapter.targets: vera cannot sit"),
        (sections.Mora(targets=["experts.up_proj"]), "adapter.targets: mora cannot sit"),
        (sections.Ia3(targets=["experts"], feedforward=[]), "adapter.targets: ia3 cannot sit"),
        (sections.Lora(targets=["experts"], dropout=0.1), "adapter.dropout: 0.1 cannot be applied to the inputs of"),
        (sections.Lora(targets=["experts"], rank=25), "adapter.rank: 25 is above 24, the smaller side"),
        (sections.Lora(targets=["down_proj"]), r"'down_proj' matches no layer of this model. Near: experts.down_proj"),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_what_does_not_fit_experts_is_refused(section: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        adapter_set(small_decoder(MIXTRAL)).add("one", section)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            sections.Lora(targets=["q_proj"], modules_to_save=["up_proj"]),
            "adapter.modules_to_save would train layers.0",
        ),
        (sections.Lora(targets=["q_proj"], bias="all"), "adapter.bias: all would train .*experts.gate_proj.bias"),
        (sections.Lora(targets=["experts"], bias="adapted"), "adapter.bias: adapted would train"),
    ],
    ids=["modules_to_save", "all", "adapted"],
)
def test_experts_are_not_trained_in_full_beside_an_adapter(section: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        adapter_set(small_decoder(BIASED)).add("one", section)


def test_lora_fa_freezes_the_as_of_experts() -> None:
    adapters = adapter_set(small_decoder(MIXTRAL))
    adapters.add("one", sections.LoraFa(targets=["experts"]))
    adapters.train_only("one")
    trained = {name.rpartition(".")[2]: each.requires_grad for name, each in adapters.tensors("one").items()}
    assert trained == {"lora_A": False, "lora_B": True}
