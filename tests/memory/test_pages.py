"""Paged state: the bits of AdamW, in a file that nobody can find, of which only what is being updated is in memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from builders.torch_process import TorchProcess
from torch import Tensor
from torch.nn import Parameter

from danlu.core.errors import ResourceError
from danlu.memory import pages as page_files
from danlu.memory.pages import PagedState, default_folder, paged_state
from danlu.optim.adamw import Float32Moments
from danlu.optim.build import Optimizers, build
from danlu.recipe.sections import AdamW, AdamW8bit, Optimizer, PagedAdamW

SHAPES = {"layers.0.up_proj.weight": (96, 70), "layers.1.up_proj.weight": (70, 96), "norm.weight": (70,)}


def trained(section: Optimizer, steps: int = 4, device: str = "cpu") -> tuple[dict[str, Parameter], Optimizers]:
    generator = torch.Generator().manual_seed(0)
    parameters = {name: Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
    for parameter in parameters.values():
        parameter.data = parameter.data.to(device)
    optimizer = build(parameters.items(), section, paged_state=paged_state)
    for step in range(steps):
        for name, parameter in parameters.items():
            late = name == "norm.weight" and step < 2
            parameter.grad = None if late else torch.randn(SHAPES[name], generator=generator).to(device)
        optimizer.step()
    return parameters, optimizer


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name].cpu(), other[name].cpu()) for name in one.keys() | other.keys())


@pytest.mark.parametrize(
    ("section", "plain", "different"),
    [
        (PagedAdamW(), AdamW(), AdamW(betas=(0.9, 0.96))),
        (PagedAdamW(bits=8), AdamW8bit(), AdamW()),
    ],
)
def test_the_bits_are_those_of_the_optimizer_without_pages(
    tmp_path: Path, section: PagedAdamW, plain: Optimizer, different: Optimizer
) -> None:
    ours, optimizer = trained(section.model_copy(update={"folder": str(tmp_path)}))
    theirs, oracle = trained(plain)
    assert equal(dict(ours), dict(theirs)) and equal(optimizer.state_tensors(), oracle.state_tensors())
    assert not equal(dict(ours), dict(trained(different)[0]))


def test_nothing_of_the_file_can_be_seen_or_is_left(tmp_path: Path) -> None:
    _, optimizer = trained(PagedAdamW(folder=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert mapped and all(line.endswith("(deleted)") for line in mapped)
    del optimizer
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def resident_bytes(folder: Path) -> int:
    """Of the mapping of the file in `folder`."""
    resident, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            ours = str(folder) in line
        elif ours and line.startswith("Rss:"):
            resident += 1024 * int(line.split()[1])
    return resident


def test_only_the_parameter_at_hand_is_in_memory(tmp_path: Path) -> None:
    parameters = [Parameter(torch.zeros(512, 256)) for _ in range(4)]
    moments = Float32Moments()
    pages = PagedState({parameter: moments.specs(parameter.shape) for parameter in parameters}, tmp_path)
    each = 2 * parameters[0].nbytes
    for parameter in parameters:
        with pages.fetched(parameter) as state:
            for tensor in state.values():
                tensor.fill_(1.0)
            # Beside it only what the system read ahead.
            assert each <= resident_bytes(tmp_path) < 2 * each
        assert resident_bytes(tmp_path) < each
    assert all(tensor.eq(1.0).all() for parameter in parameters for tensor in pages.tensors(parameter).values())
    assert resident_bytes(tmp_path) > 3 * each  # negative control: all of it is in memory if nobody puts it away


def test_a_kernel_that_cannot_fetch_all_pages_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_files, "_POPULATE_WRITE", 9999)
    assert equal(dict(trained(PagedAdamW(folder=str(tmp_path)))[0]), dict(trained(AdamW())[0]))


def test_a_state_is_read_right_into_its_pages_and_late_parameters_begin_at_zero(tmp_path: Path) -> None:
    section = PagedAdamW(folder=str(tmp_path))
    parameters, optimizer = trained(section, steps=4)
    early, first = trained(section, steps=1)
    saved = {name: tensor.clone() for name, tensor in first.state_tensors().items()}
    scalars = first.state_scalars()
    assert scalars["unstepped"] == ["norm.weight"]
    tensors = optimizer.empty_state(scalars)  # over the state of step 4, as when a run goes back
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])
    optimizer.load_state(tensors, scalars)
    assert equal(optimizer.state_tensors(), saved)
    addresses = {name: tensor.data_ptr() for name, tensor in optimizer.state_tensors().items()}
    assert addresses == {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for name, parameter in parameters.items():
        parameter.data.copy_(early[name])
    for each, other in ((parameters, optimizer), (early, first)):
        for parameter in each.values():
            parameter.grad = torch.ones_like(parameter)
        other.step()
    assert equal(dict(parameters), dict(early)) and equal(optimizer.state_tensors(), first.state_tensors())
    copied, _ = trained(section, steps=4)
    other = build(copied.items(), section, paged_state=paged_state)
    other.load_state(saved, scalars)
    assert equal(other.state_tensors(), saved)
    assert not saved.keys() & {"step.norm.weight"}


def test_what_stays_in_memory_is_the_share_of_the_largest_parameter() -> None:
    _, optimizer = trained(PagedAdamW(), steps=0)
    largest = 2 * 4 * 96 * 70 + 4
    assert optimizer.resident_state_bytes() == largest
    assert optimizer.state_bytes() == 2 * largest + 2 * 4 * 70 + 4
    _, plain = trained(AdamW(), steps=0)
    assert plain.resident_state_bytes() == plain.state_bytes() == optimizer.state_bytes()


def test_a_folder_that_is_not_there_is_made_and_a_disk_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(PagedAdamW(folder=str(tmp_path / "new" / "folder")))
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").touch()
    message = r"optimizer.folder: .*/file/in cannot hold [1-9][0-9,]+ bytes of state: Not a directory"
    with pytest.raises(ResourceError, match=message):
        trained(PagedAdamW(folder=str(tmp_path / "file" / "in")))

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceError, match=r"No space left on device. Name a folder on a disk with that much room"):
        trained(PagedAdamW(folder=str(tmp_path)))


def test_the_folder_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.delenv("TMPDIR")
    assert default_folder() == Path("/var/tmp")


def test_a_killed_process_leaves_nothing(torch_process: TorchProcess, tmp_path: Path) -> None:
    program = (
        "import os, torch; from danlu.optim.build import build; from danlu.recipe.sections import PagedAdamW\n"
        "from danlu.memory.pages import paged_state\n"
        "w = torch.nn.Parameter(torch.ones(200, 200)); w.grad = torch.ones(200, 200)\n"
        f"o = build([('w', w)], PagedAdamW(folder={str(tmp_path)!r}), paged_state=paged_state); o.step()\n"
        "os.kill(os.getpid(), 9)"
    )
    torch_process.run(program, exit_code=-9)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_on_a_gpu_state_lives_on_the_host_and_the_bits_are_those_of_adamw_there() -> None:
    ours, optimizer = trained(PagedAdamW(), device="cuda")
    theirs, oracle = trained(AdamW(), device="cuda")
    assert all(tensor.device.type == "cpu" for tensor in optimizer.state_tensors().values())
    assert equal(dict(ours), dict(theirs)) and equal(optimizer.state_tensors(), oracle.state_tensors())
    assert not equal(dict(ours), dict(trained(AdamW(betas=(0.9, 0.96)), device="cuda")[0]))
