"""`danlu train` on each process of a group, in a folder of its own: relative paths lead to copies that may differ."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from danlu.core.errors import DanluError
from danlu.recipe import load
from danlu.run.train import train

Edit = Callable[[Path], None]


def edit_text(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text, f"{file} has no {old}"
    file.write_text(text.replace(old, new), encoding="utf-8")


def edit_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}), encoding="utf-8")


def flip_a_bit(file: Path, *, at: float) -> None:
    """Of a byte in a file, `at` of the way through it."""
    content = bytearray(file.read_bytes())
    content[int(at * len(content))] ^= 1
    file.write_bytes(content)


def outcomes(folder: Path, files: Mapping[str, str], stale: Mapping[str, tuple[str, Edit]]) -> dict[str, str]:
    """How each recipe ended, by name: the class and text of its error, or the steps that it made.

    stale: by name of a recipe, the file of its own that rank 1 edits before, and how. The folder holds rank-0 and
    rank-1, which are alike.
    """
    rank = dist.get_rank()
    os.chdir(folder / f"rank-{rank}")
    found = {}
    for name, file in files.items():
        kept = None
        if name in stale and rank == 1:
            path, edit = Path(stale[name][0]), stale[name][1]
            kept = path, path.read_bytes()
            edit(path)
        try:
            outcome = train(load(Path(file)), log=lambda line: None, stream=io.StringIO())
            found[name] = f"{outcome.steps} steps"
        except DanluError as error:
            found[name] = f"{type(error).__name__}: {error}"
        if kept is not None:
            kept[0].write_bytes(kept[1])
    return found
