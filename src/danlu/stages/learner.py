"""A decoder as it learns: micro-batches of packs, its outputs, and the objective over them, in every layout.

T packed tokens · N trained targets
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from danlu.core.layer_types import Attend
from danlu.core.types import (
    Batch,
    CountingObjective,
    Loss,
    Objective,
    Outputs,
    Pack,
    Role,
    RoleObjective,
    StepObjective,
    TargetSources,
    Totals,
)
from danlu.data.batch import EMPTY_PACK, collate, pad_to_bucket
from danlu.models.attend import attend_for
from danlu.models.decoder import Decoder
from danlu.objectives.cross_entropy import CrossEntropy
from danlu.objectives.gradient_scale import scale_gradient
from danlu.optim.gradients import non_finite
from danlu.parallel.batch_sharding import shard_by_tokens, shard_in_order
from danlu.parallel.parallel_context import ParallelContext
from danlu.recipe.value import VALUE
from danlu.stages.roles import DecoderPass, DecoderRole, Forward, RoleOutputs
from danlu.training.diagnosis import non_finite_on_any
from danlu.training.learner import Activation, MicroStep
from danlu.training.memory_parts import Activations
from danlu.training.step import sum_losses

if TYPE_CHECKING:
    from danlu.adapters.adapter_set import AdapterSet
    from danlu.adapters.dropout import DropoutState
    from danlu.memory.activation_offload import ActivationOffload
    from danlu.models.load_balancing import Balancer
    from danlu.parallel.context_groups import ContextGroups
    from danlu.parallel.threads import Replicas
    from danlu.stages.critic import Critic
    from danlu.stages.moving import MovingWeights


@dataclass(frozen=True)
class DecoderLearner:
    """The `Learner` of a language model: where, in which type, through which (perhaps compiled) forward it learns."""

    model: Decoder
    model_forward: Forward  # the model itself, or its compiled form
    device: torch.device
    dtype: torch.dtype  # of activations; trained parameters are float32
    micro: int  # packs in a micro-batch
    objective: Objective = field(default_factory=CrossEntropy)
    evaluation: Objective = field(default_factory=lambda: CrossEntropy(reports_nll=True))  # what `assess` reports
    adapters: AdapterSet | None = None  # with some, the model itself is frozen
    roles: Mapping[Role, RoleOutputs] = field(default_factory=dict)  # other models than the policy, without gradients
    score_head: nn.Linear | None = None  # [labels, D] on the policy's hidden states
    critic: Critic | None = None  # where values are not a head on the policy
    activations: Activations | None = None  # None where the forward is compiled
    parallel: ParallelContext = field(default_factory=ParallelContext)
    offload: ActivationOffload | None = None  # where activations wait for the backward pass, if not on the device
    token_multiple: int = 1  # the number of tokens is a multiple of it, where ranks cut them among each other
    source_names: tuple[str, ...] = ()  # of the rows, for the loss by source
    empty: Pack = EMPTY_PACK  # without targets, with the branches, columns and facts of the stage's items
    moving: Mapping[Role, MovingWeights] = field(default_factory=dict)  # weights that follow the policy's
    balancer: Balancer | None = None  # of a policy with experts
    sequence_tokens: int | None = None
    """Tokens of a packed sequence where items are dealt by tokens: `micro` counts such sequences. None: `micro` counts
    items."""
    exact: bool = False
    """Whether a token's hidden state and log-probability have the bits that they have in a rollout."""
    context: ContextGroups | None = None
    """Ranks that take different tokens of the same packs; None where each process takes all tokens of its packs."""
    draws: DropoutState | None = None
    """The micro-batch that routers draw experts for, where a model has such routers."""
    drops_out: bool = True
    """Whether steps have the dropout of their adapters, and routers draw experts in them."""
    assessed_dropout: int | None = None
    """The step that passes without gradients take their dropout from; None: they have no dropout."""

    def weights(self) -> dict[str, Tensor]:
        """All trained tensors, by name, live: the decoder or the adapter on it, then the objective's own."""
        named = {**trained_weights(self.model, self.adapters), **objective_tensors(self.objective)}
        named |= {} if self.critic is None else self.critic.tensors()
        for moving in self.moving.values():
            named |= moving.tensors()
        named |= {} if self.balancer is None else self.balancer.tensors()
        return self.parallel.local_weights(named)

    def totals(self, items: Sequence[Pack]) -> Totals:
        """Totals of a step of these packs, with the divisors that objective and evaluation need."""
        divisors: dict[str, float] = {}
        if isinstance(self.evaluation, CountingObjective) and self.evaluation is not self.objective:
            divisors |= self.evaluation.divisors(items)
        if isinstance(self.objective, CountingObjective):
            divisors |= self.objective.divisors(items)
        return replace(Totals.of(items), divisors=divisors)

    def micro_batches(self, items: Sequence[Pack]) -> Sequence[Sequence[int]]:
        """The numbers of the packs in each micro-batch of this process: in order, or by tokens."""
        parallel = self.parallel
        if self.sequence_tokens is None:
            staged, lengths = items[0].stage_length, self.model.staged_ropes
            # As many tokens as `micro` packs of the longest stage have: it was chosen for their memory.
            micro = self.micro if staged is None else self.micro * max(lengths) // staged
            return shard_in_order(items, parallel, micro)
        data, capacity = parallel.ranks.data, self.micro * self.sequence_tokens
        least, tokens = parallel.least_micro_batches(len(items)), [item.tokens for item in items]
        dealt = shard_by_tokens(tokens, data.index, data.size, capacity, least=least)
        return [*dealt, *[[]] * (parallel.fitting(len(dealt)) - len(dealt))]

    def prepare(
        self, items: Sequence[Pack], micro_batches: Sequence[Sequence[int]], step: int | None
    ) -> Sequence[Pack]:
        """The packs as the objective wants them for its pass with gradients, where it has to see the whole step first:
        the log-probabilities of all branches, from a pass without gradients."""
        if not isinstance(self.objective, StepObjective):
            return items
        from danlu.stages.no_grad_pass import step_logprobs

        logprobs = step_logprobs(self, self.objective.step_items(items), micro_batches, step)
        return self.objective.prepared(items, logprobs, training=step is not None)

    def end_step(self) -> Mapping[str, float]:
        """Metrics of how evenly the experts of each layer were loaded in the step."""
        if self.balancer is None:
            return {}
        from danlu.models.load_balancing import merged_metrics

        return merged_metrics(self.parallel.all_gather_pipeline(self.balancer.end_step(self.parallel.all_reduce_data)))

    def updated(self, step: int) -> None:
        """Models that move take up the policy's new weights, routers move the biases of their choice, and weights that
        are rounded are encoded again."""
        if self.model.rounding is not None:
            self.model.rounding.weights_changed()
        if self.balancer is not None:
            self.balancer.updated()
        for weights in self.moving.values():
            weights.updated(step)

    def collate(self, items: Sequence[Pack]) -> Batch:
        """A micro-batch on the device, with the virtual tokens that an adapter wants before each document."""
        virtual_token_ids = () if self.adapters is None else self.adapters.virtual_token_ids
        packs, context = items or [self.empty], self.context
        device = self.device if context is None else "cpu"
        batch = collate(packs, device, virtual_token_ids=virtual_token_ids, source_names=self.source_names)
        if context is None:
            return batch
        from danlu.data.context_sharding import on_device, share_of_batch, shares

        # A layer of width D multiplies a token with about 12 D^2 parameters, and a score with 2 D numbers.
        token_cost = 6 * self.model.config.hidden_size
        dealt = shares(batch.boundaries, context.size, trees=batch.trees, token_cost=token_cost)
        return on_device(share_of_batch(batch, dealt, context.index, context.all_reduce), self.device)

    def judged_by(self, evaluation: Objective, dropout_step: int | None = None) -> DecoderLearner:
        """This learner with another objective for its passes without gradients, and the dropout of a step in them."""
        return replace(self, evaluation=evaluation, assessed_dropout=dropout_step)

    @contextmanager
    def at(self, micro_step: MicroStep[Any]) -> Iterator[None]:
        """Dropout of adapters and the draws of routers, where steps have them, by the micro-batch's place in the step;
        where their virtual tokens are in it."""
        if self.model.begin_pass is not None:
            self.model.begin_pass(micro_step.batch.tokens)
        step = self.assessed_dropout if micro_step.step is None else micro_step.step
        dropout_state = self.draws if self.adapters is None else self.adapters.build_context.dropout_state
        if dropout_state is None or step is None or not self.drops_out:
            yield
            return
        virtual = 0 if self.adapters is None else len(self.adapters.virtual_token_ids)
        packs = micro_step.items or [(0, self.empty)]
        lengths = [(number, pack.tokens + virtual * pack.documents) for number, pack in packs]
        rows = None
        if self.context is not None:
            from danlu.data.context_sharding import rows_of

            rows = rows_of(micro_step.batch.shares[self.context.index])
        dropout_state.begin(step, lengths, rows)
        try:
            yield
        finally:
            dropout_state.end()

    def forward(self, chunk: int, micro_step: MicroStep[Any], x: Activation | None) -> Activation | Loss:
        """The loss of a micro-batch; of a chunk before the last one hidden states [T', D], the policy's ([T'/tp, D]
        where tensor ranks cut tokens) and those of the roles that the objective asks."""
        batch, totals = micro_step.batch, micro_step.totals
        if chunk < self.model.chunks.last:
            return self._hidden_states(chunk, micro_step, x)
        if micro_step.step is None:
            return self.assess(batch, totals, x)
        return self.losses(batch, totals, micro_step.gradient_scale, x)

    @property
    def trained_activations(self) -> int:
        """The policy's, and those of the model of values where that is no head on the policy."""
        return self._trained_among(self._roles_of(self.objective))

    def empty_activation(self, micro_step: MicroStep[Any]) -> Activation:
        """Makes an empty [T', D] for each model in the type of activations; where tensor ranks split tokens, as they do
        with gradients, it has this rank's tokens."""
        tokens = len(pad_to_bucket(micro_step.batch, self.token_multiple).tokens)
        of_trained = tokens // (1 if micro_step.step is None else self.token_multiple)
        asked = self._asked(micro_step)
        trained = self._trained_among(asked)
        shapes = [
            (of_trained if number < trained else tokens, model.config.hidden_size)
            for number, model in enumerate(self._models(asked).values())
        ]
        return tuple(torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes)

    def losses(self, batch: Batch, totals: Totals, gradient_scale: float = 1.0, x: Activation | None = None) -> Loss:
        """The objective's loss of a micro-batch. x: as `forward` has it."""
        with self._offloaded():
            outputs = self.outputs(batch, gradient_scale, self._roles_of(self.objective), totals, x)
            loss = self.objective(outputs, batch, totals)
            return replace(loss, total=scale_gradient(loss.total, gradient_scale))

    def assess(self, batch: Batch, totals: Totals, x: Activation | None = None) -> Loss:
        """The evaluation's loss of a micro-batch, without gradients. x: as `forward` has it."""
        with torch.no_grad():
            return self.evaluation(self.outputs(batch, 1.0, self._roles_of(self.evaluation), x=x), batch, totals)

    def _hidden_states(self, chunk: int, micro_step: MicroStep[Any], x: Activation | None) -> Activation:
        trains, batch = micro_step.step is not None, micro_step.batch
        filled = pad_to_bucket(batch, self.token_multiple)
        attend = self._attend(filled)
        asked = self._asked(micro_step)
        before = self._by_model(x, asked)
        of_roles = [
            role.hidden_states(batch, filled, attend, chunk, before.get(name))
            for name, role in self.roles.items()
            if name in asked and isinstance(role, DecoderRole)
        ]
        of_critic: list[Tensor] = []
        if self.critic is not None and VALUE in asked:
            with self._offloaded() if trains else torch.no_grad():
                of_critic = [self.critic.hidden_states(batch, filled, attend, chunk, before.get(VALUE))]
        routed = self._routed(filled, micro_step.totals if trains else None, micro_step.gradient_scale)
        own = before.get("policy")
        with self._offloaded() if trains else torch.no_grad(), routed:
            of_policy = self._policy.hidden(batch, filled, attend, chunk, own)
        return of_policy, *of_critic, *of_roles

    @property
    def _policy(self) -> DecoderPass:
        return DecoderPass(self.model, self.model_forward, self.dtype, self.exact, score_head=self.score_head)

    def _offloaded(self) -> AbstractContextManager[None]:
        return nullcontext() if self.offload is None else self.offload.active()

    def _roles_of(self, objective: Objective) -> Collection[Role]:
        return objective.roles if isinstance(objective, RoleObjective) else self.roles

    def _asked(self, micro_step: MicroStep[Any]) -> Collection[Role]:
        return self._roles_of(self.evaluation if micro_step.step is None else self.objective)

    def _models(self, roles: Collection[Role]) -> dict[Role, Decoder]:
        """The decoders that run for `roles`, in the order in which their hidden states lie in an `Activation`: the
        policy, the model of values where it is no head on the policy, and frozen ones."""
        models: dict[Role, Decoder] = {"policy": self.model}
        if self.critic is not None and VALUE in roles:
            models[VALUE] = self.critic.model
        frozen = {name: role.model for name, role in self.roles.items() if isinstance(role, DecoderRole)}
        return {**models, **{name: model for name, model in frozen.items() if name in roles}}

    def _trained_among(self, roles: Collection[Role]) -> int:
        """How many of `_models` are trained: the first ones."""
        return 1 + (self.critic is not None and VALUE in roles)

    def _by_model(self, x: Activation | None, roles: Collection[Role]) -> dict[Role, Tensor]:
        """The tensors of an activation by the role of their model; none before the first chunk."""
        return {} if x is None else dict(zip(self._models(roles), x, strict=True))

    def outputs(
        self,
        batch: Batch,
        gradient_scale: float,
        roles: Collection[Role] | None = None,
        totals: Totals | None = None,
        x: Activation | None = None,
    ) -> dict[Role, Outputs]:
        """Computes the outputs of the policy and of the models of `roles` (by default all) for `batch`; only those of
        the policy and of the critic carry gradients.

        totals: of the step that the batch is trained on in; the load of the policy's experts is counted and balanced.
        x: the output of the chunk before the last one for the policy and these roles, where they are in several.

        The policy sends tokens to the experts that the batch has recorded of its rollout. Other models choose their
        own: they have other weights, of which the rollout knows nothing.
        """
        filled = pad_to_bucket(batch, self.token_multiple)
        attend = self._attend(filled)
        asked = (*self.roles, VALUE) if roles is None else roles
        hidden = self._by_model(x, asked)
        beside: dict[Role, Outputs] = {
            role: outputs_of(batch, filled, attend, hidden.get(role))
            for role, outputs_of in self.roles.items()
            if role in asked
        }
        if self.critic is not None and VALUE in asked:
            beside[VALUE] = self.critic(batch, filled, attend, gradient_scale, hidden.get(VALUE))
        with self._routed(filled, totals, gradient_scale):
            policy = self._policy.outputs(batch, filled, attend, hidden.get("policy"), gradient_scale)
        return {**beside, "policy": policy}

    def _attend(self, filled: Batch) -> Attend:
        has_dropout = self.adapters is not None and self.adapters.build_context.dropout_state.active
        recomputed_layers = self.model.recomputed_attention
        if self.critic is not None:  # attends as the policy does
            recomputed_layers |= self.critic.model.recomputed_attention
        if self.context is None:
            return attend_for(filled, exact=self.exact, recomputed_layers=recomputed_layers)
        assert not self.exact, "the recipe's rules refuse it"
        return self.context.attend_for(filled, sends_expanded=has_dropout, recomputed_layers=recomputed_layers)

    def _routed(self, filled: Batch, totals: Totals | None, gradient_scale: float) -> AbstractContextManager[None]:
        """A context in which tokens go to their recorded experts, also where activations are recomputed; in a step,
        with `totals` given, the policy's experts are counted and balanced.

        The step divides by `totals.weight`, and the balancing loss is a mean over tokens.
        """
        contexts: list[Callable[[], AbstractContextManager[None]]] = []
        if self.balancer is not None and totals is not None:
            from danlu.models.load_balancing import BatchTokens

            factor = gradient_scale * totals.weight / sum(totals.document_lengths)
            tokens = BatchTokens.of(filled.real, filled.boundaries, filled.packs, factor)
            if self.context is not None:
                tokens = tokens.of_share(filled.shares, self.context.index, self.context.sum)
            contexts.append(partial(self.balancer.active, tokens))
        if filled.routes is not None:
            from danlu.models.router_replay import replaying

            contexts.append(partial(replaying, self.model, filled.routes))
        if not contexts:
            return nullcontext()
        from danlu.memory.recomputed_function import recomputed_within

        return recomputed_within(partial(_all_of, contexts))

    def explain(self, batch: Batch, step: int) -> Exception:
        """Explains why the loss of `batch` is not finite: a weight that is not, or the first module with such an
        output."""
        of_critic = {} if self.critic is None else self.parallel.local_weights(self.critic.tensors())
        named = [*self.model.named_parameters(), *of_critic.items()]
        return self._explained(batch, step, non_finite_on_any(self.parallel.ranks.world, named))

    def _explained(self, batch: Batch, step: int, names: Sequence[str]) -> Exception:
        from danlu.stages.diagnosis import explain_non_finite

        filled = pad_to_bucket(batch, self.token_multiple)
        return explain_non_finite(self.model, batch, filled, self._attend(filled), self.dtype, step, names)


@contextmanager
def _all_of(contexts: Sequence[Callable[[], AbstractContextManager[None]]]) -> Iterator[None]:
    """A context within all of them."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


@dataclass(frozen=True)
class ReplicaBatches:
    """A micro-batch dealt out to the replicas of one process."""

    parts: tuple[Batch, ...]

    @property
    def weight(self) -> float:
        """The sum over all targets."""
        return sum(part.weight for part in self.parts)

    @property
    def targets(self) -> Tensor:
        """[N], on the first device."""
        return self._together([part.targets for part in self.parts])

    @property
    def weights(self) -> Tensor:
        """[N], on the first device."""
        return self._together([part.weights for part in self.parts])

    @property
    def target_sources(self) -> TargetSources | None:
        """Each part tells its own; their losses are added up by name."""
        return None

    def _together(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.to(tensors[0].device) for tensor in tensors])


@dataclass(frozen=True)
class ThreadedLearner(DecoderLearner):
    """The same over replicas in one process: see `parallel.threads`."""

    replicas: Replicas | None = None

    def collate(self, items: Sequence[Pack]) -> Any:
        """Each replica's part of a micro-batch, on its device."""
        from danlu.parallel.threads import shares_of

        assert self.replicas is not None, "threads run replicas"
        devices = self.replicas.devices
        parts = zip(shares_of(items, len(devices)), devices, strict=True)
        return ReplicaBatches(
            tuple(collate(part or [self.empty], device, source_names=self.source_names) for part, device in parts)
        )

    def prepare(
        self, items: Sequence[Pack], micro_batches: Sequence[Sequence[int]], step: int | None
    ) -> Sequence[Pack]:
        """Prepares items as one process does; the pass without gradients is on the first device alone."""
        first = DecoderLearner(**{each.name: getattr(self, each.name) for each in fields(DecoderLearner)})
        return first.prepare(items, micro_batches, step)

    def losses(self, batch: Any, totals: Totals, gradient_scale: float = 1.0, x: Activation | None = None) -> Loss:
        """The sum of all replicas' losses, on the first device."""
        return self._on_replicas(
            batch, lambda learner, part: DecoderLearner.losses(learner, part, totals, gradient_scale)
        )

    def assess(self, batch: Any, totals: Totals, x: Activation | None = None) -> Loss:
        """The sum of all replicas' losses as evaluation reports them."""
        return self._on_replicas(batch, lambda learner, part: DecoderLearner.assess(learner, part, totals))

    def _on_replicas(self, batch: ReplicaBatches, loss_of: Callable[[DecoderLearner, Batch], Loss]) -> Loss:
        assert self.replicas is not None, "threads run replicas"

        def work(model: Any, part: Batch) -> Loss:
            return loss_of(replace(self, model=model, model_forward=model, device=part.tokens.device), part)

        return sum_losses(self.replicas.run(work, batch.parts), self.device)

    def explain(self, batch: Any, step: int) -> Exception:
        """Explains why a loss is not finite, for the first part of which it is not."""
        return self._explained(batch.parts[0], step, non_finite(self.model.named_parameters()))


def trained_weights(model: Decoder, adapters: AdapterSet | None) -> dict[str, Tensor]:
    """All trained tensors of a decoder, by name, live: the whole of it, or the adapter on top with its frozen parts."""
    named = model.named_parameters() if adapters is None else adapters.tensors(adapters.active[-1]).items()
    return {name: parameter.detach() for name, parameter in named}


def objective_parameters(objective: Objective) -> dict[str, nn.Parameter]:
    """The parameters of an objective that has some, by the names they have in optimizer and checkpoints."""
    named = objective.named_parameters() if isinstance(objective, nn.Module) else ()
    return {f"objective.{name}": parameter for name, parameter in named}


def objective_tensors(objective: Objective) -> dict[str, Tensor]:
    """Parameters and running statistics (buffers) of an objective by name, live and without autograd."""
    buffers = objective.named_buffers() if isinstance(objective, nn.Module) else ()
    return {
        **{name: parameter.detach() for name, parameter in objective_parameters(objective).items()},
        **{f"objective.{name}": buffer for name, buffer in buffers},
    }
