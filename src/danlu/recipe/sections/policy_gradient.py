"""Objectives of stage `rl`: how answers that the policy drew, and their rewards, become gradients.

They are one policy gradient with different settings. A kind has the settings of a paper, under its name; each key may
be set otherwise. A ratio is the probability of a token (or of an answer) under the policy over that under the policy
that drew it. The names of the choices are those of `objectives/advantages.py` and `objectives/policy_losses.py`.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, create_model, model_validator

from danlu.recipe.sections.adapters import Adapter
from danlu.recipe.sections.base import NonNegative, NotReadWith, PositiveInt, ReadWith, Section, Share, VariantSection

Positive = Annotated[float, Field(gt=0)]
Baseline = Literal["group", "leave-one-out", "greedy", "batch", "none"]
Scale = Literal["group", "batch", "mean", "none"]
Normalise = Literal["tokens", "sequences", "constant", "groups"]
Clip = NonNegative | tuple[NonNegative, NonNegative]
GoodAndBad = tuple[Positive, Positive]
Count = Annotated[int, Field(ge=0)]

_UNREAD = "not read with loss: {value}. Leave it out"
_OF_LOSS = "only read with loss: {values}; this is {value}. Leave it out"


class _KlKeys(Section):
    short = "coefficient"

    coefficient: NonNegative = 0.05
    """The factor of the estimate (beta), in rewards or in the loss; with a target it starts as this."""
    estimator: Literal["k1", "k2", "k3"] | None = None
    """The estimator of KL: -x (k1), x^2 / 2 (k2) or e^x - x - 1 (k3), with x the log-probability under the reference
    less that under the policy. By default k1 with in: reward, where it alone has the gradient of KL, and k3 with in:
    loss. As a term of the loss k2 has the gradient of KL, k1 and k3 have it with ratio: true, and k1 has none without
    it.
    """
    ratio: bool = False
    """in: loss: multiply by the ratio of each token, as DeepSeek-V3.2 does (arXiv:2512.02556, section 3.1)."""
    target: Positive | None = None
    """in: reward: the KL of an answer, in nats, that the coefficient is raised or lowered for after each rollout
    (arXiv:1909.08593, section 2.2); null: it stays the same.
    """
    horizon: Annotated[PositiveInt, ReadWith("target", message="only read with a target")] = 10_000
    """The number of answers over which the coefficient changes by a fifth at most; read with a target."""

    @model_validator(mode="after")
    def _with_estimator(self) -> Self:
        """Writes the default of `estimator` down, so that a resolved recipe says which one it is."""
        if self.estimator is None:
            vars(self)["estimator"] = "k1" if self.in_reward else "k3"  # not among the fields that were set
        return self

    @property
    def kl_estimator(self) -> Literal["k1", "k2", "k3"]:
        """`estimator`, or the default of the place that the KL is in."""
        assert self.estimator is not None, "written down when the section was made"
        return self.estimator

    @property
    def in_reward(self) -> bool:
        """Whether the estimate is subtracted from the reward of each token, rather than added to the loss."""
        return bool(vars(self)["in"] == "reward")


_IN = "loss: a term of the loss. reward: subtracted from the reward of each token before advantages are computed."

if TYPE_CHECKING:

    class Kl(_KlKeys):
        """The KL divergence from the reference, estimated from the tokens that were drawn."""

        def __init__(self, **keys: Any) -> None: ...

else:  # `in` is a keyword of Python, and no class statement has a field of that name
    Kl = create_model(
        "Kl",
        __base__=_KlKeys,
        __module__=__name__,
        __doc__="The KL divergence from the reference, estimated from the tokens that were drawn.",
        **{"in": (Literal["loss", "reward"], Field("loss", description=_IN))},
    )


class Importance(Section):
    """The correction for log-probabilities of an engine that rounds otherwise than the trainer: w = the probability of
    a token under the trainer's policy over that which the engine drew it with multiplies its loss."""

    short = "level"

    level: Literal["token", "sequence"] = "token"
    """The level of w: that of each token, or the product over an answer."""
    low: Positive | None = None
    """Leave out tokens (answers) with a smaller w (IcePop, arXiv:2510.18855)."""
    high: Positive = 2.0
    """The largest w."""
    masks: bool = False
    """Leave out tokens (answers) with a larger w; false counts them with `high` (truncated importance sampling)."""


class Overlong(Section):
    """DAPO's soft punishment of long answers (arXiv:2503.14476, equation 13): 0 up to `margin` tokens before
    rollout.max_new_tokens, from there falling to -1, added to the reward."""

    short = "margin"

    margin: PositiveInt
    """Tokens over which it falls."""
    weight: Positive = 1.0
    """The factor of the penalty."""


class PolicyGradientSection(VariantSection):
    """The objective of stage `rl`. Means are over the answers of a step, whatever its micro-batches are."""

    needs_value: ClassVar[bool] = False
    """Its advantages come from a value head."""

    baseline: Baseline = "group"
    """The value subtracted from a reward: the mean over the prompt's answers (group) or over its other answers
    (leave-one-out), the reward of the prompt's greedy answer, which is drawn in addition to the others (greedy), the
    mean over the answers of the rollout (batch), or nothing.
    """
    scale: Scale = "group"
    """The divisor of the difference: the standard deviation over the prompt's answers (group) or over those of the
    rollout (batch), the mean over the prompt's answers, at least 0.1 (mean: MaxRL, arXiv:2602.02710, for rewards that
    are never below 0: exact, math, code and format), or nothing.
    """
    rewards_apart: bool = False
    """Compute advantages of each of several rewards, which are then summed and divided by the deviation of the sum
    (GDPO, arXiv:2601.05242); false takes the advantages of the sum of rewards.
    """
    process_supervision: bool = False
    """Compare the rewards of steps, where a reward judges steps: each step's reward is compared with those of all steps
    of all answers to the prompt, and a token's advantage is the sum over the steps that end with it or later
    (arXiv:2402.03300, section 4.1.3); each reward by itself. false takes the sum of an answer's steps.
    """
    ratio: Literal["token", "sequence"] = "token"
    """The ratio of each token, or the geometric mean over its answer (GSPO)."""
    loss: Literal["clip", "cispo", "sapo", "vespo"] = "clip"
    """The loss that keeps updates small: the smaller of clipped and unclipped objective (PPO, arXiv:1707.06347), a
    clipped weight of the log-probability (CISPO, arXiv:2506.13585), a soft gate (SAPO, arXiv:2511.20347), or a weight
    of whole answers (VESPO, arXiv:2602.10693).
    """
    clip: Annotated[Clip, NotReadWith("loss", ("sapo", "vespo"), _UNREAD)] = 0.2
    """How far below and above 1 the ratio counts: [low, high], or one number for both. With loss: cispo one number, the
    largest ratio itself, such as 5."""
    dual_clip: Annotated[Annotated[float, Field(gt=1)] | None, ReadWith("loss", "clip", _UNREAD)] = None
    """The largest ratio that counts for tokens with a negative advantage (arXiv:1912.09729), such as 3."""
    sapo_temperatures: Annotated[GoodAndBad, ReadWith("loss", "sapo", _OF_LOSS)] = (1.0, 1.05)
    """loss: sapo: how fast the gate closes as the ratio leaves 1 (tau), for tokens with an advantage above 0 and for
    the others; the paper closes it faster for the others."""
    vespo_shapes: Annotated[GoodAndBad, ReadWith("loss", "vespo", _OF_LOSS)] = (2.0, 3.0)
    """loss: vespo: k of the weight exp(lambda (1 - w)) w^k that an answer with ratio w has, for answers with an
    advantage of at least 0 and for the others: how fast it falls where the policy has left an answer."""
    vespo_rates: Annotated[GoodAndBad, ReadWith("loss", "vespo", _OF_LOSS)] = (3.0, 2.0)
    """loss: vespo: lambda of that weight, of both kinds of answers: how fast it falls where the policy has taken an
    answer up."""
    normalise: Normalise = "tokens"
    """The divisor of the sum over tokens: the tokens of the step, the tokens of each answer and then the number of
    answers (sequences), rollout.max_new_tokens and the number of answers (constant), or the tokens of all answers to a
    prompt and then the number of prompts (groups).
    """
    kl: Kl | None = None
    """Hold the policy to a reference: a coefficient, or a mapping."""
    entropy: NonNegative = 0.0
    """Weight of the entropy bonus, the mean entropy of the policy where tokens were drawn."""
    importance: Importance | None = None
    """Correct for an engine that rounds otherwise than the trainer: token, sequence, or a mapping."""
    off_policy: Positive | None = None
    """Leave out answers with a negative advantage if the policy has made their tokens less likely by more than this
    many nats on average (arXiv:2512.02556, section 3.1).
    """
    overlong: Overlong | None = None
    """A punishment of long answers: the tokens over which it falls, or a mapping."""
    mask_truncated: bool = False
    """Leave out answers that were cut off at rollout.max_new_tokens: they count in the baseline, and train nothing."""
    resample: Count = 0
    """Dynamic sampling (arXiv:2503.14476, section 3.2): how many times prompts are replaced by the next ones if all
    their answers have the same reward, before the rest is trained as it is.
    """

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """`clip` as (low, high)."""
        return self.clip if isinstance(self.clip, tuple) else (self.clip, self.clip)

    @property
    def needs_reference(self) -> bool:
        """Whether the policy is held to a reference."""
        return self.kl is not None and self.kl.coefficient > 0


class Grpo(PolicyGradientSection):
    """Group relative policy optimization (GRPO, arXiv:2402.03300). As in TRL there is no KL term unless it is asked
    for, and each token of the step counts alike; the paper's mean over each answer is normalise: sequences."""

    kind: Literal["grpo"] = "grpo"


class Dapo(PolicyGradientSection):
    """DAPO (arXiv:2503.14476): GRPO with a higher upper bound and dynamic sampling. Its punishment of long answers is
    `overlong`, of a margin that depends on rollout.max_new_tokens."""

    kind: Literal["dapo"] = "dapo"
    clip: Clip = (0.2, 0.28)
    resample: Count = 3


class DrGrpo(PolicyGradientSection):
    """Dr. GRPO (arXiv:2503.20783): GRPO without the divisions that favour long wrong answers, and prompts that are
    nearly always or nearly never answered rightly."""

    kind: Literal["dr-grpo"] = "dr-grpo"
    scale: Scale = "none"
    normalise: Normalise = "constant"


class Rloo(PolicyGradientSection):
    """REINFORCE leave-one-out (RLOO, arXiv:2402.14740). As in the paper the log-probability of an answer is the sum
    over its tokens; all are divided by one constant."""

    kind: Literal["rloo"] = "rloo"
    baseline: Baseline = "leave-one-out"
    scale: Scale = "none"
    normalise: Normalise = "constant"


class Gspo(PolicyGradientSection):
    """Group sequence policy optimization (GSPO, arXiv:2507.18071): ratio and clip of whole answers."""

    kind: Literal["gspo"] = "gspo"
    ratio: Literal["token", "sequence"] = "sequence"
    clip: Clip = (3e-4, 4e-4)
    normalise: Normalise = "sequences"


class Remax(PolicyGradientSection):
    """ReMax (arXiv:2310.10505): REINFORCE with the reward of the greedy answer as its baseline. The log-probability of
    an answer is the sum over its tokens; all are divided by one constant."""

    kind: Literal["remax"] = "remax"
    baseline: Baseline = "greedy"
    scale: Scale = "none"
    normalise: Normalise = "constant"


class Reinforce(PolicyGradientSection):
    """REINFORCE++ (arXiv:2501.03262): advantages normalised over the whole rollout. The paper's KL penalty is
    kl: {in: reward}, which each token pays for itself and for later ones."""

    kind: Literal["reinforce"] = "reinforce"
    baseline: Baseline = "batch"
    scale: Scale = "batch"


class Ppo(PolicyGradientSection):
    """Proximal policy optimization (PPO, arXiv:1707.06347): an advantage for every token, from a value head."""

    needs_value = True
    kind: Literal["ppo"] = "ppo"
    baseline: Baseline = "none"
    scale: Scale = "none"
    kl: Kl | None = Kl(coefficient=0.05, **{"in": "reward"})
    discount: Share = 1.0
    """The discount of the next token's reward (gamma)."""
    gae: Share = 0.95
    """lambda of generalized advantage estimation (arXiv:1506.02438): 1 takes returns less values, 0 the error of one
    step."""
    value_clip: Positive | None = 0.2
    """How far a value moves from that of the rollout in the loss of values; null: as far as it likes."""
    value_weight: NonNegative = 0.5
    """The factor of the loss of values, half the squared error."""
    whiten: bool = True
    """Shift and scale the advantages of the rollout's tokens to a mean of 0 and a deviation of 1."""
    bootstrap_truncated: bool = True
    """An answer that was cut off at rollout.max_new_tokens goes on in principle: the value at its end is its return
    from there. false takes 0.
    """


_NOT_A_HEAD = NotReadWith(
    "share", "policy", "share: policy is a head on the policy itself. Set share: base or none, or leave it out"
)


class Value(Section):
    """Stage `rl` with objective ppo: the model of values."""

    short = "share"

    share: Literal["policy", "base", "none"] = "policy"
    """policy: a head on the policy's last hidden states, which is trained with it; base: an adapter of its own, with a
    head, on the frozen base that the policy's adapter is on; none: a model of its own, all of which is trained."""
    adapter: Annotated[Adapter | None, _NOT_A_HEAD] = None
    """base: the adapter of the model of values; by default lora. Like the policy's it lies upon `model.adapters`."""
    model: str | None = None
    """The start of the model of values, with its score head if it has one, such as a run of stage reward, or the model
    that another run of ppo has saved: with share: base an adapter on the same base, with share: none a model, with
    share: policy a model of which the score head alone is read; by default the start of the policy.
    """
    learning_rate: Positive | None = None
    """The learning rate of the model of values, by the same schedule; by default `optimizer.learning_rate`."""
    rate_ratio: Annotated[
        Positive, ReadWith("learning_rate", None, "value.learning_rate says it already. Leave one of them out")
    ] = 1.0
    """The same as a multiple of `optimizer.learning_rate`."""
    warmup: Annotated[int, Field(ge=0), _NOT_A_HEAD] = 0
    """base and none: the number of first steps in which only values are trained, and the policy is held."""
    save: bool = False
    """Keep the model of values too: next to the result (model, or adapter), as model-value or adapter-value, a folder
    of a model that scores, which value.model of another run takes.
    """


PolicyGradientObjective = Grpo | Dapo | DrGrpo | Rloo | Gspo | Remax | Reinforce | Ppo
