from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from danlu.core.errors import ModelError
from danlu.core.safetensors_format import encode_header, read_header


def test_headers_place_tensors_where_safetensors_put_them(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(5, dtype=torch.bfloat16), "e": torch.zeros(0, 4)}
    file = tmp_path / "x.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    stored = read_header(file)
    assert {name: (one.dtype, one.shape) for name, one in stored.items()} == {
        "a": ("BF16", (5,)),
        "b": ("F32", (2, 3)),
        "e": ("F32", (0, 4)),
    }
    raw = file.read_bytes()
    for name, one in stored.items():
        assert raw[one.offset : one.offset + one.bytes] == tensors[name].view(torch.uint8).numpy().tobytes()


def test_safetensors_reads_our_header(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    first, second = torch.randn(3, 2), torch.randn(4).half()
    header = encode_header([("first", "F32", (3, 2)), ("second", "F16", (4,))])
    assert len(header) % 8 == 0
    file.write_bytes(header + first.numpy().tobytes() + second.numpy().tobytes())
    loaded = load_file(file)
    assert torch.equal(loaded["first"], first)
    assert torch.equal(loaded["second"], second)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> bytes:
    text = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}}).encode()
    return struct.pack("<Q", len(text)) + text


def entries(**places: tuple[int, int]) -> bytes:
    named = {name: {"dtype": "F32", "shape": [2], "data_offsets": list(place)} for name, place in places.items()}
    text = json.dumps(named).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file"),
        (b"PK\x03\x04" + b"\x00" * 40, "not a safetensors file|truncated"),
        (struct.pack("<Q", 500) + b"{", "truncated: the header alone is 508 bytes, the file has 9"),
        (struct.pack("<Q", 4) + b"{no}", "broken safetensors header: Expecting"),
        (struct.pack("<Q", 2) + b"[]", "broken safetensors header: expected an object"),
        (struct.pack("<Q", 8) + b'{"w": 1}', "broken safetensors header at tensor w"),
        (entry("F32", [2], 0, 4) + b"\0" * 4, r"tensor w: 4 bytes stored, but shape \[2\] of F32 does not take that"),
        (
            entries(a=(0, 8), b=(4, 12)) + b"\0" * 12,
            "broken safetensors header: tensor b lies over another one's bytes",
        ),
        (entry("F32", [2], 0, 8) + b"\0" * 7, "truncated: the header promises .* tensor w is cut off"),
    ],
)
def test_broken_files_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=f"model.safetensors: .*({message})"):
        read_header(file)
