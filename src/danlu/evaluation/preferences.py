"""`danlu eval` with a language model on pairs: how often the chosen answer is preferred, by how much, and the loss."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from danlu.core.errors import ModelError, RecipeError
from danlu.core.run_files import RECIPE
from danlu.core.terminal import echo
from danlu.core.types import Pack
from danlu.data.prepare import DatasetSpec
from danlu.evaluation.decoder import Request, prepared_rows, print_notes
from danlu.recipe import Recipe
from danlu.recipe.reference import resolve_reference
from danlu.recipe.sections import AdapterOff, Cached, Frozen, JudgedTerm, NoReference, PreferenceTerm, Sigmoid, terms_of
from danlu.training.run_folder import run_recipe

if TYPE_CHECKING:
    from danlu.inference.load_model import LoadedModel
    from danlu.stages.roles import RoleOutputs
    from danlu.training.evaluation import Scores

MICRO_BATCH_TOKENS = 4096
"""Tokens of a forward pass, however many pairs that are."""


@dataclass(frozen=True)
class Comparison:
    """The objective that pairs are judged by, and the model that the policy is compared with."""

    terms: tuple[PreferenceTerm, ...]
    reference: str | None
    """A path or hub id; None: log-probabilities are compared with nothing, or the adapter is switched off."""
    adapter_off: bool = False
    """Whether the reference is the model without its last adapter."""

    def said(self) -> str:
        """The objective and the reference in words."""
        kinds = " + ".join("dpo" if term.kind == "sigmoid" else str(term.kind) for term in self.terms)
        if self.adapter_off:
            return f"{kinds}, against the model without its adapter"
        return f"{kinds}, {'without a reference' if self.reference is None else f'against {self.reference}'}"


def evaluate_preferences(request: Request, reference: str | None, request_of: Callable[[str], Request]) -> None:
    """Prints how a language model prefers the chosen answers of a file's pairs.

    The objective and the reference are those of the run, where the model is one of stage preference; else DPO's. The
    numbers are those of an evaluation of that run.

    reference: a path or hub id in place of the run's. request_of: the request for that model.
    Raises ModelError for a loss that is not a number, and as `comparison_of` does.
    """
    compared = comparison_of(request, reference)
    resolved, section = request.resolved, request.recipe(packing="none").data
    other = None if compared.reference is None else request_of(compared.reference)
    tokenizer, template = str(resolved.tokenizer_folder), request.chat_template
    spec = DatasetSpec(section, "preference", tokenizer, template, 0, row_type="preference")
    prepared = prepared_rows(spec)
    loaded = request.load(request.tokenizer())
    reference_model = None if other is None else other.load(other.tokenizer())
    assert prepared.train is not None, "only a streaming data section has no samples"
    scores = _scores(loaded, reference_model, compared, spec.packed(prepared.train, shuffle=False).epoch())
    statistics = prepared.statistics
    values = {"pairs": len(prepared.train), "loss": scores.loss, **scores.metrics}
    if request.as_json:
        facts = {"bad_rows": statistics.bad_rows, "shortened": dict(statistics.shortened)}
        names = {"model": str(resolved.given_path), "data": request.data, "objective": compared.said()}
        echo(json.dumps({**names, **values, **facts, "dropped": dict(statistics.dropped)}, ensure_ascii=False))
        return
    echo(f"accuracy   {values['accuracy']:.2%} of {values['pairs']:,} pairs: the chosen answer has the higher reward")
    echo(f"margin     {values['margin']:.4f} between their rewards on average")
    echo(f"rewards    {values['rewards/chosen']:.4f} chosen, {values['rewards/rejected']:.4f} rejected, on average")
    echo(f"logps      {values['logps/chosen']:.4f} chosen, {values['logps/rejected']:.4f} rejected, in nats per answer")
    echo(f"loss       {values['loss']:.4f} per pair")
    echo(f"objective  {compared.said()}")
    print_notes(statistics, str(section.max_length))


def comparison_of(request: Request, reference: str | None) -> Comparison:
    """The objective and the reference: of the run that the model is the result of, else DPO without a reference.

    Raises RecipeError where the run's reference is gone with it, or nothing that pairs can be judged by.
    """
    recipe = _recipe_of_run(request.resolved.given_path)
    if recipe is None:
        return Comparison((Sigmoid(),), reference)
    terms = tuple(terms_of(recipe.objective))
    if any(isinstance(term, JudgedTerm) for term in terms):  # of answers that are judged alone
        terms = (Sigmoid(beta=next(getattr(term, "beta", 0.1) for term in terms if isinstance(term, JudgedTerm))),)
    if reference is not None:
        return Comparison(terms, reference)
    match resolve_reference(recipe):
        case NoReference():
            return Comparison(terms, None)
        case AdapterOff() if request.resolved.stacks:
            return Comparison(terms, None, adapter_off=True)
        case Frozen(every=None, model=str(model)):
            return Comparison(terms, model)
        case Frozen(every=None) | Cached() if recipe.model.path is not None and not recipe.model.adapters:
            return Comparison(terms, recipe.model.path)
    raise RecipeError(
        f"{request.resolved.given_path}: the reference of its run is no model folder (it moved, or had "
        "adapters in it). Name one with --reference MODEL"
    )


def _recipe_of_run(folder: Path) -> Recipe | None:
    """The recipe of the run that a folder is the result of; None unless it is one of stage preference."""
    run = folder.resolve().parent
    if not (run / RECIPE).is_file():
        return None
    recipe = run_recipe(run)
    return recipe if recipe.stage == "preference" else None


def _scores(loaded: LoadedModel, reference: LoadedModel | None, compared: Comparison, packs: Sequence[Pack]) -> Scores:
    """The means over all pairs. Raises ModelError for a loss that is not a number."""
    from danlu.objectives.preference import preference_objective
    from danlu.stages.learner import DecoderLearner
    from danlu.stages.roles import AdapterOff as WithoutAdapter
    from danlu.stages.roles import FrozenDecoder
    from danlu.training.evaluation import evaluate
    from danlu.training.progress import RowProgress

    adapters = None if loaded.stacks is None else loaded.stacks.adapters
    roles: dict[str, RoleOutputs] = {}
    if reference is not None:
        roles["reference"] = FrozenDecoder(reference.model, reference.model, reference.dtype, False)
    elif compared.adapter_off:
        assert adapters is not None, "the comparison asks for adapters"
        name = adapters.active[-1]
        roles["reference"] = WithoutAdapter(
            loaded.model, loaded.model, loaded.dtype, False, adapters=adapters, name=name
        )
    objective = preference_objective(compared.terms, bool(roles))
    learner = DecoderLearner(
        model=loaded.model,
        model_forward=loaded.model,
        device=loaded.model.embed_tokens.weight.device,
        dtype=loaded.dtype,
        micro=1,
        objective=objective,
        evaluation=objective,
        adapters=adapters,
        roles=roles,
        sequence_tokens=MICRO_BATCH_TOKENS,
    )
    with closing(RowProgress(sys.stderr, doing="scoring", units="pairs")) as progress:
        scores = evaluate(learner, packs, progress=progress if sys.stderr.isatty() else lambda done, count: None)
    assert scores is not None, "prepare refuses data without a token to score"
    if math.isnan(scores.loss):
        raise ModelError(
            f"{loaded.folder}: the loss is not a number: the model's numbers leave the range of "
            f"{str(loaded.dtype).removeprefix('torch.')}; try --dtype fp32"
        )
    return scores
