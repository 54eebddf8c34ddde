"""The reference of stage `preference`: the model that the run starts from, which the policy is held to."""

from typing import Annotated, Literal

from pydantic import Field

from danlu.recipe.sections.base import PositiveInt, ReadWith, VariantSection
from danlu.recipe.sections.model import Quantization


class Cached(VariantSection):
    """Its log-probabilities are computed once, before training, and kept on the disk: training then holds one model."""

    kind: Literal["cached"] = "cached"


class Frozen(VariantSection):
    """A second model in memory, placed like the policy."""

    kind: Literal["frozen"] = "frozen"
    model: str | None = None
    """Another model than the one that the run starts from: a Hugging Face folder, a hub id, or a finished run."""
    quantization: Quantization | None = None
    """Keep its weights in few bits; by default they are stored as the policy's base is."""
    every: PositiveInt | None = None
    """Steps between updates of a moving reference (TR-DPO, arXiv:2404.09656); null: it stays the same."""
    mix: Annotated[float, Field(gt=0, le=1), ReadWith("reference.every", message="only read with reference.every")] = (
        0.6
    )
    """The policy's share in such an update: reference = mix x policy + (1 - mix) x reference."""


class AdapterOff(VariantSection):
    """The policy without the adapter that is trained: no memory at all."""

    kind: Literal["adapter-off"] = "adapter-off"


class NoReference(VariantSection):
    """None: for objectives that compare log-probabilities with nothing."""

    kind: Literal["none"] = "none"


ReferenceSection = Cached | Frozen | AdapterOff | NoReference

Reference = Annotated[ReferenceSection, Field(discriminator="kind")]
