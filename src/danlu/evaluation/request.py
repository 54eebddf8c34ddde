"""A model that `danlu eval` judges, or that answers there, as flags name it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from danlu.core.terminal import print_status, print_status_early

if TYPE_CHECKING:
    from danlu.inference.chat_tokenizer import ChatTokenizer
    from danlu.inference.generation_config import Precision
    from danlu.inference.load_model import LoadedModel
    from danlu.inference.resolve_model import ResolvedModel
    from danlu.recipe.sections import QuantizationSection

DEFAULT_MAX_LENGTH = 2048  # tokens of a sample, where neither the user nor the model's context asks for fewer
KEYS = (
    "data.max_length", "data.overlong", "data.train_on", "data.system", "data.append_eos",
    "data.on_bad_row", "data.bad_row_limit", "data.workers", "data.cache",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A decoder, the rows it is judged on, and how both are read and the result is shown."""

    resolved: ResolvedModel
    data: str
    overrides: list[str]
    chat_template: Path | None
    quantization: QuantizationSection | None
    precision: Precision
    device: str
    context: int  # tokens of a row that the model sees
    as_json: bool

    def tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer, with the chat template that was asked for."""
        from danlu.inference.load_model import load_chat_tokenizer

        resolved = self.resolved
        return load_chat_tokenizer(resolved.tokenizer_folder, self.chat_template, model=resolved.folder)

    def load(self, tokenizer: ChatTokenizer | None = None, *, merged: bool = False) -> LoadedModel:
        """Loads the model with its tokenizer, and prints its notes. merged: as in `load_model`."""
        from danlu.inference.load_model import load_model

        loaded = load_model(
            self.resolved,
            tokenizer or self.tokenizer(),
            precision=self.precision,
            device=self.device,
            quantization=self.quantization,
            merged=merged,
        )
        for note in loaded.notes:
            print_status(note)
        return loaded


def request_of(
    model: str,
    overrides: list[str],
    *,
    base: str | None,
    data: str,
    chat_template: Path | None,
    quantization: str | None,
    precision: Precision,
    device: str,
    as_json: bool,
    may_classify: bool = True,
) -> Request:
    """Resolves the decoder that flags name. Raises a DanluError for its faults, without reading weights."""
    from danlu.inference.quantization_choice import quantization_section
    from danlu.inference.resolve_model import resolve_model
    from danlu.models.hf_folder import check_headers

    resolved = resolve_model(model, base, may_classify=may_classify)
    print_status_early(f"reading {resolved.given_path} and {data}")
    config = resolved.config
    check_headers(resolved.folder, config, quantized=True)  # before rows are tokenised
    context = config.context_length - resolved.virtual_tokens_per_prompt
    section = quantization_section(quantization, resolved)
    return Request(resolved, data, overrides, chat_template, section, precision, device, context, as_json)
