"""A decoder cut into chunks of layers: of a whole model, which may be on the meta device, a stage keeps its own.

Names are those of the whole model. Parameters that several layers share (VeRA's projections, the network behind a
prefix) and a tied embedding, which is the head too, are on every stage that uses them: under the name they have in the
whole, with a gradient that is a sum over these stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from danlu.core.shard_box import ShardBox
from danlu.models.chunks import Chunks
from danlu.models.decoder import Decoder
from danlu.parallel.comm import Group
from danlu.parallel.local_parameter import LocalParameter
from danlu.parallel.pipeline import Pipeline
from danlu.parallel.ranks import Ranks, own_of_new_groups

if TYPE_CHECKING:
    from danlu.adapters.adapter_set import AdapterSet


@dataclass(frozen=True)
class StageParameters:
    """The parameters of a whole model as one stage has them; names are those in the whole, where nothing else is said.

    By default a model that is not split.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    """The name in the whole model of each parameter here that is shared with layers of earlier stages, by its name
    here.
    """
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The indices of the stages that have a parameter, rising, for each parameter that several stages have, here or
    not.
    """
    chunk_of: Mapping[str, int] = field(default_factory=dict)
    """The lowest of this stage's chunks that has a parameter, for each parameter here; its backward pass comes last."""
    elsewhere: Mapping[str, LocalParameter] = field(default_factory=dict)
    """The parameters that only other stages have, without values."""

    def named_in_whole(self, local: Mapping[str, LocalParameter], stage: int) -> dict[str, LocalParameter]:
        """Returns a stage's part of each parameter, renamed as in the whole model. `local` has the names of this stage.

        A parameter that several stages have counts once in the norm, and the first of them saves it.
        """
        named = {}
        for own_name, parameter in local.items():
            name = self.renamed.get(own_name, own_name)
            stages, box = self.shared.get(name, (stage,)), parameter.box
            is_writer = box.is_writer and stages[0] == stage
            box = replace(box, replicas=box.replicas * len(stages), is_writer=is_writer)
            named[name] = replace(parameter, name=name, box=box)
        return named

    def sums_over_stages(self, ranks: Ranks) -> list[tuple[Group, str]]:
        """Returns (group, name) of each parameter here with a gradient that is a sum over several stages.

        Every process of the world calls this, for it makes groups.
        """
        sums, layout = [], ranks.layout
        for stages in sorted(set(self.shared.values())):
            pipelines = [layout.ranks_along(rank, ("pipeline",)) for rank in range(layout.world)]
            group = own_of_new_groups("pipeline", [[each[stage] for stage in stages] for each in pipelines], ranks.rank)
            names = [name for name, on in self.shared.items() if on == stages and name in self.chunk_of]
            sums += [(group, name) for name in names if not group.alone]
        return sums


def split(model: Decoder, adapters: AdapterSet | None, sizes: Sequence[int], pipeline: Pipeline) -> StageParameters:
    """Keeps this stage's chunks of a whole model, in place, and the parameters of `adapters` in them.

    sizes: layers in each chunk. The set of adapters still knows the modules of other stages, with parameters on the
    meta device: their names are saved with the rest.
    """
    chunks, own = Chunks.of_sizes(sizes, pipeline.chunks), pipeline.stages.index
    names: dict[Parameter, list[str]] = {}  # of each parameter in the whole; the first is its own
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    stages = {
        of_one[0]: tuple(sorted({pipeline.stage_of(chunk) for chunk in _chunks(of_one, chunks, model)}))
        for of_one in names.values()
    }
    absent = {
        parameter: _without_values(parameter) for parameter, (name, *_) in names.items() if own not in stages[name]
    }
    if adapters is not None:
        adapters.copy_trained({names[parameter][0] for parameter in absent})
    model.keep_chunks(chunks)
    elsewhere = {names[parameter][0]: empty for parameter, empty in absent.items()}
    if adapters is not None:
        _replace_parameters(adapters, absent)
        if any(added.virtual_tokens() for added in adapters.added.values()):
            model.begin_pass = adapters.begin_pass
        elsewhere |= _initial_factors(adapters, {*absent.values()})
    here = {parameter: name for name, parameter in model.named_parameters()}
    return StageParameters(
        renamed={name: names[parameter][0] for parameter, name in here.items() if names[parameter][0] != name},
        shared={name: on for name, on in stages.items() if len(on) > 1},
        chunk_of={
            names[parameter][0]: min(_chunks(names[parameter], chunks, model) & {*chunks.local}) for parameter in here
        },
        elsewhere={name: _absent(name, empty) for name, empty in elsewhere.items()},
    )


def _chunks(names: Sequence[str], chunks: Chunks, model: Decoder) -> set[int]:
    """The numbers of the chunks that use a parameter of these names."""
    used = {chunks.of_parameter(name) for name in names}
    return used | {chunks.last} if names[0] == "embed_tokens.weight" and model.has_tied_head else used


def _without_values(parameter: Tensor) -> Parameter:
    return Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)


def _absent(name: str, parameter: Parameter) -> LocalParameter:
    """Returns an entry for a parameter that has no values on this process."""
    return LocalParameter(name, parameter, parameter, ShardBox.full(parameter.shape, is_writer=False))


def _replace_parameters(adapters: AdapterSet, absent: Mapping[Parameter, Parameter]) -> None:
    """Frees the values of adapters' parameters that other stages have."""
    for added in adapters.added.values():
        for module in (part for slot in added.modules.values() for part in slot.modules()):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter in absent:
                    setattr(module, name, absent[parameter])


def _initial_factors(adapters: AdapterSet, absent: set[Parameter]) -> dict[str, Parameter]:
    """Returns, by name and without values, the factors that adapters of other stages take out of the base.

    They are those of PiSSA, OLoRA and LoftQ. They are computed where the base's weights are read, and their names are
    saved.
    """
    from danlu.adapters.lora import LowRank
    from danlu.adapters.shapes import BASE_CHANGING_INITS

    factors: dict[str, Parameter] = {}
    for added in adapters.added.values():
        if getattr(added.section, "init", None) not in BASE_CHANGING_INITS:
            continue
        for slot, module in added.slots().items():
            if isinstance(module, LowRank) and module.lora_A in absent and module.initial_A is None:
                module.set_initial_factors(module.lora_A.detach(), module.lora_B.detach())
                own = {name: module.get_parameter(name) for name in ("initial_A", "initial_B")}
                factors |= {f"{slot}.{added.name}.{name}": factor for name, factor in own.items()}
    return factors
