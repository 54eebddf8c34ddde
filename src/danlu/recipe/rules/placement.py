"""Rules about placement: parallel layout, recomputation and offload."""

from __future__ import annotations

from collections.abc import Iterator

from danlu.recipe.rules.refusals import refusals
from danlu.recipe.sections import Adafactor, AdamW, AdamW8bit, GaLore, Muon, PagedAdamW, Prefix, Prompt, Recipe
from danlu.recipe.yaml_tree import Problem

_WITHOUT_TREES = ("pretrain", "sft")
"""The stages with rows that are plain documents."""

WHOLE_MATRIX_OPTIMIZERS = (Muon, GaLore, Adafactor)
"""Their updates need all of a matrix, or of all experts' together: its singular vectors, or means of its numbers."""


def layout_is_supported(recipe: Recipe) -> Iterator[Problem]:
    """The degrees of `parallel` go together, and with the optimizer, adapter, offload and compile."""
    parallel, optimizer = recipe.parallel, recipe.optimizer
    if parallel.shard == "none":
        if parallel.replicate != 1:
            message = "copies of a sharded model, and nothing is sharded. Add shard: zero3, or leave it out"
            yield Problem("parallel.replicate", message, reads=("parallel.shard",))
        if parallel.accumulate == "sharded":
            message = "gradients are not sharded. Add shard: zero2 or zero3, or leave it out"
            yield Problem("parallel.accumulate", message, reads=("parallel.shard",))
    if parallel.sequence and parallel.tensor == 1:
        message = (
            "tokens are sharded among tensor-parallel ranks, and parallel.tensor is 1. Raise it, or leave this out"
        )
        yield Problem("parallel.sequence", message, reads=("parallel.tensor",))
    if parallel.workers == "threads":
        degrees = {name: getattr(parallel, name) for name in ("shard", "tensor", "expert")}
        degrees |= {"context": parallel.context.size, "pipeline": parallel.pipeline.stages}
        for name in (name for name, degree in degrees.items() if degree not in ("none", 1)):
            message = "threads in one process each hold all of the model. Use workers: processes, or leave this out"
            yield Problem(f"parallel.{name}", message, reads=("parallel.workers",))
        if recipe.adapter is not None or recipe.compile:
            key = "adapter" if recipe.adapter is not None else "compile"
            message = "threads are for looking at how whole models are trained in parallel. Use workers: processes"
            yield Problem(key, message, reads=("parallel.workers",))
        offloads = "activations" in recipe.memory.offload
        if offloads or recipe.memory.recompute.kind != "none":
            key = "memory.offload" if offloads else "memory.recompute.kind"
            message = "threads run copies of the model at the same time, of which nothing is recomputed or offloaded"
            yield Problem(key, f"{message}. Leave it out, or use workers: processes", reads=("parallel.workers",))
    is_cut = parallel.tensor > 1 or parallel.expert > 1
    if isinstance(optimizer, WHOLE_MATRIX_OPTIMIZERS) and (parallel.shard != "none" or is_cut):
        layout = "parallel: {}, which keeps them whole" if is_cut else "parallel.shard: none"
        message = (
            f"{optimizer.kind} works on whole matrices, and here each process has a part of them. "
            f"Use adamw, adamw8bit, lion or sgd, or {layout}"
        )
        yield Problem("optimizer.kind", message, reads=("parallel.shard", "parallel.tensor", "parallel.expert"))
    if recipe.compile and parallel.tensor > 1:
        message = "torch.compile does not follow the collectives of tensor parallelism. Leave it out"
        yield Problem("compile", message, reads=("parallel.tensor",))


def context_is_supported(recipe: Recipe) -> Iterator[Problem]:
    """Checks that a context rank's part of a packed sequence is enough for the recipe's settings."""
    context = recipe.parallel.context
    if context.ulysses > 1 and context.method == "ulysses":
        message = "with method: ulysses all context ranks exchange heads. Leave it out, or use method: ring"
        yield Problem("parallel.context.ulysses", message, reads=("parallel.context.method",))
    elif context.size % context.ulysses:
        message = f"{context.ulysses} does not divide the {context.size} context ranks"
        yield Problem("parallel.context.ulysses", message, reads=("parallel.context.size",))
    if context.size == 1:
        return
    yield from refusals(_not_of_context_ranks(recipe), "parallel: {context: 1}", "parallel.context.size")


def _not_of_context_ranks(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yields (key, reason, remedy) of settings that need all tokens of a document, or the same tokens on all ranks."""
    if recipe.stage == "classify":
        yield "stage", "context parallelism cuts documents, and images are not of tokens", "Use parallel.data"
    if recipe.numerics == "exact":
        yield "numerics", "context ranks add up attention in another order than one process", "Use numerics: fast"
    if recipe.compile:
        yield "compile", "torch.compile does not follow the collectives of context parallelism", "Leave it out"
    if recipe.memory.recompute.kind == "planned":
        reason = "a plan is measured on whole packed sequences, of which context ranks have a part"
        yield "memory.recompute.kind", reason, "Use full, every or selective"
    if isinstance(recipe.adapter, Prefix | Prompt):
        reason = "virtual tokens are kept where a document begins, and its other parts are on other ranks"
        yield "adapter.kind", reason, "Use lora"
    router = recipe.router
    balances_documents = router is not None and router.balance in ("bias", "sequence") and bool(router.sequence)
    if balances_documents and recipe.stage not in _WITHOUT_TREES:
        reason = f"rows of stage {recipe.stage} are trees, and their branches lie on several context ranks"
        yield "router.sequence", reason, "Use sequence: 0 with balance: bias, or balance: step"
    if recipe.parallel.expert > 1 and (recipe.evaluation.samples is not None or recipe.stage not in _WITHOUT_TREES):
        reason = "experts are distributed among context ranks in stages pretrain and sft alone, without samples"
        yield "parallel.expert", reason, "Leave it out"
    if router is not None and router.capacity is not None:
        yield (
            "router.capacity",
            "which rows an expert has no room for depends on all tokens of a packed sequence, in order",
            "Leave it out",
        )


def memory_is_consistent(recipe: Recipe) -> Iterator[Problem]:
    """Recomputation and offload have the settings that they need."""
    memory, recompute, optimizer = recipe.memory, recipe.memory.recompute, recipe.optimizer
    if recompute.kind == "planned":
        if recompute.budget is None:
            message = "missing: a plan needs to know how many GiB activations may take"
            yield Problem("memory.recompute.budget", message, reads=("memory.recompute.kind",))
        if recipe.batch.micro == "auto":
            message = "auto, but a plan of recomputation needs to know the size of a micro-batch. Give a number"
            yield Problem("batch.micro", message, reads=("memory.recompute.kind",))
    if recipe.compile and (recompute.kind != "none" or "activations" in memory.offload):
        message = (
            "compiled code decides itself what it keeps. Leave out compile, or recompute and offload of activations"
        )
        yield Problem("compile", message, reads=("memory.recompute.kind", "memory.offload"))
    if "gradients" in memory.offload and "parameters" not in memory.offload:
        message = "gradients are kept where their parameters are. Add parameters"
        yield Problem("memory.offload", message)
    if "optimizer" in memory.offload and not isinstance(optimizer, AdamW | AdamW8bit | PagedAdamW):
        message = f"the state of {optimizer.kind} stays on the device. Use adamw or adamw8bit, or leave out optimizer"
        yield Problem("memory.offload", message, reads=("optimizer.kind",))
    if isinstance(optimizer, AdamW8bit) and (optimizer.block, optimizer.smallest) != (256, 4096):
        message = "offloaded 8-bit moments have blocks of 256 and begin at 4096 elements. Leave block and smallest out"
        if "optimizer" in memory.offload:
            yield Problem("optimizer.block", message, reads=("memory.offload",))
