"""Rows of single tokens that several adapters train, combined into the rows of one adapter.

The change of a row is that from the base's, with the rows of the adapters below; a token that an adapter does not train
has no change there. Changes are combined as those of a whole matrix, so that the result is that of merging into the
base by the same method: there is no error.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu.adapters import token_rows
from danlu.adapters.adapter import in_float32
from danlu.adapters.adapter_config import AdapterFolder
from danlu.adapters.combine import Combination
from danlu.adapters.peft_folder import check_base_matrix, read_tensors
from danlu.adapters.peft_values import PREFIX, PeftReader
from danlu.adapters.targets import ROW_GROUPS
from danlu.assembly.base_model import base_of
from danlu.core.added_token import AddedToken
from danlu.core.errors import ModelError
from danlu.core.layer_types import Site
from danlu.models.config import ModelConfig
from danlu.models.hf_folder import read_config
from danlu.models.hf_folder import read_tensors as stored_tensors
from danlu.models.hf_layout import EMBEDDING, HEAD, hf_name, own_name
from danlu.models.initialize import named_generator
from danlu.models.loading import read_tensor
from danlu.models.sites import sites_of


@dataclass(frozen=True)
class CombinedRows:
    """The rows of the combined adapter, in PEFT's form, and the new tokens for which its base needs rows."""

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    tokens: tuple[AddedToken, ...] = ()


def combine_rows(
    folders: Sequence[AdapterFolder],
    below: Sequence[AdapterFolder],
    combination: Combination,
    into: str | Path | None,
    adapted: Collection[str],
) -> CombinedRows:
    """Combines the rows of adapters upon the same others; of adapters without rows nothing is read.

    into: the base, if not the one they name. adapted: names of the modules with low-rank factors in the result.
    Raises ModelError for rows that do not fit the base, for new tokens of one id, for a module that has both factors
    and rows, and where an adapter below changes all rows.
    """
    if not any(folder.values.get(token_rows.KEY) for folder in folders):
        return CombinedRows()
    base = base_of(folders, into, "--into", below)
    config = read_config(base.folder)
    sites = [site for site in sites_of(config) if site.group in ROW_GROUPS]
    own = [_Rows(folder, sites, tied=not config.has_own_head) for folder in folders]
    lower = [_Rows(folder, sites, tied=not config.has_own_head) for folder in below]
    values: dict[str, list[int]] = {}
    tensors: dict[str, Tensor] = {}
    for site in sites:
        ids = sorted({token for rows in own for token in rows.ids(site)})
        if not ids:
            continue
        if site.hf_name in adapted:
            raise ModelError(
                f"{site.hf_name}: one adapter trains rows of single tokens of it, another a low-rank change, and no "
                "adapter has both. Merge them into the base"
            )
        start = _stored_matrix(base.folder, config, site)
        for rows in lower:
            rows.check_alone(site)
            rows.put_into(start, site)
        change = combination.of([rows.change(start, site) for rows in own], partial(_generator, combination, site))
        values[site.hf_name.rpartition(".")[2]] = ids
        tensors[token_rows.key_of(site)] = (start + change)[ids]
    return CombinedRows({token_rows.KEY: values}, tensors, base.tokens)


class _Rows:
    """The rows that the adapter of a folder trains."""

    def __init__(self, folder: AdapterFolder, sites: Sequence[Site], *, tied: bool) -> None:
        self._path = folder.path
        self._tensors = read_tensors(folder)
        reader = PeftReader(folder.values, self._tensors, str(folder.path))
        self._ids, self._rows = token_rows.from_peft(reader, sites, tied=tied)

    def ids(self, site: Site) -> list[int]:
        """The tokens with rows of a site; none for a head that is tied to the embedding."""
        return self._ids[site.group] if site.name in self._rows else []

    def put_into(self, matrix: Tensor, site: Site) -> None:
        """Replaces rows of a site's matrix [V, D]."""
        if ids := self.ids(site):
            matrix[ids] = self._rows[site.name].to(matrix.dtype)

    def change(self, base: Tensor, site: Site) -> Tensor:
        """The change of a site's matrix [V, D]. Raises ModelError where PEFT has written another one with the rows."""
        for key, tensor in self._tensors.items():
            if token_rows.is_base_of_rows(key) and key.startswith(f"{PREFIX}{site.hf_name}."):
                check_base_matrix(str(self._path), key, f"{site.hf_name}.weight", base, tensor, self.ids(site))
        changed = base.clone()
        self.put_into(changed, site)
        return changed - base

    def check_alone(self, site: Site) -> None:
        """Raises ModelError for an adapter that changes more of a site than single rows."""
        for key in self._tensors:
            of_rows_or_base = ".token_adapter." in key or key.endswith(".base_layer.weight")
            if key.startswith(f"{PREFIX}{site.hf_name}.") and not of_rows_or_base:
                raise ModelError(
                    f"{self._path}: changes all rows of {site.hf_name}, and adapters upon it train single ones. Merge "
                    "it into the base first, and these into the result"
                )


def _generator(combination: Combination, site: Site, number: int) -> torch.Generator:
    """The generator of dare's choice for an adapter, as `merging` has it for the same matrix."""
    return named_generator(combination.seed, f"{site.hf_name}.weight.{number}")


def _stored_matrix(folder: Path, config: ModelConfig, site: Site) -> Tensor:
    """The matrix [V, D] of a base, in float32 or wider."""
    stored = {own_name(name, config): name for name in stored_tensors(folder)}
    # Some tools keep a tied matrix as the head.
    names = [hf_name(each, config) for each in ((HEAD,) if site.group == "head" else (EMBEDDING, HEAD))]
    name = next((stored[name] for name in names if name in stored), None)
    if name is None:
        raise ModelError(f"{folder}: holds no {names[0]}, of which adapters train rows")
    return in_float32(read_tensor(folder, name)).clone()
