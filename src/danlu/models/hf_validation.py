"""Whether the weights of a folder are those of its config, by what index and headers say: no weight is read. No torch.

It takes milliseconds, so it comes before rows are tokenised, which may take hours.
"""

from __future__ import annotations

from pathlib import Path

from danlu.errors import ModelError
from danlu.models.config import ModelConfig
from danlu.models.hf_folder import read_tensors
from danlu.models.hf_layout import EMBEDDING, HEAD, IGNORED, hf_tensors
from danlu.safetensors_format import FLOAT_DTYPES, TensorLocation

PACKED = "U8"  # a weight in 4 bits: its codes two a byte, its constants beside it as `<name>.absmax`, ...
_SHOWN = 10


def check_headers(folder: Path, config: ModelConfig, *, packed: bool) -> dict[str, TensorLocation]:
    """Where each tensor of a model folder lies, once index, headers and file sizes have been found to fit its config.

    packed: weights may be in 4 bits. Raises one ModelError with everything that is wrong with the tensors: absent, too
    many, of another shape or type; and those of `models.folder.read_tensors`.
    """
    stored = read_tensors(folder)
    wanted = hf_tensors(config)
    in_bits = {tensor.name for tensor in wanted if tensor.name in stored and stored[tensor.name].dtype == PACKED}
    if in_bits and not packed:
        raise ModelError(f"{folder}: its weights are stored in 4 bits; here the original weights are needed")
    wanted = [tensor for tensor in wanted if tensor.name not in in_bits]
    names = {tensor.name for tensor in wanted}
    problems = []
    for tensor in wanted:
        found = stored.get(tensor.name)
        if found is None and config.tie_word_embeddings and tensor.name == EMBEDDING:
            found = stored.get(HEAD)  # some tools keep a tied matrix under its other name
        if found is None:
            problems.append(f"{tensor.name}: missing; expected shape {list(tensor.shape)}")
        elif found.shape != tensor.shape:
            problems.append(
                f"{tensor.name} in {found.file.name}: expected shape {list(tensor.shape)}, found {list(found.shape)}"
            )
        elif found.dtype not in FLOAT_DTYPES:
            problems.append(f"{tensor.name} in {found.file.name}: expected floating point, found {found.dtype}")
    may_hold = names | ({HEAD} if config.tie_word_embeddings else set())
    for name, found in stored.items():
        constant = any(name == one or name.startswith(f"{one}.") for one in in_bits)
        if name not in may_hold and not constant and not IGNORED.search(name):
            problems.append(f"{name} in {found.file.name}: not a tensor of this {config.family} model")
    if not problems:
        return stored
    if len(problems) == 1 and problems[0].startswith(f"{HEAD}: missing"):
        problems.append('if its head is the embedding, set "tie_word_embeddings": true in config.json')
    more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    raise ModelError("\n  ".join([f"{folder}: the weights do not fit config.json:", *problems[:_SHOWN], *more]))
