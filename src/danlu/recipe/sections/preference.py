"""Objectives of stage `preference`: learning from answers that were preferred to others, or judged alone.

Names and defaults are TRL's (without its `_pair`), or the paper's. In the docstrings, the ratio of an answer is its
log-probability under the policy less that under the reference, each the sum over the answer's tokens, and delta is the
chosen answer's score less the rejected one's; with the divergence reverse-kl scores are ratios. Losses are means over
the pairs (or the answers) of a step. A loss with a margin in its formula takes it from the row, where it has one; it is
0 elsewhere.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from danlu.recipe.sections.base import NonNegative, RowType, Section, Share, VariantSection, default_section

Positive = Annotated[float, Field(gt=0)]
FlipRate = Annotated[float, Field(ge=0, lt=0.5)]
"""Share of labels that are taken to be flipped."""


class PreferenceTerm(VariantSection):
    """A term of the objective of stage `preference`; several are added up."""

    row_types: ClassVar[tuple[RowType, ...]] = ("preference",)
    """The types of rows that it can be computed from."""
    needs_reference: ClassVar[bool] = True
    """It compares the policy with a reference."""
    reference_free: ClassVar[bool] = False
    """Whether the term takes the log-probabilities themselves for the ratios with `reference: none`."""
    needs_mismatched: ClassVar[bool] = False
    """Each row has a branch more: the next row's answer behind this row's prompt."""
    takes_margins: ClassVar[bool] = False
    """Its loss asks for the margin of a row that has one."""

    weight: NonNegative = 1.0
    """The weight of the term in the sum."""


class ReverseKlDivergence(VariantSection):
    """KL(policy || reference): the score is the ratio."""

    kind: Literal["reverse-kl"] = "reverse-kl"


class ForwardKlDivergence(VariantSection):
    """KL(reference || policy): 1 - exp(-ratio)."""

    kind: Literal["forward-kl"] = "forward-kl"


class JsDivergence(VariantSection):
    """The Jensen-Shannon divergence: log 2 + log sigmoid(ratio)."""

    kind: Literal["js"] = "js"


class AlphaDivergence(VariantSection):
    """The alpha-divergence: (exp((alpha - 1) ratio) - 1) / (alpha - 1)."""

    kind: Literal["alpha"] = "alpha"
    alpha: float = 0.5
    """1 is reverse-kl."""


FDivergence = Annotated[
    ReverseKlDivergence | ForwardKlDivergence | JsDivergence | AlphaDivergence, Field(discriminator="kind")
]


class LogRatioTerm(PreferenceTerm):
    """A term over the ratios of chosen and rejected answers."""

    beta: Positive = 0.1
    """How strongly the policy is held to the reference: the inverse temperature of the implicit reward."""
    ld_alpha: Share | None = None
    """Weight of the tokens that the longer answer of a pair has more than the other (LD-DPO, arXiv:2409.06411); null:
    1."""
    wpo: bool = False
    """Weigh each pair by how likely the policy is to write it (WPO, arXiv:2406.11827, equation 2)."""


class DeltaTerm(LogRatioTerm):
    """A term that sees a pair by its delta alone."""

    reference_free = True

    divergence: FDivergence = default_section(ReverseKlDivergence)
    """The f-divergence that holds the policy to the reference (f-DPO, arXiv:2309.16240): reverse-kl, forward-kl, js or
    alpha."""


class Sigmoid(DeltaTerm):
    """Direct preference optimization (DPO, arXiv:2305.18290, equation 7): -log sigmoid(beta delta - margin). Margins
    are ODPO's (arXiv:2402.10571)."""

    kind: Literal["sigmoid"] = "sigmoid"
    takes_margins = True

    label_smoothing: FlipRate = 0.0
    """Share of labels that are taken to be flipped (cDPO)."""


class Robust(DeltaTerm):
    """Robust DPO (arXiv:2403.00409): sigmoid's loss without bias where the share label_smoothing of labels is
    flipped."""

    kind: Literal["robust"] = "robust"
    takes_margins = True

    label_smoothing: FlipRate = 0.1
    """Share of labels that are flipped."""


class Hinge(DeltaTerm):
    """The hinge loss of SLiC (arXiv:2305.10425) and RSO: max(0, 1 + margin - beta delta)."""

    kind: Literal["hinge"] = "hinge"
    takes_margins = True


class Ipo(DeltaTerm):
    """Identity preference optimization (IPO, arXiv:2310.12036, equation 17), with scores per token of the answer, as
    its authors use them: (delta - 1 / (2 beta))^2; beta is the paper's tau."""

    kind: Literal["ipo"] = "ipo"


class Exo(DeltaTerm):
    """Efficient exact optimization (EXO, arXiv:2402.00856, equation 16): the reverse KL from (sigmoid(beta delta),
    sigmoid(-beta delta)) to the smoothed labels."""

    kind: Literal["exo"] = "exo"

    label_smoothing: Annotated[float, Field(gt=0, lt=0.5)] = 1e-3
    """epsilon: the share of the rejected answer in the labels; above 0, for the KL to a label of 0 is infinite."""


class Discopop(DeltaTerm):
    """DiscoPOP, the discovered loss (arXiv:2406.08414, equation 5): logistic and exponential loss of beta delta,
    blended by sigmoid(beta delta / tau)."""

    kind: Literal["discopop"] = "discopop"

    tau: Positive = 0.05
    """The temperature of the blend."""


class SigmoidNorm(DeltaTerm):
    """Length-normalised DPO (Tulu 3, arXiv:2411.15124): sigmoid over scores per token of the answer."""

    kind: Literal["sigmoid-norm"] = "sigmoid-norm"
    takes_margins = True


class Nca(LogRatioTerm):
    """Noise contrastive alignment (NCA, arXiv:2402.05369): -log sigmoid(r_chosen) - 1/2 log sigmoid(-r_chosen)
    - 1/2 log sigmoid(-r_rejected), with r = beta x ratio."""

    kind: Literal["nca"] = "nca"


class Bco(LogRatioTerm):
    """Binary classifier optimization (BCO, arXiv:2404.04656): -log sigmoid(r_chosen - d) - log sigmoid(d - r_rejected),
    with r = beta x ratio and the reward shift d."""

    kind: Literal["bco"] = "bco"

    shift: Literal["none", "running-mean"] = "none"
    """d: 0 (none), or the mean of all rewards so far, a mean over steps (running-mean), which takes a pass without
    gradients before each step."""


class Sppo(LogRatioTerm):
    """Self-play preference optimization with hard labels (SPPO, arXiv:2405.00675, equation 4.7):
    (ratio_chosen - 1 / (2 beta))^2 + (ratio_rejected + 1 / (2 beta))^2; beta is 1 / eta."""

    kind: Literal["sppo"] = "sppo"

    beta: Positive = 1e-3
    """1 / eta."""


class ApoZero(LogRatioTerm):
    """Anchored preference optimization (APO-zero, arXiv:2408.06266, equation 7), for answers better than the model's
    own: 1 - sigmoid(r_chosen) + sigmoid(r_rejected), with r = beta x ratio."""

    kind: Literal["apo-zero"] = "apo-zero"


class ApoDown(LogRatioTerm):
    """APO-down (arXiv:2408.06266, equation 8), for answers worse than the model's own: sigmoid(r_chosen) +
    1 - sigmoid(r_chosen - r_rejected), with r = beta x ratio."""

    kind: Literal["apo-down"] = "apo-down"


class _SortedTerm(PreferenceTerm):
    beta: Positive = 0.1
    """How strongly the policy is held to the reference: the inverse temperature of the implicit reward."""
    label_smoothing: FlipRate = 0.0
    """Share of labels that are taken to be flipped."""


class Aot(_SortedTerm):
    """Alignment via optimal transport (AOT, arXiv:2406.05882), paired: sigmoid's loss between the differences of chosen
    and rejected under the policy and under the reference, each sorted over the step; a pass without gradients before.
    """

    kind: Literal["aot"] = "aot"


class AotUnpaired(_SortedTerm):
    """AOT, unpaired (arXiv:2406.05882): sigmoid's loss between the ratios of chosen and those of rejected answers, each
    sorted over the step; a pass without gradients before it."""

    kind: Literal["aot-unpaired"] = "aot-unpaired"


class Simpo(PreferenceTerm):
    """Simple preference optimization (SimPO, arXiv:2405.14734, equation 6): -log sigmoid(beta x difference of the
    log-probabilities per token - gamma - margin)."""

    kind: Literal["simpo"] = "simpo"
    needs_reference = False
    takes_margins = True

    beta: Positive = 2.0
    """The factor of log-probabilities per token."""
    gamma: NonNegative = 0.5
    """The margin that is asked for."""
    label_smoothing: FlipRate = 0.0
    """Share of labels that are taken to be flipped."""


class Cpo(PreferenceTerm):
    """Contrastive preference optimization (CPO, arXiv:2401.08417, equation 3): -log sigmoid(beta x difference of the
    log-probabilities - margin), plus the negative log-likelihood of the chosen answers' tokens, a mean over them."""

    kind: Literal["cpo"] = "cpo"
    needs_reference = False
    takes_margins = True

    beta: Positive = 0.1
    """The factor of log-probabilities."""
    nll: NonNegative = 1.0
    """Weight of the likelihood of chosen answers."""
    label_smoothing: FlipRate = 0.0
    """Share of labels that are taken to be flipped."""


class Orpo(PreferenceTerm):
    """Odds ratio preference optimization (ORPO, arXiv:2403.07691, equation 6): the negative log-likelihood of the
    chosen answers' tokens, a mean over them, - beta log sigmoid(log of the answers' odds ratio), with geometric means
    over tokens as probabilities.
    """

    kind: Literal["orpo"] = "orpo"
    needs_reference = False

    beta: Positive = 0.1
    """lambda: the weight of the odds ratio."""


class Sft(PreferenceTerm):
    """The mean negative log-likelihood of the chosen answers' tokens, as in RPO and with `pref_ftx`."""

    kind: Literal["sft"] = "sft"
    row_types = ("preference", "unpaired")
    needs_reference = False


class JudgedTerm(PreferenceTerm):
    """A term over answers that were judged one by one."""

    row_types = ("unpaired",)

    beta: Positive = 0.1
    """How strongly the policy is held to the reference: the inverse temperature of the implicit reward."""
    desirable: NonNegative = 1.0
    """Weight of the losses of desirable answers."""
    undesirable: NonNegative = 1.0
    """Weight of the losses of undesirable answers."""


class Kto(JudgedTerm):
    """Kahneman-Tversky optimization (KTO, arXiv:2402.01306, equation 8): 1 - sigmoid(r - beta z) for desirable answers
    and 1 - sigmoid(beta z - r) for undesirable ones, with r = beta x ratio; z estimates the KL divergence from the
    reference over the whole step: the mean ratio of other rows' answers to its prompts, at least 0."""

    kind: Literal["kto"] = "kto"
    needs_mismatched = True


class ApoZeroUnpaired(JudgedTerm):
    """APO-zero of single answers (arXiv:2408.06266): KTO with 0 in place of the KL divergence."""

    kind: Literal["apo-zero-unpaired"] = "apo-zero-unpaired"


PreferenceObjective = (
    Sigmoid
    | Robust
    | Hinge
    | Ipo
    | Exo
    | Discopop
    | SigmoidNorm
    | Nca
    | Bco
    | Sppo
    | ApoZero
    | ApoDown
    | Aot
    | AotUnpaired
    | Simpo
    | Cpo
    | Orpo
    | Sft
    | Kto
    | ApoZeroUnpaired
)


def terms_of(objective: Sequence[Section] | None) -> list[PreferenceTerm]:
    """The terms of stage `preference` in a recipe's `objective`; empty for other stages."""
    return [term for term in objective or () if isinstance(term, PreferenceTerm)]
