"""The parts of a decoder layer as plain data: the mixer of its tokens, its feed-forward network, its norms.

A `LayerSpec` decides the layer's parameters, products, cache and cuts. `decoder.Layer` builds it; the plan, tensor
parallelism and the shrunken models of `danlu verify` read it. Its mixers are in `mixer_spec.py`. Imports no torch.

D model width · E experts · F inner width, of each expert
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from danlu.core.errors import ModelError
from danlu.models.mixer_spec import MAXIMUMS, Delta, Factorized, Heads, Latent, Shapes, check_sizes, linear_shapes
from danlu.models.tensor_cut import Role, TensorCut


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss' gated activation: (u + 1) g sigmoid(alpha g) of g = min(gate, limit) and up within limit, u."""

    alpha: float = 1.702
    limit: float = 7.0


Activation = Literal["silu", "gelu", "gelu_tanh"] | ClampedSwiGLU
"""`gelu` is x times the normal distribution's function of x, `gelu_tanh` its approximation with tanh."""


@dataclass(frozen=True)
class Dense:
    """A gated feed-forward network, down(activation(gate(x)) * up(x)); without a gate, down(activation(up(x)))."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True

    def __post_init__(self) -> None:
        check_sizes(vars(self))

    def parameter_shapes(self, width: int) -> Shapes:
        """Its parameters in a model of that width, in the order of the forward pass."""
        shapes = linear_shapes("gate_proj", self.intermediate_size, width, self.bias) if self.gated else {}
        shapes |= linear_shapes("up_proj", self.intermediate_size, width, self.bias)
        return shapes | linear_shapes("down_proj", width, self.intermediate_size, self.bias)

    @property
    def tensor_cut(self) -> TensorCut:
        """The cut over processes, along the inner width."""
        gate: dict[str, Role] = {"gate_proj": "column"} if self.gated else {}
        return TensorCut({**gate, "up_proj": "column", "down_proj": "row"})

    def uncuttable(self, degree: int) -> str | None:
        """Why tensor ranks of that number cannot share it; None: they can."""
        if self.intermediate_size % degree:
            return f"{degree} does not divide the MLP's width of {self.intermediate_size}"
        return None


@dataclass(frozen=True)
class Router:
    """The choice of a token's experts, and the weights of their outputs.

    Scores are softmax(x W + b) over all experts, or sigmoid(x W + b) of each. A token goes to the top_k experts with
    the highest scores; with `bias_correction` a bias is added to the scores for this choice alone (DeepSeek-V3,
    arXiv:2412.19437, eq. 16), and with several groups only experts of its `top_groups` best groups take part
    (arXiv:2405.04434, section 2.2.2). The experts' outputs are weighted with the scores.
    """

    score: Literal["softmax", "sigmoid", "sparse-mixer"] = "softmax"
    """sparse-mixer: two experts one after the other, drawn while the model trains (`models.sparse_mixer`)."""
    normalise: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """The factor of the weights."""
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top-2"] = "max"
    """The score of a group: its highest score (DeepSeek-V2), or the sum of its two highest (DeepSeek-V3)."""
    bias: bool = False
    """Whether scores are made with a bias b, which is trained."""
    bias_correction: bool = False
    input_norm: bool = False
    """Whether the router reads its input normed, times a vector of its own over the root of the width (Gemma 4)."""
    expert_scales: bool = False
    """Whether the weight of each expert's output is multiplied by a number of that expert, which is trained."""
    jitter: float = 0.0
    """sparse-mixer: half the share of the highest logit within which others take part."""
    input_jitter: float = 0.0
    """sparse-mixer: how far a factor of the experts' and the router's inputs is from 1 at most, while the model
    trains."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: gated feed-forward networks of which a router gives each token top_k, and one that all
    tokens go through, if it is there (`shared`)."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """The inner width of each expert."""
    activation: Activation = "silu"
    bias: bool = False
    router: Router = Router()
    shared: Dense | None = None
    shared_gate: bool = False
    """Whether the output of the shared network is multiplied by sigmoid(x w) (Qwen2-MoE)."""
    branch_norms: bool = False
    """Whether experts and shared network have norms of their own before and behind them, in place of the layer's one
    before both (Gemma 4). The router reads what neither has normed."""

    def __post_init__(self) -> None:
        check_sizes(vars(self))
        groups, top_groups = self.router.groups, self.router.top_groups
        if self.top_k > self.num_experts:
            raise ModelError(f"a token cannot go to {self.top_k} experts of {self.num_experts}")
        if groups < 1 or self.num_experts % groups:
            raise ModelError(f"{self.num_experts} experts do not make {groups} groups of one size")
        if not 1 <= top_groups <= groups:
            raise ModelError(f"a token's experts cannot be of {top_groups} groups: there are {groups}")
        of_groups = top_groups * (self.num_experts // groups)
        if self.top_k > of_groups:
            raise ModelError(
                f"a token cannot go to {self.top_k} experts: its {top_groups} of {groups} groups have {of_groups}"
            )
        if self.router.group_score == "top-2" and 1 < groups > self.num_experts // 2:
            raise ModelError(f"groups are chosen by their two best experts: {groups} of {self.num_experts} have one")
        if self.router.score == "sparse-mixer" and self.top_k != 2:
            raise ModelError(f"SparseMixer gives a token 2 experts, not {self.top_k}")
        if self.shared_gate and self.shared is None:
            raise ModelError("there is no shared expert for the gate of one")
        if self.branch_norms and self.shared is None:
            raise ModelError("experts that are normed apart from a shared network need one")

    def parameter_shapes(self, width: int) -> Shapes:
        """Its parameters in a model of that width, in the order of the forward pass; of all experts in one tensor."""
        count, inner = self.num_experts, self.intermediate_size
        shapes = linear_shapes("router", count, width, self.router.bias)
        shapes |= {"router.correction": (count,)} if self.router.bias_correction else {}
        shapes |= {"router.scale": (width,)} if self.router.input_norm else {}
        shapes |= {"router.expert_scales": (count,)} if self.router.expert_scales else {}
        shapes |= linear_shapes("experts.gate_proj", inner, width, self.bias, count)
        shapes |= linear_shapes("experts.up_proj", inner, width, self.bias, count)
        shapes |= linear_shapes("experts.down_proj", width, inner, self.bias, count)
        if self.shared is not None:
            shapes |= {f"shared.{name}": shape for name, shape in self.shared.parameter_shapes(width).items()}
        if self.branch_norms:
            shapes |= dict.fromkeys((f"{name}.weight" for name in BRANCH_NORMS), (width,))
        return shapes | ({"shared_gate.weight": (1, width)} if self.shared_gate else {})

    @property
    def tensor_cut(self) -> TensorCut:
        """The cut over processes: every expert along its inner width, and the shared network; the router is whole."""
        of_gated: dict[str, Role] = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}
        shared = {} if self.shared is None else self.shared.tensor_cut.roles
        halves = {"experts": of_gated, "shared": shared}
        return TensorCut({f"{half}.{name}": role for half, roles in halves.items() for name, role in roles.items()})

    def uncuttable(self, degree: int) -> str | None:
        """Why tensor ranks of that number cannot share it; None: they can."""
        if self.branch_norms and degree > 1:
            return "norms stand behind the experts and behind the dense network, which need whole sums: use `expert`"
        if self.intermediate_size % degree:
            return f"{degree} does not divide the experts' width of {self.intermediate_size}"
        return None if self.shared is None else self.shared.uncuttable(degree)


BRANCH_NORMS = ("input_norm", "output_norm", "shared_input_norm", "shared_output_norm")
"""The norms of experts and a shared network that are normed apart."""
Norms = Literal["pre", "post", "sandwich", "shared"]
NormKind = Literal["rms", "layer", "layer-bias"]
"""RMSNorm (arXiv:1910.07467), or LayerNorm (arXiv:1607.06450) without or with a bias."""
Mixer = Heads | Latent | Factorized | Delta
Feed = Dense | Experts


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a decoder: attention, then a feed-forward network, each with norms around it."""

    mixer: Mixer
    feed: Feed
    norms: Norms = "pre"
    """The place of norms: before each half (`pre`), behind it, before it joins the residual stream (`post`), both
    (`sandwich`), or one before both halves of a parallel layer (`shared`).
    """
    norm_kind: NormKind = "rms"
    """The kind of norms around the halves, and of the model's final norm; norms within attention are RMSNorms."""
    parallel: bool = False
    """Whether both halves read the layer's input, and their outputs join the residual stream together (GPT-J's
    parallel residual), in place of one half after the other.
    """
    scalar: bool = False
    """Whether the layer's output is multiplied by a number of its own, which is not trained (Gemma 4)."""
    per_layer_width: int = 0
    """Features of the layer's own embedding of each token, which a gated network joins to the residual stream behind
    the two halves (Gemma 4 E2B); 0: it has none.
    """

    def __post_init__(self) -> None:
        assert self.parallel or self.norms != "shared", "halves that follow each other read different inputs"

    def parameter_shapes(self, width: int) -> Shapes:
        """Its parameters in a model of that width, in the order of the forward pass."""
        shapes: Shapes = {}
        for name, half in (("attention", self.mixer), ("mlp", self.feed)):
            shapes |= norm_shapes(f"{name}_norm", width, self.norm_kind) if name in self.normed_before else {}
            shapes |= {f"{name}.{part}": shape for part, shape in half.parameter_shapes(width).items()}
            shapes |= norm_shapes(f"post_{name}_norm", width, self.norm_kind) if self.normed_behind else {}
        if self.scalar:
            shapes |= {"layer_scalar.weight": (1,)}
        if self.per_layer_width:
            shapes |= linear_shapes("per_layer.gate_proj", self.per_layer_width, width, False)
            shapes |= linear_shapes("per_layer.down_proj", width, self.per_layer_width, False)
            shapes |= norm_shapes("post_per_layer_norm", width, self.norm_kind)
        return shapes

    @property
    def carries_values(self) -> bool:
        """Whether it reads or makes values that travel between layers next to the residual stream."""
        return bool(self.per_layer_width) or self.mixer.sharing is not None

    @property
    def normed_before(self) -> tuple[str, ...]:
        """The halves that have a norm of their own before them, or one for both, which has the name of attention's."""
        of_place = {"post": (), "shared": ("attention",)}
        halves = of_place.get(self.norms, ("attention", "mlp"))
        apart = isinstance(self.feed, Experts) and self.feed.branch_norms
        return tuple(half for half in halves if half == "attention" or not apart)

    @property
    def normed_behind(self) -> bool:
        """Whether both halves have a norm behind them."""
        return self.norms in ("post", "sandwich")

    @property
    def attention(self) -> Heads:
        """The mixer of a layer that mixes tokens with attention by heads."""
        assert isinstance(self.mixer, Heads), f"{self.mixer} is no attention by heads"
        return self.mixer

    def uncuttable(self, degree: int) -> str | None:
        """Why tensor ranks of that number cannot share the layer; None: they can."""
        return self.mixer.uncuttable(degree) or self.feed.uncuttable(degree)

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Names and values of its sizes, for messages about a model that is too large."""
        for half in (self.mixer, self.feed):
            yield from ((name, size) for name in MAXIMUMS if (size := getattr(half, name, None)) is not None)

    def differences(self, other: LayerSpec) -> list[str]:
        """Names the fields in which this layer differs from another: `mixer.qk_norm`."""
        names: list[str] = []
        for half in ("mixer", "feed"):
            own, others = getattr(self, half), getattr(other, half)
            if type(own) is not type(others):
                names.append(half)
                continue
            values: dict[str, Any] = vars(own)
            names += [f"{half}.{name}" for name, value in values.items() if getattr(others, name) != value]
        of_layer = ("norms", "norm_kind", "parallel", "scalar", "per_layer_width")
        return names + [name for name in of_layer if getattr(self, name) != getattr(other, name)]


def norm_shapes(name: str, width: int, kind: NormKind) -> Shapes:
    """The weight of a norm over `width` features and, if it has one, its bias."""
    weight: Shapes = {f"{name}.weight": (width,)}
    return weight | {f"{name}.bias": (width,)} if kind == "layer-bias" else weight
