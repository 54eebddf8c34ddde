"""Stage `distill`, and terms of stage `rl`: the teacher, and how far the policy's distribution is from its."""

from typing import Annotated, Literal

from pydantic import Field

from danlu.recipe.sections.base import NonNegative, PositiveInt, ReadWith, Section, Share, VariantSection
from danlu.recipe.sections.model import Quantization


class Teacher(Section):
    """A model with a distribution over the vocabulary to learn."""

    short = "model"

    model: str
    """A Hugging Face folder, a hub id, a finished run, or the folder of an adapter, which names its base."""
    quantization: Quantization | None = None
    """Keep its weights in few bits."""
    top_k: PositiveInt | None = None
    """Learn only from its k likeliest tokens and the mass of all others; null: from the whole distribution."""
    cache: bool = False
    """Write its top_k down before training, and then train without it."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Its share where there are several, which are divided by their sum."""


class _Divergence(VariantSection):
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The divisor of the logits of teacher and policy; the divergence is multiplied by its square."""
    cross_entropy: Share = 0.0
    """Stage distill: alpha of alpha x cross-entropy of the rows + (1 - alpha) x divergence."""
    weight: Annotated[
        float,
        Field(gt=0),
        ReadWith("stage", "rl", "only read with stage rl, next to a policy gradient. Leave it out"),
    ] = 1.0
    """Stage rl: the weight of the divergence, a mean over the tokens that are trained, relative to the policy
    gradient.
    """


class ForwardKL(_Divergence):
    """KL(teacher || policy), which covers all that the teacher may say (arXiv:1503.02531)."""

    kind: Literal["forward"] = "forward"


class ReverseKL(_Divergence):
    """KL(policy || teacher), which keeps to tokens that are likely under the teacher (arXiv:2306.08543)."""

    kind: Literal["reverse"] = "reverse"
    policy_gradient: Annotated[
        bool,
        ReadWith(
            "stage",
            "rl",
            "only read with stage rl. Leave it out; on_policy has the same gradient in the mean, with less noise",
        ),
    ] = False
    """Stage rl: weight x (log-probability under the teacher - under the policy) of each drawn token is added to the
    advantage of that token; false: the divergence over the whole vocabulary is a term of the loss."""


class JensenShannon(_Divergence):
    """The generalised Jensen-Shannon divergence between both (GKD, arXiv:2306.13649, equation 1)."""

    kind: Literal["jensen-shannon"] = "jensen-shannon"
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The teacher's share of the mixture that both are compared with."""


class HiddenStates(VariantSection):
    """The mean squared error between the teacher's last hidden states and a linear map of the policy's, which is
    trained with it (arXiv:1909.10351, equation 8); a term in addition to a divergence.
    """

    kind: Literal["hidden"] = "hidden"
    weight: NonNegative = 1.0
    """The weight of the term in the sum."""
    rate_ratio: Annotated[float, Field(gt=0)] = 1.0
    """The linear map learns this many times faster than `optimizer.learning_rate` says."""


Divergence = ForwardKL | ReverseKL | JensenShannon

DistillationObjective = ForwardKL | ReverseKL | JensenShannon | HiddenStates
