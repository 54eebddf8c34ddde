"""A recipe for a shrunken model: the same kind of adapter, packing, objective and optimizer, with sizes that fit it."""

from __future__ import annotations

from pathlib import Path

from danlu.assembly.stored_base import stored_quantization
from danlu.models.config import ModelConfig
from danlu.models.hf_folder import CONFIG
from danlu.numerics.dtypes import DTYPES
from danlu.parallel.layout import Layout
from danlu.planning.activation_memory import ActivationPlan, activation_bytes
from danlu.planning.batch_shape import BatchShape, RankShare
from danlu.planning.pipeline_split import num_chunks
from danlu.recipe import Recipe, sections
from danlu.verification.proxy_adapters import (
    RANK,
    proxy_adapter_folders,
    proxy_section,
    row_tokens,
    write_numbers_tokenizer,
)
from danlu.verification.proxy_model import MAX_LENGTH, proxy_config
from danlu.verification.role_proxies import (
    proxy_reference,
    proxy_teachers,
    proxy_value,
    small_blocks,
    write_model,
)

EPS = 1e-4
"""Adam's eps, where the step is gradient / (size + eps): with the usual 1e-8, a gradient that is zero but for rounding
moves its weight by a whole learning rate, this way in one layout and that way in another. Clipped ones are about 5e-4.
"""
CLIPPING = 0.1
"""The limit of the global norm: that of a small model is 0.2 to 3, which the usual 1.0 would often leave alone."""
LEAST_RATE = 2e-4  # learning rate: with less, as of most stages, a wrong weight decay is no larger than rounding
_STAGES_THAT_READ_THE_POLICY = ("distill", "reward")  # its width and vocabulary, for what is trained next to it
_BUDGET_SHARE = 0.7
"""The budget's share of the estimated activations of a micro-batch: with 0.6 of them a small Gemma 2 has no plan, with
all of them a small Llama recomputes nothing."""


def proxy_recipe(
    recipe: Recipe, config: ModelConfig, layout: Layout, folder: Path, length: int
) -> tuple[Recipe, ModelConfig, list[str]]:
    """Returns the recipe with a small model; where it starts from folders, of a model or adapters, small ones are
    written.

    Args:
        config: of the large model.
        folder: where those are written.
        length: as `trained_length`.

    Returns (the recipe, the config of its model, notes of differences from the recipe apart from sizes).
    Raises ModelError for weights that are stored in a way that danlu does not read, RecipeError for a teacher that the
    layout cannot shard.
    """
    optimizer, notes = proxy_optimizer(recipe.optimizer)
    section, stored = recipe.quantization, None
    if recipe.model.path is not None:
        base = Path(recipe.model.path).expanduser()
        stored = stored_quantization(base) if (base / CONFIG).is_file() else None
        if stored is not None:
            section = stored
            notes.append(f"the base is stored in {stored.kind}: a small one is packed when it is loaded")
    deep = recipe.memory.recompute.kind in ("every", "planned")
    pipeline = recipe.parallel.pipeline
    if isinstance(pipeline.split, list):
        pipeline = pipeline.model_copy(update={"split": "even"})
        notes.append("parallel.pipeline.split: even, for the small model has few layers")
    chunks = num_chunks(pipeline)
    small = proxy_config(
        config,
        layout,
        quantized=section is not None,
        deep=deep,
        least_layers=max(2, chunks),
        trained_length=length,
    )
    if any(rope.follows_length or rope.temperature is not None for rope in small.ropes):
        notes.append(f"rotations by length as of a model that was trained at {length} tokens")
    changes: dict[str, object] = {
        "parallel": recipe.parallel.model_copy(update={"pipeline": pipeline}),
        "adapter": None if recipe.adapter is None else proxy_section(recipe.adapter, config, small),
        "quantization": small_blocks(section),
        "optimizer": optimizer,
        "memory": _small_budget(recipe, small, layout),
        "data": recipe.data.model_copy(update={"max_length": min(recipe.data.max_length, MAX_LENGTH)}),
    }
    if recipe.model.path is not None or recipe.stage in _STAGES_THAT_READ_THE_POLICY:
        start: dict[str, object] = {"path": str(folder / "model"), "preset": None, "config": None, "tokens": []}
        tokenizer = None
        if isinstance(recipe.adapter, sections.LowRank) and (recipe.model.tokens or recipe.adapter.trainable_tokens):
            tokenizer = write_numbers_tokenizer(folder / "tokenizer", small.vocab_size)
            rows = [str(token) for token in row_tokens(small)]
            changes["adapter"] = proxy_section(recipe.adapter, config, small, rows)
            start["tokenizer"] = None
            notes.append(f"rows of single tokens: {len(rows)} of the small model's")
        write_model(small, folder / "model", recipe.seed, tokenizer_from=tokenizer)
        if recipe.model.adapters:
            start["adapters"], kinds = proxy_adapter_folders(
                recipe.model.adapters, config, folder / "model", folder / "adapters", seed=recipe.seed
            )
            notes.append(f"adapters of the same kinds as in model.adapters, with numbers of their own: {kinds}")
        changes["model"] = recipe.model.model_copy(update=start)
    for of_role, notes_of_role in (
        proxy_reference(recipe, small, folder),
        proxy_value(recipe, config, small, folder),
        proxy_teachers(recipe, config, small, layout, folder, length),
    ):
        changes |= of_role
        notes += notes_of_role
    return recipe.model_copy(update=changes), small, notes


def _small_budget(recipe: Recipe, small: ModelConfig, layout: Layout) -> sections.Memory:
    """Sets a memory budget for planned recompute with which some activations are recomputed and some kept."""
    memory, micro, cut = recipe.memory, recipe.batch.micro, layout.tensor
    if memory.recompute.kind != "planned":
        return memory
    assert isinstance(micro, int), "the recipe's rules ask for it"
    lengths, element_bytes = [min(recipe.data.max_length, MAX_LENGTH)] * micro, DTYPES[recipe.activations].itemsize
    settings = ActivationPlan(share=RankShare(cut, recipe.parallel.sequence))
    activations = activation_bytes(small, BatchShape.of_lengths(lengths, element_bytes), settings)
    kept = _BUDGET_SHARE * activations.kept / 2**30
    return memory.model_copy(update={"recompute": memory.recompute.model_copy(update={"budget": kept})})


def proxy_optimizer(section: sections.Optimizer) -> tuple[sections.Optimizer, list[str]]:
    """Returns a section with blocks and ranks that fit small matrices, `eps` and learning rate above the rounding of
    gradients and weights.

    Returns (the section, notes of differences from the recipe apart from sizes).
    """
    given = getattr(section, "eps", None)
    match section:
        case sections.AdamW(moments="8bit"):
            shared = section.model_dump(exclude={"kind", "moments"})
            section = sections.AdamW8bit(**shared, block=32, smallest=256)
        case sections.AdamW8bit():
            section = section.model_copy(update={"block": 32, "smallest": min(section.smallest, 256)})
        case sections.GaLore():
            section = section.model_copy(update={"rank": min(section.rank, RANK), "update_every": 2})
    changes, notes = dict[str, float](), list[str]()
    if given is not None and given < EPS:
        changes["eps"] = EPS
        notes.append(f"optimizer.eps {EPS:g}, so that rounding alone turns no update round")
    if section.learning_rate < LEAST_RATE:
        changes["learning_rate"] = LEAST_RATE
        notes.append(f"optimizer.learning_rate {LEAST_RATE:g}, so that an update is larger than rounding")
    return section.model_copy(update=changes), notes
