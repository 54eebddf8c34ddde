"""`danlu eval`: how well a model predicts a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from danlu.cli.model_flags import MODEL_HELP, EngineFlags, ModelFlags, Seed, takes_flag_groups
from danlu.core.errors import RecipeError
from danlu.core.terminal import print_status_early
from danlu.evaluation.decoder import AnswerSettings, Request, evaluate_decoder

if TYPE_CHECKING:
    from danlu.evaluation.rewards import RewardFlags
    from danlu.inference.generation_config import Precision


@dataclass(frozen=True)
class AnswerFlags:
    """The flags of answers: their comparison or rewards, and their sampling."""

    generate: Annotated[
        bool, typer.Option("--generate", help="Have the rows answered, and compare with the rows' own answers.")
    ] = False
    pattern: Annotated[
        str | None,
        typer.Option(help="--generate: compare only what this regular expression finds last, such as '####\\s*(.+)'."),
    ] = None
    rewards: Annotated[
        list[str] | None,
        typer.Option(
            help="What answers are worth: a recipe with rewards, FILE.py:NAME, or {kind: math, column: answer}. May be "
            "given several times."
        ),
    ] = None
    threshold: Annotated[
        float | None, typer.Option(help="--rewards: an answer is right from this reward on, for pass@k. Default 1.")
    ] = None
    samples: Annotated[
        int | None, typer.Option(min=1, help="Answers to each row. Default: --generate 1, --rewards 8.")
    ] = None
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token. Default: --generate 0, --rewards 1.")
    ] = None
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer. Default 256.")] = None
    seed: Seed = 0
    answers: Annotated[
        str | None,
        typer.Option(
            help="--generate: a new file for the answers, a line of JSON each. --rewards: the column of the rows with "
            "the answers that are judged, in the place of a model's."
        ),
    ] = None

    def of_rewards(self, data: str, keys: Sequence[str], scores: Path | None, as_json: bool) -> RewardFlags:
        """Returns the flags of --rewards. Raises RecipeError for flags that do not go with it."""
        if self.generate or self.pattern is not None or not self.rewards:
            raise RecipeError("--rewards judges answers by itself: leave out --generate and --pattern, or --threshold")
        from danlu.evaluation.rewards import RewardFlags

        sampling = (self.samples, self.temperature, self.max_new_tokens, self.seed)
        return RewardFlags(self.rewards, data, keys, self.answers, *sampling, self.threshold, scores, as_json)

    def of_answers(self) -> AnswerSettings | None:
        """The values of `AnswerSettings`; None without --generate. Raises RecipeError for flags that need it."""
        if not self.generate:
            if any(flag is not None for flag in (self.pattern, self.samples, self.temperature, self.answers)):
                raise RecipeError("--pattern, --samples, --temperature and --answers are of answers: add --generate")
            return None
        return AnswerSettings(
            self.samples or 1,
            self.max_new_tokens or 256,
            self.temperature or 0.0,
            self.seed,
            self.pattern,
            None if self.answers is None else Path(self.answers),
        )


@takes_flag_groups
def eval(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} Only --rewards with --answers goes without."),
    ] = None,
    *,
    data: Annotated[str, typer.Option(help="File, folder or data set in any row format; path#N takes N rows.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="data.KEY=VALUE",
            help="How rows are read, as in a recipe: data.max_length=512 data.train_on=last data.on_bad_row=skip ...",
        ),
    ] = None,
    scores: Annotated[
        Path | None,
        typer.Option(help="With a reward model, or --rewards: a new file for all scores, a line of JSON each."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Of pairs: the model that log-probabilities are compared with. Default: that of a preference run, "
            "else none."
        ),
    ] = None,
    answering: AnswerFlags,
    engine: EngineFlags,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    loading: ModelFlags,
) -> None:
    """Loss, perplexity and token accuracy of a model on a file; of plain text also bits per byte.

    Of a classifier of images: loss and accuracy on the test files of a folder, or on a file of images.

    Of pairs (chosen, rejected): how often the chosen answer is preferred, the margin, and the loss of the run's
    objective, or DPO's.

    Of a reward model: how often the chosen answer of a pair has the higher score, or a judged step is classified
    correctly.

    With --generate: the share of answers that are exactly the rows' own, white space aside.

    With --rewards: the mean of each reward over sampled answers, and how likely one of k is right (pass@k).

    Of text every token is scored, of conversations the assistant's, of prompts with completions the completions.

    Rows longer than the model's context (or 2048 tokens) are cut into pieces, so that nothing is left out.

    Unlike in training, the end-of-text token after a document or completion counts only with data.append_eos=true.
    """
    given = {} if answering.temperature is None else {"temperature": answering.temperature}
    precision = loading.check(given, answering.seed, [])
    keys = overrides or []
    if answering.rewards or answering.threshold is not None:
        if answering.answers is not None and model is not None and model.startswith("data."):
            keys, model = [model, *keys], None  # the first key is in the place of MODEL, which may be left out
        flags = answering.of_rewards(data, keys, scores, as_json)
        may_classify = answering.answers is not None
        request = None
        if model is not None:
            request = request_of(model, keys, data, loading, precision, as_json=as_json, may_classify=may_classify)
        from danlu.evaluation.rewards import evaluate

        evaluate(request, flags, engine.options)
        return
    settings = answering.of_answers()
    if model is None:
        raise RecipeError(f"MODEL is missing: {MODEL_HELP[0].lower()}{MODEL_HELP[1:]}")
    # numpy, a tenth of a second, and below torch, more than one: for this verb, not for its --help.
    from danlu.models.hf_folder import LENET, model_type

    if model_type(model) == LENET:
        from danlu.evaluation.images import evaluate_images

        of_text = {
            "--chat-template": loading.chat_template,
            "--template-kwargs": loading.chat_template_kwargs,
            "--base": loading.base,
            "--quantization": loading.quantization,
            "--scores": scores,
            "--generate": answering.generate,
        }
        unusable = [*keys, *(name for name, flag in of_text.items() if flag)]
        evaluate_images(model, data, unusable, as_json=as_json, precision=precision, device=loading.device)
    else:
        named = partial(request_of, keys=keys, data=data, loading=loading, precision=precision, as_json=as_json)
        evaluate_decoder(named(model), scores, settings, engine.options, reference, named)


def request_of(
    model: str,
    keys: list[str],
    data: str,
    loading: ModelFlags,
    precision: Precision,
    *,
    as_json: bool,
    may_classify: bool = True,
) -> Request:
    """Resolves the decoder that flags name. Raises a DanluError for its faults, without reading weights."""
    from danlu.assembly.base_model import weight_layouts
    from danlu.inference.quantization_choice import quantization_section
    from danlu.inference.resolve_model import resolve_model
    from danlu.models.hf_folder import check_headers

    resolved = resolve_model(model, loading.base, may_classify=may_classify)
    print_status_early(f"reading {resolved.given_path} and {data}")
    layouts = weight_layouts(resolved.folder)
    check_headers(resolved.folder, resolved.config, quantized=True, layouts=layouts)  # before rows are tokenised
    quantization_section(loading.quantization, resolved)  # likewise
    template = None if loading.chat_template is None else str(loading.chat_template)
    tokenizer, load = partial(loading.load_tokenizer, resolved), partial(loading.load, resolved)
    kwargs = loading.template_kwargs
    return Request(resolved, data, keys, template, kwargs, precision, loading.device, as_json, tokenizer, load)
