"""LeNet-5 is the network of the table in its file; what is saved is what is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from danlu.core.errors import ModelError
from danlu.models import lenet


def made(seed: int = 0) -> lenet.LeNet5:
    model = lenet.LeNet5()
    lenet.initialize(model, seed)
    return model


def pixels(count: int = 5) -> torch.Tensor:
    return torch.randint(256, (count, 28, 28), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def of_torch(model: lenet.LeNet5, pool: type[nn.Module] = nn.MaxPool2d) -> nn.Sequential:
    """The same out of torch's own layers."""
    parts = [
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), pool(2), nn.Conv2d(6, 16, 5), nn.ReLU(), pool(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    ]  # fmt: skip
    network = nn.Sequential(*parts)
    for theirs, ours in zip(network.parameters(), model.parameters(), strict=True):
        theirs.data.copy_(ours.data)
    return network


def test_it_is_what_the_table_says() -> None:
    model = made()
    assert sum(parameter.numel() for parameter in model.parameters()) == 61_706
    images = pixels()
    scaled = images[:, None].double() / 255 * 1.275 - 0.1
    wanted = of_torch(model).double()(scaled).float()
    torch.testing.assert_close(model(images), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            model(images), of_torch(model, nn.AvgPool2d).double()(scaled).float(), rtol=1e-5, atol=1e-5
        )
    narrow = model(images, torch.bfloat16)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow, wanted, rtol=0.05, atol=0.05)
    assert not torch.equal(narrow, wanted)


def test_first_weights_are_a_function_of_the_seed_and_the_name() -> None:
    weights = {name: parameter.detach() for name, parameter in made().named_parameters()}
    torch.manual_seed(5)
    again = dict(made().named_parameters())
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    other = dict(made(1).named_parameters())
    assert not any(torch.equal(weights[name], other[name]) for name in weights if name.endswith("weight"))
    assert weights["c5.weight"].std().item() == pytest.approx((2 / 400) ** 0.5, rel=0.02)
    assert not weights["c5.bias"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_gives_the_model_back(dtype: torch.dtype, tmp_path: Path) -> None:
    model = made()
    lenet.save(model, tmp_path / "model", dtype=dtype)
    lenet.save(model, tmp_path / "model", dtype=dtype)  # over a model
    found = lenet.load(tmp_path / "model")
    for (name, ours), (_, theirs) in zip(model.named_parameters(), found.named_parameters(), strict=True):
        assert torch.equal(ours.to(dtype).float(), theirs), name
    assert {one.dtype for one in load_file(tmp_path / "model" / "model.safetensors").values()} == {dtype}
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "lenet5"


def test_one_process_writes_what_all_give(tmp_path: Path) -> None:
    model, asked = made(), []

    def value(name: str) -> torch.Tensor | None:
        asked.append(name)
        return None

    lenet.save(model, tmp_path / "model", value=value, writes=False)
    assert asked == [name for name, _ in model.named_parameters()]
    assert not (tmp_path / "model").exists()


def test_what_cannot_be_saved_or_loaded_is_told(tmp_path: Path) -> None:
    folder, model = tmp_path / "model", made()
    with torch.no_grad():
        model.f6.bias[3] = torch.nan
    with pytest.raises(ModelError, match="f6.bias: not finite"):
        lenet.save(model, folder)
    assert not folder.exists()
    lenet.save(made(), folder)
    tensors = load_file(folder / "model.safetensors")
    for changed, said in (
        ({**tensors, "c1.weight": torch.zeros(6, 1, 3, 3)}, r"tensor c1.weight is \(6, 1, 3, 3\), and LeNet-5 has"),
        ({**tensors, "more": torch.zeros(1)}, r"tensor more is \(1,\), and LeNet-5 has None"),
        ({name: one for name, one in tensors.items() if name != "output.bias"}, "tensor output.bias is None"),
    ):
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(ModelError, match=said):
            lenet.load(folder)
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ModelError, match="cannot be read"):
        lenet.load(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"num_labels": 10', '"num_labels": 26'))
    with pytest.raises(ModelError, match="num_labels is 26, and LeNet-5 has 10"):
        lenet.load(folder)
