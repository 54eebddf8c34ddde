"""Expert parallelism: the experts of each mixture distributed among data ranks, to which rows travel and come back.

Each of `expert` neighbouring data ranks has E / expert of the E experts, in order (GShard, arXiv:2006.16668). A rank
routes its own tokens; their rows go to the ranks that have their experts, are multiplied there, and come back in the
order in which they were sent. They are weighed and added on the token's own rank, so nothing of the router travels.

In a layer that is four all-to-alls of rows: to the experts and back, and the same for the gradients; six where it is
recomputed. Before that, ranks exchange the number of rows for each expert, once: a recomputation sends the same rows.
Every rank takes part in each of them, also without tokens.

Products in tiles of FP8 take rows, and gradients of their outputs, as codes with scales: so these are what goes to the
experts, bit for bit the factors of one process (DeepSeek-V3, arXiv:2412.19437, section 3.3.3). What comes back is not
rounded: outputs, and the gradients of rows, in the type of activations.

N rows of this rank's tokens · R rows that this rank's experts multiply · D model width · E experts
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from danlu.core.layer_types import DispatchedRows, RowCodes
from danlu.core.shard_box import ShardBox
from danlu.models.decoder import Decoder, Layer
from danlu.models.modules import GroupedLinear
from danlu.parallel.comm import Group
from danlu.parallel.tensor import trained_copies

if TYPE_CHECKING:
    from danlu.adapters.adapter_set import AdapterSet
    from danlu.models.experts import MoE


class Exchange:
    """A `layer_types.ExpertExchange`: all-to-alls over the ranks of a group, each of which has equally many experts."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.sends: list[int] = []  # rows to each rank, of the last `dispatch`
        self.receives: list[int] = []
        self._places: Tensor | None = None  # [R] int64, where each row that came is among rows sorted by expert

    def dispatch(self, rows: Tensor, counts: Tensor, codes: RowCodes | None = None) -> DispatchedRows:
        """Sends rows [N, D] by expert, counts [E] int64 of all experts, to the ranks of their experts.

        codes: as which rows travel. Gradients come back in the type of rows in any case.
        """
        from danlu.models.forward_values import from_forward

        by_source, self.sends, self.receives = from_forward(lambda: self._agreed(counts))
        # Rows come by rank, and of each rank by expert; what multiplies them wants all rows of an expert together.
        of_expert = torch.arange(by_source.shape[1], device=rows.device).repeat(self.group.size)
        experts = torch.repeat_interleave(of_expert, by_source.flatten(), output_size=sum(self.receives))
        order = experts.argsort(stable=True)
        self._places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        here = by_source.sum(0)
        if codes is None:
            arrived: Tensor = _AllToAll.apply(rows, self.group, self.sends, self.receives)
            return DispatchedRows(_permuted(arrived, order, self._places), here)
        trip = _Trip(self.group, self.sends, self.receives, codes)
        without_values, *kept = _DispatchedCodes.apply(rows, order, self._places, trip)
        return DispatchedRows(without_values, here, tuple(kept))

    def _agreed(self, counts: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Exchanges counts [E] of this rank's rows.

        Returns the counts of each rank's rows for the experts here, [ranks, E here] int64, and how many rows go to each
        rank and come from it.
        """
        size = self.group.size
        even = [len(counts) // size] * size
        by_source = self.group.all_to_all(counts, even, even).view(size, -1)
        return by_source, counts.view(size, -1).sum(1).tolist(), by_source.sum(1).tolist()

    def combine(self, rows: Tensor, codes: RowCodes | None = None) -> Tensor:
        """Returns the experts' outputs for the rows of the last `dispatch`, [R, D] -> [N, D], in the rows' original
        order.

        codes: as which gradients come. Outputs travel in their own type in any case.
        """
        assert self._places is not None, "rows come back that were never sent"
        order = torch.empty_like(self._places).scatter_(
            0, self._places, torch.arange(len(self._places), device=rows.device)
        )
        if codes is not None:
            trip = _Trip(self.group, self.sends, self.receives, codes)
            combined: Tensor = _CombinedOutputs.apply(rows, order, self._places, trip)
            return combined
        returned: Tensor = _AllToAll.apply(_permuted(rows, self._places, order), self.group, self.receives, self.sends)
        return returned


class _Trip(NamedTuple):
    """The way of rows to the ranks of their experts, which they go as codes, and back, which they do not.

    order [R] int64: of each row by expert its place among those that came; places [R]: the inverse.
    """

    group: Group
    sends: Sequence[int]
    receives: Sequence[int]
    codes: RowCodes

    def there(self, rows: Tensor, order: Tensor) -> tuple[Tensor, ...]:
        """rows [N, D] -> what is kept of those of this rank's experts, [R, D] by expert."""
        row_bytes = self.codes.to_bytes(self.codes.keep(rows))
        arrived = self.group.all_to_all(row_bytes, self.sends, self.receives)
        return self.codes.from_bytes(arrived.index_select(0, order), rows.shape[1])

    def back(self, rows: Tensor, places: Tensor) -> Tensor:
        """rows [R, D] by expert -> [N, D] in the order of the rows that were sent."""
        return self.group.all_to_all(rows.index_select(0, places), self.receives, self.sends)


class _DispatchedCodes(torch.autograd.Function):
    """Rows to the ranks of their experts in few bits; their gradients come back in the type of activations
    (DeepSeek-V3, arXiv:2412.19437, section 3.3.3).

    Returns a tensor of NaN [R, D], all of them one number in memory, for autograd alone, and the codes.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor, trip: _Trip) -> tuple[Tensor, ...]:
        ctx.trip = trip
        ctx.save_for_backward(places)
        kept = trip.there(rows, order)
        ctx.mark_non_differentiable(*kept)
        return rows.new_full((1, 1), torch.nan).expand(len(order), rows.shape[1]), *kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        return ctx.trip.back(grad, places), None, None, None


class _CombinedOutputs(torch.autograd.Function):
    """The experts' outputs back in their type; the gradients of these go to the experts in few bits.

    There they are decoded, for the gradient of a weight has other tiles. Encoded again for the gradient of the input
    they are the same numbers: with a power of two that no number exceeds, no number that has codes is rounded.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        ctx.save_for_backward(order)
        return trip.back(rows, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        trip: _Trip = ctx.trip
        (order,) = ctx.saved_tensors
        return trip.codes.kept_values(trip.there(grad, order), grad.dtype), None, None, None


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks of a group; their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        ctx.group, ctx.sends, ctx.receives = group, sends, receives
        return group.all_to_all(rows, sends, receives)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return ctx.group.all_to_all(grad, ctx.receives, ctx.sends), None, None, None


def _permuted(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Returns rows[order]; its gradient is a gather too."""
    permuted: Tensor = _Permuted.apply(rows, order, inverse)
    return permuted


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class ExpertDistributor:
    """Keeps this rank's experts of each layer, a layer at a time, and puts the exchange into their slot.

    Parameters may be on the meta device; those that were read as `own_boxes` says are left as they are. `boxes` says
    afterwards which part of each parameter is here; its `replicas` count one rank alone.
    """

    def __init__(self, model: Decoder, adapters: AdapterSet | None, group: Group) -> None:
        self.model, self.adapters, self.group = model, adapters, group
        self.boxes: MutableMapping[Tensor, ShardBox] = WeakIdKeyDictionary()
        self.boxes_by_name: dict[str, ShardBox] = {}
        """The same by the names of the model's parameters, which outlive these where a layer is sharded next."""

    def own_boxes(self) -> dict[str, ShardBox]:
        """This rank's box of each parameter of the model's own experts, by name; none where it has all of them."""
        if self.group.alone:
            return {}
        boxes = {}
        for name, module in self.model.named_modules():
            for attribute, parameter in (
                module.named_parameters(recurse=False) if isinstance(module, GroupedLinear) else ()
            ):
                boxes[f"{name}.{attribute}"] = ShardBox.full(parameter.shape).narrow(0, *self._own(len(parameter)))
        return boxes

    def layer(self, name: str) -> None:
        """Distributes the experts of one layer, if it has any."""
        if self.group.alone:
            return
        copies = trained_copies(self.adapters)
        for moe in mixtures_of(self.model.layers[name]):
            experts = moe.experts
            for linear in (experts.gate_proj, experts.up_proj, experts.down_proj):
                if linear.quantized is not None and linear.quantized.count == experts.num_experts:
                    linear.quantized = linear.quantized.part(*self._own(experts.num_experts))
            for module in experts.modules():
                for attribute, parameter in module.named_parameters(recurse=False):
                    for tensor in (parameter, *copies.get((id(module), attribute), ())):
                        self._distribute(tensor, experts.num_experts)
            experts.exchange = Exchange(self.group)
        for path, parameter in self.model.layers[name].named_parameters():
            if parameter in self.boxes:
                self.boxes_by_name[f"layers.{name}.{path}"] = self.boxes[parameter]

    @torch.no_grad()
    def _distribute(self, parameter: Tensor, num_experts: int) -> None:
        if parameter in self.boxes:
            return
        start, count = self._own(num_experts)
        box = ShardBox.full((num_experts, *parameter.shape[1:])).narrow(0, start, count)
        assert len(parameter) in (num_experts, count), f"{list(parameter.shape)} does not have {num_experts} experts"
        if len(parameter) == num_experts:
            parameter.data = box.view_of(parameter.data).clone(memory_format=torch.contiguous_format)
        self.boxes[parameter] = box

    def _own(self, num_experts: int) -> tuple[int, int]:
        """The first of this rank's experts, and how many it has."""
        assert num_experts % self.group.size == 0, "`layout.problems` refuses it"
        count = num_experts // self.group.size
        return count * self.group.index, count


def mixtures_of(layer: nn.Module) -> Iterator[MoE]:
    """The mixtures of experts in a layer."""
    from danlu.models.experts import MoE

    assert isinstance(layer, Layer)
    return (sublayer for sublayer in layer.sublayers.values() if isinstance(sublayer, MoE))


def expert_names(model: Decoder) -> set[str]:
    """Names of the parameters that are experts', all of them stacked in their first dimension.

    Among them are codes of quantized experts, which are no parameters before they are sharded.
    """
    if not model.config.has_experts:
        return set()
    stacked = {
        parameter
        for layer in model.layers.values()
        for moe in mixtures_of(layer)
        for parameter in moe.experts.parameters()
    }
    names = {name for name, parameter in model.named_parameters() if parameter in stacked}
    return names | {
        f"{name}.quantized.codes" for name, each in model.named_modules() if isinstance(each, GroupedLinear)
    }
