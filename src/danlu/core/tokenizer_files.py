"""The files of a folder that a tokenizer is read from, copied with and downloaded by: one list for all of that."""

from __future__ import annotations

from pathlib import Path

VOCABULARY_FILES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "tiktoken.model",
    "spiece.model",
    "spm.model",
    "sentencepiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
"""Vocabularies: a folder with any of these has a tokenizer."""
NAMED_TEMPLATES = "additional_chat_templates"
"""The folder, within a tokenizer's, of chat templates besides the ordinary one (`tool_use.jinja`)."""
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "tokenizer.*.json",  # for versions of the tokenizers library, named by fast_tokenizer_files of its config
    "tokenizer.model.*",  # Mistral's versions of a vocabulary
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    f"{NAMED_TEMPLATES}/*.jinja",
)
"""Everything that a tokenizer may be read from, as patterns relative to its folder (transformers 5.23)."""


def lacks_chat_template(folder: Path) -> bool:
    """Whether a folder has a tokenizer, and no chat template for it. The files are searched, no library is loaded."""
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        return False
    files = ("chat_template.jinja", "chat_template.json", f"{NAMED_TEMPLATES}/*.jinja")
    config = folder / "tokenizer_config.json"
    named = config.is_file() and b'"chat_template"' in config.read_bytes()
    return not named and not any(file.is_file() for pattern in files for file in folder.glob(pattern))
