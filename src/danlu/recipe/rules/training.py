"""Rules about the run: its length, batch, schedule, optimizer and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from danlu.recipe.sections import SGD, AdamW, GaLore, Recipe, Schedule, Section, value_at
from danlu.recipe.yaml_tree import Problem

MAX_PACKS = 2**24
"""Packed sequences of a step: each is a Python object."""
UNITS = {"preference": ("rows", "rows"), "reward": ("rows", "rows"), "rl": ("prompts", "prompts")}
"""The key that counts a step and the name of its unit, by stage, where they are not packed sequences."""
MOST_BFLOAT16_BETA = 0.996
"""The largest beta of moments in bfloat16: 1 - 2^-8, rounded down. Half a step is up to 2^-8 of a number."""
MAX_TRIED = 10_000
"""How many numbers near a `batch.micro` that does not divide the step are tried, to suggest one that does."""

# (key, largest value, its unit and reason): what no machine can do, or nobody means; far above what was ever published.
_BOUNDS: tuple[tuple[str, float, str], ...] = (
    ("steps", 10**10, "steps: a millisecond each would be four months"),
    ("epochs", 10**10, "epochs: at a millisecond for each, four months"),
    ("batch.sequences", MAX_PACKS, "in a step: each is an object of its own"),
    ("batch.prompts", MAX_PACKS, "in a rollout: each is an object of its own"),
    ("batch.passes", 10**6, "times that an answer is trained on"),
    ("data.max_length", 2**24, "tokens: those of a packed sequence go through the model at once"),
    ("data.shuffle_buffer", 10**9, "rows: they are held in memory"),
    ("data.workers", 1024, "processes"),
    ("threads", 4096, "threads"),
    ("evaluation.samples.max_new_tokens", 2**24, "tokens: the keys and values of each are held in memory"),
    ("reward_limits.workers", 1024, "processes"),
    ("rollout.samples", 2**16, "answers to a prompt: each is an object of its own"),
    ("rollout.max_new_tokens", 2**24, "tokens: the keys and values of each are held in memory"),
    ("rollout.batch_tokens", 2**24, "tokens: they go through the model at once"),
    ("rollout.sequences", 2**16, "answers: each is an object of its own"),
    ("rollout.cache_gib", 2**20, "GiB: no machine has as much memory"),
    ("rollout.swap_gib", 2**20, "GiB: no machine has as much memory"),
    ("rollout.block", 2**16, "tokens: what a block does not use is wasted"),
    ("rollout.server.connections", 2**16, "requests: each is a connection of its own"),
    ("rollout.server.bucket_mib", 2**20, "MiB: no machine has as much memory to spare"),
    ("rollout.draft.tokens", 64, "tokens: hardly one further back would be accepted"),
    ("rollout.draft.longest", 64, "tokens: a longer end of a text is hardly ever found in it"),
    ("adapter.rank", 2**17, "columns: no matrix of a model is as wide"),
    ("adapter.width", 2**17, "columns: no matrix of a model is as wide"),
    ("adapter.projection", 2**17, "columns: no matrix of a model is as wide"),
    ("adapter.tokens", 2**20, "tokens: they stand before every document"),
)


def run_length_is_given_once(steps: int | None, epochs: float | None) -> Iterator[Problem]:
    """A run has steps or epochs, not both."""
    if steps is not None and epochs is not None:
        yield Problem("steps", "the run's length is given twice: keep steps or epochs", reads=("epochs",))


def batch_size_is_divisible(recipe: Recipe) -> Iterator[Problem]:
    """A step is counted in tokens or sequences, in whole packed sequences and in whole micro-batches."""
    batch, data = recipe.batch, recipe.data
    packed = data.packing.kind != "none"
    sizes = ("batch.tokens", "batch.sequences", "batch.rows", "batch.prompts")
    unit, noun = UNITS.get(recipe.stage, ("sequences", "packed sequences"))
    if recipe.stage in UNITS and getattr(batch, unit) is None:
        given = next((name for name in batch.one_of if getattr(batch, name) is not None), unit)
        message = f"a step of stage {recipe.stage} is counted in {noun}. Give batch.{unit} instead"
        yield Problem(f"batch.{given}", message, reads=("stage",))
        return
    for other, (stages, counted) in {"rows": ("preference and reward", "rows"), "prompts": ("rl", "prompts")}.items():
        if other != unit and getattr(batch, other) is not None:
            counting = f"only stages {stages} count" if " " in stages else f"only stage {stages} counts"
            message = f"{counting} {counted}; stage {recipe.stage} takes batch.{unit}"
            yield Problem(f"batch.{other}", message, reads=("stage",))
            return
    if recipe.stage in UNITS:
        return
    if batch.tokens is not None and batch.sequences is not None:
        yield Problem("batch", "tokens and sequences are both given: give one of them", reads=sizes)
        return
    if batch.tokens is not None and packed and batch.tokens % data.max_length:
        multiple = batch.tokens // data.max_length * data.max_length
        nearby = f"{multiple} or {multiple + data.max_length}" if multiple else f"{data.max_length}"
        message = (
            f"{batch.tokens} is not a multiple of data.max_length {data.max_length}, the length of a packed sequence"
        )
        yield Problem("batch.tokens", f"{message}. Use {nearby}", reads=("data.max_length", "data.packing"))
        return
    if batch.tokens is not None and not packed:
        message = "without packing a step is counted in rows. Give batch.sequences instead"
        yield Problem("batch.tokens", message, reads=("data.packing",))
        return
    packs = batch.sequences if batch.sequences is not None else (batch.tokens or 0) // data.max_length
    if packs > MAX_PACKS:
        if batch.tokens is not None:
            message = f"{batch.tokens:,} tokens are {packs:,} packed sequences of {data.max_length} tokens, and a step "
            yield Problem("batch.tokens", f"{message}has at most {MAX_PACKS:,}", reads=("data.max_length",))
        return
    if isinstance(batch.micro, int) and packs % batch.micro:
        center = min(batch.micro, packs)
        nearby_sizes = (n for distance in range(center) for n in (center - distance, center + distance) if n <= packs)
        divisor = next((n for n in islice(nearby_sizes, MAX_TRIED) if packs % n == 0), 1)
        message = f"{batch.micro} does not divide the {packs} sequences of a step. Use {divisor}, or auto"
        yield Problem("batch.micro", message, reads=(*sizes, "data.max_length"))


def numbers_are_within_bounds(recipe: Recipe) -> Iterator[Problem]:
    """Checks that no number is beyond the reach of any machine."""
    for key, largest, unit in _BOUNDS:
        value = value_at(recipe, key)
        if isinstance(value, int | float) and value > largest:
            yield Problem(key, f"{value:,} is more than the {largest:,} {unit}. Give less")
    if recipe.stage != "classify" and recipe.data.max_length < 2:
        message = "1 trains nothing: the first token of a sample is context. Give 2 or more"
        yield Problem("data.max_length", message)


def schedule_fits_run(schedule: Schedule, steps: int | None) -> Iterator[Problem]:
    """Warm-up and decay fit in the run."""
    for field, message in schedule.problems(steps):
        yield Problem(f"schedule.{field}", message, reads=("steps", "schedule.warmup", "schedule.decay"))


def rewind_has_checkpoint(recipe: Recipe) -> Iterator[Problem]:
    """A rewind has a checkpoint to go back to before the run ends."""
    every, steps = recipe.checkpoint.every, recipe.steps
    if recipe.watch.policy == "rewind" and every is not None and steps is not None and every >= steps:
        message = f"rewind needs a checkpoint to go back to, and the first is at step {every} of {steps}. "
        reads = ("checkpoint.every", "steps")
        yield Problem("watch.policy", f"{message}Lower checkpoint.every", reads=reads)


def optimizer_is_consistent(optimizer: Section, adapter: Section | None) -> Iterator[Problem]:
    """The optimizer's own keys go together, and with an adapter."""
    if isinstance(optimizer, SGD) and optimizer.nesterov and optimizer.momentum == 0:
        yield Problem("optimizer.nesterov", "Nesterov's step needs momentum above 0", reads=("optimizer.momentum",))
    if isinstance(optimizer, AdamW) and optimizer.moments == "bf16" and max(optimizer.betas) > MOST_BFLOAT16_BETA:
        message = (
            f"{max(optimizer.betas):g}, but a moment in bf16 has steps of 1/256 of itself: it is rounded back to what "
            f"it was where a step takes less than half of one away, and never shrinks. Give {MOST_BFLOAT16_BETA} or "
            "less, or moments: float32"
        )
        yield Problem("optimizer.betas", message, reads=("optimizer.moments",))
    if isinstance(optimizer, GaLore) and adapter is not None:
        message = "galore projects gradients of whole matrices, and an adapter's are small. Use adamw, or no adapter"
        yield Problem("optimizer.kind", message, reads=("adapter",))
