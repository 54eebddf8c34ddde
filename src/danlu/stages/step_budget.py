"""The budget of a decoder's step: its micro-batch size, the memory it takes, and the time it cannot go below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from danlu.assembly.memory_estimate import (
    BytesByDevice,
    MemoryEstimate,
    find_micro_batch,
    gathered_parameters,
    kernels_name,
    with_devices,
)
from danlu.assembly.parallelize import shards_on_host
from danlu.assembly.parameters import model_bytes, own_name
from danlu.core.types import MemoryParts
from danlu.models.decoder import Decoder
from danlu.numerics.quantized_weight import QuantizedModule, dense_workspace_bytes
from danlu.objectives.loss_memory import workspace_bytes
from danlu.optim.build import Optimizers
from danlu.planning.flops import DecoderFlops
from danlu.planning.layer_training import layers_training, training_of_chunks
from danlu.planning.product_peak import Peak, peak_of
from danlu.planning.step_estimate import CriticPass, stage_config
from danlu.stages.learner import objective_tensors
from danlu.stages.placed import PlacedDecoder
from danlu.stages.protocols import LeastSeconds
from danlu.training.state import Run


@dataclass(frozen=True)
class DecoderBudget:
    """The `StepBudget` of a decoder."""

    policy: PlacedDecoder
    lengths: np.ndarray | None = None  # [rows] int: tokens of each row, where the rows are known before training
    reward_bytes: int = 0  # of reward models that this process loads when they first judge

    def micro(self, optimizer: Optimizers, most: int) -> int:
        """The micro-batch size in packs: the recipe's, or the largest that fits in memory, at most `most`."""
        smallest = self.estimate(optimizer, 1)
        resident = smallest.parts.weights + smallest.parts.adapter - self.reward_bytes  # not there yet
        return find_micro_batch(smallest, most, resident_bytes=resident)

    def estimate(self, optimizer: Optimizers, micro: int) -> MemoryEstimate:
        """The expected memory of a step of this process: counted, but for activations and logits."""
        policy = self.policy
        recipe, model, ranks = policy.recipe, policy.model, policy.parallel.ranks
        average = sum(parameter.nbytes for parameter in optimizer.parameters.values()) if recipe.ema is not None else 0
        resident = self._resident(policy.weights(), optimizer, average)
        elsewhere = optimizer.state_bytes() - optimizer.resident_state_bytes()
        if not ranks.dense_data.all.alone and shards_on_host(recipe.memory, policy.device):
            elsewhere += resident.total
            resident = replace(resident, weights=0, adapter=0, gradients=0, optimizer=0, average=0)
        gathered, gradients = gathered_parameters(model, recipe)
        gathered += sum(gathered_parameters(placed.subject.model, recipe)[0] for placed in policy.frozen.values())
        if policy.own_critic is not None:
            of_critic = gathered_parameters(policy.own_critic.subject.model, recipe)
            gathered, gradients = gathered + of_critic[0], gradients + of_critic[1]
        modules = (module for own in policy.modules() for module in own.modules())
        packed = (module.workspace_elements for module in modules if isinstance(module, QuantizedModule))
        fixed = replace(
            resident,
            gradients=resident.gradients + gradients,
            packed=max(packed, default=0) * policy.dtype.itemsize,
            gathered=gathered,
        )
        critic = None
        if (placed := policy.critic_decoder) is not None:
            model_of_values = placed.subject.model
            critic = CriticPass(stage_config(model_of_values.config, model_of_values.chunks), placed.plan)
        estimate = MemoryEstimate(
            recipe,
            stage_config(model.config, model.chunks),
            fixed,
            plan=policy.placed.plan,
            micro=micro,
            device_type=policy.device.type,
            kernels=kernels_name(policy.device.type),
            has_head=model.chunks.has_last,
            training=training_of_chunks(layers_training(recipe, model.config), model.chunks, model.chunks.local),
            offloaded_bytes=elsewhere,
            processes=ranks.world.size,
            critic=critic,
            in_flight=policy.parallel.micro_batches_in_flight,
            lengths=self.lengths,
        ).with_activations()
        device_map = policy.placed.device_map
        return estimate if device_map is None else with_devices(estimate, device_map, self._bytes_by_device(optimizer))

    def _bytes_by_device(self, optimizer: Optimizers) -> BytesByDevice:
        """The bytes of the models on each device, by the names of their parameters."""
        counted, policy = BytesByDevice(), self.policy
        device_map, adapters = policy.placed.device_map, policy.adapters
        assert device_map is not None, "all models lie on one device"
        for placed in (policy.placed, *policy.frozen.values()):
            model, own = placed.subject.model, placed.device_map or device_map
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                counted.weights[own.of_parameter(name)] += tensor.nbytes
        own_tensors = objective_tensors(policy.objective).values()
        counted.weights[device_map.head] += sum(tensor.nbytes for tensor in own_tensors)
        if adapters is not None:
            for added in adapters.added.values():
                for replaced in added.copies:
                    counted.weights[device_map.of_parameter(replaced.name)] += replaced.original.nbytes
            for name, parameter in adapters.tensors(adapters.active[-1]).items():
                counted.adapter[device_map.of_parameter(name)] += parameter.nbytes
        for name, parameter in optimizer.parameters.items():
            counted.trained[device_map.of_parameter(name)] += parameter.nbytes
        return counted

    def peak(self) -> Peak:
        """The matrix-product speed of all devices, which utilisation is measured against."""
        policy = self.policy
        return peak_of(policy.dtype, policy.device, policy.parallel.ranks.world.size)

    def least_seconds(self) -> LeastSeconds:
        """The time of a step at `peak`, by its floating-point operations."""
        policy = self.policy
        own, peak, frozen = DecoderFlops(policy.model.config), self.peak().divisor, policy.adapters is not None
        decoder = policy.critic_decoder
        critic = None if decoder is None else DecoderFlops(decoder.subject.model.config)

        def seconds(lengths: Sequence[int], targets: int) -> float:
            flops = own.training(lengths, targets, frozen=frozen)
            if critic is not None:  # without a head over the vocabulary
                flops += critic.training(lengths, 0, frozen=policy.own_critic is None)
            return flops / peak

        return seconds

    def expected(self, run: Run) -> MemoryEstimate:
        """The memory that a step of `run` will hold."""
        return self.estimate(run.optimizer, run.learner.micro)

    def memory(self, run: Run) -> MemoryParts:
        """The parts of the run's memory, as they were counted in training."""
        counted, policy = run.learner.activations, self.policy
        assert counted is not None, "there is nothing to tell where activations were not counted"
        average = 0 if run.ema is None else sum(tensor.nbytes for tensor in run.ema.state_tensors().values())
        is_language_model = policy.model.config.task == "causal-lm"
        # No operation saves the final hidden states, those of targets, and the gradient of these.
        states = (
            3 * counted.targets * policy.model.config.hidden_size * policy.dtype.itemsize if is_language_model else 0
        )
        return replace(
            self._resident(run.learner.weights(), run.optimizer, average),
            activations=round(counted.peak_bytes * policy.parallel.micro_batches_in_flight) + states,
            logits=self._logits_bytes(counted.targets) if is_language_model else 0,
            packed=dense_workspace_bytes(),
        )

    def _logits_bytes(self, targets: int) -> int:
        policy, config = self.policy, self.policy.model.config
        return workspace_bytes(
            targets,
            config.hidden_size,
            config.vocab_size,
            element_bytes=policy.dtype.itemsize,
            device_type=policy.device.type,
            frozen=not policy.model.trains_head if policy.model.chunks.has_last else policy.adapters is not None,
        )

    def _resident(self, weights: Mapping[str, Tensor], optimizer: Optimizers, average: int) -> MemoryParts:
        """The parts of a step's memory that do not depend on its micro-batches.

        weights: the trained tensors, as much of each as this process has. average: bytes of the moving average.
        """
        policy, of_own_critic, adapter, replaced = self.policy, own_name(""), 0, 0
        if policy.adapters is not None:
            adapter = sum(tensor.nbytes for name, tensor in weights.items() if not name.startswith(of_own_critic))
            # Parameters that trained copies have replaced wait next to the model.
            copies = (copy for added in policy.adapters.added.values() for copy in added.copies)
            replaced = sum(copy.original.nbytes for copy in copies)
        models = sum(model_bytes(module) for module in policy.modules() if isinstance(module, Decoder))
        own = sum(tensor.nbytes for tensor in objective_tensors(policy.objective).values())
        trained = sum(parameter.nbytes for parameter in optimizer.parameters.values())
        pipeline = policy.parallel.pipeline
        return MemoryParts(
            weights=models + own + replaced + self.reward_bytes - adapter,
            adapter=adapter,
            gradients=optimizer.gradient_bytes(),
            optimizer=optimizer.resident_state_bytes(),
            average=average,
            activations=0,
            logits=0,
            stash=0 if pipeline is None else pipeline.weight_delay * trained,
        )
