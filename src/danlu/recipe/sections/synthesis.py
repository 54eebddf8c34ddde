"""The recipe of `danlu synthesize`: a model that answers, seeds or documents, steps in their order, and a budget."""

from typing import Annotated, Literal

from pydantic import Field

from danlu.recipe.sections.base import PositiveInt, Section, VariantSection, default_section
from danlu.recipe.sections.curating import DecontaminateStep, DeduplicationStep
from danlu.recipe.sections.data import Source
from danlu.recipe.sections.rewards import (
    CodeReward,
    ExactReward,
    FormatReward,
    FunctionReward,
    MathReward,
    NumericReward,
)

Temperature = Annotated[float, Field(ge=0)]
TopP = Annotated[float, Field(gt=0, le=1)]
Price = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]]
Operation = Literal["constraints", "deepen", "concretize", "reasoning", "input", "breadth"]


class AnsweringModel(Section):
    """A model of this machine (`path`), or one behind a server with OpenAI's interface (`url` and `name`)."""

    short = "path"
    one_of = ("path", "url")

    path: str | None = None
    """A model folder, a finished danlu run, or a hub id: danlu's rollout engine answers with it."""
    url: str | None = None
    """The URL of the server, with the path before /chat/completions: http://localhost:8000/v1."""
    name: str | None = None
    """The name that the server knows the model by."""
    key: Annotated[str, Field(pattern=r"^env:\w+$")] | None = None
    """The environment variable with the key of the server, as env:API_KEY."""
    price: Price | None = None
    """The price of a million tokens: [of prompts, of answers]. `budget.cost` is in the same currency."""
    in_flight: PositiveInt | None = None
    """The most requests at a time; by default 16 at a server, and 256 in the engine."""
    retries: Annotated[int, Field(ge=0)] = 6
    """How often a request is made again where the server is busy or the connection is lost, after 0.5, 1, 2, ... s."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds until the whole answer to a request is there."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device of a model of this machine: auto takes the GPU where there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """The type of weights and activations of a model of this machine; auto takes that of the weights."""
    exact: bool = True
    """Whether answers of a model of this machine hang on nothing that is computed at the same time, so that a run that
    was killed ends with the same bytes. false is faster, and rounds differently in other batches."""


class SynthesisData(Section):
    """Where synthesis begins."""

    short = "seeds"

    seeds: list[Source] = []
    """Tasks: rows of prompts (`prompt`, `messages`, `instruction`), with or without answers."""
    documents: list[Source] = []
    """Texts (`text`), for from-documents."""
    types: str | None = None
    """A YAML file with a list of kinds of task for self-instruct: {name: ..., about: ..., share: 1}."""


class SynthesisBudget(Section):
    """The most that a run may cost, in all its attempts together."""

    tokens: Annotated[float, Field(gt=0)] | None = None
    """Tokens of prompts and answers."""
    cost: Annotated[float, Field(gt=0)] | None = None
    """Money, by `price`."""


class _Asking(VariantSection):
    model: AnsweringModel | None = None
    """A model for this step alone; by default the recipe's."""
    max_new_tokens: PositiveInt = 1024
    """Most tokens of an answer. One that is longer is cut off, and is no row."""
    top_p: TopP = 1.0
    """The smallest set of likely tokens with this probability, from which each is drawn."""


class Shots(Section):
    """The tasks that self-instruct shows."""

    seed: PositiveInt = 6
    """The seeds that are shown."""
    made: Annotated[int, Field(ge=0)] = 2
    """The tasks of earlier rounds that are shown; fewer where there are not so many."""


class SelfInstructStep(_Asking):
    """New tasks after examples of tasks (self-instruct, arXiv:2212.10560)."""

    kind: Literal["self-instruct"] = "self-instruct"
    rows: PositiveInt
    """Tasks to make."""
    shots: Shots = default_section(Shots)
    """How many tasks are shown: of the seeds, and of those that were made."""
    novelty: Annotated[float, Field(gt=0, le=1)] = 0.7
    """A task is dropped if its ROUGE-L with a seed or an earlier task is this much or more."""
    per_request: PositiveInt = 4
    """Tasks that are asked for at a time."""
    temperature: Temperature = 1.0
    """Divides the logits; 0 takes the likeliest token."""


class EvolveStep(_Asking):
    """Instructions rewritten into harder or rarer ones (Evol-Instruct, arXiv:2304.12244); the old ones stay."""

    kind: Literal["evolve"] = "evolve"
    rounds: PositiveInt = 1
    """How often; each time the results of the time before are rewritten."""
    operations: list[Operation] = ["constraints", "deepen", "concretize", "reasoning", "input", "breadth"]
    """The ways of rewriting, one of which is drawn for each row."""
    novelty: Annotated[float, Field(gt=0, le=1)] = 0.9
    """A result is dropped if its ROUGE-L with what it was rewritten from is this much or more."""
    temperature: Temperature = 1.0
    """Divides the logits; 0 takes the likeliest token."""


class MagpieStep(_Asking):
    """Instructions that a model of chats writes by itself behind the header of a user's turn (arXiv:2406.08464)."""

    kind: Literal["magpie"] = "magpie"
    rows: PositiveInt
    """Requests to make. A request that gives no row is not made again."""
    header: str | None = None
    """The text of the chat template before a user's first turn. A model of this machine has it; for a server, which
    must take raw prompts (POST /completions), it is needed."""
    stop: list[str] = []
    """Texts that end a user's turn, such as "<|im_end|>"; a model of this machine knows them."""
    temperature: Temperature = 1.0
    """Divides the logits. At 0 all answers are equal."""


class FromDocumentsStep(_Asking):
    """Questions that documents answer, with their answers."""

    kind: Literal["from-documents"] = "from-documents"
    questions: PositiveInt = 1
    """Questions to each document."""
    most_characters: PositiveInt = 6000
    """Characters of a document that are shown; of a longer one so many from a line that is drawn."""
    temperature: Temperature = 0.7
    """Divides the logits; 0 takes the likeliest token."""


class AnswerStep(_Asking):
    """Answers to prompts."""

    kind: Literal["answer"] = "answer"
    samples: PositiveInt = 1
    """Answers to each prompt."""
    system: str | None = None
    """A system message for prompts that have none; it is no part of the row."""
    temperature: Temperature = 0.8
    """Divides the logits; 0 takes the likeliest token, and is for one sample."""


class JudgeStep(_Asking):
    """A model gives answers marks from 1 to 5 by a rubric."""

    kind: Literal["judge"] = "judge"
    rubric: str
    """A text file: what a good answer is."""
    votes: PositiveInt = 1
    """Replies to each question; an answer's score is the mean of their marks."""
    swap: bool = False
    """Show answers in pairs and each pair in both orders, so that no answer gains by its place; false shows each alone.
    """
    temperature: Temperature = 0.7
    """Divides the logits; 0 takes the likeliest token, and is for one vote."""


class PairsStep(VariantSection):
    """The best and the worst answer to each prompt, as a pair to train on with stage dpo."""

    kind: Literal["pairs"] = "pairs"
    by: Literal["judge"] = "judge"
    """The scores that compare answers."""
    margin: Annotated[float, Field(gt=0)] = 1.0
    """The least difference of their scores."""


class BestStep(VariantSection):
    """The answer to each prompt that has the highest score."""

    kind: Literal["best"] = "best"
    at_least: float = 1.0
    """The least score of an answer that stays."""


class RejectionStep(VariantSection):
    """Rejection sampling: the answers that rewards accept."""

    kind: Literal["rejection"] = "rejection"
    rewards: list[
        Annotated[
            ExactReward | NumericReward | MathReward | FormatReward | CodeReward | FunctionReward,
            Field(discriminator="kind"),
        ]
    ]
    """Rewards as those of stage rl, by columns of the seed; their weighted sum counts."""
    at_least: float = 1.0
    """The least sum that an answer must have."""
    most: PositiveInt = 4
    """Answers to a prompt that stay, the first ones."""


class DistillStep(_Asking):
    """Answers of a teacher, with its log-probabilities in the column `teacher_logprobs`."""

    kind: Literal["distill"] = "distill"
    top_k: PositiveInt = 64
    """The likeliest tokens that are kept at each place."""
    samples: PositiveInt = 1
    """Answers to each prompt."""
    system: str | None = None
    """A system message for prompts that have none; it is no part of the row."""
    temperature: Temperature = 0.8
    """Divides the logits; 0 takes the likeliest token, and is for one sample."""


SynthesisStep = Annotated[
    SelfInstructStep
    | EvolveStep
    | MagpieStep
    | FromDocumentsStep
    | AnswerStep
    | JudgeStep
    | PairsStep
    | BestStep
    | RejectionStep
    | DistillStep
    | DeduplicationStep
    | DecontaminateStep,
    Field(discriminator="kind"),
]


class SynthesizeRecipe(Section):
    """A recipe with `stage: synthesize`."""

    stage: Literal["synthesize"]
    """Data made by a model."""
    model: AnsweringModel
    """The model that answers: a folder, or {url: ..., name: ..., key: env:API_KEY, price: [0.1, 0.4]}."""
    data: SynthesisData = default_section(SynthesisData)
    """Seeds, or documents; magpie needs neither."""
    steps: list[SynthesisStep]
    """The steps in their order. One that makes prompts comes first, unless the seeds are the prompts."""
    budget: SynthesisBudget = default_section(SynthesisBudget)
    """The most that all answers may cost. Where it ends first, the same command with a larger one goes on."""
    threads: PositiveInt | None = None
    """CPU threads for a model of this machine; by default one per core."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides every draw: the shots, the types, the tokens."""
    output: str
    """The folder of the data set. A run that was stopped goes on in it."""
