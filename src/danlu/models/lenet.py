"""LeNet-5, a classifier of small images (LeCun et al., Proceedings of the IEEE 86, 1998), in its modern form.

Sizes of layers are the paper's; later changes are made here too:

=========  =============================================  ========================================
layer      here                                           in the paper
=========  =============================================  ========================================
C1         6 maps by 5x5, the image padded by 2           the same, on images of 32x32
S2, S4     maximum of 2x2                                 sum of 2x2, with a trained weight and bias
C3         16 maps by 5x5, each sees all 6                each sees some of the 6 (table I)
C5, F6     120 and 84 units                               the same
output     10 logits                                      distances to 10 fixed patterns (RBF)
between    ReLU                                           a scaled tanh
=========  =============================================  ========================================

61,706 parameters. Pixels are bytes: 0 becomes -0.1 and 255 becomes 1.175, as in the paper (section II.C).

N images · C classes
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from danlu.core.errors import ModelError
from danlu.core.output_folder import replace_folder
from danlu.models.hf_folder import CONFIG, LENET, SINGLE_FILE, read_json
from danlu.models.initialize import named_generator

SIDE = 28  # pixels of an image, each way
CLASSES = 10
LOWEST, HIGHEST = -0.1, 1.175

_CONFIG: dict[str, Any] = {
    "model_type": LENET,
    "architectures": ["LeNet5"],
    "image_size": SIDE,
    "num_channels": 1,
    "num_labels": CLASSES,
    "pixel_range": [LOWEST, HIGHEST],
}


class LeNet5(nn.Module):
    """Parameters are float32; they are used in the type of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(1, 6, 5, padding=2)
        self.c3 = nn.Conv2d(6, 16, 5)
        self.c5 = nn.Linear(16 * 5 * 5, 120)  # a convolution by 5x5 in the paper, on maps of that size
        self.f6 = nn.Linear(120, 84)
        self.output = nn.Linear(84, CLASSES)

    def forward(self, pixels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, 28, 28] uint8 -> [N, C] float32 logits, with activations in `dtype`."""
        x = pixels.unsqueeze(1).to(dtype) * ((HIGHEST - LOWEST) / 255) + LOWEST
        x = F.max_pool2d(F.relu(_conv(self.c1, x)), 2)  # [N, 6, 14, 14]
        x = F.max_pool2d(F.relu(_conv(self.c3, x)), 2)  # [N, 16, 5, 5]
        x = F.relu(_linear(self.c5, x.flatten(1)))
        x = F.relu(_linear(self.f6, x))
        return _linear(self.output, x).float()


def _conv(layer: nn.Conv2d, x: Tensor) -> Tensor:
    assert layer.bias is not None, "every layer has one"
    return F.conv2d(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype), padding=layer.padding)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))


@torch.no_grad()
def initialize(model: LeNet5, seed: int) -> None:
    """First weights by (seed, parameter name): normal, std sqrt(2 / inputs), as ReLU wants (arXiv:1502.01852)."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.zero_()
        else:
            std = math.sqrt(2 / parameter[0].numel())
            parameter.copy_(torch.empty(parameter.shape).normal_(std=std, generator=named_generator(seed, name)))


def save(
    model: LeNet5,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    value: Callable[[str], Tensor | None] | None = None,
    writes: bool = True,
) -> None:
    """Writes config.json and model.safetensors with weights in `dtype`; the folder appears whole or not at all.

    value: parameter by parameter, where it is not the model as it stands. writes: False on those of several processes
    that only help with `value`.
    Raises ModelError for a folder that holds something else and for weights that are not finite; ResourceError for a
    full disk or a folder that cannot be written.
    """
    given = {name: (value or model.get_parameter)(name) for name, _ in model.named_parameters()}
    if not writes:
        return
    tensors: dict[str, Tensor] = {}
    for name, tensor in given.items():
        assert tensor is not None, f"{name}: no value on the process that writes"
        tensors[name] = tensor.detach().to("cpu", dtype).contiguous()
        if not tensors[name].isfinite().all():
            raise ModelError(f"{name}: not finite as {dtype}; the model is not written")
    config = _CONFIG | {"torch_dtype": str(dtype).removeprefix("torch.")}
    with replace_folder(folder, sum(tensor.nbytes for tensor in tensors.values()), own_file=CONFIG) as fresh:
        (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, fresh / SINGLE_FILE, {"format": "pt"})


def load(folder: Path, *, device: torch.device | str = "cpu") -> LeNet5:
    """The classifier in a folder, in float32. Raises ModelError for another model, and for weights that do not fit."""
    config = read_json(folder / CONFIG)
    for key in ("model_type", "image_size", "num_channels", "num_labels", "pixel_range"):
        if config.get(key) != _CONFIG[key]:
            raise ModelError(f"{folder / CONFIG}: {key} is {config.get(key)!r}, and LeNet-5 has {_CONFIG[key]!r}")
    file = folder / SINGLE_FILE
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from None
    model = LeNet5()
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stored = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | stored.keys()):
        if expected.get(name) != stored.get(name):
            raise ModelError(f"{file}: tensor {name} is {stored.get(name)}, and LeNet-5 has {expected.get(name)}")
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.to(device)
