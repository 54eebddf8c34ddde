"""Decoders on the processes of a run: what the run asks of them before training, and after."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from danlu.assembly.memory_estimate import (
    BytesByDevice,
    CriticPass,
    MemoryEstimate,
    estimate_of,
    find_micro_batch,
    gathered_parameters,
    stage_config,
    with_devices,
)
from danlu.assembly.parallelize import Placed, replica_devices, shards_on_host, token_shares
from danlu.assembly.parameter_count import model_bytes
from danlu.assembly.parameter_roles import TRAINED, VALUE, own_name
from danlu.assembly.recipe_adapters import adapter_warnings, base_identity
from danlu.core.errors import RecipeError
from danlu.core.shard_box import BoxValue
from danlu.core.types import HeadObjective, Objective, Pack, Role
from danlu.data.batch import EMPTY_PACK
from danlu.models.block_scaled import scaled_method
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import CONFIG, read_json, resolve_folder
from danlu.models.modules import GroupedLinear
from danlu.numerics.quantized_weight import QuantizedModule, dense_workspace_bytes
from danlu.objectives.linear_cross_entropy import workspace_bytes
from danlu.optim.build import Optimizers
from danlu.parallel import data
from danlu.parallel.context_groups import ContextGroups
from danlu.parallel.parallel_context import ParallelContext
from danlu.planning.flops import training_flops
from danlu.planning.gemm import Peak, peak_of
from danlu.planning.precision import DTYPES
from danlu.recipe import Recipe, sections
from danlu.stages.export import write
from danlu.stages.learner import (
    DecoderLearner,
    ThreadedLearner,
    objective_parameters,
    objective_tensors,
    trained_weights,
)
from danlu.stages.protocols import (
    FromColumns,
    LeastSeconds,
    ModelSpec,
    PolicyWithoutAdapter,
    RoleSpec,
)
from danlu.stages.roles import AdapterOff, Forward, FrozenDecoder, RoleOutputs, StoredOutputs, forward_of
from danlu.training.memory_parts import Activations, MemoryParts
from danlu.training.state import Generate, Run

if TYPE_CHECKING:
    from danlu.adapters.adapter_set import AdapterSet
    from danlu.memory.activation_offload import ActivationOffload
    from danlu.models.load_balancing import Balancer
    from danlu.stages.critic import Critic
    from danlu.stages.moving import MovingWeights

EXPERTS_STAY_WIDE = (
    "model.path: this folder has its linear layers quantized, but not the matrices of experts, which are most of the "
    "model and kept in the type of activations. The original model with `quantization: nf4` takes less"
)

EXPERTS_WITHOUT_ADAPTER = (
    "adapter.targets: no adapter sits on the experts, which are most of this model: `experts` among the targets puts "
    "one on each of their matrices"
)


@dataclass(frozen=True)
class PlacedDecoder:
    """A `PlacedModel`: a decoder, or adapters on one, with what its objective asks beside it."""

    recipe: Recipe
    placed: Placed
    device: torch.device
    objective: Objective
    evaluation: Objective
    beside: Mapping[Role, RoleSpec] = field(default_factory=dict)  # what the objective asks beside the policy
    frozen: Mapping[Role, Placed] = field(default_factory=dict)  # those of it that are decoders of their own
    own_critic: Placed | None = None  # a decoder of values, which is trained
    moving: Mapping[Role, MovingWeights] = field(default_factory=dict)  # weights of those that follow the policy
    balancer: Balancer | None = None  # of a policy with experts
    reward_bytes: int = 0  # of reward models that this process loads when they first judge
    empty: Pack = EMPTY_PACK  # an item without targets, with what the items of the stage have
    lengths: np.ndarray | None = None  # [rows] int: tokens of each row, where the rows are known before training

    @property
    def model(self) -> Decoder:
        """The policy."""
        return self.placed.subject.model

    @property
    def adapters(self) -> AdapterSet | None:
        """What is trained in place of the policy's own parameters, if anything."""
        return self.placed.subject.adapters

    @property
    def parallel(self) -> ParallelContext:
        """The part of this process in each step."""
        return self.placed.parallel

    @property
    def name(self) -> str:
        """The policy's family, for the console."""
        return self.model.config.family

    @property
    def notes(self) -> Sequence[str]:
        """What is worth knowing of how the models were placed, for the console."""
        notes = (*adapter_warnings(self.recipe.model), *self.placed.notes, *self._unpack_notes())
        return (*notes, *self._expert_notes(), *self._dense_note())

    def _unpack_notes(self) -> list[str]:
        """What dequantizes 4-bit weights, where there are quantized ones."""
        if not any(isinstance(module, QuantizedModule) for module in self.model.modules()):
            return []
        from danlu.numerics.four_bit_weight import unpack_kernels

        return [kernel.note for kernel in unpack_kernels(self.model, self.dtype)]

    def _expert_notes(self) -> list[str]:
        """What of quantization and adapters does not reach the experts of a model that has some."""
        if not self.model.config.has_experts:
            return []
        modules = list(self.model.modules())
        is_quantized = any(isinstance(module, QuantizedModule) for module in modules)
        experts_are = any(isinstance(module, GroupedLinear) and module.quantized is not None for module in modules)
        notes = [EXPERTS_STAY_WIDE] if is_quantized and not experts_are else []
        added = None if self.adapters is None else self.adapters.added.get(TRAINED)
        if added is not None and isinstance(added.section, sections.LowRank):
            on_experts = any(site.experts is not None for site in added.sites)
            notes += [] if on_experts else [EXPERTS_WITHOUT_ADAPTER]
        return notes

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations."""
        return DTYPES[self.recipe.precision]

    def _dense_note(self) -> list[str]:
        """That the result is larger than what it starts from, where that is stored with scales."""
        path = self.recipe.model.path
        method = None if path is None else scaled_method(read_json(resolve_folder(path) / CONFIG))
        if method is None or self.adapters is not None:
            return []
        dtype = "bfloat16" if self.recipe.precision == "bf16" else "float32"
        return [f"model.path: weights stored as {method} are dequantised; the result has them in {dtype}"]

    def parameters(self) -> list[tuple[str, Parameter]]:
        """What optimizers and averages work on, by name: as much of each parameter as this process has."""
        local = self.parallel.local_parameters
        if local:
            return self.placed.parameters()
        critic = [] if self.own_critic is None else self.own_critic.parameters()
        own = objective_parameters(self.objective)
        return [
            *self.placed.parameters(),
            *((own_name(name), parameter) for name, parameter in critic),
            *own.items(),
        ]

    def base(self) -> dict[str, Any] | None:
        """What tells the frozen base of a trained adapter from another; None where the model itself is trained."""
        return None if self.recipe.adapter is None else base_identity(self.recipe.model)

    def weights(self) -> dict[str, Tensor]:
        """What a checkpoint has of the model, by name, live: as much of each tensor as this process has."""
        weights = trained_weights(self.model, self.adapters)
        if self._critic_pass is not None:
            from danlu.stages.critic import critic_tensors

            own = None if self.own_critic is None else self.own_critic.subject.model
            weights = {**weights, **critic_tensors(self.adapters, own)}
        weights = {**weights, **objective_tensors(self.objective)}
        if self.moving:
            from danlu.stages.moving import moving_tensors

            weights |= moving_tensors(self.moving)
        return self.parallel.local_weights(weights)

    def micro(self, optimizer: Optimizers, most: int) -> int:
        """PackedDataset in a micro-batch, at most so many, by what the recipe says and what fits."""
        smallest = self.estimate(optimizer, 1)
        resident = smallest.parts.weights + smallest.parts.adapter - self.reward_bytes  # not there yet
        return find_micro_batch(smallest, most, resident_bytes=resident)

    def estimate(self, optimizer: Optimizers, micro: int) -> MemoryEstimate:
        """What a step of this process is expected to hold: counted, but for activations and logits."""
        recipe, model, ranks = self.recipe, self.model, self.parallel.ranks
        average = sum(parameter.nbytes for parameter in optimizer.parameters.values()) if recipe.ema is not None else 0
        resident = self._resident(self.weights(), optimizer, average)
        elsewhere = optimizer.state_bytes() - optimizer.resident_state_bytes()
        if not ranks.dense_data.all.alone and shards_on_host(recipe, self.device):
            elsewhere += resident.total
            resident = replace(resident, weights=0, adapter=0, gradients=0, optimizer=0, average=0)
        gathered, gradients = gathered_parameters(model, recipe)
        gathered += sum(gathered_parameters(placed.subject.model, recipe)[0] for placed in self.frozen.values())
        if self.own_critic is not None:
            of_critic = gathered_parameters(self.own_critic.subject.model, recipe)
            gathered, gradients = gathered + of_critic[0], gradients + of_critic[1]
        modules = (module for own in self._modules() for module in own.modules())
        packed = (module.workspace_elements for module in modules if isinstance(module, QuantizedModule))
        fixed = replace(
            resident,
            gradients=resident.gradients + gradients,
            packed=max(packed, default=0) * self.dtype.itemsize,
            gathered=gathered,
        )
        critic = self._critic_pass
        if critic is not None:
            chunks = (model if self.own_critic is None else self.own_critic.subject.model).chunks
            critic = critic._replace(config=stage_config(critic.config, chunks))
        estimate = estimate_of(
            recipe,
            stage_config(model.config, model.chunks),
            fixed,
            plan=self.placed.plan,
            micro=micro,
            device_type=self.device.type,
            offloaded_bytes=elsewhere,
            processes=ranks.world.size,
            critic=critic,
            in_flight=self.parallel.pipeline.micro_batches_in_flight,
            lengths=self.lengths,
        )
        device_map = self.placed.device_map
        return estimate if device_map is None else with_devices(estimate, device_map, self._bytes_by_device(optimizer))

    def _bytes_by_device(self, optimizer: Optimizers) -> BytesByDevice:
        """What of the models lies where, by the names of their parameters."""
        counted, policy = BytesByDevice(), self.placed.device_map
        assert policy is not None, "all models lie on one device"
        for placed in (self.placed, *self.frozen.values()):
            model, own = placed.subject.model, placed.device_map or policy
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                counted.weights[own.of_parameter(name)] += tensor.nbytes
        counted.weights[policy.head] += sum(tensor.nbytes for tensor in objective_tensors(self.objective).values())
        if self.adapters is not None:
            for added in self.adapters.added.values():
                for replaced in added.copies:
                    counted.weights[policy.of_parameter(replaced.name)] += replaced.original.nbytes
            for name, parameter in self.adapters.tensors(self.adapters.active[-1]).items():
                counted.adapter[policy.of_parameter(name)] += parameter.nbytes
        for name, parameter in optimizer.parameters.items():
            counted.trained[policy.of_parameter(name)] += parameter.nbytes
        return counted

    @property
    def _critic_pass(self) -> CriticPass | None:
        if self.own_critic is not None:
            return CriticPass(self.own_critic.subject.model.config, self.own_critic.plan)
        if self.adapters is not None and VALUE in self.adapters.added:
            return CriticPass(self.model.config, self.placed.plan)
        return None

    def learner(self, micro: int, sources: tuple[str, ...] = ()) -> DecoderLearner:
        """The placed models with the objective."""
        model, compiled = self.model, self.recipe.compile
        weights = (tensor for module in self._modules() for tensor in (*module.parameters(), *module.buffers()))
        forward = forward_of(model, compiled=compiled)
        batch = self.recipe.batch
        counts_trees = batch.pairs is not None or batch.prompts is not None
        learner = DecoderLearner(
            model,
            forward,
            self.device,
            self.dtype,
            micro,
            self.objective,
            self.evaluation,
            self.adapters,
            self._roles(forward),
            self._score_head,
            self._critic(forward),
            None if compiled else Activations.beside(weights),
            data.replicated_step(self.parallel, self.recipe.parallel),
            offload=self._activation_offload(),
            token_multiple=token_shares(self.recipe, self.parallel.ranks),
            source_names=sources,
            empty=self.empty,
            moving=self.moving,
            balancer=self.balancer,
            exact=self.recipe.numerics == "exact",
            drops_out=self.recipe.drops_out,
            sequence_tokens=self.recipe.data.max_length if counts_trees else None,
            context=ContextGroups.of(self.parallel.ranks, self.recipe.parallel.context.method),
        )
        if self.recipe.parallel.workers == "threads":
            from danlu.parallel.threads import Replicas

            devices = replica_devices(self.recipe, self.device)
            if self.frozen and len(set(devices)) > 1:
                raise RecipeError("parallel.workers: threads copies the policy to every GPU, not a frozen model")
            return ThreadedLearner(**vars(learner), replicas=Replicas(model, devices))
        return learner

    def check_weights(self) -> None:
        """Raises ModelError where numerics are to be exact and are not, by weights as they are before the first step:
        read, or taken up from a checkpoint."""
        if self.recipe.numerics == "exact":
            from danlu.inference.self_check import check_exact

            virtual = () if self.adapters is None else self.adapters.virtual_token_ids
            check_exact(self.model, self.dtype, virtual_token_ids=virtual, world=self.parallel.ranks.world)

    def generate(self) -> Generate | None:
        """Writes texts with the policy, where the recipe asks for samples."""
        if self.recipe.evaluation.samples is None:
            return None
        from danlu.stages.samples import sampler

        return sampler(self.recipe, self.placed)

    def peak(self) -> Peak:
        """The matrix-product speed of all devices, which utilisation is measured against."""
        return peak_of(self.dtype, self.device, self.parallel.ranks.world.size)

    def least_seconds(self) -> LeastSeconds:
        """The time of a step at `peak`, by its floating-point operations."""
        config, peak, frozen = self.model.config, self.peak().divisor, self.adapters is not None
        critic = self._critic_pass

        def seconds(lengths: Sequence[int], targets: int) -> float:
            flops = training_flops(config, lengths, targets, frozen=frozen)
            if critic is not None:  # without a head over the vocabulary
                flops += training_flops(critic.config, lengths, 0, frozen=self.own_critic is None)
            return flops / peak

        return seconds

    def expected(self, run: Run) -> MemoryEstimate:
        """What a step of `run` will hold in memory."""
        return self.estimate(run.optimizer, run.learner.micro)

    def memory(self, run: Run) -> MemoryParts:
        """The parts of the run's memory, as they were counted in training."""
        counted, model = run.learner.activations, self.model
        assert counted is not None, "there is nothing to tell where activations were not counted"
        average = 0 if run.ema is None else sum(tensor.nbytes for tensor in run.ema.state_tensors().values())
        return replace(
            self._resident(run.learner.weights(), run.optimizer, average),
            activations=round(counted.peak_bytes * self.parallel.pipeline.micro_batches_in_flight),
            logits=0 if model.config.task != "causal-lm" else self._logits_bytes(counted.targets),
            packed=dense_workspace_bytes(),
        )

    def _logits_bytes(self, targets: int) -> int:
        config = self.model.config
        return workspace_bytes(
            targets,
            config.hidden_size,
            config.vocab_size,
            element_bytes=self.dtype.itemsize,
            device_type=self.device.type,
            frozen=self.adapters is not None
            if not self.model.chunks.has_last
            else not self.model.head_weight.requires_grad,
        )

    def write(self, target: Path, value: BoxValue | None, *, writes: bool) -> None:
        """A model in the type of activations that it was trained with (fp16: float32), or an adapter; before it the
        model of values, where that is kept."""
        if self.recipe.value is not None and self.recipe.value.save:
            from danlu.stages.critic import critic_folder

            self._write_critic(critic_folder(target), value, writes=writes)
        classifies = self.model.config.task != "causal-lm"  # a critic's head is no part of the result
        head = self._gathered_score_head(value) if classifies else None
        write(self.placed.subject, self.recipe, target, value, writes=writes, score_head=head)

    def _write_critic(self, target: Path, value: BoxValue | None, *, writes: bool) -> None:
        head = self._gathered_score_head(value)
        assert head is not None, "the recipe's rules ask for ppo"
        if self.own_critic is not None:
            own = None if value is None else (lambda name, box=None: value(own_name(name), box))
            write(self.own_critic.subject, self.recipe, target, own, writes=writes, score_head=head)
            return
        has_own = self.adapters is not None and VALUE in self.adapters.added
        adapter = VALUE if has_own else TRAINED
        write(self.placed.subject, self.recipe, target, value, writes=writes, score_head=head, adapter=adapter)

    @property
    def _score_head(self) -> nn.Linear | None:
        return self.objective.score_head if isinstance(self.objective, HeadObjective) else None

    def _gathered_score_head(self, value: BoxValue | None) -> nn.Linear | None:
        """The score head with the values that it has where it is trained: of a pipeline on another stage than the one
        that writes. Every process calls it."""
        head = self._score_head
        if head is None or value is None or self.parallel.pipeline.alone:
            return head
        gathered = copy.deepcopy(head)
        for name in objective_parameters(self.objective):
            values = value(name)
            if values is not None:  # on the process that writes
                gathered.get_parameter(name.rpartition(".")[2]).data.copy_(values)
        return gathered

    def _modules(self) -> list[nn.Module]:
        own = [self.objective] if isinstance(self.objective, nn.Module) else []
        critic = [] if self.own_critic is None else [self.own_critic.subject.model]
        return [self.model, *(placed.subject.model for placed in self.frozen.values()), *critic, *own]

    def _critic(self, policy: Forward) -> Critic | None:
        """The model of values, where that is no head on the policy, whose forward is `policy`."""
        head, exact = self._score_head, self.recipe.numerics == "exact"
        if head is None or self._critic_pass is None:
            return None
        from danlu.stages.critic import Critic

        if self.own_critic is not None:
            model = self.own_critic.subject.model
            return Critic(model, forward_of(model, compiled=self.recipe.compile), self.dtype, head, exact=exact)
        return Critic(self.model, policy, self.dtype, head, self.adapters, exact)

    def _roles(self, policy: Forward) -> dict[Role, RoleOutputs]:
        """What makes the outputs of the models beside the policy, whose forward is `policy`.

        Where the policy is compiled, so are they: else bf16 would round them otherwise.
        """
        roles: dict[Role, RoleOutputs] = {}
        exact = self.recipe.numerics == "exact"
        for role, spec in self.beside.items():
            match spec:
                case ModelSpec():
                    model = self.frozen[role].subject.model
                    forward = forward_of(model, compiled=self.recipe.compile)
                    roles[role] = FrozenDecoder(model, forward, self.dtype, exact)
                case PolicyWithoutAdapter():
                    assert self.adapters is not None, "the recipe's rules ask for an adapter"
                    roles[role] = AdapterOff(self.model, policy, self.dtype, self.adapters, TRAINED, exact)
                case FromColumns(outputs):
                    roles[role] = StoredOutputs(outputs)
        return roles

    def _activation_offload(self) -> ActivationOffload | None:
        memory = self.recipe.memory
        if "activations" not in memory.offload:
            return None
        from danlu.memory.activation_offload import offload_for

        return offload_for(self.device, None if memory.folder is None else Path(memory.folder).expanduser())

    def _resident(self, weights: Mapping[str, Tensor], optimizer: Optimizers, average: int) -> MemoryParts:
        """What is there in every step, whatever goes through the model.

        weights: what is trained, as much of each as this process has. average: bytes of the moving average.
        """
        adapters = self.adapters
        of_own_critic = own_name("")
        adapter = 0
        if adapters is not None:
            adapter = sum(tensor.nbytes for name, tensor in weights.items() if not name.startswith(of_own_critic))
        models = sum(model_bytes(module) for module in self._modules() if isinstance(module, Decoder))
        own = sum(tensor.nbytes for tensor in objective_tensors(self.objective).values())
        trained = sum(parameter.nbytes for parameter in optimizer.parameters.values())
        return MemoryParts(
            weights=models + own + _replaced_bytes(adapters) + self.reward_bytes - adapter,
            adapter=adapter,
            gradients=optimizer.gradient_bytes(),
            optimizer=optimizer.resident_state_bytes(),
            average=average,
            activations=0,
            logits=0,
            stash=self.parallel.pipeline.weight_delay * trained,
        )


def _replaced_bytes(adapters: AdapterSet | None) -> int:
    """Bytes of parameters that have been replaced by trained copies of theirs, and wait beside the model."""
    added = () if adapters is None else adapters.added.values()
    return sum(copy.original.nbytes for adapter in added for copy in adapter.copies)
