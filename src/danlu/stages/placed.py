"""The decoder that a stage trains, on the processes of a run, with the models and the objective next to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from danlu.assembly.devices import replica_devices
from danlu.assembly.parallelize import Placed, token_shares
from danlu.assembly.parameters import own_name
from danlu.assembly.recipe_adapters import base_identity
from danlu.core.errors import RecipeError
from danlu.core.layer_types import TRAINED
from danlu.core.types import HeadObjective, Objective, Pack, Role
from danlu.data.batch import EMPTY_PACK
from danlu.models.decoder import Decoder
from danlu.models.layer_spec import Experts
from danlu.numerics.dtypes import DTYPES
from danlu.parallel import data
from danlu.parallel.parallel_context import ParallelContext
from danlu.recipe import Recipe
from danlu.recipe.value import VALUE
from danlu.stages.learner import (
    DecoderLearner,
    ThreadedLearner,
    objective_parameters,
    objective_tensors,
    trained_weights,
)
from danlu.stages.placing_notes import placing_notes
from danlu.stages.protocols import FromColumns, RoleSpec
from danlu.stages.roles import AdapterOff, Forward, FrozenDecoder, RoleOutputs, StoredOutputs, forward_of
from danlu.training.memory_parts import Activations
from danlu.training.state import Generate

if TYPE_CHECKING:
    from danlu.adapters.adapter_set import AdapterSet
    from danlu.adapters.dropout import DropoutState
    from danlu.memory.activation_offload import ActivationOffload
    from danlu.models.load_balancing import Balancer
    from danlu.parallel.context_groups import ContextGroups
    from danlu.stages.critic import Critic
    from danlu.stages.moving import MovingWeights


@dataclass(frozen=True)
class PlacedDecoder:
    """A `PlacedModel`: a decoder, or adapters on one, with the models that its objective reads."""

    recipe: Recipe
    placed: Placed
    device: torch.device
    objective: Objective
    evaluation: Objective
    beside: Mapping[Role, RoleSpec] = field(default_factory=dict)  # other models that the objective asks
    frozen: Mapping[Role, Placed] = field(default_factory=dict)  # those of it that are decoders of their own
    own_critic: Placed | None = None  # a decoder of values, which is trained
    moving: Mapping[Role, MovingWeights] = field(default_factory=dict)  # weights of those that follow the policy
    balancer: Balancer | None = None  # of a policy with experts
    empty: Pack = EMPTY_PACK  # an item without targets, with what the items of the stage have

    @property
    def model(self) -> Decoder:
        """The policy."""
        return self.placed.subject.model

    @property
    def adapters(self) -> AdapterSet | None:
        """The adapters that are trained in place of the policy's own parameters, if any."""
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
        """Lines for the console on how the models were placed."""
        return tuple(placing_notes(self.recipe.model, self.recipe.activations, self.placed))

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations."""
        return DTYPES[self.recipe.activations]

    @property
    def score_head(self) -> nn.Linear | None:
        """The head of the objective, where it has one."""
        return self.objective.score_head if isinstance(self.objective, HeadObjective) else None

    @property
    def critic_decoder(self) -> Placed | None:
        """The decoder that gives values in a pass of its own: another one, or the policy's with another adapter."""
        if self.own_critic is None and self.adapters is not None and VALUE in self.adapters.added:
            return self.placed
        return self.own_critic

    def modules(self) -> list[nn.Module]:
        """The models that this process has, frozen ones included, and the objective where it has parameters."""
        own = [self.objective] if isinstance(self.objective, nn.Module) else []
        critic = [] if self.own_critic is None else [self.own_critic.subject.model]
        return [self.model, *(placed.subject.model for placed in self.frozen.values()), *critic, *own]

    def parameters(self) -> list[tuple[str, Parameter]]:
        """The parameters of optimizers and averages, by name: as much of each as this process has."""
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
        """The identity of the frozen base of a trained adapter; None where the model itself is trained."""
        return None if self.recipe.adapter is None else base_identity(self.recipe.model)

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors in a checkpoint, by name, live: this process's shard of each."""
        weights = trained_weights(self.model, self.adapters)
        if self.critic_decoder is not None:
            from danlu.stages.critic import critic_tensors

            own = None if self.own_critic is None else self.own_critic.subject.model
            weights = {**weights, **critic_tensors(self.adapters, own)}
        weights = {**weights, **objective_tensors(self.objective)}
        for moving in self.moving.values():
            weights |= moving.tensors()
        return self.parallel.local_weights(weights)

    def learner(self, micro: int, sources: tuple[str, ...] = ()) -> DecoderLearner:
        """The placed models with the objective."""
        model, compiled = self.model, self.recipe.compile
        weights = (tensor for module in self.modules() for tensor in (*module.parameters(), *module.buffers()))
        forward = forward_of(model, compiled=compiled)
        batch = self.recipe.batch
        parallel = self.parallel if self.parallel.alone else data.replicated_step(self.parallel, self.recipe.parallel)
        counts_trees = batch.rows is not None or batch.prompts is not None
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
            self.score_head,
            self._critic(forward),
            None if compiled else Activations.beside(weights),
            parallel,
            offload=self._activation_offload(),
            token_multiple=token_shares(self.recipe.parallel, self.parallel.ranks),
            source_names=sources,
            empty=self.empty,
            moving=self.moving,
            balancer=self.balancer,
            exact=self.recipe.numerics == "exact",
            draws=self._draws(),
            drops_out=self.recipe.drops_out,
            sequence_tokens=self.recipe.data.max_length if counts_trees else None,
            context=self._context(parallel),
        )
        if self.recipe.parallel.workers == "threads":
            from danlu.parallel.threads import Replicas

            devices = replica_devices(self.recipe.parallel.data, self.device)
            if self.frozen and len(set(devices)) > 1:
                raise RecipeError("parallel.workers: threads copies the policy to every GPU, not a frozen model")
            return ThreadedLearner(**vars(learner), replicas=Replicas(model, devices))
        return learner

    def _context(self, parallel: ParallelContext) -> ContextGroups | None:
        """The context groups of this process; None of one that is alone."""
        if parallel.alone:
            return None
        from danlu.parallel.context_groups import ContextGroups

        return ContextGroups.of(parallel.ranks, self.recipe.parallel.context.method)

    def _draws(self) -> DropoutState | None:
        """Gives routers that draw experts their random numbers, and returns the state of these, which is that of
        adapters' dropout where there are some; None for other models."""
        feeds = [kind.feed for kind in self.model.config.kinds if self.recipe.drops_out]
        if not any(isinstance(feed, Experts) and feed.router.score == "sparse-mixer" for feed in feeds):
            return None
        if self.recipe.parallel.workers == "threads":
            raise RecipeError(
                f"parallel.workers: threads has no random numbers for the routers of {self.model.config.family}, which "
                "draw experts while the model trains. Use processes"
            )
        from danlu.adapters.dropout import DropoutState, SiteNumbers
        from danlu.models.router_replay import routers_of

        adapters = self.adapters
        state = DropoutState(self.recipe.seed) if adapters is None else adapters.build_context.dropout_state
        for place, router in routers_of(self.model).items():
            router.draws = SiteNumbers(f"router {place}", state)
        return state

    def check_weights(self) -> None:
        """Raises ModelError where numerics are to be exact and are not, by weights as they are before the first step:
        read, or taken up from a checkpoint."""
        if self.recipe.numerics == "exact":
            from danlu.inference.self_check import check_exact

            virtual = self.placed.subject.virtual_token_ids
            check_exact(self.model, self.dtype, virtual_token_ids=virtual, world=self.parallel.ranks.world)

    def generate(self) -> Generate | None:
        """Writes texts with the policy, where the recipe asks for samples."""
        if self.recipe.evaluation.samples is None:
            return None
        from danlu.stages.samples import sampler

        return sampler(self.recipe, self.placed)

    def _critic(self, policy: Forward) -> Critic | None:
        """The value model, unless it is a head on the policy. policy: the forward pass of the policy."""
        head, exact = self.score_head, self.recipe.numerics == "exact"
        if head is None or self.critic_decoder is None:
            return None
        from danlu.stages.critic import Critic

        if self.own_critic is not None:
            model = self.own_critic.subject.model
            return Critic(model, forward_of(model, compiled=self.recipe.compile), self.dtype, exact, score_head=head)
        return Critic(self.model, policy, self.dtype, exact, score_head=head, adapters=self.adapters)

    def _roles(self, policy: Forward) -> dict[Role, RoleOutputs]:
        """The outputs of the models of other roles, by role. policy: the forward pass of the policy.

        Where the policy is compiled, so are they: else bf16 would round them otherwise.
        """
        roles: dict[Role, RoleOutputs] = {}
        exact = self.recipe.numerics == "exact"
        for role, spec in self.beside.items():
            if isinstance(spec, FromColumns):
                roles[role] = StoredOutputs(spec.outputs)
            elif role in self.frozen:
                model = self.frozen[role].subject.model
                forward = forward_of(model, compiled=self.recipe.compile)
                roles[role] = FrozenDecoder(model, forward, self.dtype, exact)
            else:  # the policy without its adapter
                assert self.adapters is not None, "the recipe's rules ask for an adapter"
                roles[role] = AdapterOff(self.model, policy, self.dtype, exact, adapters=self.adapters, name=TRAINED)
        return roles

    def _activation_offload(self) -> ActivationOffload | None:
        memory = self.recipe.memory
        if "activations" not in memory.offload:
            return None
        from danlu.memory.activation_offload import offload_for

        return offload_for(self.device, None if memory.folder is None else Path(memory.folder).expanduser())
