"""The sections of a recipe: frozen, strict pydantic models; `danlu explain` prints each field's docstring.

Variants are distinguished by `kind`. A section that has a short form names it in its `short` class variable: the field
that a bare value fills (`model: folder` means `model: {path: folder}`). Where a field takes a list, a bare value is a
list of one. Rules that concern more than one field are in `rules/`. All sections are imported from here.
"""

from typing import Annotated, Literal, get_args

from pydantic import Field

from danlu.recipe.sections.adapters import (
    Adapter,
    AdapterSection,
    Bottleneck,
    Continue,
    Dora,
    Ia3,
    Loftq,
    Lora,
    LoraFa,
    LoraPlus,
    LowRank,
    Mora,
    Olora,
    Pissa,
    Prefix,
    Prompt,
    QaLora,
    RsLora,
    Vera,
)
from danlu.recipe.sections.base import (
    OF_RL,
    OF_TOKENS,
    NonNegative,
    NotReadWith,
    PositiveInt,
    ReadWith,
    RowType,
    Section,
    Share,
    default_section,
    value_at,
)
from danlu.recipe.sections.data import Data, Packing, Source
from danlu.recipe.sections.distillation import (
    DistillationObjective,
    Divergence,
    ForwardKL,
    HiddenStates,
    JensenShannon,
    ReverseKL,
    Teacher,
)
from danlu.recipe.sections.environments import (
    ENVIRONMENT,
    Agent,
    AgentSection,
    Environment,
    EnvironmentSection,
    OpenEnv,
    PythonEnvironment,
    Tools,
    Verifiers,
)
from danlu.recipe.sections.long_context import LengthStage, LongContext, LongRopeSearch
from danlu.recipe.sections.model import (
    QUANTIZATIONS,
    TRAINABLE,
    Fp4,
    Fp8,
    Int2,
    Int3,
    Int4,
    Int8,
    Model,
    Mxfp4,
    Mxfp8,
    NewToken,
    Nf4,
    Nvfp4,
    Quantization,
    QuantizationSection,
)
from danlu.recipe.sections.optimizers import (
    SGD,
    Adafactor,
    AdamW,
    AdamW8bit,
    GaLore,
    Lion,
    Muon,
    Optimizer,
    PagedAdamW,
)
from danlu.recipe.sections.placement import Context, Memory, Parallel, Pipeline, Recompute
from danlu.recipe.sections.policy_gradient import (
    Dapo,
    DrGrpo,
    Grpo,
    Gspo,
    Importance,
    Kl,
    Overlong,
    PolicyGradientObjective,
    PolicyGradientSection,
    Ppo,
    Reinforce,
    Remax,
    Rloo,
    Value,
)
from danlu.recipe.sections.preference import (
    AlphaDivergence,
    Aot,
    AotUnpaired,
    ApoDown,
    ApoZero,
    ApoZeroUnpaired,
    Bco,
    Cpo,
    DeltaTerm,
    Discopop,
    Exo,
    ForwardKlDivergence,
    Hinge,
    Ipo,
    JsDivergence,
    JudgedTerm,
    Kto,
    LogRatioTerm,
    Nca,
    Orpo,
    PreferenceObjective,
    PreferenceTerm,
    ReverseKlDivergence,
    Robust,
    Sft,
    Sigmoid,
    SigmoidNorm,
    Simpo,
    Sppo,
    terms_of,
)
from danlu.recipe.sections.reference import AdapterOff, Cached, Frozen, NoReference, Reference, ReferenceSection
from danlu.recipe.sections.reward import BradleyTerry, RewardObjective, Stepwise
from danlu.recipe.sections.rewards import (
    CodeReward,
    ExactReward,
    FormatReward,
    FunctionReward,
    JudgeReward,
    LengthReward,
    MathReward,
    ModelReward,
    NumericReward,
    Reward,
    RewardLimits,
    RewardSection,
)
from danlu.recipe.sections.rollout import AnswerFormat, DraftModel, Ngram, Rollout, Server
from danlu.recipe.sections.training import (
    Activations,
    BatchSize,
    Checkpoint,
    EarlyStop,
    Ema,
    Evaluation,
    Fp8Products,
    Log,
    LossOptions,
    Router,
    Samples,
    Schedule,
    Watch,
)

Objective = Annotated[
    PreferenceObjective | RewardObjective | DistillationObjective | PolicyGradientObjective, Field(discriminator="kind")
]


class Recipe(Section):
    """A whole recipe."""

    one_of = ("epochs", "steps")

    stage: Literal["pretrain", "sft", "classify", "preference", "reward", "distill", "rl"]
    """The kind of training: plain text (pretrain), conversations (sft), a classifier of small images (classify), a
    policy on preferred answers (preference; dpo, kto, orpo, simpo and cpo name one with its objective), a reward model
    (reward), a student of other models (distill), or a policy on its own answers and their rewards (rl; grpo, ppo,
    rloo, gspo, dapo, dr-grpo, remax, reinforce and online-dpo name one with its objective).
    """
    model: Model
    """Where the weights start."""
    data: Data
    """The rows to train on, and how they become tokens."""
    objective: list[Objective] | None = None
    """Stages preference, reward and distill: the loss, one term or a weighted sum of several. Stage rl: the policy
    gradient, and optionally a divergence from teachers behind it ([grpo, {kind: reverse, weight: 0.1}]); or terms of
    stage preference over the best and the worst of a prompt's answers.
    """
    rewards: Annotated[list[Reward] | None, OF_RL] = None
    """Stage rl: the rewards of answers, one or a weighted sum of several."""
    reward_limits: Annotated[RewardLimits, OF_RL] = default_section(RewardLimits)
    """Stage rl: how long rewards are waited for, and how many may fail."""
    environment: Annotated[Environment | None, OF_RL] = None
    """Stage rl: the environment that answers the policy, turn by turn: a class of yours (my_env.py:Maze), or tools."""
    reference: Annotated[
        Reference | None,
        ReadWith(
            "stage",
            ("preference", "rl"),
            "only stages preference and rl have a reference; this is {value}. Leave it out",
        ),
    ] = None
    """Stages preference and rl: where the log-probabilities that the policy's are compared with come from: cached
    (not for rl), frozen, adapter-off or none. By default adapter-off with an adapter that starts without effect, else
    cached (rl: frozen); none where no term, or no `kl`, asks for any."""
    value: Annotated[Value | None, OF_RL] = None
    """Stage rl with objective ppo: the model of values; by default a head on the policy."""
    teacher: Annotated[
        list[Teacher] | None,
        ReadWith(
            "stage", ("distill", "rl"), "only stages distill and rl have a teacher; this is {value}. Leave it out"
        ),
    ] = None
    """Stage distill, and stage rl with a divergence: the models to learn the distribution of."""
    on_policy: Annotated[
        Share | bool,
        NotReadWith("stage", "rl", "only read with stage distill; this is rl: all of its answers are the policy's own"),
        ReadWith("stage", "distill", "only read with stage distill; this is {value}"),
    ] = False
    """Stage distill: the share of the items that have the policy's own answers in the place of the rows', drawn with
    the weights of the step as `rollout` says (GKD, arXiv:2306.13649); true: all of them."""
    adapter: Annotated[Adapter | None, OF_TOKENS] = None
    """Train few parameters on a frozen base: lora, dora, rslora, pissa, olora, loftq, lora-fa, lora-plus, qa-lora,
    vera, mora, ia3, bottleneck, prefix, prompt; continue trains the last of `model.adapters` on.
    """
    long_context: Annotated[
        LongContext | None,
        ReadWith(
            "stage",
            ("pretrain", "sft"),
            "stage {value} takes a model as it is. Train it at more tokens with stage pretrain or sft first",
        ),
    ] = None
    """Train at more tokens than the model was trained at: a scaling of its rotary embedding, lengths in stages."""
    quantization: Annotated[Quantization | None, OF_TOKENS] = None
    """Quantize the linear layers of the frozen base, each expert's too: nf4, fp4, int8, int4, int3, int2, fp8, mxfp8,
    mxfp4, nvfp4; or train for such a format, in full or with LoRA ({kind: int4, group: 32, trained: true})."""
    optimizer: Optimizer = default_section(AdamW)
    """How gradients become updates: adamw, adamw8bit, paged-adamw, galore, sgd, adafactor, lion or muon."""
    schedule: Schedule = default_section(Schedule)
    """The learning rate over the run."""
    batch: BatchSize = default_section(BatchSize, sequences=8)
    """The batch of one optimizer step."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the data; 1 when neither epochs nor steps is given."""
    steps: PositiveInt | None = None
    """Optimizer steps, instead of epochs."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] | Fp8Products = "bf16"
    """Type of activations and matrix products. Trained weights and gradient sums are float32 in every case, and
    so is optimizer state unless the optimizer says otherwise. auto measures at the start of a run which of fp32 and
    bf16 multiplies faster on this machine (CPUs without AMX: fp32) and writes it into the run's recipe.yaml; a run that
    is resumed keeps it. fp8 multiplies the linear layers of attention, feed-forward networks and experts in 8 bits
    ({kind: fp8, recipe: tile})."""
    numerics: Annotated[Literal["fast", "exact"], OF_TOKENS] = "fast"
    """exact: training and rollout give a token the same log-probability to the last bit, whatever else is in the batch;
    slower. fast takes the quickest kernels for each, which round differently.
    """
    parallel: Parallel = default_section(Parallel)
    """The parallelism strategy: none (DDP), zero1, zero2, zero3 (FSDP), tensor, sequence."""
    memory: Memory = default_section(Memory)
    """Recompute and offload."""
    loss: Annotated[
        LossOptions,
        NotReadWith(
            "stage",
            "rl",
            "additions to a cross-entropy, which stage rl has none of. Leave it out, or see objective.entropy",
        ),
    ] = default_section(LossOptions)
    """Additions to the cross-entropy."""
    router: Router | None = None
    """Models with experts: the method that keeps them evenly loaded."""
    gradient_clipping: NonNegative | None = 1.0
    """Largest global gradient norm, of each model where a run trains several (PPO with a model of values of its own);
    null to leave gradients alone."""
    watch: Watch = default_section(Watch)
    """The response when a step looks wrong."""
    ema: Ema | None = None
    """An average of the weights, kept in addition to them."""
    evaluation: Evaluation = default_section(Evaluation)
    """The interval of evaluations, early stopping, and samples to generate."""
    rollout: Rollout = default_section(Rollout)
    """The engine that samples from the model: embedded, vllm or sglang."""
    checkpoint: Checkpoint = default_section(Checkpoint)
    """The checkpoints to resume from, and how often they are saved."""
    log: Log = default_section(Log)
    """The files that are written while training."""
    compile: Annotated[bool, OF_TOKENS] = False
    """torch.compile the model; the first steps are slow, later ones may be faster."""
    deterministic: bool = False
    """Use only algorithms that give the same bits each time on a GPU; by default the backward passes of attention and
    of the embedding add in any order. Slower; on a CPU nothing changes.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU where there is one."""
    threads: PositiveInt | None = None
    """CPU threads for matrix products; by default one per core."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides the order of the data, the first weights and every other draw."""
    output: str
    """The run folder."""

    @property
    def fp8(self) -> Fp8Products | None:
        """The section of 8-bit products; None without them."""
        return self.precision if isinstance(self.precision, Fp8Products) else None

    @property
    def trained_quantization(self) -> QuantizationSection | None:
        """The format that weights are trained for (quantization-aware training); None without."""
        return self.quantization if self.quantization is not None and self.quantization.trained else None

    @property
    def base_quantization(self) -> QuantizationSection | None:
        """The format in which the frozen base is held; None without."""
        return None if self.trained_quantization is not None else self.quantization

    @property
    def gathers_activation_type(self) -> bool:
        """Whether shards of trained weights are gathered in the type of activations; otherwise as they are stored, in
        float32, for what is encoded of them, or because they are an adapter's."""
        return self.adapter is None and self.fp8 is None and self.trained_quantization is None

    @property
    def activations(self) -> Activations:
        """The type of activations, and of all matrix products that are not in 8 bits."""
        return self.precision.activations if isinstance(self.precision, Fp8Products) else self.precision

    @property
    def precision_name(self) -> str:
        """The name of the arithmetic of matrix products: fp8, or the type of activations."""
        return self.activations if self.fp8 is None else self.fp8.kind

    @property
    def row_type(self) -> RowType | None:
        """The type of rows that all terms of the objective are computed from; None where rows are no trees."""
        if self.stage not in ("preference", "reward"):
            return None
        of_terms = [term.row_types for term in self.answer_terms]
        shared = [kind for kind in get_args(RowType) if all(kind in kinds for kinds in of_terms)]
        return shared[0] if shared else None

    @property
    def needs_mismatched(self) -> bool:
        """Whether a term compares each answer with the log-probabilities of other rows' answers to its prompt."""
        return any(term.needs_mismatched for term in self.answer_terms)

    @property
    def answer_terms(self) -> list[PreferenceTerm | RewardObjective]:
        """The terms of the objective that compare or judge answers."""
        return [term for term in self.objective or () if isinstance(term, PreferenceTerm | BradleyTerry | Stepwise)]

    @property
    def policy_gradient(self) -> PolicyGradientSection | None:
        """The policy gradient of stage `rl`; None for other stages, and where it trains on pairs of answers."""
        return next((term for term in self.objective or () if isinstance(term, PolicyGradientSection)), None)

    @property
    def drops_out(self) -> bool:
        """Whether steps have the dropout of adapters, and the draws of routers that choose at random. Not with a policy
        gradient: the policy that drew the answers had none, and the ratio is to that one."""
        return self.policy_gradient is None

    @property
    def divergence(self) -> ForwardKL | ReverseKL | JensenShannon | None:
        """The divergence from teachers among the terms of the objective; None where there is none."""
        return next((term for term in self.objective or () if isinstance(term, Divergence)), None)

    @property
    def teachers_advise(self) -> bool:
        """Whether teachers are asked of drawn tokens alone, for the advantages of stage `rl`."""
        return self.stage == "rl" and isinstance(self.divergence, ReverseKL) and self.divergence.policy_gradient

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weight of each reward of an answer, by its name in metrics: the environment's first, where it
        gives one.
        """
        own = (
            {}
            if self.environment is None or not self.environment.gives_reward
            else {ENVIRONMENT: self.environment.weight}
        )
        return {**own, **{reward.label: reward.weight for reward in self.rewards or ()}}
