"""The start of a run: the model, and the quantization of a frozen base."""

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from danlu.recipe.sections.base import OF_TOKENS, PositiveInt, ReadWith, Section, VariantSection


class NewToken(Section):
    """A token that the tokenizer does not have."""

    short = "text"

    text: str
    """The text that becomes one token, wherever it stands."""
    special: bool = False
    """Tools that leave special tokens out of a text (`skip_special_tokens`) leave this one out too."""
    description: str | None = None
    """A text on its meaning: its rows start at the mean of the rows of this text's tokens, and by default at the mean
    of all rows."""


class Model(Section):
    """Where the weights start."""

    short = "path"
    one_of = ("path", "preset", "config")

    path: str | None = None
    """A folder in Hugging Face form, a finished danlu run, or a hub id (read from the local cache when offline)."""
    preset: Literal["tiny", "small", "lenet5"] | None = None
    """A model from scratch: Llama-shaped, tiny (about 5M parameters) or small (about 58M), with the vocabulary of the
    tokenizer; for stage classify, lenet5 (61,706 parameters)."""
    config: Annotated[str | dict[str, Any] | None, OF_TOKENS] = None
    """Train from scratch: a config.json (path) or its content. Weights are drawn from (seed, parameter name)."""
    tokenizer: Annotated[str | None, OF_TOKENS] = None
    """Tokenizer folder or hub id; by default the one in `path`."""
    tokens: Annotated[list[NewToken], OF_TOKENS] = []
    """New tokens, such as `[<plan>, <act>]`. Embedding and head get a row for each, up to a multiple of 8 rows; rows
    that no token has are left out of losses and sampling. With an adapter (lora and its relatives) these rows are
    trained next to it, as PEFT's `trainable_token_indices` are."""
    chat_template: Annotated[str | None, OF_TOKENS] = None
    """A Jinja file, or the name of a template that comes with danlu (`danlu recipes templates` lists them), in the
    place of the tokenizer's own chat template."""
    chat_template_kwargs: Annotated[dict[str, Any], OF_TOKENS] = {}
    """Further variables of the chat template, such as {enable_thinking: false}, wherever it renders rows, prompts and
    samples of this run."""
    chat_template_date: Annotated[str | None, OF_TOKENS] = None
    """The day (2026-11-22) that a chat template which writes the date (`strftime_now`) takes for today. By default the
    day on which the run begins, which the run's recipe then holds: a resumed run goes on with it."""
    adapters: Annotated[list[str], OF_TOKENS] = []
    """Adapter folders (danlu's or PEFT's, or finished runs) to start from, one upon the other. Without `adapter` they
    are merged and the whole model is trained; with `adapter: continue` the last one is trained on; with any other
    `adapter` they stay as they are below the new one."""


class _Quantization(VariantSection):
    trained: bool = False
    """Quantization-aware training: float32 weights are trained, in full or by LoRA, and products have them rounded as
    `danlu quantize` will write them. false: the frozen base of an adapter is held in this format."""

    def of_base(self) -> dict[str, Any]:
        """The values of a frozen base, as they are stored with adapters that were trained on it."""
        return self.model_dump(mode="json", exclude={"trained", "symmetric", "scale"})


class _FourBit(_Quantization):
    block: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096] = 64
    """Numbers that share a scale."""
    double: bool = True
    """Quantize the scales too: 4.13 bits a parameter instead of 4.5."""


class Nf4(_FourBit):
    """Four bits with levels at quantiles of the normal distribution, as in QLoRA (arXiv:2305.14314)."""

    kind: Literal["nf4"] = "nf4"


class Fp4(_FourBit):
    """Four-bit floating point: a sign, two bits of exponent, one of mantissa."""

    kind: Literal["fp4"] = "fp4"


class _Groups(_Quantization):
    group: PositiveInt = 128
    """Inputs of a row that share a scale."""


class _Integers(_Groups):
    symmetric: Annotated[bool, ReadWith("trained")] = True
    """trained: as `danlu quantize` has it. false gives each group a zero (export awq)."""
    scale: Annotated[Literal["float32", "float16", "bfloat16"], ReadWith("trained")] = "float32"
    """trained: the type of scales. float16 for the exports awq and gptq; float32 for dense, and for compressed-tensors
    of the run's float32 folder."""


class Int8(_Integers):
    """Eight-bit integers, rounded to nearest."""

    kind: Literal["int8"] = "int8"


class Int4(_Integers):
    """Four-bit integers, rounded to nearest."""

    kind: Literal["int4"] = "int4"


class Int3(_Integers):
    """Three-bit integers, rounded to nearest."""

    kind: Literal["int3"] = "int3"


class Int2(_Integers):
    """Two-bit integers, rounded to nearest."""

    kind: Literal["int2"] = "int2"


class Fp8(_Groups):
    """Eight-bit floating point, E4M3 (arXiv:2209.05433), with float32 scales."""

    kind: Literal["fp8"] = "fp8"


class Mxfp8(_Quantization):
    """E4M3 with a power of two, rounded up, for each 32 inputs of a row (OCP Microscaling, arXiv:2506.08027)."""

    group: ClassVar[int] = 32
    kind: Literal["mxfp8"] = "mxfp8"


class Mxfp4(_Quantization):
    """Four-bit floating point, E2M1, with a power of two for each 32 inputs of a row (OCP Microscaling formats)."""

    group: ClassVar[int] = 32
    kind: Literal["mxfp4"] = "mxfp4"


class Nvfp4(_Quantization):
    """E2M1 with an E4M3 scale for each 16 inputs of a row, and a float32 one of each matrix above them (NVIDIA)."""

    group: ClassVar[int] = 16
    kind: Literal["nvfp4"] = "nvfp4"


QuantizationSection = Nf4 | Fp4 | Int8 | Int4 | Int3 | Int2 | Fp8 | Mxfp8 | Mxfp4 | Nvfp4
QUANTIZATIONS: tuple[type[QuantizationSection], ...] = get_args(QuantizationSection)
"""The sections of all kinds of quantization."""

TRAINABLE: tuple[type[QuantizationSection], ...] = (Int8, Int4, Int3, Int2, Fp8, Mxfp8, Mxfp4, Nvfp4)
"""Those that `danlu quantize` writes from trained weights, and weights can be trained for."""

Quantization = Annotated[QuantizationSection, Field(discriminator="kind")]
