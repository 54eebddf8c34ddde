"""The placement of a run: parallelism, recomputation and offload."""

from typing import Annotated, Literal

from pydantic import Field

from danlu.recipe.sections.base import OF_TOKENS, NotReadWith, PositiveInt, ReadWith, Section, default_section

_OF_STAGES = NotReadWith("stages", 1, "there is one stage, and nothing to divide. Raise stages, or leave this out")


class Context(Section):
    """Context parallelism: how attention sees the tokens of long documents that are sharded among ranks."""

    short = "size"

    size: PositiveInt = 1
    """Context-parallel degree: ranks among which the tokens of each packed sequence are sharded. Short documents stay
    whole; of long ones each rank has a part from the beginning and one from the end, so that all have as much to do."""
    method: Literal["ring", "gather", "ulysses"] = "ring"
    """ring: keys and values travel around the ranks while each computes with those it has (arXiv:2310.01889). gather:
    each rank gathers all of them. ulysses: ranks exchange tokens for attention heads, so that each has some heads of
    all tokens (arXiv:2309.14509)."""
    ulysses: PositiveInt = 1
    """The number of neighbouring ranks that exchange heads, with ring or gather; keys of these heads travel among the
    others (arXiv:2405.07719). It divides `size`.
    """


class Pipeline(Section):
    """Pipeline parallelism: stages of layers on different ranks, through which micro-batches go one after the other."""

    short = "stages"

    stages: PositiveInt = 1
    """Pipeline-parallel degree: ranks among which the layers are distributed."""
    schedule: Annotated[
        Literal["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev", "pipedream"], _OF_STAGES
    ] = "1f1b"
    """The order of each stage's forward and backward passes: see `danlu schedule`. All compute the same step except
    pipedream; its step is one micro-batch, updated while others are in flight.
    """
    chunks: Annotated[PositiveInt | None, _OF_STAGES] = None
    """Parts of the model on each stage, which lie one pass through the pipeline apart. By default 1; with interleaved,
    zbv and dualpipev 2."""
    split: Annotated[Literal["even", "cost"] | list[PositiveInt], _OF_STAGES] = "even"
    """Layers of each chunk of the whole model: even, by cost (floating-point operations, with the head's), or a list of
    their numbers from the first chunk to the last."""

    vertical_sync: Annotated[bool, _OF_STAGES] = False
    """pipedream: all stages use the version of the weights that the first one has for a micro-batch, and so one model;
    each then keeps as many versions as there are stages."""

    @property
    def updates_each_micro_batch(self) -> bool:
        """Whether a step is one micro-batch, with an update of its own while others are in flight."""
        return self.stages > 1 and self.schedule == "pipedream"

    @property
    def defers_weight_gradients(self) -> bool:
        """Whether the schedule splits backward passes, and puts gradients of weights off."""
        return self.schedule in ("zb-h1", "zbv", "dualpipev")


class Parallel(Section):
    """The parallelism strategy; results stay the same, and `danlu verify` shows it."""

    short = "shard"

    data: PositiveInt | Literal["auto"] = "auto"
    """Data-parallel degree; times `context`, `tensor` and `pipeline` it is the world size (the number of processes),
    from which auto takes it."""
    shard: Literal["none", "zero1", "zero2", "zero3"] = "none"
    """Sharding strategy among data-parallel ranks: none (DDP, each holds all), optimizer state (zero1), gradients too
    (zero2), parameters too (zero3, the same as FSDP)."""
    replicate: PositiveInt = 1
    """Hybrid sharding: this many replicas of a model that is sharded among data / replicate ranks."""
    tensor: Annotated[PositiveInt, OF_TOKENS] = 1
    """Tensor-parallel degree: ranks among which every matrix is sharded, with attention heads and vocabulary."""
    sequence: Annotated[bool, OF_TOKENS] = False
    """Sequence parallelism: with tensor, tokens are sharded among the same ranks in norms and residuals
    (arXiv:2205.05198)."""
    pipeline: Pipeline = default_section(Pipeline)
    """Pipeline parallelism, for models with layers that do not fit on one device, over slow networks too. All stages of
    language models have it.
    """
    context: Context = default_section(Context)
    """Context parallelism, for documents with too many activations for one device. Parameters and gradients are sharded
    among context ranks as among data ranks.
    """
    expert: PositiveInt = 1
    """Expert-parallel degree: neighbouring data-parallel ranks among which the experts of each layer are distributed;
    tokens travel to the ranks that have their experts (arXiv:2006.16668). It divides the data-parallel degree (with
    `replicate`, that of each replica) and the number of experts. With `shard`, ranks that have the same experts shard
    these."""
    accumulate: Literal["auto", "local", "sharded"] = "auto"
    """Gradient accumulation: local keeps unsharded gradients and reduces them once a step; sharded reduces after each
    micro-batch and keeps a shard. auto: sharded with zero2 and zero3, else local, as in schedules that put weight
    gradients off."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients are reduced over data-parallel ranks; bf16 halves the traffic, and loses digits."""
    prefetch: Annotated[int, Field(ge=0)] = 1
    """zero3: the number of layers that gather parameters ahead of use."""
    device_map: Literal["auto", "balanced"] | dict[str, str | int] | None = None
    """Naive model parallelism in one process: layers lie on several devices, and hidden states go from one to the next.
    balanced: each device has as many parameters; auto: as many as go with its free memory; or a device for each part,
    {embed: cuda:0, layers.0-15: cuda:0, layers.16-31: cuda:1, head: cuda:1}, where "" names all other parts."""
    workers: Literal["processes", "threads"] = "processes"
    """threads: data parallel in one process, a copy of the model for each device (a teaching mode: Python runs one
    thread at a time, so it is slower)."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """How often all processes are restarted from the last checkpoint when one dies."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a collective has failed; before that the processes that wait, and where, are reported."""

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Whether a sharded model's gradients are reduced after each micro-batch, as `accumulate` says it."""
        by_default = self.shard in ("zero2", "zero3") and not self.pipeline.defers_weight_gradients
        return self.accumulate == "sharded" or (self.accumulate == "auto" and by_default)


class Recompute(Section):
    """Activation checkpointing: the activations that are dropped in the forward pass and recomputed in the backward
    pass.
    """

    short = "kind"

    kind: Literal["none", "elementwise", "selective", "full", "every", "planned"] = "none"
    """none; elementwise: norms, gated products, the rows of experts and probabilities of attention, which costs least;
    selective: all of attention, while other matrix products are kept; full: every layer; every: each `layers`-th;
    planned: the choice with the least time under `budget`, from sizes and times measured on this model.
    """
    layers: Annotated[PositiveInt | None, ReadWith("kind", "every")] = None
    """every: the number of layers in a segment that keeps only its input; by default the square root of the number of
    layers.
    """
    budget: Annotated[Annotated[float, Field(gt=0)] | None, ReadWith("kind", "planned")] = None
    """planned: GiB that activations of a micro-batch may take; of a pipeline, of all that a stage has in flight."""


class Memory(Section):
    """Ways to trade time for memory."""

    short = "recompute"

    recompute: Annotated[Recompute, OF_TOKENS] = default_section(Recompute)
    """Activations that are recomputed instead of being kept."""
    offload: Annotated[list[Literal["parameters", "gradients", "optimizer", "activations"]], OF_TOKENS] = []
    """The tensors that are kept in the host's memory (or, with `folder`, on its disk) instead of the device's."""
    folder: Annotated[
        str | None, OF_TOKENS, ReadWith("offload", message="nothing is offloaded to it: add memory.offload")
    ] = None
    """A folder on a local disk (NVMe): offloaded optimizer state and parameters lie in memory-mapped files there."""
