"""Adapters put into a decoder: they start equal to the base, switch, merge and leave without a trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from builders.tiny_adapters import adapter_set, hidden_states, logits, perturb, wide_logits, widen
from builders.tiny_run import tiny_model

from danlu.adapters.merge import UNMERGEABLE_KINDS, merge_weights, merged_parameter
from danlu.adapters.shapes import BASE_CHANGING_INITS
from danlu.core.errors import ModelError, RecipeError
from danlu.numerics.four_bit_weight import FourBitWeight
from danlu.recipe import sections

KINDS: list[Any] = [
    sections.Lora(),
    sections.Lora(targets=["all-linear", "embed_tokens", "lm_head"], init="gaussian"),
    sections.RsLora(rank=4, targets=["attention"]),
    sections.Dora(rank=3),
    sections.Dora(exact_norm=True, targets=["mlp", "lm_head"]),
    sections.LoraFa(),
    sections.Pissa(),
    sections.Pissa(svd_iterations=8),
    sections.Olora(),
    sections.Dora(init="pissa", scaling="rslora"),
    sections.Lora(bias="all", modules_to_save=["norm", "lm_head"]),
    sections.Vera(rank=16),
    sections.Vera(rank=48, targets=["attention", "lm_head"], modules_to_save=["norm"]),
    sections.Mora(rank=4, targets=["all-linear", "lm_head"]),
    sections.Mora(rank=2, form="sharing"),
    sections.Ia3(),
    sections.Ia3(targets=["q_proj", "mlp", "lm_head"], feedforward=["o_proj", "up_proj", "down_proj"]),
    sections.Bottleneck(width=6),
    sections.Bottleneck(placement="pfeiffer", activation="relu", modules_to_save=["norm"]),
]
MERGEABLE = [section for section in KINDS if section.kind not in UNMERGEABLE_KINDS]
VIRTUAL: list[Any] = [  # which change the model from the start
    sections.Prompt(tokens=3),
    sections.Prefix(tokens=3),
    sections.Prefix(tokens=2, projection=5),
]


def name_of(section: Any) -> str:
    changed = section.model_dump(exclude_defaults=True)
    return "-".join([section.kind, *(f"{key}" for key in changed if key != "kind")])


def model_of(**changes: Any) -> Any:
    return tiny_model(model_type="llama", attention_bias=True, **changes)


def assert_same(found: torch.Tensor, expected: torch.Tensor, *, of_float32: float = 0.0) -> None:
    """Equal but for the last bit of float32, in which logits come; what is before them is float64, unless told."""
    torch.testing.assert_close(found, expected, rtol=3e-7 + of_float32, atol=1e-7 + of_float32)


@pytest.mark.parametrize("section", KINDS, ids=name_of)
def test_an_adapter_starts_as_the_base_and_then_differs(section: Any) -> None:
    model = model_of()
    before = logits(model)
    adapters = adapter_set(model)
    adapters.add("one", section)
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)
    adapters.train_only("one")
    perturb(adapters, "one")
    assert (logits(model) - before).abs().max() > 0.05


@pytest.mark.parametrize("section", KINDS + VIRTUAL, ids=name_of)
def test_disabled_is_the_base_bit_for_bit(section: Any) -> None:
    model = model_of()
    adapters = adapter_set(model)
    adapters.add("one", section)
    adapters.train_only("one")
    base = {name: parameter.detach().clone() for name, parameter in adapters.base_parameters().items()}
    with adapters.disabled():
        before = logits(model)
    perturb(adapters, "one")
    adapted = logits(model, virtual_token_ids=adapters.virtual_token_ids)
    with adapters.disabled():
        assert adapters.virtual_token_ids == ()
        assert torch.equal(logits(model), before)
        assert all(torch.equal(base[name], now) for name, now in adapters.base_parameters().items())
    assert torch.equal(logits(model, virtual_token_ids=adapters.virtual_token_ids), adapted) and not torch.equal(
        adapted, before
    )


@pytest.mark.parametrize("section", MERGEABLE, ids=name_of)
def test_merged_is_unmerged(section: Any) -> None:
    model = model_of().double()
    adapters = adapter_set(model)
    adapters.add("one", section)
    adapters.train_only("one")
    perturb(adapters, "one")
    widen(adapters)
    apart = wide_logits(model)
    weights = {name: parameter.detach().clone() for name, parameter in adapters.base_parameters().items()}
    values = {name: merged_parameter(adapters, name).clone() for name in weights}
    assert torch.equal(wide_logits(model), apart)
    assert all(torch.equal(weights[name], now) for name, now in adapters.base_parameters().items())
    merge_weights(adapters)
    assert_same(wide_logits(model), apart)
    merged = adapters.base_parameters()
    assert any(not torch.equal(weights[name], merged[name]) for name in weights) or section.modules_to_save
    for name, value in values.items():
        torch.testing.assert_close(value, merged[name])


@pytest.mark.parametrize("section", KINDS + VIRTUAL, ids=name_of)
def test_steps_change_what_should_train_and_nothing_else(section: Any) -> None:
    model = model_of()
    adapters = adapter_set(model)
    adapters.add("one", section)
    adapters.add("other", sections.Lora(rank=2, init="gaussian", targets=["o_proj"]))
    adapters.train_only("one")
    adapters.activate("one")
    own = adapters.tensors("one")
    learns = [parameter for parameter in own.values() if parameter.requires_grad]
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert set(own) <= set(before)  # tensors have the names that they have in the model
    optimizer = torch.optim.SGD(learns, lr=0.5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        hidden = hidden_states(model, virtual_token_ids=adapters.virtual_token_ids)
        loss = torch.nn.functional.linear(hidden, model.head_weight).logsumexp(-1).mean()
        losses.append(loss.item())
        loss.backward()
        assert all(parameter.grad is None for name, parameter in model.named_parameters() if name not in own)
        optimizer.step()
    for name, parameter in model.named_parameters():
        learnt = name in own and own[name].requires_grad
        assert torch.equal(before[name], parameter) != learnt, name
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("section", KINDS + VIRTUAL, ids=name_of)
def test_bfloat16_activations_leave_parameters_and_gradients_in_float32(section: Any) -> None:
    model = model_of()
    adapters = adapter_set(model)
    adapters.add("one", section)
    adapters.train_only("one")
    perturb(adapters, "one", size=0.1)
    exact = logits(model, virtual_token_ids=adapters.virtual_token_ids)
    hidden = hidden_states(model, dtype=torch.bfloat16, virtual_token_ids=adapters.virtual_token_ids)
    assert hidden.dtype == torch.bfloat16
    rounded = model.logits(hidden)
    assert (rounded - exact).square().mean() < 1e-3 * exact.square().mean()
    rounded.square().mean().backward()
    for name, parameter in adapters.tensors("one").items():
        assert parameter.dtype == torch.float32 and (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.grad is None or parameter.grad.isfinite().all()


LEAVES_BASE = [one for one in KINDS + VIRTUAL if getattr(one, "init", "default") not in BASE_CHANGING_INITS]


@pytest.mark.parametrize("section", LEAVES_BASE, ids=name_of)
def test_one_that_is_taken_out_leaves_no_trace(section: Any) -> None:
    model = model_of()
    before = logits(model)
    adapters = adapter_set(model)
    adapters.add("one", section)
    adapters.remove("one")
    assert torch.equal(logits(model), before) and adapters.virtual_token_ids == ()
    assert not any(".one." in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("section", [sections.Bottleneck(), *VIRTUAL], ids=name_of)
def test_what_is_no_change_of_weights_is_not_merged(section: Any) -> None:
    adapters = adapter_set(model_of())
    adapters.add("one", section)
    with pytest.raises(ModelError, match="'one' .* changes what flows through the model, not its weights"):
        merge_weights(adapters)
    with adapters.disabled():
        merge_weights(adapters)


def test_gradients_reach_the_adapter_and_nothing_else() -> None:
    model = model_of()
    adapters = adapter_set(model)
    adapters.add("one", sections.Lora(targets=["q_proj", "down_proj"], bias="adapted"))
    adapters.train_only("one")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == set(adapters.tensors("one"))
    assert {name.rpartition(".")[2] for name in trained} == {"lora_A", "lora_B", "bias"}
    assert all("q_proj" in name or "down_proj" in name for name in trained)


def test_several_at_once_add_up_and_are_switched() -> None:
    model = model_of().double()
    base = wide_logits(model)
    adapters = adapter_set(model)
    alone = []
    for name, section in {"one": sections.Lora(targets=["mlp"]), "two": sections.Lora(rank=2)}.items():
        adapters.add(name, section)
        perturb_all(adapters, name)
        widen(adapters)
        adapters.activate(name)
        alone.append(wide_logits(model))
    adapters.activate("one", "two")
    both = wide_logits(model)
    assert not any(torch.equal(both, other) for other in (*alone, base))
    merged = copy.deepcopy(adapters)
    merge_weights(merged)
    assert_same(wide_logits(merged.model), both)
    adapters.activate("two")
    assert torch.equal(wide_logits(model), alone[1])
    adapters.remove("two")
    assert torch.equal(wide_logits(model), base)
    assert set(adapters.added) == {"one"}


def perturb_all(adapters: Any, name: str) -> None:
    adapters.train_only(name)
    perturb(adapters, name, seed=len(name))


def test_dora_cannot_lie_upon_another() -> None:
    adapters = adapter_set(model_of())
    adapters.add("one", sections.Lora())
    with pytest.raises(
        ModelError, match="'two' is DoRA, which scales the weight itself: no other adapter can be stacked"
    ):
        adapters.add("two", sections.Dora())


def test_the_head_of_a_tied_model_gets_an_adapter_of_its_own() -> None:
    model = model_of(tie_word_embeddings=True).double()
    before = wide_logits(model)
    adapters = adapter_set(model)
    adapters.add("one", sections.Lora(targets=["lm_head"]))
    adapters.train_only("one")
    perturb(adapters, "one")
    widen(adapters)
    apart = wide_logits(model)
    assert not torch.allclose(apart, before)
    assert model.embed_tokens.weight is model.lm_head.weight
    embedding = model.embed_tokens.weight.detach().clone()
    merge_weights(adapters)
    assert_same(wide_logits(model), apart)
    assert torch.equal(model.embed_tokens.weight, embedding)


STARTS = [sections.Pissa(), sections.Olora(rank=3), sections.Dora(init="pissa"), sections.Pissa(targets=["lm_head"])]


@pytest.mark.parametrize("section", STARTS, ids=name_of)
def test_a_start_that_was_taken_out_of_the_base_comes_back_when_the_adapter_is_not_active(section: Any) -> None:
    model, alone = (model_of().double() for _ in range(2))
    original = wide_logits(model)
    adapters, others = adapter_set(model), adapter_set(alone)
    adapters.add("start", section)
    adapters.train_only("start")
    perturb(adapters, "start")
    widen(adapters)
    trained = wide_logits(model)
    with adapters.disabled():
        assert_same(wide_logits(model), original, of_float32=1e-6)  # the start itself is float32
        merged = copy.deepcopy(adapters)
        merge_weights(merged)
        assert_same(wide_logits(merged.model), original, of_float32=1e-6)
    assert torch.equal(wide_logits(model), trained) and not torch.allclose(trained, original, atol=1e-2)

    other = sections.Lora(targets=["up_proj"])
    adapters.activate()
    for one in (adapters, others):
        one.add("other", other)
        perturb_all(one, "other")
        widen(one)
    adapters.activate("other")
    assert_same(wide_logits(model), wide_logits(alone), of_float32=1e-6)
    adapters.remove("other")
    adapters.remove("start")
    assert_same(wide_logits(model), original, of_float32=1e-6)


def test_a_start_cannot_be_given_back_to_a_packed_base() -> None:
    model = model_of()
    adapters = adapter_set(model)
    adapters.add("start", sections.Pissa(targets=["q_proj"]))
    linear = model.layers["0"].attention.q_proj
    linear.store(FourBitWeight.quantize(linear.weight.data))
    with pytest.raises(ModelError, match=r"'start' \(pissa\) took its start out of a base that was packed without it"):
        adapters.remove("start")
    assert adapters.active == ("start",)


def test_first_values_depend_on_seed_and_name_alone() -> None:
    found = []
    for targets, seed in ((["q_proj"], 0), (["all-linear"], 0), (["q_proj"], 1)):
        adapters = adapter_set(model_of(), seed=seed)
        adapters.add("one", sections.Lora(targets=targets))
        found.append(adapters.tensors("one")["layers.1.attention.q_proj.adapter.one.lora_A"])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (sections.Lora(targets=["q_prj"]), "adapter.targets: 'q_prj' matches no layer of this model. Near: q_proj"),
        (sections.Lora(targets=["attn"]), "'attn' matches no layer of this model. Near: attention"),
        (sections.Lora(targets=["["]), r"adapter.targets: '\[' is no regular expression"),
        (sections.Lora(rank=33), r"adapter.rank: 33 is above 32, the smaller side of model.layers.0.self_attn.q_proj"),
        (sections.Lora(rank_pattern={"q_poj": 3}), "adapter.rank_pattern: 'q_poj' matches no layer"),
        (sections.Lora(modules_to_save=["head"]), "adapter.modules_to_save: 'head' matches no module"),
        (sections.Dora(targets=["embed_tokens"]), "dora cannot sit on an embedding"),
        (sections.Lora(targets=["lm_head"], dropout=0.1), "adapter.dropout: the head is multiplied together"),
        (sections.Vera(targets=["lm_head"], dropout=0.1), "adapter.dropout: the head is multiplied together"),
        (sections.Vera(targets=["embed_tokens"]), "vera cannot sit on an embedding"),
        (sections.Mora(targets=["v_proj", "embed_tokens"]), "mora cannot sit on an embedding"),
        (sections.Mora(targets=["q_proj"], rank=18), r"adapter.rank: 18 makes a square of width 34 .* at most 16"),
        (
            sections.Ia3(feedforward=["down"]),
            "adapter.feedforward: 'down' matches no layer of this model. Near: down_proj",
        ),
        (sections.Prompt(text="a word"), "adapter.text: this run has no tokenizer"),
    ],
)
def test_what_does_not_fit_is_said(section: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        adapter_set(model_of()).add("one", section)


def test_ranks_and_alphas_by_pattern() -> None:
    adapters = adapter_set(model_of())
    section = sections.Lora(
        rank=4, alpha=8, rank_pattern={"layers.1.*_proj": 2, "q_proj": 3}, alpha_pattern={"up_proj": 1}
    )
    adapters.add("one", section)
    modules = adapters.added["one"].modules
    assert modules["layers.0.attention.k_proj"].rank == 4 and modules["layers.0.attention.k_proj"].scale == 2
    assert modules["layers.0.attention.q_proj"].rank == 3
    assert modules["layers.1.attention.q_proj"].rank == 2
    assert modules["layers.0.mlp.up_proj"].scale == 1 / 4
