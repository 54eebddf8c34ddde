"""The quantization of a model that is loaded: the kind that was asked for, or the one its adapter was trained with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from danlu.core.errors import ModelError
from danlu.models.hf_folder import CONFIG, read_json

if TYPE_CHECKING:
    from danlu.inference.resolve_model import ResolvedModel
    from danlu.recipe.sections import QuantizationSection


def quantization_section(kind: str | None, resolved: ResolvedModel | None = None) -> QuantizationSection | None:
    """The recipe's section for --quantization; without the flag, that of an adapter's base while it was trained.

    None keeps weights as they are stored. Raises ModelError for values of danlu.json that no recipe may have.
    """
    values: Mapping[str, Any] = {"kind": kind}
    if kind is None:
        if resolved is None or "quantization_config" in read_json(resolved.folder / CONFIG) or not resolved.stacks:
            return None
        if (trained_with := resolved.stacks[0][-1].quantization) is None:
            return None
        values = trained_with
    elif kind == "none":
        return None
    # Imported here: it brings pydantic, which takes half a second.
    from pydantic import ValidationError

    from danlu.recipe import sections

    known = {section.model_fields["kind"].default: section for section in sections.QUANTIZATIONS}
    try:
        return known[values["kind"]](**values)
    except ValidationError as error:  # a kind alone is right: it is an adapter's own danlu.json
        assert resolved is not None
        first = error.errors()[0]
        key = ".".join(("quantization", *map(str, first["loc"])))
        raise ModelError(f"{resolved.stacks[0][-1].path / 'danlu.json'}: {key}: {first['msg']}") from None
