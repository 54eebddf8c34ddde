"""The formats of the recipe's kinds of quantization, in groups as small as the matrices of tests."""

from __future__ import annotations

from danlu.numerics.format import Format

GROUP = 32
FORMATS = {
    "int8": Format("int8", (1, GROUP), narrow_range=True),
    "int4": Format("int4", (1, GROUP), narrow_range=True),
    "int3": Format("int3", (1, GROUP)),
    "int2": Format("int2", (1, GROUP)),
    "fp8": Format("e4m3", (1, GROUP)),
    "mxfp8": Format("e4m3", (1, 32), "e8m0"),
    "mxfp4": Format("e2m1", (1, 32), "e8m0", rounding="floor"),
    "nvfp4": Format("e2m1", (1, 16), "e4m3"),
}
OF_FILES = {
    "fp8 blocks": Format("e4m3", (16, 24)),
    "fp8 rows": Format("e4m3", (1, 0)),
    "fp8 tensor": Format("e4m3", (0, 0)),
    "int5": Format("int5", (1, GROUP), "bfloat16"),
    "int4, zeros": Format("int4", (1, GROUP), "float16", "integer"),
    "int3, float zeros": Format("int3", (1, GROUP), zero="float"),
    "int8, zeros": Format("int8", (1, 0), zero="integer"),
}
"""Further ones, in which folders of other tools may be."""
