"""The budget of a decoder's step: the memory that it has taken, and the time that it cannot go below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from danlu.assembly.parameters import model_bytes, own_name
from danlu.core.memory_parts import MemoryParts
from danlu.models.decoder import Decoder
from danlu.numerics.quantized_weight import dense_workspace_bytes
from danlu.objectives.loss_memory import workspace_bytes
from danlu.optim.build import Optimizers
from danlu.planning.flops import DecoderFlops
from danlu.planning.product_peak import Peak, peak_of
from danlu.stages.learner import objective_tensors
from danlu.stages.placed import PlacedDecoder
from danlu.stages.protocols import LeastSeconds
from danlu.training.state import Run


@dataclass(frozen=True)
class DecoderBudget:
    """The `StepBudget` of a decoder."""

    policy: PlacedDecoder
    reward_bytes: int = 0  # of reward models that this process loads when they first judge

    def automatic_micro(self) -> None:
        """None: the plan of the step says how many packed sequences fit."""

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
            self.resident(run.learner.weights(), run.optimizer, average),
            activations=round(counted.peak_bytes * policy.parallel.micro_batches_in_flight) + states,
            logits=self._logits_bytes(counted.targets) if is_language_model else 0,
            packed=dense_workspace_bytes() + self._kept_codes(),
        )

    def _kept_codes(self) -> int:
        if self.policy.recipe.trained_quantization is None:
            return 0
        from danlu.assembly.trained_quantization import kept_code_bytes

        return kept_code_bytes(self.policy.model)

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

    def resident(self, weights: Mapping[str, Tensor], optimizer: Optimizers, average: int) -> MemoryParts:
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
