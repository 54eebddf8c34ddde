"""One decoder whole and once more cut among processes, on the same tokens: for the tests of `parallel.tensor`.

Runs inside of a group of processes (`builders.process_group`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from builders.family_values import GEMMA2, GEMMA4, GEMMA4_E2B
from builders.generation import generate
from builders.recompute import kept_bytes
from builders.tiny_adapters import adapter_set, perturb
from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.dropout import DropoutState
from danlu.adapters.lora import LowRank
from danlu.assembly.frozen_base import quantize_weight
from danlu.core.types import TargetLosses
from danlu.inference.request import SamplingOptions
from danlu.memory import recompute
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.hf_config import read_config_values
from danlu.models.initialize import initialize, named_generator
from danlu.models.loading import build, meta_decoder
from danlu.models.modules import Linear, RMSNorm
from danlu.numerics.relative_error import relative_error
from danlu.objectives.linear_cross_entropy import linear_cross_entropy
from danlu.parallel.comm import Group
from danlu.parallel.layout import Layout
from danlu.parallel.ranks import ranks_of
from danlu.parallel.tensor import Cuts, cut
from danlu.recipe import sections

CONFIG = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 99,
    "attention_bias": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biased multi-query": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "head_dim": 16},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3.5": {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
    },
    "gemma2": GEMMA2,
    "gemma4": GEMMA4,
    "gemma4-e2b": {
        **GEMMA4_E2B,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 131,
    },
    "cohere2": {
        "model_type": "cohere2",
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": False,
    },
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": None, "rotary_pct": 0.5},
    "glm4": {"model_type": "glm4", "head_dim": 16, "eos_token_id": 2, "pad_token_id": 0},
    "olmo2": {"model_type": "olmo2", "pad_token_id": 0},
    "exaone4": {"model_type": "exaone4", "sliding_window": 6, "sliding_window_pattern": 2},
    "deepseek_v3": {"model_type": "deepseek_v3", "q_lora_rank": 20, **LATENT},
    "deepseek_v2": {"model_type": "deepseek_v2", "q_lora_rank": None, **LATENT},
    "mfa": {"model_type": "mfa", "head_dim": 16, "query_norm": True},
    "mfa, key reuse": {"model_type": "mfa", "head_dim": 16, "query_rank": 20, "key_reuse": True},
    "phimoe": {
        "model_type": "phimoe",
        "num_local_experts": 3,
        "intermediate_size": 24,
        "attention_bias": True,
        "lm_head_bias": True,
    },
    "olmo2, multi-query": {"model_type": "olmo2", "num_key_value_heads": 1, "pad_token_id": 0},
}

LENGTHS = (5, 7, 4)  # of documents; with 4 virtual tokens each the sum stays a multiple of 4
LOSS = {"label_smoothing": 0.1, "z_loss": 1e-2}


@dataclass(frozen=True)
class Case:
    """What is cut and trained."""

    config: Mapping[str, Any] = field(default_factory=dict)
    adapters: tuple[Any, ...] = ()  # sections, lowest first; the last is trained
    quantization: Any = None
    sequence: bool = False
    dropout: bool = False
    asleep: bool = False  # no adapter is active
    prepare: str = ""  # "rows", or a kind of recompute
    wrong: str = ""  # one of WRONG, after the cut
    dtype: torch.dtype = (
        torch.float64
    )  # of activations; parameters are of the same type, or float32 with a narrower one
    losses: Mapping[str, float] = field(default_factory=lambda: LOSS)
    mixer: Mapping[str, Any] = field(default_factory=dict)  # what is changed of all layers' attention


@dataclass
class Side:
    model: Decoder
    adapters: AdapterSet | None
    dropout_state: DropoutState


def side(case: Case) -> Side:
    """The whole model of a case; every call makes the same numbers."""
    config = read_config_values({**CONFIG, **case.config})
    model = build(config.with_layers(lambda layer: replace(layer, mixer=replace(layer.mixer, **case.mixer))))
    initialize(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases as after training
                parameter += 0.3 * torch.empty_like(parameter).normal_(generator=named_generator(1, name))
    dropout_state = DropoutState(7)
    adapters = None if not case.adapters else _adapted(model, dropout_state, case)
    if case.dtype == torch.float64:
        model.double()
    return Side(model, adapters, dropout_state)


def _adapted(model: Decoder, dropout_state: DropoutState, case: Case) -> AdapterSet:
    adapters = adapter_set(model, dropout_state=dropout_state)
    for number, section in enumerate(case.adapters):
        adapters.add(f"a{number}", section)
        perturb(adapters, f"a{number}", seed=number + 1)
    adapters.train_only(f"a{len(case.adapters) - 1}")
    if case.quantization is not None:
        saved = adapters.fully_trained()
        for site in adapters.sites:
            if site.group in ("attention", "mlp") and f"{site.name}.weight" not in saved:
                site.module.store(quantize_weight(site.module.weight.detach(), case.quantization, site.name))
    if case.asleep:
        adapters.activate()
        adapters.train_only()
        model.norm.weight.requires_grad_(True)
    return adapters


@dataclass(frozen=True)
class Pass:
    """What one pass gave; gradients as `model.named_parameters()` has them."""

    hidden: Tensor
    sums: Tensor  # total, nll, correct
    gradients: dict[str, Tensor]


def run_pass(one: Side, case: Case) -> Pass:
    virtual = () if one.adapters is None else one.adapters.virtual_token_ids
    generator = torch.Generator().manual_seed(5)
    documents = [torch.randint(0, CONFIG["vocab_size"], (length,), generator=generator) for length in LENGTHS]
    documents = [torch.cat((torch.tensor(virtual, dtype=torch.int64), words)) for words in documents]
    tokens = torch.cat(documents)
    boundaries = (0, *torch.tensor([len(words) for words in documents]).cumsum(0).tolist())
    positions = torch.cat([torch.arange(len(words)) for words in documents])
    if case.dropout:
        one.dropout_state.begin(3, [(number, len(words)) for number, words in enumerate(documents)])
    hidden = one.model(tokens, positions, PackedAttention(boundaries), case.dtype)
    sources = (positions >= len(virtual)).nonzero().squeeze(1)
    targets = torch.randint(0, CONFIG["vocab_size"], (len(sources),), generator=generator)
    entropy = head_loss(one.model, hidden.index_select(0, sources), targets, case)
    entropy.total.backward()
    one.dropout_state.end()
    gradients = {
        name: parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        for name, parameter in one.model.named_parameters()
        if parameter.grad is not None
    }
    sums = torch.stack((entropy.total.detach(), entropy.nll, entropy.correct))
    return Pass(hidden.detach()[sources], sums, gradients)


def head_loss(model: Decoder, hidden: Tensor, targets: Tensor, case: Case) -> TargetLosses:
    vocab_shard = model.vocab_shard
    return linear_cross_entropy(
        model.head_input(hidden),
        model.head_weight,
        targets,
        torch.linspace(0.5, 2.0, len(targets), dtype=torch.float64),
        softcap=model.config.final_softcap,
        slice_rows=17,
        tensor_group=None if vocab_shard is None else vocab_shard.group,
        vocab_start=0 if vocab_shard is None else vocab_shard.start,
        vocab_size=model.config.vocab_size,
        **case.losses,
    )


def errors(case: Case, group: Group, against: Case | None = None) -> dict[str, float]:
    """The relative error of hidden states, sums and each gradient of the cut model, by name.

    against: the case of the whole model, where it is another one.
    """
    against = case if against is None else against
    want = run_pass(side(against), against)
    mine = side(case)
    cuts = cut(mine.model, mine.adapters, group, sequence=case.sequence)
    prepare(mine, case)
    WRONG.get(case.wrong, lambda side, cuts: None)(mine, cuts)
    got = run_pass(mine, case)
    sum_partial(got.gradients, cuts)
    missing = want.gradients.keys() ^ got.gradients.keys()
    assert not missing, f"gradients on one side alone: {sorted(missing)}"
    found = {"hidden": relative_error(got.hidden, want.hidden)}
    found |= {name: relative_error(got.sums[n], want.sums[n]) for n, name in enumerate(("total", "nll", "correct"))}
    for name, gradient in got.gradients.items():
        whole = want.gradients[name]
        found[name] = relative_error(gradient, cuts.boxes[name].view_of(whole), whole)
    return found


def sum_partial(gradients: Mapping[str, Tensor], cuts: Cuts) -> None:
    for name, group in cuts.partial.items():
        if name in gradients:
            group.sum(gradients[name])


# ── before the pass, and what must show ──


def prepare(one: Side, case: Case) -> None:
    """As `placing.place` does: tokens that sequence parallelism gathers are gathered again in the backward pass."""
    one.model.embed_tokens.sparse_gradient = case.prepare == "rows"
    wrap(one, case, gathered=case.sequence)


def wrap(one: Side, case: Case, *, gathered: bool) -> None:
    kind = "none" if case.prepare in ("", "rows") else case.prepare
    plan = recompute.plan_of(sections.Recompute(kind=kind), one.model)  # type: ignore[arg-type]
    recompute.wrap(one.model, plan, gathered=gathered)


def _untie(one: Side, cuts: Cuts) -> None:
    head = Linear(*reversed(one.model.embed_tokens.weight.shape), bias=False)
    head.weight = torch.nn.Parameter(one.model.embed_tokens.weight.detach().clone(), requires_grad=False)
    one.model.lm_head = head


def _same_masks(one: Side, cuts: Cuts) -> None:
    for module in one.model.modules():
        dropout = getattr(module, "_dropout", None) or getattr(module, "dropout", None)
        if dropout is not None:
            dropout.first_feature = 0


def _every_bias(one: Side, cuts: Cuts) -> None:
    for module in one.model.modules():
        if isinstance(module, Linear):
            module.adds_bias = True


def _local_norms_of_rows(one: Side, cuts: Cuts) -> None:
    for module in one.model.modules():
        if isinstance(module, LowRank):
            module.tensor_group = None


def _every_prompt(one: Side, cuts: Cuts) -> None:
    assert one.adapters is not None
    for added in one.adapters.added.values():
        for virtual in added.virtual_tokens():
            virtual.adds_embeddings = True


def _uncounted_heads(one: Side, cuts: Cuts) -> None:
    """Heads of keys and values that several processes hold get no sum."""
    for name in [name for name, group in cuts.partial.items() if name.endswith(("k_proj.weight", "v_proj.weight"))]:
        del cuts.partial[name]


def _unsummed_norms(one: Side, cuts: Cuts) -> None:
    for name in [name for name in cuts.partial if "norm" in name]:
        del cuts.partial[name]


def _cut_norms(one: Side) -> Iterator[RMSNorm]:
    return (module for module in one.model.modules() if isinstance(module, RMSNorm) and module.shard is not None)


def _local_norms(one: Side, cuts: Cuts) -> None:
    for norm in _cut_norms(one):
        norm.shard = None


def _local_gradients_of_norms(one: Side, cuts: Cuts) -> None:
    """Statistics are summed forward alone."""
    for norm in _cut_norms(one):
        assert norm.shard is not None
        norm.shard = replace(norm.shard, group=ForwardGroup(norm.shard.group))


def _copies_of_keys(one: Side, cuts: Cuts) -> None:
    for norm in _cut_norms(one):
        assert norm.shard is not None
        norm.shard = replace(norm.shard, copies=1)


@dataclass(frozen=True)
class ForwardGroup:
    """Sums the squares [T, 1] of the forward pass, and not what [T] the backward pass asks for."""

    group: Any

    def sum(self, x: Tensor) -> Tensor:
        return self.group.sum(x) if x.ndim == 2 else x


WRONG: dict[str, Callable[[Side, Cuts], None]] = {
    "every bias": _every_bias,
    "every prompt": _every_prompt,
    "copies of keys": _copies_of_keys,
    "local gradients of norms": _local_gradients_of_norms,
    "local norms": _local_norms,
    "local norms of rows": _local_norms_of_rows,
    "same masks": _same_masks,
    "uncounted heads": _uncounted_heads,
    "unsummed norms": _unsummed_norms,
    "untied": _untie,
}


# ── workers ──


def world() -> Group:
    return Group("tensor", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


def each(worker: Callable[..., Any], cases: Mapping[str, Case], *args: Any) -> dict[str, Any]:
    """Worker: what another gives for each of several cases."""
    return {name: worker(case, *args) for name, case in cases.items()}


def compare(case: Case) -> dict[str, float]:
    """Worker: the errors of a case."""
    return errors(case, world())


def narrow_types(case: Case) -> dict[str, tuple[float, float]]:
    """Worker: of each gradient in bfloat16 the relative error against float32: cut, and in one process."""
    wide = replace(case, dtype=torch.float32, sequence=False)
    exact, whole = run_pass(side(wide), wide), run_pass(side(case), replace(case, sequence=False))
    cut_errors = errors(case, world(), against=wide)
    return {
        name: (cut_errors[name], relative_error(gradient, exact.gradients[name]))
        for name, gradient in whole.gradients.items()
    }


@dataclass(frozen=True)
class CountingGroup(Group):
    """Notes each collective."""

    seen: list[str] = field(default_factory=list)

    def sum(self, x: Tensor) -> Tensor:
        self.seen.append("sum")
        return super().sum(x)

    def all_gather(self, x: Tensor) -> Tensor:
        self.seen.append("all-gather")
        return super().all_gather(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self.seen.append("reduce-scatter")
        return super().reduce_scatter(x)


def collectives(case: Case, layers: Sequence[int]) -> dict[int, dict[str, list[str]]]:
    """Worker: what is sent in the forward and in the backward pass of models of so many layers; the loss left out."""
    found = {}
    for count in layers:
        one = side(replace(case, config={**case.config, "num_hidden_layers": count}))
        group = CountingGroup("tensor", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
        cut(one.model, one.adapters, group, sequence=case.sequence)
        prepare(one, case)
        tokens = torch.arange(16)
        hidden = one.model(tokens, tokens, PackedAttention((0, 16)), torch.float32)
        forward, group.seen[:] = list(group.seen), []
        hidden.square().sum().backward()
        found[count] = {"forward": forward, "backward": list(group.seen)}
    return found


def kept(cases: Mapping[str, Case]) -> dict[str, tuple[int, int]]:
    """Worker: bytes that autograd keeps of 16 tokens: with what was gathered, and where that is gathered again."""

    def bytes_of(case: Case, gathered: bool) -> int:
        one = side(case)
        cut(one.model, one.adapters, world(), sequence=case.sequence)
        wrap(one, case, gathered=gathered)
        tokens = torch.arange(16)
        with kept_bytes(one.model) as found:
            one.model(tokens, tokens, PackedAttention((0, 16)), torch.float32)
        return sum(found.values())

    return {name: (bytes_of(case, False), bytes_of(case, True)) for name, case in cases.items()}


def shapes_first(case: Case) -> dict[str, Any]:
    """Worker: a decoder that is cut before it has values, filled box by box: its boxes, and the error of its states."""
    whole = side(case)
    model = meta_decoder(whole.model.config)
    cuts = cut(model, None, world(), sequence=case.sequence)
    before = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    model.to_empty(device="cpu").double()
    with torch.no_grad():
        values = dict(whole.model.named_parameters())
        for name, parameter in model.named_parameters():
            parameter.copy_(cuts.boxes[name].view_of(values[name]))
    one = Side(model, None, DropoutState(0))
    got, want = run_pass(one, case), run_pass(whole, case)
    return {"shapes": before, "boxes": cuts.boxes, "error": relative_error(got.hidden, want.hidden)}


def sampled(case: Case) -> dict[str, Any]:
    """Worker: answers of the whole model and of the cut one: greedy and drawn, and their log-probabilities."""
    whole, mine = side(case), side(case)
    cut(mine.model, mine.adapters, world(), sequence=case.sequence)
    virtual = () if mine.adapters is None else mine.adapters.virtual_token_ids
    prompts = [[1, 30, 7], [1, 99, 100, 12, 64], [5]]
    found: dict[str, Any] = {}
    for name, options in (
        ("greedy", SamplingOptions(temperature=0.0)),
        ("drawn", SamplingOptions(temperature=1.0, seed=3)),
    ):
        both = [generate(one.model, prompts, options, 6, virtual_token_ids=virtual) for one in (whole, mine)]
        found[name] = [[answer.tokens for answer in answers] for answers in both]
        found[f"{name} logprobs"] = [torch.tensor([answer.logprobs for answer in answers]) for answers in both]
    return found


def beside_data(case: Case) -> dict[str, Any]:
    """Worker, of 4: two data ranks of two tensor ranks each; errors, and the groups that gradients are summed over."""
    ranks = ranks_of(Layout(replicate=2, tensor=2), "cpu")
    mine = side(case)
    cuts = cut(mine.model, mine.adapters, ranks.tensor, sequence=case.sequence)
    return {
        "errors": errors(case, ranks.tensor),
        "partial": {name: group.ranks for name, group in cuts.partial.items()},
        "copies": {name: (box.replicas, box.is_writer) for name, box in cuts.boxes.items()},
    }


@dataclass(frozen=True)
class Deaf:
    """A process that does not hear the others."""

    size: int

    def sum(self, x: Tensor) -> Tensor:
        return x

    def max(self, x: Tensor) -> Tensor:
        return x


@contextmanager
def few_rows() -> Iterator[None]:
    """A frozen head goes by rows: several times, with a rest."""
    from danlu.objectives import loss_memory

    before = loss_memory.FEWEST_ROWS, loss_memory.KEPT_BYTES
    loss_memory.FEWEST_ROWS, loss_memory.KEPT_BYTES = 8, 1
    try:
        yield
    finally:
        loss_memory.FEWEST_ROWS, loss_memory.KEPT_BYTES = before


def vocabulary_loss(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Worker: the loss over a head of 101 rows, cut unevenly, against the whole: errors of sums and gradients."""
    group = world()
    bounds = [0, 37, 101] if group.size == 2 else [0, 37, 38, 60, 101]
    first, end = bounds[group.index : group.index + 2]
    found = []
    for options in settings:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(37, 16, generator=generator, dtype=torch.float64)
        head = torch.randn(101, 16, generator=generator, dtype=torch.float64)
        targets = torch.randint(0, 101, (37,), generator=generator)
        if options.get("ties"):  # many logits are equal, also in several parts of the vocabulary
            hidden, head = hidden.sign(), head.sign()
            hidden[:3] = 0
        targets[:9] = (hidden @ head.t()).argmax(1)[:9]
        weights = torch.rand(37, generator=generator, dtype=torch.float64)
        frozen = options["frozen"]
        rest = {name: value for name, value in options.items() if name not in ("frozen", "deaf", "ties")}
        one, table = hidden.clone().requires_grad_(), head.clone().requires_grad_(not frozen)
        want = linear_cross_entropy(one, table, targets, weights, **rest)
        want.total.backward()
        part, rows = hidden.clone().requires_grad_(), head[first:end].clone().requires_grad_(not frozen)
        with few_rows():
            tensor_group = Deaf(group.size) if options.get("deaf") else group
            got = linear_cross_entropy(
                part,
                rows,
                targets,
                weights,
                tensor_group=tensor_group,
                vocab_start=first,
                vocab_size=101,
                slice_rows=10,
                **rest,
            )
        got.total.backward()
        assert one.grad is not None and part.grad is not None
        errors_of = {
            name: relative_error(getattr(got, name), getattr(want, name)) for name in ("total", "nll", "correct")
        }
        errors_of["hidden"] = relative_error(group.sum(part.grad), one.grad)
        if not frozen:
            assert table.grad is not None and rows.grad is not None
            errors_of["head"] = relative_error(rows.grad, table.grad[first:end], table.grad)
        found.append(errors_of)
    return found


def refused(case: Case) -> str:
    """Worker: what is said of a model that cannot be cut."""
    one = side(case)
    try:
        cut(one.model, one.adapters, world(), sequence=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
