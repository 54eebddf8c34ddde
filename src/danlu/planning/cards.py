"""Published figures of GPUs: memory, bandwidth, peaks and links, by the names that a cluster gives them. No torch.

The figures are those of the makers' data sheets and white papers:

- NVIDIA: the data sheets of V100, T4, A100, A10, RTX A6000, H100, H100 NVL, H200, L4 and L40S; of HGX and DGX B200 and
  B300 and of GB200 NVL72; the white papers of GA102 (RTX 3090), AD102 (RTX 4090) and GB202 (RTX 5090). Data sheets
  often print twice as much, for sparse matrices: these are for dense ones, with sums in float32.
- A800, H800 and H20 are A100 and H100 with slower NVLink (400 GB/s of both directions for A800 and H800), and with
  fewer multiprocessors in the H20.
- AMD: the data sheets of MI250X and MI300X. torch sees the two dies of an MI250X as two devices, so its row is one die.

Memory is the total that torch reports, which is less than the name says: a part is kept for error correction and the
driver. It is from torch's messages that memory ran out ("GPU 0 has a total capacity of 79.19 GiB").
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from danlu.core.errors import RecipeError
from danlu.core.spelling import did_you_mean

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
"""The types of operands that a peak may be known for."""
PCIE3, PCIE4, PCIE5 = 16e9, 32e9, 64e9  # bytes/s of 16 lanes, each direction


@dataclass(frozen=True)
class Card:
    """One device as a rank uses it."""

    name: str
    memory_bytes: int
    bandwidth: float | None
    """Bytes/s between the device and its memory; None where it is not known, as of a CPU that was not measured."""
    peaks: Mapping[str, float]
    """FLOP/s of dense matrix products by the operands' type, one of `PRECISIONS`; those that are known."""
    nvlink: float | None = None
    """Bytes/s that a card sends to its neighbours through NVLink or Infinity Fabric, in one direction; None: it has
    none."""
    nvlink_ranks: int | None = None
    """The cards that it connects; None: all of a node."""
    nvlink_spans_nodes: bool = False
    """Whether these may be cards of several nodes, as in a rack of GB200."""
    pcie: float = PCIE4
    """Bytes/s that a card sends through PCI Express, in one direction."""
    network: float = 12.5e9
    """Bytes/s that a card sends to other nodes in the maker's own system (DGX); 100 Gbit/s where there is none."""
    device_name: str = field(default="", compare=False)
    """A regular expression for the name that torch and nvidia-smi give it."""

    def peak(self, precision: str) -> float:
        """FLOP/s of dense products of operands of a type. Raises RecipeError where it is not known."""
        if precision not in self.peaks:
            known = ", ".join(self.peaks) or "none"
            raise RecipeError(
                f"{self.name}: its peak with {precision} is not known (known: {known}). Write it by hand in a cluster "
                f"file, as cards: {{peak: {{{precision}: ...}}}} in TFLOP/s"
            )
        return self.peaks[precision]


def _gpu(
    name: str,
    device_name: str,
    memory_gib: float,
    gb_s: float,
    fp32: float,
    tf32: float | None,
    bf16: float | None,
    fp16: float,
    fp8: float | None,
    int8: float | None,
    *,
    nvlink_gb_s: float | None = None,
    nvlink_ranks: int | None = None,
    nvlink_spans_nodes: bool = False,
    pcie: float = PCIE4,
    network_gb_s: float = 12.5,
) -> Card:
    """A row of the table: peaks in TFLOP/s, bandwidths in GB/s, memory in GiB."""
    peaks = dict(zip(PRECISIONS, (fp32, tf32, bf16, fp16, fp8, int8), strict=True))
    return Card(
        name,
        round(memory_gib * 2**30),
        gb_s * 1e9,
        {precision: teraflops * 1e12 for precision, teraflops in peaks.items() if teraflops is not None},
        None if nvlink_gb_s is None else nvlink_gb_s * 1e9,
        nvlink_ranks,
        nvlink_spans_nodes,
        pcie,
        network_gb_s * 1e9,
        device_name,
    )


# Of several that match a device's name the first counts. Columns: name, device name, memory, bandwidth, then the peaks
# with fp32, tf32, bf16, fp16, fp8 and int8.
CARDS: tuple[Card, ...] = (
    _gpu("GB200-186G", r"GB200\b", 184.31, 8000, 80, 1250, 2500, 2500, 5000, 5000,
         nvlink_gb_s=900, nvlink_ranks=72, nvlink_spans_nodes=True, pcie=PCIE5, network_gb_s=50),
    # INT8 is slow on it by design.
    _gpu("B300-288G", r"B300\b", 267.69, 7700, 75, 1125, 2250, 2250, 4500, 153.5,
         nvlink_gb_s=900, pcie=PCIE5, network_gb_s=100),
    _gpu("B200-180G", r"B200\b", 178.35, 7700, 75, 1125, 2250, 2250, 4500, 4500,
         nvlink_gb_s=900, pcie=PCIE5, network_gb_s=50),
    _gpu("H200-141G-NVL", r"H200 NVL\b", 139.80, 4800, 60, 417.5, 835.5, 835.5, 1670.5, 1670.5,
         nvlink_gb_s=450, nvlink_ranks=4, pcie=PCIE5, network_gb_s=50),
    _gpu("H200-141G", r"H200\b", 139.80, 4800, 66.9, 494.7, 989.4, 989.4, 1978.9, 1978.9,
         nvlink_gb_s=450, pcie=PCIE5, network_gb_s=50),
    _gpu("H100-80G-PCIe", r"H100 PCIe\b", 79.19, 2000, 51, 378, 756, 756, 1513, 1513,
         nvlink_gb_s=300, nvlink_ranks=2, pcie=PCIE5, network_gb_s=50),
    _gpu("H100-94G-NVL", r"H100 NVL\b", 93.10, 3900, 60, 417.5, 835.5, 835.5, 1670.5, 1670.5,
         nvlink_gb_s=300, nvlink_ranks=2, pcie=PCIE5, network_gb_s=50),
    _gpu("H100-80G", r"H100\b", 79.19, 3350, 66.9, 494.7, 989.4, 989.4, 1978.9, 1978.9,
         nvlink_gb_s=450, pcie=PCIE5, network_gb_s=50),
    _gpu("H800-80G", r"H800\b", 79.19, 3350, 66.9, 494.7, 989.4, 989.4, 1978.9, 1978.9,
         nvlink_gb_s=200, pcie=PCIE5, network_gb_s=50),
    _gpu("H20-96G", r"H20\b", 95.22, 4000, 44, 74, 148, 148, 296, 296,
         nvlink_gb_s=450, pcie=PCIE5, network_gb_s=50),
    _gpu("A100-40G-PCIe", r"A100-PCIE-40GB\b", 39.49, 1555, 19.5, 156, 312, 312, None, 624,
         nvlink_gb_s=300, nvlink_ranks=2, network_gb_s=25),
    _gpu("A100-80G-PCIe", r"A100 80GB PCIe\b", 79.25, 1935, 19.5, 156, 312, 312, None, 624,
         nvlink_gb_s=300, nvlink_ranks=2, network_gb_s=25),
    _gpu("A100-80G", r"A100-SXM4-80GB\b", 79.25, 2039, 19.5, 156, 312, 312, None, 624,
         nvlink_gb_s=300, network_gb_s=25),
    _gpu("A100-40G", r"A100\b", 39.49, 1555, 19.5, 156, 312, 312, None, 624,
         nvlink_gb_s=300, network_gb_s=25),
    _gpu("A800-80G", r"A800\b", 79.25, 2039, 19.5, 156, 312, 312, None, 624,
         nvlink_gb_s=200, network_gb_s=25),
    _gpu("L40S-48G", r"L40S\b", 44.40, 864, 91.6, 183, 362, 362, 733, 733),
    _gpu("L4-24G", r"L4\b", 22.03, 300, 30.3, 60, 121, 121, 242.5, 242.5),
    _gpu("A10-24G", r"A10\b", 22.06, 600, 31.2, 62.5, 125, 125, None, 250),
    _gpu("A6000-48G", r"RTX A6000\b", 47.53, 768, 38.7, 77.4, 154.8, 154.8, None, 309.7,
         nvlink_gb_s=56.25, nvlink_ranks=2),
    _gpu("RTX5090-32G", r"GeForce RTX 5090$", 31.37, 1792, 104.8, 104.8, 209.5, 209.5, 419, 838, pcie=PCIE5),
    _gpu("RTX4090-24G", r"GeForce RTX 4090$", 23.64, 1008, 82.6, 82.6, 165.2, 165.2, 330.3, 660.6),
    _gpu("RTX3090-24G", r"GeForce RTX 3090$", 23.68, 936, 35.6, 35.6, 71, 71, None, 284,
         nvlink_gb_s=56.25, nvlink_ranks=2),
    # These have no bfloat16, and their INT8 has no matrix products in the V100.
    _gpu("V100-16G-PCIe", r"V100-PCIE-16GB\b", 15.78, 900, 14, None, None, 112, None, None, pcie=PCIE3),
    _gpu("V100-32G-PCIe", r"V100-PCIE\b", 31.74, 900, 14, None, None, 112, None, None, pcie=PCIE3),
    _gpu("V100-16G", r"V100-SXM2-16GB\b", 15.78, 900, 15.7, None, None, 125, None, None,
         nvlink_gb_s=150, pcie=PCIE3, network_gb_s=6.25),
    _gpu("V100-32G", r"V100-SXM2\b", 31.73, 900, 15.7, None, None, 125, None, None,
         nvlink_gb_s=150, pcie=PCIE3, network_gb_s=6.25),
    _gpu("T4-16G", r"T4\b", 14.56, 320, 8.1, None, None, 65, None, 130, pcie=PCIE3),
    _gpu("MI300X-192G", r"MI300X\b", 191.98, 5300, 163.4, 653.7, 1307.4, 1307.4, 2614.9, 2614.9,
         nvlink_gb_s=448, pcie=PCIE5, network_gb_s=50),
    _gpu("MI250X-64G", r"MI250X\b", 63.98, 1638, 47.9, None, 191.5, 191.5, None, 191.5,
         nvlink_gb_s=200, network_gb_s=25),
)  # fmt: skip
_BY_NAME = {card.name.lower(): card for card in CARDS}


def card_of_device(device_name: str) -> Card | None:
    """The row of a device by the name that torch and nvidia-smi give it; None where it is not in the table."""
    return next((card for card in CARDS if re.search(rf"\b{card.device_name}", device_name)), None)


def find_card(kind: str) -> Card | str:
    """The row with a name such as H100-80G, or a message that says why there is none.

    Upper and lower case, and G and GB, are the same. The part with the memory may be left out where that leaves one
    size, of which the name without an ending (PCIe, NVL) is meant.
    """
    name = re.sub(r"(?<=\d)gb?(?=-|$)", "g", kind.lower())
    if name in _BY_NAME:
        return _BY_NAME[name]
    beginning = [key for key in _BY_NAME if key.startswith(f"{name}-")]
    shortest = min(beginning, key=len, default="")
    if beginning and all(key.startswith(shortest) for key in beginning):
        return _BY_NAME[shortest]
    if beginning:
        return f"{kind!r} is several: {', '.join(_BY_NAME[key].name for key in beginning)}. Name one of them"
    names = {key: card.name for key, card in _BY_NAME.items()}
    known = ", ".join(card.name for card in CARDS)
    return f"no card {kind!r} is known.{did_you_mean(kind, names)} There are {known}"


def nvidia_free_bytes() -> list[int]:
    """Bytes of memory of each GPU that no program takes now, as nvidia-smi shows them; none where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        return [int(line) << 20 for line in said.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def nvidia_devices() -> list[tuple[str, int]]:
    """Name and bytes of memory of each GPU that nvidia-smi shows; none where there is no nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        rows = [line.rsplit(",", 1) for line in said.splitlines() if line.strip()]
        return [(name.strip(), int(mebibytes) << 20) for name, mebibytes in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
