"""Mutations of the proof of layouts."""

from __future__ import annotations

from mutation.table import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    # -- what is not finite on one process is told by all
    Mutation(
        "train/diagnosis.py",
        "for names in world.all_gather_objects(non_finite(named)) for name in names",
        "for names in world.all_gather_objects(non_finite(named))[:1] for name in names",
        "parallel/test_not_finite.py",
    ),
    Mutation(
        "train/loop.py",
        "non_finite_on_any(world, run.optimizer.named_gradients())",
        "non_finite_on_any(type(world)(), run.optimizer.named_gradients())",
        "parallel/test_not_finite.py",
        only="gradient",
    ),
    Mutation(
        "train/loop.py",
        "non_finite_on_any(run.learner.parallel.ranks.world, run.learner.weights().items())",
        "non_finite_on_any(type(run.learner.parallel.ranks.world)(), run.learner.weights().items())",
        "parallel/test_not_finite.py",
        only="updated_weight",
    ),
    Mutation(
        "train/agreement.py",
        "ranks_of.setdefault(failure.text, []).append(rank)",
        "ranks_of.setdefault(failed[min(failed)].text, []).append(rank)",
        "train/test_agreement.py parallel/test_not_finite.py",
        only="different or evaluation",
    ),
    Mutation(
        "train/pipedream.py",
        "by_stage.setdefault(stage, []).extend(names)",
        "by_stage[stage] = names",
        "train/test_pipedream.py",
    ),
)
