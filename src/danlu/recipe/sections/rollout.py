"""The rollout engine, which answers prompts with the model while it is trained."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from danlu.recipe.sections.base import NonNegative, PositiveInt, ReadWith, Section, VariantSection, default_section


class Ngram(VariantSection):
    """Prompt lookup: proposes the tokens that followed the last few ones at an earlier place."""

    kind: Literal["ngram"] = "ngram"
    tokens: PositiveInt = 4
    """Tokens that are proposed at a time."""
    longest: PositiveInt = 3
    """The longest end of the text that is looked for earlier in it; shorter ones follow."""


class DraftModel(VariantSection):
    """A smaller model with the same vocabulary (arXiv:2211.17192)."""

    kind: Literal["model"] = "model"
    model: str
    """A Hugging Face folder, a hub id or a finished run."""
    tokens: PositiveInt = 4
    """Tokens that are proposed at a time."""


Draft = Annotated[Ngram | DraftModel, Field(discriminator="kind")]


class Server(Section):
    """How a rollout engine that runs as a server is spoken to, and handed the weights."""

    api_key_variable: str | None = None
    """The environment variable that holds the server's key; the key itself is in no recipe. Left out: no key, or the
    one that `danlu serve --rollouts` has made for itself on this machine."""
    connections: PositiveInt = 64
    """Requests that are under way at a time, at each server."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """The longest wait for one answer."""
    reconnect_s: NonNegative = 120.0
    """How long a server that is gone is waited for before the run ends; with `urls`, where all are gone."""
    hand_over: Literal["auto", "group", "folder", "adapter"] = "auto"
    """How weights get there: over a process group that the server joins (in buckets of one broadcast each), as a model
    folder, or the trained adapter alone as a folder. auto: adapter where one is trained, else folder."""
    exchange_folder: str | None = None
    """hand_over: folder, adapter: a folder on a disk that trainer and server both see; by default `hand-over` in the
    run folder."""
    push: Annotated[
        bool, ReadWith("rollout.engine", "http", "only read with engine: http, by danlu serve. Leave it out")
    ] = False
    """engine: http, danlu serve: files of weights are sent to the servers, in buckets, and need not lie on a disk that
    these see."""
    bucket_mib: PositiveInt = 512
    """hand_over: group, folder: tensors of one broadcast, or of one file, in MiB."""
    group_address: str = "127.0.0.1"
    """hand_over: group: where the server reaches this machine."""
    canary_tolerance: NonNegative = 0.05
    """The largest mean difference from the trainer's log-probabilities of fixed tokens, in nats, that the server may
    have after each weight sync; a larger one stops the run.
    """


class AnswerFormat(Section):
    """A form of answers, by one of these keys; see docs/serving.md, "Answers in a form"."""

    json_schema: dict[str, Any] | None = None
    """JSON by this schema."""
    regex: str | None = None
    """Text that matches this expression as a whole, of Rust's kind."""
    choice: list[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """Text by these rules, in llguidance's dialect of Lark."""

    @property
    def kinds(self) -> dict[str, Any]:
        """The keys that are there, with their values."""
        values = {name: getattr(self, name) for name in ("json_schema", "regex", "choice", "grammar")}
        return {name: value for name, value in values.items() if value is not None}


SAMPLING_KEYS = (
    *("samples", "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop_strings", "format", "staleness"),
)
"""Keys of `rollout` that say which answers stage `rl` draws; the others say how the engine computes them."""

_ROLLOUTS = ReadWith(
    "stage",
    "rl",
    "only read with stage rl; this is {value}",
    hint=("evaluation.samples", "; evaluation.samples has settings of its own"),
)
_ANSWERS = replace(_ROLLOUTS, or_with="on_policy")
_EMBEDDED = ReadWith(
    "engine", "embedded", "a setting of the embedded engine; {value} takes its own when it starts. Leave it out"
)


class Rollout(Section):
    """The engine that samples from the policy, and for stage rl how. Of the engine's own settings none but `draft`,
    `precision` and `cache` changes an answer: `draft` keeps the distribution which answers are drawn from, the others
    round."""

    short = "engine"

    samples: Annotated[PositiveInt, _ROLLOUTS] = 8
    """Stage rl: answers to each prompt."""
    max_new_tokens: Annotated[PositiveInt, _ANSWERS] = 256
    """Stage rl: the longest answer. The prompt has the rest of data.max_length."""
    temperature: Annotated[NonNegative, _ANSWERS] = 1.0
    """Stage rl: the divisor of logits, both where answers are drawn and in the policy that is trained."""
    top_p: Annotated[float, Field(gt=0, le=1), _ANSWERS] = 1.0
    """Stage rl: draw from the likeliest tokens that together have this probability (arXiv:1904.09751). With this or
    another filter the policy that is trained has the same tokens to choose from."""
    top_k: Annotated[int, Field(ge=0), _ANSWERS] = 0
    """Stage rl: the number of likeliest tokens to draw from; 0: all."""
    min_p: Annotated[float, Field(ge=0, lt=1), _ANSWERS] = 0.0
    """Stage rl: draw from tokens at least this fraction as likely as the likeliest (arXiv:2407.01082)."""
    stop_strings: Annotated[list[str], _ANSWERS] = []
    """Stage rl: texts that end an answer, in addition to the end tokens of the model."""
    format: Annotated[AnswerFormat | None, _ROLLOUTS] = None
    """Stage rl: a form that every answer has: no token is drawn with which it could not become one. The policy that is
    trained has the same tokens to choose from, as with the filters. A form needs the package llguidance, and vLLM and
    SGLang as grammar engine too (--structured-outputs-config.backend guidance, --grammar-backend llguidance), where
    JSON may have any white space between its tokens.
    """
    staleness: Annotated[int, Field(ge=0), _ROLLOUTS] = 0
    """Stage rl: how many updates before a rollout is trained on its answers may begin. Above 0 these are drawn in
    processes next to the trainer, or by servers that one such process asks, and go on with new weights after each
    update. 0: answers are drawn, then trained on.
    """
    processes: Annotated[
        PositiveInt,
        _ROLLOUTS,
        ReadWith(
            "staleness", message="only read with rollout.staleness above 0: the trainer itself answers. Leave it out"
        ),
        _EMBEDDED,
    ] = 1
    """staleness above 0: how many processes answer, each with a copy of the policy, on GPUs that no trainer has where
    there are some."""
    routing_replay: Annotated[bool | None, _ROLLOUTS] = None
    """Stage rl, for a policy with experts: whether each token goes to the same experts in training as in the rollout
    (R3, arXiv:2510.11370), with recomputed weights. By default it does with policy gradients, and with pairs of answers
    (online-dpo) it does not, where the engine reports these experts: embedded and danlu serve do, vLLM and SGLang do
    not.
    """
    engine: Literal["embedded", "http", "vllm", "sglang"] = "embedded"
    """embedded answers in this process, with the trainer's own tensors; the others are servers that run elsewhere and
    receive the weights. http: one or several at `urls`, of any kind (danlu serve --rollouts, vLLM, SGLang); the others
    take over the requests of one that dies.
    """
    url: str | None = None
    """vllm, sglang: where the server listens, such as http://localhost:8000."""
    urls: list[str] = []
    """http: the URLs of the servers. danlu asks each for its kind."""
    server: Annotated[
        Server,
        ReadWith("engine", ("http", "vllm", "sglang"), "only read with engine: http, vllm or sglang. Leave it out"),
    ] = default_section(Server)
    """http, vllm, sglang: how the server is spoken to."""
    block: Annotated[PositiveInt, _EMBEDDED] = 16
    """The page size: tokens with keys and values that are kept together."""
    cache_gib: Annotated[float, Field(gt=0), _EMBEDDED] = 2.0
    """The most memory that keys and values take, in GiB, on each process."""
    cache: Annotated[Literal["auto", "fp8", "int8", "int4"], _EMBEDDED] = "auto"
    """auto keeps keys and values in the type of activations; fp8 (E4M3) and int8 as 8-bit codes with a scale for each
    token and head: about a quarter of float32's memory, half of bf16's. int4 keeps full blocks in 4 bits, keys with a
    scale for each channel of up to 32 tokens, values for 32 channels of each token: about a third of bf16's with
    block: 32; a block that is not full stays as it is. Answers then differ by rounding from what the trainer computes,
    which policy_gradient.importance corrects; not with numerics: exact."""
    precision: Annotated[Literal["auto", "int8", "fp8"], _EMBEDDED] = "auto"
    """The products of linear layers in attention, feed-forward networks and experts. auto: in the type of activations.
    int8: of 8-bit integers, with a scale for each token and each output; fp8: in E4M3, in the blocks of `precision`
    where that is fp8, else of tile. Weights are encoded again after each update. Answers then differ by rounding from
    what the trainer computes, which policy_gradient.importance corrects; not with numerics: exact, or a quantized base.
    """
    packed_gib: Annotated[NonNegative, _EMBEDDED] = 2.0
    """embedded, on a CPU: the most memory of copies of weights in the order in which oneDNN multiplies fastest.
    numerics: exact makes none."""
    batch_tokens: Annotated[PositiveInt, _EMBEDDED] = 1024
    """The most tokens of one forward pass; longer prompts are read in several (chunked prefill)."""
    sequences: Annotated[PositiveInt, _EMBEDDED] = 256
    """The most answers that grow at a time."""
    prefix_sharing: Annotated[bool, _EMBEDDED] = True
    """Read prompts that begin alike once, and share the keys and values of their common prefix."""
    draft: Annotated[Draft | None, _EMBEDDED] = None
    """Speculative decoding: ngram or model proposes tokens, which the policy checks in one pass."""
    preempt: Annotated[Literal["recompute", "swap"], _EMBEDDED] = "recompute"
    """The treatment of an answer that has to make room for others: read again later, or copied to the host's memory."""
    swap_gib: Annotated[NonNegative, _EMBEDDED, ReadWith("preempt", "swap")] = 4.0
    """preempt: swap: host memory for swapped-out answers, in GiB."""
    gather: Annotated[Literal["auto", "all", "layer"], _EMBEDDED] = "auto"
    """zero3: all gathers the weights of the whole model on each process for as long as it is sampled from; layer
    gathers them layer by layer in each forward pass, in which all ranks take part. auto: all where they fit."""
