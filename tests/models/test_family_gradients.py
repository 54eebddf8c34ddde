"""Every gradient of families against transformers, tensor by tensor as transformers has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.family_twins import LENGTH, random_tokens, twin

from danlu.models.attend import PackedAttention
from danlu.models.hf_layout import hf_tensors
from danlu.models.loading import load

FAMILIES = ["cohere2", "cohere2-biased", "gemma", "glm", "glm4", "glm4-moe-lite", "gpt-neox", "gpt-neox-sequential"]
FAMILIES += ["ernie", "exaone4", "granite-4", "granite-4-experts", "granite-moe", "hunyuan", "phimoe", "seed-oss"]
FAMILIES += ["gemma4", "gemma4-e2b", "gemma4-e4b", "gemma4-experts", "gemma4-plain", "gemma4-unified"]


def largest_difference(values: dict[str, Any], theirs: Any, folder: Path) -> float:
    """The largest difference of two gradients of a tensor, in units of that tensor's largest one in transformers.

    Some gradients are nothing but rounding, as those of the biases of keys that are not rotated: units are a hundredth
    of the largest gradient of all at the least.
    """
    tokens = random_tokens(values["vocab_size"])
    grad = torch.randn(LENGTH, values["vocab_size"], generator=torch.Generator().manual_seed(2))
    theirs(tokens[None]).logits[0].backward(grad)
    model = load(folder)
    model.logits(model(tokens, torch.arange(LENGTH), PackedAttention((0, LENGTH)))).backward(grad)
    own = dict(model.named_parameters())
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    tensors = hf_tensors(model.config, stacked=model.config.has_experts)
    least = 1e-2 * max(float(grad.abs().max()) for grad in wanted.values())
    differences = []
    for tensor in tensors:
        if all(own[name].requires_grad for name in tensor.parameters):
            name = "lm_head.weight" if tensor.name == "embed_out.weight" else tensor.name  # which transformers renames
            found, want = tensor.assembled(lambda name: own[name].grad), wanted.pop(name)
            differences.append(float((found - want).abs().max()) / max(float(want.abs().max()), least))
    assert wanted.keys() <= {"lm_head.weight"}  # of a tied head, which is the embedding
    return max(differences)


@pytest.mark.parametrize("case", FAMILIES)
def test_every_gradient_equals_transformers(
    case: str, tiny_values: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    values = tiny_values(case)
    theirs = twin(values, tmp_path)
    assert largest_difference(values, theirs, tmp_path) < 1e-5
    theirs.zero_grad()
    with torch.no_grad():  # the control
        next(parameter for name, parameter in theirs.named_parameters() if "norm" in name).add_(0.01)
    assert largest_difference(values, theirs, tmp_path) > 1e-4
