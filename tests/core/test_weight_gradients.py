"""Weight gradients that are put off: the bits of a whole backward pass, no work done twice, what is left to later."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from builders.covering import fast
from builders.recompute import BOUNDARIES, adapted, full
from builders.small_config import small_config
from builders.small_experts import BIASED, QWEN2_MOE, small_decoder
from builders.split_backward import SPLIT, WHOLE, Forward, Passes, run_passes, same_bits
from builders.tiny_adapters import adapter_set, perturb
from torch import Tensor, nn

from danlu.adapters.dropout import DropoutState
from danlu.core.weight_gradients import DeferredWeightGradients
from danlu.memory.layer_plan import Kind, LayerPlan
from danlu.memory.recompute import wrap
from danlu.memory.recomputed_function import _Frame
from danlu.models import ops
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.initialize import initialize
from danlu.models.mixer_spec import Factorized, Latent
from danlu.numerics.four_bit_weight import FourBitWeight
from danlu.objectives.linear_cross_entropy import linear_cross_entropy
from danlu.recipe import sections

LAYERS = 2


@dataclass(frozen=True)
class Case:
    model: Decoder
    trained: dict[str, Tensor]
    dropout_state: DropoutState = field(default_factory=lambda: DropoutState(0))


def trained_whole(model: Decoder) -> Case:
    initialize(model, 0)
    return Case(model, {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad})


def with_adapter(section: sections.Adapter, model: Decoder) -> Case:
    adapters = adapter_set(model)
    adapters.add("one", section)
    perturb(adapters, "one", size=0.1)
    adapters.train_only("one")
    return Case(model, {name: tensor for name, tensor in adapters.tensors("one").items() if tensor.requires_grad})


def whole_model(family: str = "llama", **changes: Any) -> Case:
    case = full(family, num_hidden_layers=LAYERS, **changes)
    return Case(case.model, case.trained)


def adapted_model(kind: str, quantize: Callable[[Tensor], FourBitWeight] | None = None) -> Case:
    case = adapted(kind, quantize, num_hidden_layers=LAYERS)
    return Case(case.model, case.trained, case.dropout_state)


LATENT = small_config(mixer=Latent, vocab_size=64, q_lora_rank=8, kv_lora_rank=16, qk_nope_head_dim=6, v_head_dim=8)
CASES: dict[str, Callable[[], Case]] = {
    "llama": lambda: whole_model(),
    "tied and biased": lambda: whole_model(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "linear attention": lambda: whole_model("qwen3.5"),
    "latent attention": lambda: trained_whole(Decoder(LATENT)),
    "factorized attention": lambda: trained_whole(
        Decoder(small_config(mixer=Factorized, query_rank=8, key_reuse=True, vocab_size=64))
    ),
    "experts": lambda: trained_whole(small_decoder(QWEN2_MOE, vocab_size=64)),
    "biased experts": lambda: trained_whole(small_decoder(BIASED, vocab_size=64)),
    "lora-dropout": lambda: adapted_model("lora-dropout"),
    "dora-dropout": lambda: adapted_model("dora-dropout"),
    "mora": lambda: adapted_model("mora"),
    "ia3": lambda: adapted_model("ia3"),
    "bottleneck": lambda: adapted_model("bottleneck"),
    "vera": lambda: with_adapter(sections.Vera(rank=6), whole_model().model),
    "exact dora": lambda: with_adapter(sections.Dora(rank=4, exact_norm=True), whole_model().model),
    "frozen A": lambda: with_adapter(sections.LoraFa(rank=4), whole_model().model),
    "qlora": lambda: adapted_model("lora-dropout", FourBitWeight.quantize),
    "lora on experts": lambda: with_adapter(
        sections.Lora(rank=4, targets=["experts", "attention"]), small_decoder(QWEN2_MOE, vocab_size=64)
    ),
}
"""A model, and what of it is trained."""


def forwards_of(case: Case, dtype: torch.dtype) -> tuple[list[Forward], Callable[[int], None]]:
    """Three micro-batches through model and head; and what puts dropout into the state of one."""
    model = case.model

    def begin(number: int) -> None:
        case.dropout_state.begin(1, [(number, BOUNDARIES[-1])])

    def forward(number: int) -> Tensor:
        tokens = torch.randint(0, 60, (BOUNDARIES[-1],), generator=torch.Generator().manual_seed(number))
        positions = torch.cat([torch.arange(end - start) for start, end in pairwise(BOUNDARIES)])
        hidden = model(tokens, positions, PackedAttention(BOUNDARIES), dtype)
        weights = torch.ones(len(tokens))
        return linear_cross_entropy(hidden, model.head_weight, tokens.roll(-1), weights).total

    return [lambda number=number: forward(number) for number in range(3)], begin  # type: ignore[misc]


def passes(case: Case, order: str, dtype: torch.dtype = torch.float32, *, counts_flops: bool = False) -> Passes:
    return run_passes(order, *forwards_of(case, dtype), case.trained, counts_flops=counts_flops)


@pytest.mark.parametrize("name", fast(CASES, *list(CASES)[::5]))
def test_a_split_backward_pass_has_the_bits_of_a_whole_one_in_bfloat16(name: str) -> None:
    case = CASES[name]()
    assert same_bits(passes(case, SPLIT, torch.bfloat16), passes(case, WHOLE, torch.bfloat16))


@pytest.mark.parametrize("name", CASES)
def test_a_split_backward_pass_has_the_bits_of_a_whole_one(name: str) -> None:
    case = CASES[name]()
    assert same_bits(passes(case, SPLIT), passes(case, WHOLE))


@pytest.mark.parametrize("name", fast(CASES, *list(CASES)[::3]))
def test_a_split_backward_pass_of_recomputed_layers_has_the_bits_of_a_whole_one(name: str) -> None:
    case = CASES[name]()
    whole = passes(case, WHOLE)
    wrap(case.model, [LayerPlan(layer, "full") for layer in range(len(case.model.layers))])
    assert same_bits(passes(case, SPLIT), whole)


@pytest.mark.parametrize("recompute", ["elementwise", "selective", "full"])
@pytest.mark.parametrize("name", ["llama", "lora-dropout"])
def test_what_is_recomputed_is_so_in_the_input_pass_and_kept_for_the_weight_pass(name: str, recompute: Kind) -> None:
    case = CASES[name]()
    whole, without = passes(case, WHOLE), passes(case, SPLIT)
    wrap(case.model, [LayerPlan(layer, recompute) for layer in range(LAYERS)])
    split = passes(case, SPLIT)
    assert same_bits(split, whole) and split.kept_bytes == without.kept_bytes > 0
    forwards, begin = forwards_of(case, torch.float32)
    begin(0)
    queue = DeferredWeightGradients()
    with queue.active():
        forwards[0]().backward()
    with mock.patch.object(_Frame, "_recompute", side_effect=AssertionError("recomputed in a weight pass")):
        queue.accumulate()
    case.model.zero_grad()


# Of a width of 32 and a rank of 4; attention's products have no weight gradient, nor has a frozen base.
SHARES = {"llama": (0.3, 0.5), "experts": (0.3, 0.5), "lora-dropout": (0.05, 0.2), "qlora": (0.05, 0.2)}


@pytest.mark.parametrize("name", SHARES)
def test_no_product_is_made_twice_and_the_weight_pass_has_its_share(name: str) -> None:
    case = CASES[name]()
    whole = passes(case, "F0 B0", counts_flops=True).flops
    split = passes(case, "F0 I0 W0", counts_flops=True).flops
    assert split["F"] == whole["F"] and split["I"] + split["W"] == whole["B"]
    lowest, highest = SHARES[name]
    assert lowest < split["W"] / whole["B"] < highest


def test_what_is_left_to_the_weight_pass() -> None:
    def kinds(name: str) -> set[str]:
        left = passes(CASES[name](), "F0 I0 W0").left
        return {name.removesuffix(".weight").rsplit(".", 1)[-1] for name in left}

    attention, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert kinds("llama") == attention | mlp
    assert kinds("experts") == attention | mlp | {"router", "shared_gate"}
    assert kinds("lora-dropout") == {"lora_A", "lora_B"} and kinds("frozen A") == {"lora_B"}
    assert kinds("mora") == {"mora_M"} and kinds("vera") == {"vera_lambda_b"}
    assert kinds("ia3") == kinds("bottleneck") == set()


def test_an_entry_that_is_lost_or_doubled_is_seen() -> None:
    case = CASES["llama"]()
    whole = passes(case, WHOLE)
    put_off = DeferredWeightGradients.put_off
    count = 0

    def wrong(times: int) -> Callable[[DeferredWeightGradients, object], None]:
        def put_off_wrongly(queue: DeferredWeightGradients, entry: object) -> None:
            nonlocal count
            count += 1
            for _ in range(times if count == 5 else 1):
                put_off(queue, entry)  # type: ignore[arg-type]

        return put_off_wrongly

    for times in (0, 2):
        count = 0
        with mock.patch.object(DeferredWeightGradients, "put_off", wrong(times)):
            split = passes(case, SPLIT)
        different = [key for key, value in whole.gradients.items() if not torch.equal(split.gradients[key], value)]
        assert len(different) == 1 and "proj" in different[0]


def test_weight_passes_in_another_order_round_otherwise() -> None:
    case = CASES["llama"]()
    whole, split = passes(case, WHOLE), passes(case, "F0 I0 F1 I1 F2 I2 W2 W1 W0")
    assert not same_bits(split, whole)
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(split.gradients[name], gradient, rtol=1e-5, atol=1e-6)


def run_linear(x: Tensor, weight: nn.Parameter, count: int, *, between: Callable[[], object] = lambda: None) -> None:
    """`count` products of x with one weight, and their split backward pass."""
    queue = DeferredWeightGradients()
    with queue.active():
        y = x
        for _ in range(count):
            y = ops.linear(y, weight).tanh()
        y.sum().backward()
    between()
    queue.accumulate()


def test_hooks_of_a_parameter_are_called_once_when_its_gradient_is_whole() -> None:
    torch.manual_seed(0)
    x, weight, whole = torch.randn(3, 4), nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.empty(4, 4))
    whole.data.copy_(weight.data)
    y = x
    for _ in range(3):
        y = ops.linear(y, whole).tanh()
    y.sum().backward()
    assert whole.grad is not None
    seen: list[Tensor | None] = []
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    run_linear(x, weight, 3, between=lambda: seen.append(weight.grad))
    assert seen[0] is None and len(seen) == 2  # nothing came in the input pass, and all at once in the weight pass
    assert seen[1] is not None and torch.equal(seen[1], whole.grad)


def test_a_tensor_that_is_changed_before_the_weight_pass_is_noticed() -> None:
    x, weight = torch.randn(3, 4), nn.Parameter(torch.randn(4, 4))
    with pytest.raises(AssertionError, match="changed in place after the input pass"):
        run_linear(x, weight, 1, between=lambda: x.add_(1))


def test_nothing_is_put_off_for_weights_that_are_frozen_or_computed() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), nn.Parameter(torch.randn(4, 4))
    for used in (weight.detach(), weight * 2):
        queue = DeferredWeightGradients()
        with queue.active():
            ops.linear(x, used).sum().backward()
        assert not queue.weights and queue.kept_bytes == 0
    assert weight.grad is not None and x.grad is not None


def test_contexts_end_with_the_queue_that_was_there_before() -> None:
    first, second = DeferredWeightGradients(), DeferredWeightGradients()
    weight = nn.Parameter(torch.randn(4, 4))
    for context in (second.active(), nullcontext()):
        with first.active():
            with context:
                pass
            ops.linear(torch.randn(3, 4), weight).sum().backward()
    assert len(first._entries) == 2 and not second._entries
