"""The recipe of `danlu quantize`: a trained model, the rows that calibrate, and the methods in their order."""

from typing import Annotated, Literal

from pydantic import Field

from danlu.recipe.sections.base import PositiveInt, Section, Share, VariantSection
from danlu.recipe.sections.data import Source

FIXED_FORMATS = ("fp8", "mxfp8", "mxfp4", "nvfp4")
"""Forms of a folder that say what its numbers are."""


class CalibrationData(Section):
    """The rows by which methods see what a model's layers get as inputs."""

    short = "data"

    data: list[Source]
    """One or more sources of rows, rendered and packed as in training. Rows that the model's own run evaluates on are
    left out, and counted."""
    tokens: PositiveInt = 131072
    """Tokens to calibrate with, at most; whole packed sequences in the order of a run."""
    max_length: PositiveInt = 2048
    """Longest sample, and length of a packed sequence, in tokens."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be read: stop with its file and line, or count and skip it."""
    bad_row_limit: PositiveInt = 100
    """The number of bad rows after which on_bad_row: skip stops."""
    cache: str = "~/.cache/danlu"
    """The folder of tokenised data, as `data.cache` of a run."""


class _Rounded(VariantSection):
    bits: Literal[2, 3, 4, 5, 6, 7, 8] = 4
    """Bits of a weight, without its share of a scale."""
    group: Annotated[int, Field(ge=0)] = 128
    """Inputs of a row that share a scale; 0: all of them."""
    symmetric: bool = True
    """true: codes have a sign, and a group has a scale alone. false: it has a zero too, and its codes lie between its
    least and its greatest weight."""


class SmoothQuant(VariantSection):
    """Factors that move outliers of a layer's inputs into its weights (arXiv:2211.10438); another method comes behind
    it."""

    kind: Literal["smoothquant"] = "smoothquant"
    alpha: Share = 0.5
    """The share of an input's range that moves, in logarithms: s = max|x|^alpha / max|w|^(1 - alpha)."""


class NearestRounding(_Rounded):
    """Each weight to the nearest number, without calibration."""

    kind: Literal["nearest"] = "nearest"


class GptqRounding(_Rounded):
    """Column by column, where later columns make good what earlier ones lose (GPTQ, arXiv:2210.17323)."""

    kind: Literal["gptq"] = "gptq"
    act_order: bool | Literal["group"] = True
    """true: columns in the order of their inputs' mean square, the largest first; groups stay those of neighbours, with
    the original weight's scales. group: groups in the order of their largest, and columns so within each
    (arXiv:2505.14638); scales are found when a group's turn comes."""
    damping: Annotated[float, Field(gt=0)] = 0.01
    """The multiple of the Hessian's mean diagonal that is added to it; it grows where that is not enough."""


class AwqRounding(_Rounded):
    """Factors that give large inputs finer steps, and clips, both searched by outputs (AWQ, arXiv:2306.00978)."""

    kind: Literal["awq"] = "awq"
    symmetric: bool = False
    """true: codes have a sign, and a group has a scale alone. false: it has a zero too, and its codes lie between its
    least and its greatest weight."""
    clip: bool = True
    """Search how much of each group's largest weight is kept."""


RoundingSection = NearestRounding | GptqRounding | AwqRounding
QuantizationStep = Annotated[SmoothQuant | RoundingSection, Field(discriminator="kind")]


class QuantizeRecipe(Section):
    """A recipe with `stage: quantize`."""

    stage: Literal["quantize"]
    """Quantization after training."""
    model: str
    """A model folder, a finished danlu run, or a hub id."""
    calibration: CalibrationData | None = None
    """The rows that gptq, awq and smoothquant look at; nearest needs none."""
    quantization: list[QuantizationStep]
    """The methods in their order: nearest, gptq or awq, and smoothquant before it."""
    experts: bool = True
    """Models with experts: quantize these too, each by itself."""
    export: Literal["dense", "compressed-tensors", "awq", "gptq", "fp8", "mxfp8", "mxfp4", "nvfp4"] = "dense"
    """The form of the folder. dense: the numbers of the codes in the type of the other weights, a model folder of the
    same size that every tool reads. compressed-tensors, awq (4 bits with zeros) and gptq hold integers; fp8 E4M3 in
    blocks of 128 x 128, mxfp8 E4M3, mxfp4 and nvfp4 E2M1 in small groups, of which `bits`, `group` and `symmetric` are
    fixed."""
    activations: Literal["auto", "int8"] = "auto"
    """The activations of products with the weights. auto: as they are. int8: 8-bit integers, each token rounded with a
    scale of its own while the model answers (W8A8, which smoothquant is for); of weights with bits: 8 and group: 0, in
    export: compressed-tensors."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of what is not quantized; auto: as it is stored."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of activations during calibration."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU where there is one."""
    threads: PositiveInt | None = None
    """CPU threads for matrix products; by default one per core."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides which rows calibrate, where there are more than `calibration.tokens`."""
    output: str
    """The folder to write, empty or new."""

    @property
    def smoothing(self) -> float | None:
        """SmoothQuant's alpha; None without it."""
        return next((step.alpha for step in self.quantization if isinstance(step, SmoothQuant)), None)

    @property
    def rounding(self) -> RoundingSection:
        """The method that finds codes, the last one."""
        last = self.quantization[-1]
        assert not isinstance(last, SmoothQuant), "the recipe's rules refuse it"
        return last

    @property
    def described(self) -> str:
        """The methods and the numbers, such as `smoothquant, gptq: int4`."""
        numbers = self.export if self.export in FIXED_FORMATS else f"int{self.rounding.bits}"
        return f"{', '.join(step.kind for step in self.quantization)}: {numbers}"

    @property
    def needs_calibration(self) -> bool:
        """Whether a method looks at rows."""
        return not all(isinstance(step, NearestRounding) for step in self.quantization)
