"""The result of a run as a Hugging Face folder or a PEFT folder, with its tokenizer and chat template."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from danlu.assembly.parallelize import Subject
from danlu.assembly.parameters import own_name
from danlu.assembly.recipe_adapters import model_folder, tokenizer_path
from danlu.core.errors import DanluError
from danlu.core.layer_types import TRAINED
from danlu.core.shard_box import BoxValue
from danlu.core.types import Task
from danlu.data.chat_template import with_defaults
from danlu.data.tokenizer_export import end_of_turn_ids, exported_tokenizer, padding_token
from danlu.data.tokenizer_folder import fast_tokenizer_folder, read_chat_template
from danlu.models.saving import save
from danlu.recipe import Recipe, sections
from danlu.recipe.value import VALUE
from danlu.stages.learner import objective_parameters
from danlu.stages.reader import tokenizer_of

if TYPE_CHECKING:
    from danlu.stages.placed import PlacedDecoder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecoderExporter:
    """The `Exporter` of a decoder, or of the adapter that is trained on it."""

    policy: PlacedDecoder

    def write(self, target: Path, value: BoxValue | None, *, writes: bool) -> None:
        """A model in the type of activations that it was trained with (fp16: float32), or an adapter; before it the
        model of values, where that is kept. Weights that were trained for a format of few bits are float32: codes of
        rounded ones would be others."""
        policy = self.policy
        if policy.recipe.value is not None and policy.recipe.value.save:
            from danlu.stages.critic import critic_folder

            self._write_critic(critic_folder(target), value, writes=writes)
        classifies = policy.model.config.task != "causal-lm"  # a critic's head is no part of the result
        head = self._gathered_score_head(value) if classifies else None
        write(policy.placed.subject, policy.recipe, target, value, writes=writes, score_head=head)

    def _write_critic(self, target: Path, value: BoxValue | None, *, writes: bool) -> None:
        policy, head = self.policy, self._gathered_score_head(value)
        assert head is not None, "the recipe's rules ask for ppo"
        if policy.own_critic is not None:
            own = None if value is None else (lambda name, box=None: value(own_name(name), box))
            write(policy.own_critic.subject, policy.recipe, target, own, writes=writes, score_head=head)
            return
        adapter = TRAINED if policy.critic_decoder is None else VALUE
        write(policy.placed.subject, policy.recipe, target, value, writes=writes, score_head=head, adapter=adapter)

    def _gathered_score_head(self, value: BoxValue | None) -> nn.Linear | None:
        """The score head with the values that it has where it is trained: of a pipeline on another stage than the one
        that writes. Every process calls it."""
        head = self.policy.score_head
        if head is None or value is None or self.policy.parallel.pipeline is None:
            return head
        gathered = copy.deepcopy(head)
        for name in objective_parameters(self.policy.objective):
            values = value(name)
            if values is not None:  # on the process that writes
                gathered.get_parameter(name.rpartition(".")[2]).data.copy_(values)
        return gathered


def write(
    subject: Subject,
    recipe: Recipe,
    target: Path,
    value: BoxValue | None,
    *,
    writes: bool,
    score_head: nn.Linear | None = None,
    adapter: str = TRAINED,
) -> None:
    """Writes a model (bfloat16 where it was trained in it and for no format of few bits, else float32), or the adapter
    that was trained on one.

    value, writes: as in `models.saving.save`. score_head: of a model that classifies; one that writes texts is written
    as the hidden states under it. adapter: the name of the one that is written.
    """
    template, own_tokenizer = recipe.model.chat_template, tokenizer_path(recipe.model)
    tokenizer_folder = _exported_tokenizer(subject, recipe) if writes else fast_tokenizer_folder(own_tokenizer)
    task: Task = subject.model.config.task
    if score_head is not None and task == "causal-lm":
        task = "sequence-classification"
    classifies = task != "causal-lm"
    pad_token = _pad_token(subject, recipe) if writes and classifies else None
    stop_ids = end_of_turn_ids(own_tokenizer, template) if writes and not classifies else ()
    template_text = _exported_template(recipe)
    if subject.adapters is not None and subject.base is not None:
        from danlu.assembly.adapter_training import write_result

        write_result(
            subject.adapters,
            subject.base,
            target,
            started_from=recipe.model.adapters,
            quantization=recipe.base_quantization,
            continued=isinstance(recipe.adapter, sections.Continue),
            tokenizer_from=tokenizer_folder,
            chat_template=template_text,
            value=value,
            writes=writes,
            score_head=score_head if classifies else None,
            pad_token=pad_token,
            stop_ids=stop_ids,
            name=adapter,
            task=task,
        )
        return
    save(
        subject.model,
        target,
        dtype=torch.bfloat16 if recipe.activations == "bf16" and not recipe.trained_quantization else torch.float32,
        tokenizer_from=tokenizer_folder,
        chat_template=template_text,
        config=replace(subject.model.config, task=task),
        value=value,
        writes=writes,
        score_head=score_head if classifies else None,
        pad_token=pad_token,
        stop_ids=stop_ids,
        origin=None if recipe.model.path is None else model_folder(recipe.model),
    )


def _exported_template(recipe: Recipe) -> str | None:
    """The text of the recipe's chat template, with `model.chat_template_kwargs` as defaults; None for the tokenizer's
    own."""
    source, kwargs = read_chat_template(recipe.model.chat_template), recipe.model.chat_template_kwargs
    if not kwargs:
        return source
    sources = {"default": source} if source is not None else tokenizer_of(recipe).template_sources
    if [*sources] == ["default"]:
        return with_defaults(sources["default"], kwargs)
    if sources:
        log.warning(
            "the tokenizer has chat templates for tools of their own, so the result does not keep "
            "model.chat_template_kwargs: give them where you use it, as in --template-kwargs"
        )
    return source


def _pad_token(subject: Subject, recipe: Recipe) -> tuple[str, int] | None:
    """The token with which transformers is to pad the result, so that it scores answers at their last token."""
    token = padding_token(tokenizer_of(recipe), subject.model.config.eos_token_ids)
    if token is None:
        log.warning(
            "%s: this tokenizer has no special token but those that end answers, so the result has no pad_token_id: "
            "transformers scores one row at a time with it",
            tokenizer_path(recipe.model),
        )
    return token


def _exported_tokenizer(subject: Subject, recipe: Recipe) -> Path:
    """The folder of the tokenizer's files for the result, which is read by the type that its config.json says."""
    config = subject.model.config
    is_adapter = subject.adapters is not None and subject.base is not None
    family = None if is_adapter else config.multimodal or config.family
    path = tokenizer_path(recipe.model)
    try:
        export = exported_tokenizer(path, family)
    except DanluError as error:  # nothing that has been trained may be lost for it
        log.warning("%s: whether the result's tokenizer is read as the one trained with is not known: %s", path, error)
        return fast_tokenizer_folder(path)
    if not export.faithful:
        log.warning(
            "%s: next to a config.json of model_type %s, transformers (and danlu by it) reads another tokenizer from "
            "these files than the one that was trained with. Use the model with the tokenizer's own folder",
            path,
            family,
        )
    return export.folder
