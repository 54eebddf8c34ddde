"""VeRA against autograd over its definition written out, and its random matrices against PEFT's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from builders.tiny_adapters import adapter_set
from builders.tiny_run import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from danlu.adapters.adapter import DenseLinear
from danlu.adapters.dropout import Dropout, DropoutState
from danlu.adapters.vera import Projection, Vera
from danlu.models.modules import Linear
from danlu.models.saving import save
from danlu.recipe import sections

TOKENS, INPUTS, OUTPUTS, RANK = 7, 10, 6, 5


def made(dropout: Dropout | None = None) -> tuple[Vera, Linear]:
    """One whose layer is smaller than the shared matrices both ways, with its rows from the third on, in float64."""
    torch.manual_seed(0)
    linear = Linear(INPUTS, OUTPUTS, bias=True).double()
    torch.nn.init.normal_(linear.weight)
    torch.nn.init.normal_(linear.bias)
    projection = Projection(RANK, (12, 14), seed=3).double()
    module = Vera(projection, slice(2, 2 + OUTPUTS), INPUTS, dropout or Dropout(0, "", DropoutState(0)), initial_d=0.1)
    module.vera_lambda_d.data = torch.randn(RANK, dtype=torch.float64)
    module.vera_lambda_b.data = torch.randn(OUTPUTS, dtype=torch.float64)
    return module, linear.requires_grad_(False)


def written_out(module: Vera, x: Tensor) -> Tensor:
    """The adapter's path, by its definition."""
    a, b = module.projection.vera_A[:, :INPUTS], module.projection.vera_B[2 : 2 + OUTPUTS]
    return module.vera_lambda_b * F.linear(module.vera_lambda_d * F.linear(x, a), b)


def gradients(y: Tensor, x: Tensor, module: Vera) -> tuple[Tensor, ...]:
    torch.manual_seed(9)
    return torch.autograd.grad(
        (y * torch.randn_like(y)).sum(), [x, module.vera_lambda_d, module.vera_lambda_b], retain_graph=True
    )


def test_outputs_and_gradients_are_those_of_the_definition() -> None:
    module, linear = made()
    x = torch.randn(TOKENS, INPUTS, dtype=torch.float64, requires_grad=True)
    base = linear.base(x)
    ours, plain = module.adapt_output(x, base, linear), base + written_out(module, x)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients(ours, x, module), gradients(plain, x, module), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(ours, base, rtol=1e-2)


def test_dropout_reaches_the_path_alone_and_backward_draws_the_same_mask() -> None:
    dropout_state = DropoutState(3)
    module, linear = made(Dropout(0.4, "layers.0", dropout_state))
    x = torch.randn(TOKENS, INPUTS, dtype=torch.float64, requires_grad=True)
    dropout_state.begin(5, [(2, TOKENS)])
    mask = module.dropout(torch.ones_like(x))
    base = linear.base(x)
    ours = module.adapt_output(x, base, linear)
    dropout_state.begin(6, [(0, TOKENS)])  # by the time of the backward pass the run may be elsewhere
    found = gradients(ours, x, module)
    plain = base + written_out(module, x * mask)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for one, other in zip(found, gradients(plain, x, module), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    undropped = base + written_out(module, x)
    assert not torch.allclose(ours, undropped, rtol=1e-3)
    assert not torch.allclose(found[0], gradients(undropped, x, module)[0], rtol=1e-3)


def test_merged_is_the_definition_and_differentiable() -> None:
    module, linear = made()
    merged = module.merged_into(DenseLinear(linear.weight, linear.bias))
    x = torch.randn(TOKENS, INPUTS, dtype=torch.float64, requires_grad=True)
    plain = linear.base(x) + written_out(module, x)
    ours = F.linear(x, merged.weight, merged.bias)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients(ours, x, module), gradients(plain, x, module), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_only_what_the_random_matrix_makes_of_x_is_kept() -> None:
    """Not x, not an output, and no copy of A or B in the type of activations."""
    module, linear = made()
    module = module.float()
    x = torch.randn(TOKENS, INPUTS, dtype=torch.bfloat16, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = module.adapt_output(x, torch.zeros(TOKENS, OUTPUTS, dtype=torch.bfloat16), linear)
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    new = [tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in own]
    assert [tensor.shape for tensor in new] == [(TOKENS, RANK)]
    plain = written_out(module, x.float())
    torch.testing.assert_close(y.float(), plain, rtol=0.05, atol=0.1)
    grads = gradients(y, x, module)
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32, torch.float32]
    torch.manual_seed(9)
    exact = torch.autograd.grad((plain * torch.randn_like(y)).sum(), [module.vera_lambda_b])[0]
    torch.testing.assert_close(grads[2], exact, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize(
    ("model_type", "targets"), [("llama", ["q_proj", "v_proj", "down_proj"]), ("phi3", ["qkv_proj", "gate_up_proj"])]
)
def test_the_random_matrices_are_pefts_bit_for_bit(
    tmp_path: Path, model_type: str, targets: list[str], seed: int
) -> None:
    model = tiny_model(model_type=model_type, pad_token_id=0)
    save(model, tmp_path / "base")
    theirs: Any = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32),
        peft.VeraConfig(task_type="CAUSAL_LM", r=9, target_modules=targets, projection_prng_key=seed, d_initial=0.2),
    ).base_model
    adapters = adapter_set(model, seed=5)
    adapters.add("one", sections.Vera(rank=9, targets=targets, projection_seed=seed, initial_d=0.2))
    tensors = adapters.tensors("one")
    shared = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items() if ".projection." in name}
    assert torch.equal(shared["vera_A"], theirs.vera_A["default"])
    assert torch.equal(shared["vera_B"], theirs.vera_B["default"])
    assert all((tensors[name] == 0.2).all() for name in tensors if name.endswith("lambda_d"))
    assert not any(tensors[name].any() for name in tensors if name.endswith("lambda_b"))
    other = Projection(9, (len(shared["vera_B"]), shared["vera_A"].shape[1]), seed=seed + 1)
    assert not torch.equal(other.vera_A, shared["vera_A"])


def test_the_matrices_are_there_once_for_all_layers_and_are_never_trained() -> None:
    model = tiny_model()
    adapters = adapter_set(model)
    adapters.add("one", sections.Vera(rank=4))
    adapters.train_only("one")
    names = [name for name, _ in model.named_parameters() if "projection" in name]
    assert names == [f"layers.0.attention.q_proj.adapter.one.projection.vera_{letter}" for letter in "AB"]
    assert set(names) < set(adapters.tensors("one"))
    projections = {module.projection for module in adapters.added["one"].modules.values()}
    assert len(adapters.added["one"].modules) == 14 and len(projections) == 1
    assert not any(parameter.requires_grad for parameter in projections.pop().parameters())


def test_parts_of_a_fused_layer_have_one_vector_over_the_rank_and_their_own_rows() -> None:
    adapters = adapter_set(tiny_model(model_type="phi3", pad_token_id=0))
    adapters.add("one", sections.Vera(rank=4, targets=["q_proj", "v_proj"]))
    modules = adapters.added["one"].modules
    q, v = (modules[f"layers.0.attention.{part}_proj"] for part in "qv")
    assert q.vera_lambda_d is v.vera_lambda_d
    assert v.vera_lambda_d is not modules["layers.1.attention.v_proj"].vera_lambda_d
    assert (q.rows, v.rows) == (slice(0, 32), slice(48, 64))  # k has the sixteen between
