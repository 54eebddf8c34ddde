"""Training at lengths beyond those that a model was trained at: the rotary scaling, and lengths in stages."""

from typing import Annotated, Literal

from pydantic import Field

from danlu.recipe.sections.base import PositiveInt, ReadWith, Section, Share

Factor = Annotated[float, Field(gt=0)]

_LONGROPE = ReadWith("method", "longrope", "only method longrope reads it; this is {value}")


class LengthStage(Section):
    """Steps of a run at one length."""

    length: PositiveInt
    """Longest sample, and length of a packed sequence, in tokens; not less than in the stage before."""
    steps: PositiveInt
    """Optimizer steps at this length."""


class LongRopeSearch(Section):
    """The evolutionary search for LongRoPE's factors (arXiv:2402.13753, algorithm 1), made before the first step."""

    documents: PositiveInt = 5
    """Held-out documents that candidates are judged by: their perplexity at the longest length."""
    population: Annotated[int, Field(ge=2)] = 64
    """Candidates at first: those of linear scaling, NTK-aware scaling and YaRN, and mutations of these."""
    parents: Annotated[int, Field(ge=2)] = 32
    """The best of all candidates so far, from which new ones are made."""
    mutations: PositiveInt = 16
    """New candidates of a generation, each a parent with some of its factors redrawn."""
    crossovers: PositiveInt = 16
    """New candidates of a generation, each with factors of two parents."""
    generations: PositiveInt = 40
    """How often new candidates are made and judged."""
    probability: Share = 0.3
    """The probability with which a mutation redraws a factor, and a crossover takes it from the second parent."""


class LongContext(Section):
    """A model made to see more tokens than it was trained at (stages pretrain and sft)."""

    short = "method"

    method: Literal["none", "linear", "ntk", "dynamic", "yarn", "longrope"]
    """How the rotary embedding is scaled: linear divides all frequencies by the factor (position interpolation); ntk
    raises the base (NTK-aware); dynamic raises it with the length of each document; yarn interpolates by wavelength;
    longrope divides each frequency by a factor of its own; none leaves it as it is. The factor is a stage's length over
    original_length; the result's config.json has that of the longest."""
    original_length: PositiveInt | None = None
    """Tokens that the model was trained at; by default its config's (original_max_position_embeddings, or
    max_position_embeddings).
    """
    stages: list[LengthStage] = []
    """Lengths one after the other, in one run: [{length: 2048, steps: 200}, {length: 8192, steps: 100}]. They take the
    place of `steps`, and data.max_length is the longest. Evaluations are at the longest length throughout, of the model
    as it would be exported."""
    long_factor: Annotated[list[Factor] | None, _LONGROPE] = None
    """longrope: the divisor of each frequency in documents longer than original_length, the fastest first."""
    short_factor: Annotated[list[Factor] | None, _LONGROPE] = None
    """longrope: the same for shorter documents; by default 1 for each."""
    search: Annotated[LongRopeSearch | None, _LONGROPE] = None
    """longrope: searches long_factor before the first step; the run's recipe.yaml then holds it."""
