"""Products in FP8 with one scale a tensor, of which two ranks have parts, next to those of whole factors."""

from __future__ import annotations

import torch
from torch import Tensor

from danlu.numerics.arithmetic import Fp8Arithmetic, Sharing
from danlu.parallel.comm import Group

INPUTS, OUTPUTS, ROWS = 48, 32, (5, 0, 11)


def parts(recipe: str, takes_maximum: bool) -> dict[str, float]:
    """Worker: by product, the distance of what two ranks compute from their parts to the product of whole factors."""
    group = Group("tensor", (0, 1), torch.distributed.get_rank(), torch.distributed.group.WORLD)
    shared = (group,) if takes_maximum else ()
    whole = Fp8Arithmetic(recipe)
    by_outputs = Fp8Arithmetic(recipe, sharing=Sharing(weight=shared, grad=shared))
    by_inputs = Fp8Arithmetic(recipe, sharing=Sharing(x=shared, weight=shared))
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        # Features, and with them the two parts, of other sizes.
        torch.randn(*shape, generator=generator) * torch.logspace(0, 1, shape[-1])
        for shape in ((sum(ROWS), INPUTS), (len(ROWS), OUTPUTS, INPUTS), (sum(ROWS), OUTPUTS))
    )
    counts = torch.tensor(ROWS)
    results: dict[str, tuple[Tensor, Tensor]] = {}

    by_tokens = Fp8Arithmetic(recipe, sharing=Sharing(x=shared, grad=shared))
    own = slice(group.index * len(x) // 2, (group.index + 1) * len(x) // 2)
    (y,), kept = by_tokens.forward(x[own], (weight[0],))
    (wanted,), whole_kept = whole.forward(x, (weight[0],))
    grad_x, grad_weight = by_tokens.input_gradient(grad[own], weight[0]), by_tokens.weight_gradient(grad[own], kept)
    results["forward by tokens"] = group.all_gather(y), wanted
    results["input gradient by tokens"] = group.all_gather(grad_x), whole.input_gradient(grad, weight[0])
    results["weight gradient by tokens"] = group.sum(grad_weight), whole.weight_gradient(grad, whole_kept)
    for kind, arithmetic, axis in (("outputs", by_outputs, 1), ("inputs", by_inputs, 2)):
        own_weight = weight.chunk(2, axis)[group.index]
        own_x, own_grad = (x, grad.chunk(2, 1)[group.index]) if axis == 1 else (x.chunk(2, 1)[group.index], grad)
        for name, each, factors in (
            ("whole", whole, (x, weight, grad)),
            ("part", arithmetic, (own_x, own_weight, own_grad)),
        ):
            rows, matrices, gradient = factors
            (y,), kept = each.forward(rows, (matrices[0],))
            (of_groups,), grouped_kept = each.grouped_forward(rows, (matrices,), counts)
            products = {
                "forward": y,
                "input gradient": each.input_gradient(gradient, matrices[0]),
                "weight gradient": each.weight_gradient(gradient, kept),
                "grouped forward": of_groups,
                "grouped input gradient": each.grouped_input_gradient(gradient, matrices, counts),
                "grouped weight gradient": each.grouped_weight_gradient(gradient, grouped_kept, counts),
            }
            for product, value in products.items():
                key = f"{product} by {kind}"
                if name == "whole":
                    results[key] = value, value
                else:
                    results[key] = _joined(value, product, axis, group), results[key][0]
    return {name: float((part - wanted).norm() / wanted.norm()) for name, (part, wanted) in results.items()}


def _joined(value: Tensor, product: str, axis: int, group: Group) -> Tensor:
    """The whole result of parts: a sum of terms, or parts of its features."""
    is_sum = product.endswith("forward") == (axis == 2) and not product.endswith("weight gradient")
    if is_sum:
        return group.sum(value.clone())
    dim = axis - 3 if product.endswith("weight gradient") else -1
    return torch.cat(group.all_gather(value.unsqueeze(0)).unbind(), dim)
