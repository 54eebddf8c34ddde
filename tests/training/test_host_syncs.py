"""A micro-batch never asks the device for a value: the host would wait for all that it has handed to it.

On the meta device `.item()` raises, and so do comparisons that want a bool, indexing by masks, and `nonzero`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders.covering import fast
from builders.preference_samples import pair
from builders.tiny_run import SyntheticPacks, tiny_config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from danlu.assembly.frozen_base import adapters_of
from danlu.core.types import Totals
from danlu.memory.layer_plan import LayerPlan
from danlu.memory.recompute import wrap
from danlu.models.loading import meta_decoder
from danlu.objectives.cross_entropy import CrossEntropy
from danlu.objectives.preference import preference_objective
from danlu.objectives.reward import BradleyTerry
from danlu.recipe import sections
from danlu.stages.learner import DecoderLearner
from danlu.training.learner import MicroStep

META = torch.device("meta")
ADAPTERS: dict[str, Any] = {
    "full": None,
    "lora": sections.Lora(rank=4, dropout=0.1, targets=["all-linear", "embed_tokens"]),
    "vera": sections.Vera(rank=16),
    "mora": sections.Mora(rank=4),
    "ia3": sections.Ia3(),
    "bottleneck": sections.Bottleneck(width=8),
}
"""Not prefixes and prompts: they look for their virtual tokens among the others, once in a micro-batch."""


def compute_on_meta(kind: str, recompute: Any = None, **model: Any) -> DecoderLearner:
    decoder, adapters = meta_decoder(tiny_config(**model)), None
    if ADAPTERS[kind] is not None:
        adapters = adapters_of(decoder, device=META)
        adapters.add("default", ADAPTERS[kind])
        adapters.train_only("default")
    if recompute is not None:
        wrap(decoder, [LayerPlan(layer, recompute) for layer in range(2)])
    return DecoderLearner(decoder, decoder, META, torch.bfloat16, 2, CrossEntropy(z_loss=1e-4), adapters=adapters)


def micro_batch(compute: DecoderLearner) -> torch.Tensor:
    packs = [SyntheticPacks().at(number) for number in range(2)]
    micro_step = MicroStep(compute.collate(packs), list(enumerate(packs)), Totals.of(packs), 1)
    with compute.at(micro_step):
        total = compute.forward(0, micro_step, None).total
        total.backward()
    return total


def without_gradient(compute: DecoderLearner) -> list[str]:
    """Trained parameters that a backward pass did not come to."""
    return [
        name
        for name, parameter in compute.model.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_micro_batch_asks_for_no_value(kind: str) -> None:
    compute = compute_on_meta(kind)
    assert without_gradient(compute) != []  # control: before the pass
    total = micro_batch(compute)
    assert without_gradient(compute) == []
    with pytest.raises(RuntimeError, match="cannot be called on meta"):  # control
        total.item()


@pytest.mark.parametrize(
    ("kind", "changes"),
    fast(
        itertools.product(["full", "lora"], [{"recompute": "full"}, {"recompute": "selective"}]),
        ("full", {"recompute": "selective"}),
        ("lora", {"recompute": "full"}),
    ),
    ids=str,
)
def test_nor_does_one_that_is_recomputed(kind: str, changes: dict[str, Any]) -> None:
    compute = compute_on_meta(kind, **changes)
    micro_batch(compute)
    assert without_gradient(compute) == []


def test_nor_do_windows_and_softcaps() -> None:
    gemma = {"model_type": "gemma2", "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
    compute = compute_on_meta("full", **gemma)
    micro_batch(compute)
    assert without_gradient(compute) == []


class _PlainCopies(TorchDispatchMode):
    """Notes what goes from the host to the device as a plain copy, which the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu" and out.device.type == "meta":
            self.shapes.append(args[0].shape)
        return out


def learner_of_pairs() -> DecoderLearner:
    decoder, objective = (
        meta_decoder(tiny_config()),
        preference_objective([sections.Sigmoid(), sections.Hinge()], False),
    )
    return DecoderLearner(decoder, decoder, META, torch.float32, 2, objective, objective)


def learner_of_rewards() -> DecoderLearner:
    decoder, objective = meta_decoder(tiny_config()), BradleyTerry(nn.Linear(32, 1, bias=False, device=META), 0.01)
    head = objective.score_head
    return DecoderLearner(decoder, decoder, META, torch.float32, 2, objective, objective, score_head=head)


@pytest.mark.parametrize("learner_of", [learner_of_pairs, learner_of_rewards])
def test_what_is_known_of_pairs_is_copied_to_the_device_without_waiting(
    learner_of: Callable[[], DecoderLearner], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shapes_of_plain_copies() -> list[torch.Size]:
        compute = learner_of()
        packs = [pair({"prompt": [5, 6], "chosen": [7, 8], "rejected": [9], "margin": 0.5}) for _ in range(2)]
        totals, batch = compute.totals(packs), compute.collate(packs)
        with _PlainCopies() as copies:
            compute.losses(batch, totals).total.backward()
        return copies.shapes

    assert shapes_of_plain_copies()  # control: margins, and where answers end, are copied, by `copy_to`
    users = [module for name, module in sys.modules.items() if name.startswith("danlu.") and hasattr(module, "copy_to")]
    for module in users:
        monkeypatch.setattr(module, "copy_to", lambda x, device: torch.empty_like(x, device=device))
    assert shapes_of_plain_copies() == []
