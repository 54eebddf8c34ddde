"""How gradients become updates. Rates and weight decay here are for pretraining; `stage_defaults` has other stages'."""

from typing import Annotated, Literal

from pydantic import Field

from danlu.recipe.sections.base import Beta, NonNegative, PositiveInt, VariantSection

Decay = Literal["matrices", "all"]


class _Moments(VariantSection):
    """The settings that every optimizer with Adam's two moments has."""

    learning_rate: NonNegative = 3e-4
    """Peak learning rate; `schedule` scales it over the run."""
    weight_decay: NonNegative = 0.1
    """Each step shrinks a weight by learning_rate x weight_decay of itself."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Memory of the gradient's mean and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment, against division by zero."""


class AdamW(_Moments):
    """Adam with decoupled weight decay (arXiv:1711.05101)."""

    kind: Literal["adamw"] = "adamw"
    moments: Literal["float32", "bf16", "8bit"] = "float32"
    """How both moments are kept between steps; updates are computed in float32. bf16 takes half the memory, rounded to
    nearest (arXiv:2412.19437, section 3.3.3), and needs betas of at most 0.996; 8bit is `adamw8bit` with its
    defaults."""
    decay: Decay = "matrices"
    """matrices leaves norms, biases and embeddings without weight decay."""


class SGD(VariantSection):
    """Stochastic gradient descent with momentum."""

    kind: Literal["sgd"] = "sgd"
    learning_rate: NonNegative = 1e-2
    """Peak learning rate; `schedule` scales it over the run."""
    weight_decay: NonNegative = 0.0
    """Added to the gradient as weight_decay x weight."""
    momentum: Beta = 0.9
    """Share of the last direction that is kept; 0 keeps no state."""
    nesterov: bool = False
    """Look ahead along the momentum; needs momentum above 0."""
    decay: Decay = "matrices"
    """matrices leaves norms, biases and embeddings without weight decay."""


class Adafactor(VariantSection):
    """Factored second moments: optimizer state of rows + columns instead of rows x columns (arXiv:1804.04235)."""

    kind: Literal["adafactor"] = "adafactor"
    learning_rate: NonNegative = 1e-2
    """Peak learning rate; `schedule` scales it over the run."""
    weight_decay: NonNegative = 0.0
    """Each step shrinks a weight by learning_rate x weight_decay of itself."""
    beta2_decay: Annotated[float, Field(le=0)] = -0.8
    """The second moment at step t forgets at the rate t ** beta2_decay."""
    clip_threshold: Annotated[float, Field(ge=1)] = 1.0
    """Largest root mean square of a tensor's update."""
    decay: Decay = "matrices"
    """matrices leaves norms, biases and embeddings without weight decay."""


class Lion(VariantSection):
    """The sign of a momentum: one state tensor, updates of equal size (arXiv:2302.06675)."""

    kind: Literal["lion"] = "lion"
    learning_rate: NonNegative = 3e-5
    """Peak learning rate; 3 to 10 times smaller than AdamW's."""
    weight_decay: NonNegative = 1.0
    """Each step shrinks a weight by learning_rate x weight_decay of itself; 3 to 10 times larger than AdamW's."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """Weight of the old momentum in the step, and memory of the momentum."""
    decay: Decay = "matrices"
    """matrices leaves norms, biases and embeddings without weight decay."""


class Muon(VariantSection):
    """Momentum made orthogonal by a Newton-Schulz iteration, for matrices; AdamW for the rest."""

    kind: Literal["muon"] = "muon"
    learning_rate: NonNegative = 2e-2
    """The learning rate of hidden matrices; the rest (embeddings, head, norms, biases) is trained by AdamW."""
    weight_decay: NonNegative = 0.01
    """Each step shrinks a weight by learning_rate x weight_decay of itself."""
    momentum: Beta = 0.95
    """Share of the last direction that is kept."""
    newton_schulz_steps: Annotated[int, Field(ge=1, le=99)] = 5
    """Iterations of the orthogonalisation."""
    adamw_learning_rate: NonNegative = 3e-4
    """Peak learning rate of the AdamW part."""
    adamw_betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Betas of the AdamW part."""
    decay: Decay = "matrices"
    """matrices leaves norms, biases and embeddings without weight decay."""


class AdamW8bit(_Moments):
    """AdamW with 8-bit moments (arXiv:2110.02861): a quarter of the state; on a CPU an update takes 7 times as long."""

    kind: Literal["adamw8bit"] = "adamw8bit"
    block: PositiveInt = 256
    """Elements that share a scale: with 256, state is 2.03 bytes a parameter instead of 8. An update of 63M parameters
    takes 0.33 s instead of 0.05 on two CPU threads."""
    smallest: Annotated[int, Field(ge=0)] = 4096
    """Parameters with fewer elements than this keep float32 moments."""
    decay: Decay = "matrices"
    """matrices leaves norms, biases and embeddings without weight decay."""


class PagedAdamW(_Moments):
    """AdamW with its state in a file (on a GPU: in the host's memory), so that no spike of memory can end the run."""

    kind: Literal["paged-adamw"] = "paged-adamw"
    bits: Literal[8, 32] = 32
    """32 keeps moments in float32, with the results of adamw bit for bit and twice the time of an update on a CPU (more
    when the disk has to help); 8 keeps them as adamw8bit does."""
    folder: str | None = None
    """Folder of the file, which has no name and is gone when the run ends. By default TMPDIR, or else /var/tmp; on a
    GPU the host's memory."""
    decay: Decay = "matrices"
    """matrices leaves norms, biases and embeddings without weight decay."""


class GaLore(_Moments):
    """All weights trained, with gradients of hidden matrices projected to a low rank (arXiv:2403.03507); else AdamW."""

    kind: Literal["galore"] = "galore"
    learning_rate: NonNegative = 1e-3
    """Peak learning rate; hidden matrices learn at `scale` times it (the paper pretrains with 1e-2)."""
    weight_decay: NonNegative = 0.0
    """Each step shrinks a weight by learning_rate x weight_decay of itself."""
    rank: PositiveInt = 128
    """Dimensions that are left of a gradient, at most the smaller dimension of every hidden matrix. Gradients and
    moments of a matrix shrink by rank / that dimension; the gradient norm and clipping see projected gradients."""
    update_every: PositiveInt = 200
    """Steps between new projections: the first singular vectors of the gradient of the step's first micro-batch."""
    scale: Annotated[float, Field(gt=0)] = 0.25
    """The factor of an update when it is projected back."""
    states: Literal["adamw", "adamw8bit"] = "adamw"
    """How moments are kept: in float32, or in 8 bits."""
    decay: Decay = "matrices"
    """matrices leaves norms, biases and embeddings without weight decay."""


Optimizer = Annotated[
    AdamW | AdamW8bit | PagedAdamW | GaLore | SGD | Adafactor | Lion | Muon, Field(discriminator="kind")
]
