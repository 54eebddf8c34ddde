"""The models that a server has by name: a base and its adapters, each with its tokenizer. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danlu.core.errors import DataError, RecipeError
from danlu.data.harmony_thoughts import ANALYSIS, HarmonyReader
from danlu.data.thoughts import THOUGHTS, ThoughtReader
from danlu.data.tokenizer import Tokenizer
from danlu.data.tool_calls import ReadCalls, unknown_form_line
from danlu.inference.chat_tokenizer import ChatTokenizer
from danlu.inference.engine_adapters import BASE
from danlu.inference.generation_config import sampling_defaults
from danlu.inference.grammar import Grammars
from danlu.models.config import ModelConfig
from danlu.serving.openai_api import ApiError

if TYPE_CHECKING:
    from danlu.inference.load_model import LoadedModel
    from danlu.inference.resolve_model import ResolvedModel


@dataclass(frozen=True)
class ServedModel:
    """The model that a request chooses with `model`."""

    name: str
    adapter: str | None
    """Its name in the engine; None where the engine has no adapters."""
    chat_tokenizer: ChatTokenizer
    stop_ids: frozenset[int]
    """Tokens that end an answer."""
    virtual_tokens: int
    """The number of tokens that the engine puts before its prompts."""
    advised: Mapping[str, Any]
    """Sampling options where a request has none, by generation_config.json."""
    grammars: Grammars | None = None
    """Compile the grammars of requests for its tokens."""
    thought_reader: type[ThoughtReader] | type[HarmonyReader] | None = None
    """Reads the thoughts of its answers in chats apart from their text; None where they have none, or stay in it."""
    read_calls: ReadCalls = field(default_factory=ReadCalls)
    """The parser of tool calls in its answers, without the tools."""
    notes: tuple[str, ...] = ()
    """Remarks that a server prints at its start."""


class ServedModels:
    """All of them. A request that names none gets the first."""

    def __init__(self, models: Sequence[ServedModel], config: ModelConfig) -> None:
        self.config = config
        """The config of all of them."""
        self._by_name = {model.name: model for model in models}

    @property
    def notes(self) -> list[str]:
        """Returns the remarks on them that a server prints at its start, once each."""
        return list(dict.fromkeys(note for model in self._by_name.values() for note in model.notes))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def put(self, model: ServedModel) -> None:
        """Takes one more model, in the place of one of its name."""
        self._by_name[model.name] = model

    def remove(self, name: str) -> None:
        """Has requests find a model no more."""
        del self._by_name[name]

    def find(self, name: str | None) -> ServedModel:
        """Raises ApiError, 404, for a name that is not there."""
        if name is None:
            return next(iter(self._by_name.values()))
        if name not in self._by_name:
            raise ApiError(
                f"model: no {name!r:.100} here; there are {', '.join(self.names)}",
                param="model",
                status=404,
                code="model_not_found",
            )
        return self._by_name[name]


def served_models(
    resolved: ResolvedModel,
    loaded: LoadedModel,
    name: str | None = None,
    chat_template: Path | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    reasoning: bool = True,
) -> ServedModels:
    """A loaded model and its adapters: first the model of the command line, then the others.

    name: the base's, in place of its folder's; RecipeError is raised where an adapter has it.
    template_kwargs: further variables of chat templates.
    reasoning: whether thoughts stand apart from the text of answers, where the chat template has them.
    """
    from danlu.inference.chat_adapters import ChatAdapters  # here, since it brings torch

    chat_adapters = ChatAdapters(resolved, loaded, chat_template, template_kwargs)
    adapters = loaded.adapter_names
    if name in adapters:
        raise RecipeError(f"--name: {name} is the name of an adapter already")
    models = []
    for adapter in (BASE, *adapters):
        try:
            active = chat_adapters.tokenizer_of(adapter)
        except DataError:  # a text can be continued without a chat template; a request to chat is refused
            active = chat_adapters.tokenizer_of(adapter, chat=False)
        models.append(
            served_model(
                (name or base_name(resolved.folder, adapters)) if adapter == BASE else adapter,
                adapter if adapters else None,
                active.chat_tokenizer,
                active.stop_ids,
                active.virtual_tokens,
                loaded.model.config,
                (resolved.tokenizer_folder, resolved.folder),
                reasoning=reasoning,
            )
        )
    if resolved.given_path != resolved.folder:  # an adapter was given as the model
        models.insert(0, models.pop(1))
    return ServedModels(models, loaded.model.config)


def served_model(
    name: str,
    adapter: str | None,
    chat_tokenizer: ChatTokenizer,
    stop_ids: frozenset[int],
    virtual_tokens: int,
    config: ModelConfig,
    folders: Sequence[Path],
    *,
    reasoning: bool,
) -> ServedModel:
    """One model of a server; see `ServedModel`. folders: of generation_config.json, of which the first counts."""
    tokenizer = chat_tokenizer.tokenizer
    return ServedModel(
        name=name,
        adapter=adapter,
        chat_tokenizer=chat_tokenizer,
        stop_ids=stop_ids,
        virtual_tokens=virtual_tokens,
        advised=next(filter(None, map(sampling_defaults, folders)), {}),
        grammars=Grammars(tokenizer, config.vocab_size, stop_ids),
        thought_reader=_thought_reader(tokenizer) if reasoning else None,
        **_calls(tokenizer),
    )


def _thought_reader(tokenizer: Tokenizer) -> type[ThoughtReader] | type[HarmonyReader] | None:
    """The reader of thoughts by the marks that the chat template of a model knows; None where it knows none."""
    if not tokenizer.has_template:
        return None
    try:
        source = tokenizer.template().source
    except DataError:  # one that does not compile: requests to chat are refused
        return None
    if any(mark in source for mark in THOUGHTS.values()):
        return ThoughtReader
    return HarmonyReader if ANALYSIS in source else None


def _calls(tokenizer: Tokenizer) -> dict[str, Any]:
    """The reader of a model's calls of tools, with remarks on it; none where the model is shown no tools."""
    if not tokenizer.has_template:
        return {}
    try:
        template = tokenizer.template(tools=True)
    except DataError:  # a template that does not compile: requests to chat are refused
        return {}
    if not template.takes_tools:
        return {}
    line = unknown_form_line(template)
    return {"read_calls": ReadCalls.of(template, ()), "notes": () if line is None else (line,)}


def base_name(folder: Path, adapters: Sequence[str]) -> str:
    """A server's name for the model of a folder: the hub id it is a snapshot of, its run, or the folder's own name.

    adapters: names that are taken.
    """
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        name = repository.removeprefix("models--").replace("--", "/")
    else:
        name = folder.parent.name if (folder.parent / "recipe.yaml").is_file() else folder.name
    return f"{name}-base" if name in adapters else name
