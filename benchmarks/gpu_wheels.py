"""Fills wheels/ with what `make gpu` needs on a machine that has torch and no network; under 60 MiB.

    python benchmarks/gpu_wheels.py [--python 3.12] [--cuda 130] [--platform manylinux_2_28_x86_64] [--no-bitsandbytes]

bitsandbytes brings its kernels for every version of CUDA and processor; those of one version are kept. The wheel is
then no longer the one that was signed, so it stays in wheels/ and is installed from nowhere else.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

from gpu import NEEDED, WHEELS

MAX_BYTES = 60 * 2**20
PLATFORMS = ("manylinux_2_28_{}", "manylinux_2_27_{}", "manylinux_2_24_{}", "manylinux_2_17_{}", "manylinux2014_{}")
WITH_TORCH = ("torch", "typing-extensions")  # torch cannot be imported without the second


def download(packages: list[str], python: str, processor: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--python-version", python, "--implementation", "cp", "--dest", str(WHEELS)]
    for platform in PLATFORMS:
        command += ["--platform", platform.format(processor)]
    constraints = WHEELS.parent / "constraints.txt"
    subprocess.run([*command, "-c", str(constraints), *packages], check=True)


def slimmed(wheel: Path, cuda: str) -> int:
    """Rewrites bitsandbytes' wheel with the CPU's library and that of one CUDA version. Returns its bytes."""
    kept = wheel.with_suffix(".slim")
    found = []
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(kept, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            name = entry.filename.rpartition("/")[2]
            if name.startswith("libbitsandbytes_"):
                found.append(name)
                if name not in (f"libbitsandbytes_cuda{cuda}.so", "libbitsandbytes_cpu.so"):
                    continue
            target.writestr(entry, source.read(entry))
    if f"libbitsandbytes_cuda{cuda}.so" not in found:
        kept.unlink()
        raise SystemExit(f"{wheel.name} has no kernels for CUDA {cuda}; it has {', '.join(sorted(found))}. Give --cuda")
    kept.replace(wheel)
    return wheel.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--cuda", default="130", help="as in torch.version.cuda, without the point")
    parser.add_argument("--processor", default="x86_64")
    parser.add_argument("--no-bitsandbytes", action="store_true")
    options = parser.parse_args()
    WHEELS.mkdir(exist_ok=True)
    for old in WHEELS.glob("*.whl"):
        old.unlink()
    download([one for one in NEEDED.values() if one not in WITH_TORCH], options.python, options.processor)
    if not options.no_bitsandbytes:
        download(["bitsandbytes"], options.python, options.processor)
        for wheel in WHEELS.glob("bitsandbytes-*.whl"):
            slimmed(wheel, options.cuda)
    total = 0
    for wheel in sorted(WHEELS.glob("*.whl")):
        total += wheel.stat().st_size
        print(f"{wheel.stat().st_size / 2**20:6.1f} MiB  {wheel.name}")
    print(f"{total / 2**20:6.1f} MiB in {WHEELS}")
    if total > MAX_BYTES:
        raise SystemExit(f"more than {MAX_BYTES / 2**20:.0f} MiB: leave something out (--no-bitsandbytes)")


if __name__ == "__main__":
    main()
