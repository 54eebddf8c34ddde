"""A stem that is shared gives what a stem that is repeated gives: hidden states, losses and every gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from builders.covering import fast
from builders.recompute import LAYERS, RecomputeCase, adapted, full
from builders.trees import nested, pair
from builders.worst_errors import worst_relative_error
from torch import Tensor

from danlu.core.errors import TrainingError
from danlu.core.types import Batch, Branch, Outputs, Pack, Role, Sample, Totals
from danlu.data.trees import repeat_stem
from danlu.memory.layer_plan import LayerPlan
from danlu.memory.recompute import wrap
from danlu.objectives.preference import preference_objective
from danlu.recipe.sections import Sigmoid
from danlu.stages.learner import DecoderLearner

CLOSE = 1e-5
SAMPLES = [pair(0, 12, 7, 5), nested(1), pair(2, 1, 3, 9), pair(3, 20, 2, 2)]


class Learner(DecoderLearner):
    """Keeps the policy's outputs of the last micro-batch; may give positions that restart in branches."""

    seen: dict[Role, Outputs]
    restarts = False

    def outputs(
        self,
        batch: Batch,
        gradient_scale: float,
        roles: Any = None,
        totals: Totals | None = None,
        x: Tensor | None = None,
    ) -> dict[Role, Outputs]:
        if self.restarts:
            starts = torch.zeros_like(batch.positions)
            for branch in batch.trees:
                starts[branch.start : branch.stop] = branch.start
            batch = replace(batch, positions=torch.arange(len(starts)) - starts)
        outputs = super().outputs(batch, gradient_scale, roles, totals, x)
        object.__setattr__(self, "seen", outputs)
        return outputs


@dataclass
class Step:
    loss: float
    hidden: Tensor  # [N, D]: at the tokens that targets are predicted from
    gradients: dict[str, Tensor]

    def is_close(self, other: Step) -> bool:
        errors = worst_relative_error({"hidden": self.hidden}, {"hidden": other.hidden})
        errors = max(errors, worst_relative_error(self.gradients, other.gradients))
        return errors < CLOSE and abs(self.loss - other.loss) < CLOSE * abs(other.loss)


def step(case: RecomputeCase, samples: list[Sample], *, compiled: bool = False, restarts: bool = False) -> Step:
    """Forward and backward of pairs' losses, in one micro-batch."""
    forward = case.model.compiled() if compiled else case.model
    objective = preference_objective((Sigmoid(beta=0.5),), has_reference=False)
    learner = Learner(case.model, forward, torch.device("cpu"), torch.float32, 2, objective, adapters=case.adapters)
    object.__setattr__(learner, "restarts", restarts)
    items = [Pack((sample,)) for sample in samples]
    batch, totals = learner.collate(items), learner.totals(items)
    loss = learner.losses(batch, totals).total
    loss.backward()
    hidden = learner.seen["policy"].hidden()[batch.logits_indices].detach()
    gradients = {name: tensor.grad for name, tensor in case.trained.items() if tensor.grad is not None}
    for tensor in case.trained.values():
        tensor.grad = None
    return Step(float(loss.detach()), hidden, {name: gradient.to_dense() for name, gradient in gradients.items()})


def sees_its_sibling(sample: Sample) -> Sample:
    """A mistake: the second answer goes on from the first."""
    if len(sample.branches) != 3:
        return sample
    return replace(sample, branches=(*sample.branches[:2], sample.branches[2]._replace(parent=1)))


def check(case: RecomputeCase) -> None:
    repeated = step(case, [repeat_stem(sample) for sample in SAMPLES])
    assert any(gradient.abs().max() > 0 for gradient in repeated.gradients.values())
    assert step(case, SAMPLES).is_close(repeated)
    assert not step(case, [sees_its_sibling(sample) for sample in SAMPLES]).is_close(repeated)
    assert not step(case, SAMPLES, restarts=True).is_close(repeated)


@pytest.mark.parametrize(
    ("family", "recompute"),
    fast(
        itertools.product(["llama", "qwen3", "gemma2"], ["none", "selective", "full"]),
        ("llama", "none"),
        ("qwen3", "selective"),
        ("gemma2", "full"),
        ("gemma2", "none"),
    ),
)
def test_a_shared_stem_equals_a_repeated_one(family: str, recompute: str) -> None:
    case = full(family)
    if recompute != "none":
        wrap(case.model, [LayerPlan(layer, recompute) for layer in range(LAYERS)])  # type: ignore[arg-type]
    check(case)


@pytest.mark.parametrize("kind", ["lora-dropout", "dora-dropout", "prefix", "prompt", "bottleneck"])
def test_adapters_and_virtual_tokens_change_nothing_of_that(kind: str) -> None:
    check(adapted(kind))  # dropout is by place in the pack, so it is off


@pytest.mark.slow
def test_what_is_compiled_equals_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    case = full("gemma2", num_hidden_layers=2)  # one of which has a window
    repeated = step(case, [repeat_stem(sample) for sample in SAMPLES])
    assert step(case, SAMPLES, compiled=True).is_close(repeated)


@pytest.mark.parametrize("long", [False, True])
def test_a_model_rotated_by_length_needs_its_stem_repeated(long: bool) -> None:
    """Up to max_position_embeddings a stem may be shared; beyond them its keys depend on what comes behind it."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    case = full("llama", rope_scaling=dynamic, max_position_embeddings=12 if long else 22)
    repeated = step(case, [repeat_stem(sample) for sample in SAMPLES])
    assert step(case, SAMPLES).is_close(repeated) != long


@pytest.mark.parametrize("laid_out", [lambda sample: sample, repeat_stem])
def test_the_row_of_a_tree_that_is_not_finite_is_named_once(laid_out: Callable[[Sample], Sample]) -> None:
    samples = [pair(4, 6, 3, 3, vocabulary=63), pair(5, 5, 4, 2, vocabulary=63)]
    samples[1].tokens[1] = 63
    model = full().model
    model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: output.masked_fill((inputs[0] == 63)[:, None], float("nan"))
    )
    learner = DecoderLearner(model, model, torch.device("cpu"), torch.float32, 2)
    error = learner.explain(learner.collate([Pack((laid_out(sample),)) for sample in samples]), step=3)
    assert isinstance(error, TrainingError)
    assert str(error).count("pairs.jsonl:5") == 1 and "pairs.jsonl:4" not in str(error)


def test_an_item_without_pairs_adds_nothing() -> None:
    case = full()
    alone = step(case, SAMPLES)
    learner = DecoderLearner(case.model, case.model, torch.device("cpu"), torch.float32, 2)
    empty = learner.collate([])
    assert len(empty.targets) == 0 and learner.losses(empty, Totals(1.0, 2, 2, (1, 1))).total == 0
    root = Sample(SAMPLES[0].tokens[:2], SAMPLES[0].weights[:2], "empty", "", (Branch(-1, 0, 2),), {},
                  {"label": SAMPLES[0].facts["label"][:1]})  # fmt: skip
    assert step(case, [*SAMPLES, root]).is_close(alone)
