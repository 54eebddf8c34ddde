"""Processes of the tests of sharded checkpoints: what each holds of known tensors, and what it does with it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from builders.tiny_adapters import adapter_set, perturb
from builders.tiny_run import tiny_model
from danlu.adapters.peft_folder import write_adapter
from danlu.core.errors import DanluError
from danlu.core.shard_box import BoxValue, ShardBox
from danlu.models.saving import save as save_model
from danlu.optim.eight_bit import EightBitMoments
from danlu.parallel.comm import Group, new_group
from danlu.recipe import sections
from danlu.training.checkpoints import store as checkpoint_store
from danlu.training.checkpoints.gathering import Gathering
from danlu.training.checkpoints.loading import load_checkpoint
from danlu.training.checkpoints.state_boxes import state_box
from danlu.training.checkpoints.store import CheckpointStore

Groups = dict[str, dict[str, Tensor]]
Layout = Callable[[tuple[int, ...], int, int], ShardBox]


def wholes(seed: int = 0) -> Groups:
    """Tensors of a small run: rows that do not divide, fewer rows than processes, three dimensions, a step counter."""
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    return {
        "model": {
            "wide": random(7, 12),
            "short": random(3, 5).to(torch.bfloat16),
            "vector": random(9),
            "experts": random(4, 3, 6),
            "codes": torch.randint(0, 256, (8, 8), dtype=torch.uint8, generator=draw),
            "nothing": torch.zeros(0, 4),
        },
        "optimizer": {"exp_avg.wide": random(7, 12), "step.wide": torch.tensor(3.0)},
    }


def bounds(length: int, number: int, of: int) -> tuple[int, int]:
    """(start, size) as torch.chunk deals out: the first get more, the last may get none."""
    each = -(-length // of)
    start = min(length, number * each)
    return start, min(length, start + each) - start


def cut(shape: tuple[int, ...], dim: int, number: int, of: int, box: ShardBox | None = None) -> ShardBox:
    """A box narrowed along one dimension; a tensor without that dimension stays whole, for one of `of` to write."""
    box = box or ShardBox.full(shape)
    if dim >= len(shape):
        return ShardBox(box.global_shape, box.offsets, box.sizes, box.replicas * of, box.is_writer and number == 0)
    first, count = bounds(box.sizes[dim], number, of)
    start, size = list(box.offsets), list(box.sizes)
    start[dim], size[dim] = start[dim] + first, count
    return ShardBox(box.global_shape, tuple(start), tuple(size), box.replicas, box.is_writer)


def rows(shape: tuple[int, ...], rank: int, size: int) -> ShardBox:
    return cut(shape, 0, rank, size)


def columns(shape: tuple[int, ...], rank: int, size: int) -> ShardBox:
    return cut(shape, 1, rank, size)


def grid(shape: tuple[int, ...], rank: int, size: int) -> ShardBox:
    """Columns among pairs of neighbours, rows among the pairs."""
    return cut(shape, 0, rank // 2, size // 2, cut(shape, 1, rank % 2, 2))


def copies(shape: tuple[int, ...], rank: int, size: int) -> ShardBox:
    """Two copies, each cut by rows; the first one writes."""
    box = cut(shape, 0, rank % (size // 2), size // 2)
    return ShardBox(box.global_shape, box.offsets, box.sizes, 2 * box.replicas, box.is_writer and rank < size // 2)


LAYOUTS: dict[str, Layout | None] = {"rows": rows, "columns": columns, "grid": grid, "copies": copies, "same": None}


def boxes_of(layout: str, whole: Groups, rank: int, size: int) -> dict[str, dict[str, ShardBox]] | None:
    place = LAYOUTS[layout]
    if place is None or size == 1:
        return None
    return {
        group: {name: place(tuple(one.shape), rank, size) for name, one in named.items()}
        for group, named in whole.items()
    }


def local(whole: Groups, boxes: dict[str, dict[str, ShardBox]] | None) -> Groups:
    """What this process holds; memory of its own."""
    return {
        group: {
            name: (tensor if boxes is None else boxes[group][name].view_of(tensor)).clone()
            for name, tensor in named.items()
        }
        for group, named in whole.items()
    }


def blank(held: Groups) -> Groups:
    return {group: {name: torch.zeros_like(one) for name, one in named.items()} for group, named in held.items()}


def differing(a: Groups, b: Groups) -> list[str]:
    return [
        f"{group}.{name}"
        for group in a
        for name in a[group]
        if a[group][name].dtype != b[group][name].dtype or not torch.equal(a[group][name], b[group][name])
    ]


def own_group() -> Group:
    return new_group("checkpoint", range(dist.get_world_size()), backend="gloo")


def saves(folder: str) -> list[str]:
    """One checkpoint in each layout, one in `folder / layout`; what the store says about them."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), own_group()
    said = []
    for number, layout in enumerate(LAYOUTS, 1):
        boxes = boxes_of(layout, wholes(), rank, size)
        with CheckpointStore(Path(folder) / layout, group=group) as store:
            store.save(number, local(wholes(1), boxes), {"rank": rank}, boxes=boxes)
            held = local(wholes(), boxes)
            store.save(10 + number, held, {"rank": rank}, boxes=boxes, loss=float(rank))
            for tensor in (one for named in held.values() for one in named.values()):
                tensor.zero_()
            said.append(f"{store.latest()} {store.best()} {len(store.checkpoints())}")
            assert store.discard_after(10 + number) == []
    return said


def loads(paths: list[str]) -> list[str]:
    """Loads each checkpoint into the boxes of each layout; what came out wrong, and what did not though it should."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), own_group()
    return load_all(paths, rank, size, group)


def load_all(paths: list[str], rank: int, size: int, group: Group) -> list[str]:
    wrong = []
    for path in paths:
        for layout in LAYOUTS if size > 1 else ["same"]:
            boxes = boxes_of(layout, wholes(), rank, size)
            expected = local(wholes(), boxes)
            found = blank(expected)
            state = load_checkpoint(Path(path), found, boxes, group)
            wrong += [f"{path} into {layout}: {one}" for one in differing(found, expected)]
            if state != {"rank": 0}:
                wrong.append(f"{path} into {layout}: state {state}")
            # The negative control: the boxes of a neighbour are other numbers.
            if boxes is not None and layout != "copies":
                others = local(wholes(), boxes_of(layout, wholes(), (rank + 1) % size, size))
                if differing(found, others) == []:
                    wrong.append(f"{path} into {layout}: a neighbour's boxes would pass as well")
    return wrong


def refused(path: str, change: str) -> tuple[str, bool]:
    """What loading says on this rank, and whether anything was touched."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), own_group()
    boxes = boxes_of("rows", wholes(), rank, size)
    assert boxes is not None
    held = blank(local(wholes(), boxes))
    if change == "dtype on rank 1" and rank == 1:
        held["model"]["wide"] = held["model"]["wide"].double()
    if change == "a name too much on rank 2" and rank == 2:
        held["model"]["new"] = torch.zeros(2)
    if change == "a name too few":
        del held["model"]["vector"]
    if change == "a name too few on rank 0" and rank == 0:
        del held["model"]["vector"]
    try:
        load_checkpoint(Path(path), held, boxes, group)
    except DanluError as error:
        return f"{type(error).__name__}: {error}", any(bool(one.any()) for one in held["model"].values())
    return "", True


def saves_while_training(folder: str) -> list[float]:
    """A save whose background part cannot end before twenty sums over another group have been made; the sums."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), own_group()
    world = Group("world", tuple(range(size)), rank, dist.group.WORLD)
    trained = threading.Event()
    real = checkpoint_store.sync_file
    overlapped = []

    def slow(path: Path) -> None:
        if not trained.is_set():
            overlapped.append(trained.wait(60))
        real(path)

    boxes = boxes_of("rows", wholes(), rank, size)
    sums = []
    with patched(checkpoint_store, "sync_file", slow), CheckpointStore(Path(folder), group=group) as store:
        held = local(wholes(), boxes)
        store.save(1, held, {"rank": rank}, boxes=boxes)
        for number in range(20):
            held["model"]["wide"].add_(1)
            sums.append(float(world.sum(torch.tensor(float(rank + number)))))
        assert not (Path(folder) / "step-00000001").exists()
        trained.set()
        store.wait()
        sums += [float(world.sum(torch.tensor(1.0))) for _ in range(3)]
    assert overlapped == [True]
    return sums


def saves_with_an_error(folder: str, background: bool) -> list[str]:
    """Errors on one rank at each stage: what each rank raises, and that the next save works."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), own_group()
    boxes = boxes_of("rows", wholes(), rank, size)
    held = local(wholes(), boxes)
    said = []

    def attempt(step: int, state: dict[str, Any], boxes: Any = boxes) -> None:
        try:
            store.save(step, held, state, boxes=boxes)
            store.wait()
            said.append("")
        except DanluError as error:
            cause = type(error.__cause__).__name__
            said.append(f"{type(error).__name__}: {error} <- {cause}")

    with CheckpointStore(Path(folder), group=group, background=background) as store:
        attempt(1, {"rank": rank})
        attempt(2, {"rank": (1, 2) if rank == 1 else rank})
        with patched(checkpoint_store, "write_shard", full_disk) if rank == 1 else patched():
            attempt(3, {"rank": rank})
        with patched(checkpoint_store, "sync_file", full_disk) if rank > 0 else patched():
            attempt(4, {"rank": rank})
        with patched(checkpoint_store, "write_atomically", full_disk):  # rank 0 alone comes there
            attempt(5, {"rank": rank})
        everywhere = {
            group: {name: ShardBox.full(one.shape) for name, one in named.items()} for group, named in held.items()
        }
        attempt(6, {"rank": rank}, everywhere if rank == 1 else boxes)
        attempt(7, {"rank": rank})
        said.append(str([info.step for info in store.checkpoints()]))
    return said


def full_disk(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def dies(folder: str, name: str, victim: int) -> None:
    """Saves step 1, then step 2, in which one rank vanishes as it comes to the function `checkpoint.<name>`."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), own_group()
    boxes = boxes_of("rows", wholes(), rank, size)
    store = CheckpointStore(Path(folder), group=group)
    store.save(1, local(wholes(), boxes), {"rank": rank}, boxes=boxes)
    store.wait()
    if rank == victim:
        setattr(checkpoint_store, name, lambda *_, **__: os._exit(9))
    store.save(2, local(wholes(1), boxes), {"rank": rank}, boxes=boxes)
    try:
        store.wait()
    except RuntimeError as error:  # of torch: its words are for whoever tells why the run ended
        (Path(folder).parent / f"said-{rank}").write_text(str(error))
    # The victim is in its thread, whose end is the end of the process.


def saves_eight_bit(folder: str) -> list[str]:
    """Moments in blocks, of which a row is a whole number or is not; saved, and loaded into the same boxes."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), own_group()
    wrong = []
    for name, shape in EIGHT_BIT:
        box = rows(shape, rank, size)
        state = eight_bit_state(shape, box)
        boxes = {"optimizer": {key: state_box(one, box) for key, one in state.items()}}
        with CheckpointStore(Path(folder) / name, group=group) as store:
            path = store.save(1, {"optimizer": state}, {}, boxes=boxes)
        found = blank({"optimizer": state})
        load_checkpoint(path, found, boxes, group)
        wrong += [f"{name}: {one}" for one in differing(found, {"optimizer": state})]
    return wrong


EIGHT_BIT: list[tuple[str, tuple[int, int]]] = [("aligned", (10, 512)), ("unaligned", (10, 300))]


def eight_bit_state(shape: tuple[int, int], box: ShardBox) -> dict[str, Tensor]:
    """State of two steps of 8-bit AdamW on a box of a parameter, by the names of `Optimizers.state_tensors`."""
    draw = torch.Generator().manual_seed(3)
    weight, *gradients = (box.view_of(torch.randn(shape, generator=draw)).contiguous() for _ in range(3))
    moments = EightBitMoments(256, smallest=1)
    state = {key: torch.zeros(spec.shape, dtype=spec.dtype) for key, spec in moments.specs(weight.shape).items()}
    settings = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    for gradient in gradients:
        if weight.numel():
            moments.update(settings, [weight], [gradient], [state])
    return {f"{key}.w": one for key, one in state.items()}


def gathers() -> dict[str, list[str]]:
    """Every tensor of every layout put together on the first rank; what is wrong with it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = Group("world", tuple(range(size)), rank, dist.group.WORLD)
    wrong: dict[str, list[str]] = {}
    for layout in LAYOUTS:
        whole = wholes()
        boxes = boxes_of(layout, whole, rank, size)
        held = local(whole, boxes)
        wrong[layout] = []
        with Gathering(world) as gathering:
            for group, named in held.items():
                for name, one in named.items():
                    found = gathering.whole(name, one, boxes[group][name] if boxes else None)
                    if (found is not None) != (rank == 0):
                        wrong[layout].append(f"{name}: {'' if found is None else 'not '}None on rank {rank}")
                    elif found is not None and not torch.equal(found, whole[group][name]):
                        wrong[layout].append(name)
                    shape = tuple(one.shape) if boxes is None else boxes[group][name].global_shape
                    half = ShardBox(
                        shape, tuple(side // 2 for side in shape), tuple(side - side // 2 for side in shape)
                    )
                    found = gathering.part(name, one, boxes[group][name] if boxes else None, half)
                    if found is not None and not torch.equal(found, half.view_of(whole[group][name])):
                        wrong[layout].append(f"{name}{half}")
    return wrong


def gathering_fails(after: int) -> str:
    """The first rank fails after so many tensors; what each rank raises."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = Group("world", tuple(range(size)), rank, dist.group.WORLD)
    boxes = boxes_of("rows", wholes(), rank, size)
    assert boxes is not None
    held = local(wholes(), boxes)["model"]
    try:
        with Gathering(world) as gathering:
            for number, (name, one) in enumerate(held.items()):
                if number == after and rank == 0:
                    full_disk()
                gathering.whole(name, one, boxes["model"][name])
            if after >= len(held) and rank == 0:
                full_disk()
    except (OSError, DanluError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def exports(folder: str) -> None:
    """A model and an adapter, each rank with boxes of their parameters, into folders that the first rank writes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = Group("world", tuple(range(size)), rank, dist.group.WORLD)
    for layout in ("rows", "grid"):
        model, _ = adapted(None)
        with Gathering(world) as gathering:
            value = boxed(gathering, dict(model.named_parameters()), layout, rank, size)
            save_model(model, Path(folder) / f"model-{layout}", value=value, writes=gathering.first)
    for kind in KINDS:
        _, adapters = adapted(kind)
        target = Path(folder) / f"adapter-{kind}"
        if rank == 0:
            target.mkdir()
        with Gathering(world) as gathering:
            value = boxed(gathering, adapters.tensors("mine"), "rows", rank, size)
            write_adapter(
                adapters, "mine", target, base="b", base_fingerprint=None, value=value, writes=gathering.first
            )
        assert all(bool(one.isnan().all()) for one in adapters.tensors("mine").values()), "its own are not back"


def boxed(gathering: Gathering, named: Mapping[str, Tensor], layout: str, rank: int, size: int) -> BoxValue:
    """The gathered value of a parameter of which this rank has a box; what the module itself has is spoilt."""
    whole = {"model": {name: one.detach().clone() for name, one in named.items()}}
    boxes = boxes_of(layout, whole, rank, size)
    assert boxes is not None
    held = local(whole, boxes)["model"]
    for parameter in named.values():
        parameter.data.fill_(float("nan"))
    return lambda name, box=None: gathering.part(name, held[name], boxes["model"][name], box)


KINDS = ("lora", "dora", "pissa", "vera", "mora", "ia3", "bottleneck", "prefix", "prompt")


def adapted(kind: str | None) -> Any:
    """A tiny model; with a kind, the perturbed adapter "mine" on it."""
    model = tiny_model()
    if kind is None:
        return model, None
    adapters = adapter_set(model)
    made = {
        "lora": sections.Lora(rank=4, modules_to_save=["lm_head"], bias="none"),
        "dora": sections.Dora(rank=3),
        "pissa": sections.Pissa(rank=4),
        "vera": sections.Vera(rank=8),
        "mora": sections.Mora(),
        "ia3": sections.Ia3(),
        "bottleneck": sections.Bottleneck(),
        "prefix": sections.Prefix(tokens=3),
        "prompt": sections.Prompt(tokens=3),
    }[kind]
    adapters.add("mine", made)
    adapters.train_only("mine")
    perturb(adapters, "mine")
    return model, adapters


@contextmanager
def patched(place: Any = None, name: str = "", value: Any = None) -> Iterator[None]:
    if place is None:
        yield
        return
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)
