"""Language models in a verification: a small decoder, or adapters on one, and packs of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from danlu.adapters.peft_folder import write_adapter
from danlu.assembly.parallelize import place, subject_of
from danlu.assembly.parameters import TRAINED
from danlu.assembly.recipe_adapters import base_config, check_adapters
from danlu.core.errors import ModelError, RecipeError
from danlu.core.shard_box import BoxValue
from danlu.core.types import Pack
from danlu.data.batch import EMPTY_PACK, empty_like
from danlu.models.config import ModelConfig
from danlu.models.hf_config import config_values
from danlu.models.hf_folder import read_config
from danlu.models.layer_spec import Experts, LayerSpec
from danlu.models.long_context import ropes_by_length, with_long_context
from danlu.models.presets import from_scratch
from danlu.models.rope_config import Rope
from danlu.models.saving import save
from danlu.parallel.collective_traffic import CollectiveTraffic
from danlu.parallel.layout import Layout, problems
from danlu.parallel.ranks import Ranks
from danlu.planning.pipeline_split import pipedream_problems
from danlu.recipe import Recipe
from danlu.recipe.routing_replay import replays_routes
from danlu.stages.builder import check_router, placed_decoder
from danlu.stages.distillation import check_teachers, resolved_teacher
from danlu.stages.placed import PlacedDecoder
from danlu.stages.table import STAGES
from danlu.training.checkpoints.loading import read_group
from danlu.verification.collective_traffic import decoder_traffic
from danlu.verification.context_traffic import context_ranks_traffic
from danlu.verification.data import fold_tokens, proxy_data
from danlu.verification.pipeline_traffic import stages_traffic
from danlu.verification.proxy import MicroBatches, PreparedProxy, ProxyTraining, has_experts
from danlu.verification.proxy_adapters import adapted_sites
from danlu.verification.proxy_model import (
    CANDIDATES,
    LENGTH_OF_ROUTES,
    MAX_LENGTH,
    proxy_recipe,
    staged_ropes,
    trained_length,
)
from danlu.verification.role_proxies import with_columns
from danlu.verification.synthetic_rollouts import with_synthetic_routes
from danlu.verification.teacher_proxies import with_small_teachers

_VOCAB_SIZE = 32_000  # of a model from scratch whose tokenizer was not loaded


@dataclass(frozen=True)
class DecoderProxy:
    """A `Proxy`: a decoder."""

    config: ModelConfig
    vocab_size: int | None = None
    """Texts that adapters start from are encoded as bytes modulo this; None: by the recipe's tokenizer."""
    has_norms: bool = True
    has_files: bool = True
    empty: Pack = EMPTY_PACK  # an item without targets, with the columns and facts of the others
    staged_ropes: Mapping[int, tuple[Rope, ...]] = field(default_factory=dict)  # as of `Decoder`

    @property
    def layer_kinds(self) -> Sequence[LayerSpec]:
        return self.config.kinds

    @property
    def has_tied_head(self) -> bool:
        return self.config.tie_word_embeddings

    def trains_experts(self, recipe: Recipe) -> bool:
        if recipe.adapter is None:
            return has_experts(self)
        return any(site.experts is not None for site in adapted_sites(recipe, self.config))

    def place(self, recipe: Recipe, ranks: Ranks, device: torch.device, resumed: Path | None) -> PlacedDecoder:
        subject = subject_of(
            recipe,
            self.config,
            device,
            saved=None if resumed is None or recipe.adapter is None else read_group(resumed, "model"),
            resumed=resumed is not None,
            encode=lambda text: self._encoded(text, recipe),
            ranks=ranks,
        )
        placed = place(subject, recipe, ranks, device, resumed=resumed is not None)
        placed.subject.model.staged_ropes = self.staged_ropes
        decoder = placed_decoder(recipe, STAGES[recipe.stage], placed, self.config, device, resumed=resumed is not None)
        return replace(decoder, empty=self.empty)

    def write(self, placed: PlacedDecoder, target: Path, value: BoxValue | None, *, writes: bool) -> None:
        adapters = placed.placed.subject.adapters
        if adapters is None:
            save(placed.model, target, value=value, writes=writes)
            return
        if writes:
            target.mkdir(parents=True, exist_ok=True)
        write_adapter(adapters, TRAINED, target, base="base", base_fingerprint=None, value=value, writes=writes)

    def expected_traffic(self, training: ProxyTraining, micro_batches: MicroBatches) -> list[CollectiveTraffic]:
        return [
            *decoder_traffic(training, micro_batches),
            *context_ranks_traffic(training, micro_batches),
            *stages_traffic(training, micro_batches),
        ]

    def _encoded(self, text: str, recipe: Recipe) -> list[int]:
        """Token ids of a text that prompt tuning starts from."""
        if self.vocab_size is not None:
            return [byte % self.vocab_size for byte in text.encode()]
        # transformers, seconds and hundreds of MiB that only such a recipe needs.
        from danlu.data.tokenizer import load_tokenizer
        from danlu.inference.chat_tokenizer import ChatTokenizer

        named = recipe.model.tokenizer or recipe.model.path
        return ChatTokenizer(
            load_tokenizer(str(named), recipe.model.chat_template, recipe.model.chat_template_date)
        ).encode_prompt(text)


def prepare_proxy(recipe: Recipe, layout: Layout, count: int, folder: Path, *, full: bool) -> PreparedProxy:
    """`count` packs and a shrunken model for them; the folders that it starts from are written into `folder`.

    Of a model with experts there are `CANDIDATES` times as many packs.

    full: keep the recipe's own model and lengths.
    Raises RecipeError for a layout that the large model cannot be cut into, or a router that it has not, ModelError for
    adapters of another one.
    """
    check_adapters(recipe.model, recipe.adapter)
    check_teachers(recipe)
    config = _config(recipe, None)
    check_router(recipe.router, config, replays=recipe.rollout.routing_replay)
    max_length = recipe.data.max_length
    if not full:
        longest = LENGTH_OF_ROUTES if config.has_experts else MAX_LENGTH
        short = min(recipe.data.max_length, longest)
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": short})})
    data = proxy_data(recipe, count * (CANDIDATES if config.has_experts else 1))
    unscaled = _config(recipe, data.vocab_size)
    config, length = with_long_context(unscaled, recipe.long_context, max_length), trained_length(data.packs)
    if wrong := [*problems(recipe.parallel, config), *pipedream_problems(recipe, config)]:
        raise RecipeError(wrong)
    small_recipe, small, notes = (recipe, config, []) if full else proxy_recipe(recipe, config, layout, folder, length)
    if not full:
        small_recipe, of_teachers = with_small_teachers(small_recipe, config, small, layout, folder, length)
        notes += of_teachers
    assert full or not list(problems(small_recipe.parallel, small)), "divides as the large one does"
    stage = STAGES[recipe.stage]
    small = replace(small, task=stage.task(recipe))
    # Rows that one of the embeddings has more than another stand for no token.
    teachers = map(resolved_teacher, small_recipe.teacher or ())
    known_tokens = min([small.vocab_size, *(read_config(teacher.folder).vocab_size for teacher in teachers)])
    folded = data.packs if full and data.vocab_size is not None else fold_tokens(data.packs, known_tokens)
    packs = with_columns(folded, small_recipe, stage, None if full else folder, small.vocab_size)
    if small.has_experts and recipe.stage == "rl" and replays_routes(recipe):
        packs = with_synthetic_routes(packs, small, recipe.seed)
        notes.append("tokens go to experts that are drawn, in the place of those of a rollout (rollout.routing_replay)")
    by_stage = ropes_by_length(unscaled, recipe.long_context)
    ropes = staged_ropes(config, small, by_stage, None if full else length)
    if ropes:
        notes.append(f"stages of {', '.join(f'{tokens:,}' for tokens in by_stage)} tokens, a step of each")
    has_files = recipe.adapter is not None or can_be_written(small)
    if not has_files:
        notes.append("the result is compared by parameters, for no config.json can say this model")
    first = packs[0].samples[0]
    return PreparedProxy(
        recipe=small_recipe,
        proxy=DecoderProxy(
            small,
            None if full else small.vocab_size,
            empty=empty_like(first) if first.branches or first.columns else EMPTY_PACK,
            staged_ropes=ropes,
            has_files=has_files,
        ),
        items=packs,
        parameters=small.parameter_count(),
        item_name="prompts" if recipe.stage == "rl" else "packed sequences" if recipe.row_type is None else "rows",
        model_summary=_summary(small, config),
        data_summary=data.source,
        notes=notes,
        stages=tuple(ropes),
    )


def can_be_written(config: ModelConfig) -> bool:
    """Whether the config.json of its family can describe a model."""
    try:
        config_values(config, torch_dtype="float32")
    except ModelError:
        return False
    return True


def _config(recipe: Recipe, vocab_size: int | None) -> ModelConfig:
    if recipe.model.path is not None:
        return base_config(recipe.model)
    given = recipe.model.config if isinstance(recipe.model.config, dict) else {}
    return from_scratch(recipe.model, vocab_size or int(given.get("vocab_size", _VOCAB_SIZE)), 1, 2)


def _summary(small: ModelConfig, large: ModelConfig) -> str:
    def sizes(config: ModelConfig) -> str:
        feeds = {kind.feed.num_experts for kind in config.kinds if isinstance(kind.feed, Experts)}
        experts = "".join(f", {count} experts" for count in sorted(feeds))
        return f"{len(config.layers)} layers of {config.layers[0].mixer}{experts}, width {config.hidden_size}"

    instead = "" if small == large else f" in place of {sizes(large)}"
    return f"{small.family}, {sizes(small)}{instead}"
