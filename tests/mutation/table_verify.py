"""Mutations of the proof of layouts."""

from __future__ import annotations

from mutation.table import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    # -- what is not finite on one process is told by all
    Mutation(
        "training/diagnosis.py",
        "for names in world.all_gather_objects(non_finite(named)) for name in names",
        "for names in world.all_gather_objects(non_finite(named))[:1] for name in names",
        "parallel/test_not_finite.py",
    ),
    Mutation(
        "training/loop.py",
        "non_finite_on_any(world, run.optimizer.named_gradients())",
        "non_finite_on_any(type(world)(), run.optimizer.named_gradients())",
        "parallel/test_not_finite.py",
        only="gradient",
    ),
    Mutation(
        "training/loop.py",
        "non_finite_on_any(run.learner.parallel.ranks.world, run.learner.weights().items())",
        "non_finite_on_any(type(run.learner.parallel.ranks.world)(), run.learner.weights().items())",
        "parallel/test_not_finite.py",
        only="updated_weight",
    ),
    Mutation(
        "training/agreement.py",
        "ranks_of.setdefault(failure.text, []).append(rank)",
        "ranks_of.setdefault(failed[min(failed)].text, []).append(rank)",
        "training/test_agreement.py parallel/test_not_finite.py",
        only="different or evaluation",
    ),
    Mutation(
        "training/pipedream.py",
        "names_by_rank.setdefault(rank, []).extend(names)",
        "names_by_rank[rank] = names",
        "training/test_pipedream.py",
    ),
    # -- verifications see what surrounds a step
    Mutation(
        "verification/comparison.py",
        'yield _number(f"updates of the {label}", kind, updates, float(expected[0].updates), 0.0)',
        'yield _number(f"updates of the {label}", kind, updates, updates[0], 1e9)',
        "verification/test_comparison.py",
        only="count_anew",
    ),
    Mutation(
        "verification/comparison.py",
        "named = [float(step.error is not None and name in step.error) for step in by_rank]",
        "named = [float(step.error is not None) for step in by_rank]",
        "verification/test_comparison.py",
        only="surrounds",
    ),
    Mutation(
        "verification/comparison.py",
        "    yield from _exported(traces)",
        "    yield from ()",
        "verification/test_comparison.py",
        only="last_bit or state_that",
    ),
    Mutation(
        "verification/comparison.py",
        "        if any(doing in trace.problems for trace in by_rank):",
        "        if doing in by_rank[0].problems:",
        "verification/test_comparison.py",
        only="surrounds",
    ),
    Mutation(
        "verification/comparison.py",
        "    except ValueError:  # a part of it is on no process",
        "    except KeyError:  # a part of it is on no process",
        "verification/test_comparison.py",
        only="surrounds",
    ),
    Mutation(
        "verification/comparison.py",
        "            yield replace(number, error=max(_metric_error(each, value) for each in values))",
        "            yield replace(number, error=_metric_error(values[0], value), ranks=None)",
        "verification/test_comparison.py",
        only="surrounds",
    ),
    Mutation(
        "verification/proxy_model.py",
        "        positions = length",
        "        positions = rope.max_position_embeddings",
        "verification/test_proxy_model.py",
        only="rotations or stages",
    ),
    Mutation(
        "verification/proxy_model.py",
        "scaling = replace(scaling, original_max_position_embeddings=length)",
        "scaling = replace(scaling)",
        "verification/test_proxy_model.py",
        only="rotations",
    ),
    Mutation(
        "verification/proxy_model.py",
        "    return max(2, longest[len(longest) // 2] // 2)",
        "    return max(2, longest[len(longest) // 2] * 2)",
        "verification/test_proxy_model.py",
        only="half",
    ),
    Mutation(
        "verification/proxy_model.py",
        "own = [_small_rope(ropes[places[rope]], rope.dim) for rope in small.ropes]",
        "own = list(small.ropes)",
        "verification/test_proxy_model.py",
        only="stages",
    ),
    Mutation(
        "verification/workers.py",
        "_BUCKET_BYTES, _LARGE_BYTES = 2**13, 2**11",
        "_BUCKET_BYTES, _LARGE_BYTES = 2**25, 2**25",
        "verification/test_verification.py",
        only="bucket-dropped",
    ),
    Mutation(
        "verification/trace.py",
        "            if name == withheld:",
        '            if name == "":',
        "verification/test_pipelines.py",
        only="unstepped",
    ),
    Mutation(
        "verification/clear_routes.py",
        "            if margin_of(before, self._candidates[number]) >= LEAST_MARGIN:",
        "            if margin_of(before, self._candidates[number]) >= 0:",
        "verification/test_clear_routes.py",
    ),
    Mutation(
        "verification/verification.py",
        '        changes["gradient_clipping"] = CLIPPING',
        '        changes["gradient_clipping"] = 100.0',
        "verification/test_verification.py",
        only="clipped-to-larger-norm",
    ),
)
