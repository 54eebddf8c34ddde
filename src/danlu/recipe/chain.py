"""A chain: one file with the recipes of several stages, each of which starts from the result of one before it.

Its `stages` are recipes with a `name`. Keys next to `stages` are shared: each stage has them, except those that it sets
itself. Stage NAME runs in OUTPUT/NAME. `stages.NAME` stands for the result of an earlier stage wherever a recipe names
a model. Every stage is checked before the first one starts, and every problem is reported at once. Stages train, but
for those with `stage: quantize`, which are recipes of `danlu quantize`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from danlu.core.errors import RecipeError
from danlu.core.spelling import did_you_mean
from danlu.recipe import overrides as overriding
from danlu.recipe.loading import Loaded, check, complete, in_order, load_tree, loaded, read_text
from danlu.recipe.messages import format_value
from danlu.recipe.overrides import Override
from danlu.recipe.sections import Continue, Model, Recipe
from danlu.recipe.short_forms import expand
from danlu.recipe.yaml_reader import parse
from danlu.recipe.yaml_tree import Node, Origin, Problem

if TYPE_CHECKING:
    from danlu.recipe.quantize_recipe import LoadedQuantize
    from danlu.recipe.sections.quantizing import QuantizeRecipe

STAGES, NAME, FROM = "stages", "name", "from"
CHAIN_KEYS = {
    STAGES: "A chain: recipes that are trained one after the other, each from the result of one before it. The keys "
    "next to it are shared by all of them, and stage NAME runs in OUTPUT/NAME.",
    f"{STAGES}.{NAME}": "What the stage is called, in overrides (NAME.steps=10) and in the output folder; by default "
    "what its `stage` says.",
    f"{STAGES}.{FROM}": "The earlier stage with the result that this one starts from; by default the one before it.",
}
"""The keys that only a chain has, with their meanings."""
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][\w-]*")
_PREFIX = f"{STAGES}."
_WHOLE_MODELS = re.compile(r"model\.tokenizer|reference\.model|rollout\.draft\.model")
"""Keys that take a model, but not an adapter."""
_MODELS = re.compile(rf"{_WHOLE_MODELS.pattern}|model\.path|teacher\.\d+\.model|rewards\.\d+\.path")
"""The keys that take `stages.NAME` as their text."""


@dataclass(frozen=True)
class ChainStage:
    """One recipe of a chain that trains, with `output` set to the stage's own folder."""

    name: str
    loaded: Loaded
    inputs: tuple[str, ...]  # names of the earlier stages that it reads results of


@dataclass(frozen=True)
class QuantizeStage:
    """One recipe of a chain that quantizes, with `output` set to the stage's own folder, which becomes the model's."""

    name: str
    loaded: LoadedQuantize
    inputs: tuple[str, ...]  # as those of a `ChainStage`: the stage of the model, or none


@dataclass(frozen=True)
class Chain:
    """Checked recipes in the order of their work, one at least of which trains."""

    output: str
    stages: tuple[ChainStage | QuantizeStage, ...]

    @property
    def trained(self) -> tuple[ChainStage, ...]:
        """The stages that train."""
        return tuple(stage for stage in self.stages if isinstance(stage, ChainStage))


def load_recipe_or_chain(path: str | Path, overrides: Sequence[str] = ()) -> Loaded | Chain:
    """Reads and checks a file: a chain where it has `stages`, else a recipe, as `load` does. The file is parsed once.

    An override that begins with a stage's name (`sft.steps=10`) is for that stage; any other is for every stage.
    Raises RecipeError with one line for each problem: file, line and column (or the override), key, remedy.
    """
    problems: list[Problem] = []
    tree = parse(read_text(Path(path)), str(path), problems)
    if tree is None or tree.child(STAGES) is None:
        return load_tree(tree, path, overrides, problems)
    chain = _Reader(tree, overriding.parse_overrides(overrides, problems), problems).read()
    if problems or chain is None:
        raise RecipeError([problem.line(str(path)) for problem in in_order(problems)])
    return chain


class _Reader:
    """Reads the stages of a file one after the other, and collects their problems."""

    def __init__(self, tree: Node, overrides: Sequence[Override], problems: list[Problem]) -> None:
        self.problems = problems
        self.written = tree.child(STAGES)
        shared = (
            {key: node for key, node in tree.value.items() if key != STAGES} if isinstance(tree.value, dict) else {}
        )
        self.output = shared.pop("output", None)
        self.shared = expand(Node(shared, tree.origin), Recipe)
        walked = [node for _, node in Node(shared, tree.origin).walk()]
        self.shared_places = {
            origin.place for node in walked for origin in (node.origin, node.key_origin) if origin is not None
        }
        self.whole = tree.origin
        self.overrides = list(overrides)
        self.folders: dict[str, str] = {}  # of the stages read so far, by name
        self.recipes: dict[str, Recipe | QuantizeRecipe | None] = {}  # the same; None for one that is wrong
        self.misfits: dict[Problem, list[str]] = {}  # problems of shared values, and the stages that have them

    def complain(self, key: str, message: str, origin: Origin | None) -> None:
        """Adds a problem of the file."""
        self.problems.append(Problem(key, message, origin))

    def read(self) -> Chain | None:
        """The chain; None, with problems, where it has no stages or no output."""
        entries = self._entries()
        names = [name for name, _ in entries]
        general = self._general_overrides(names)
        output = self._output()
        for key in Model.one_of:
            node, exact = self.shared.nearest(f"model.{key}")
            if exact:
                message = "a start is for one stage: others start from a result. Write it in the first one"
                self.complain(f"model.{key}", message, node.origin)
        if self.problems or output is None:
            # Without names and folders nothing can be said of what refers to them.
            return None
        if all(_quantizes(entry) for _, entry in entries):
            self.complain(STAGES, "none of them trains. For a model that is there use `danlu quantize`", self.whole)
        stages: list[ChainStage | QuantizeStage | None] = [
            self._quantize_stage(name, entry, output, general, names)
            if _quantizes(entry)
            else self._stage(name, entry, output, general, names)
            for name, entry in entries
        ]
        for problem, of in self.misfits.items():
            where = "" if len(of) == len(names) else f" (in stage {', '.join(of)})"
            self.problems.append(replace(problem, message=problem.message + where))
        return Chain(output, tuple(stage for stage in stages if stage is not None))

    def _entries(self) -> list[tuple[str, Node]]:
        """Returns the mappings of `stages` with their names; those without a proper name are left out and reported."""
        assert self.written is not None, "the file has stages"
        if not isinstance(self.written.value, list) or not self.written.value:
            what = format_value(self.written.plain)
            self.complain(STAGES, f"expected a list of recipes, each with a name, not {what}", self.written.origin)
            return []
        entries: list[tuple[str, Node]] = []
        for index, entry in enumerate(self.written.value):
            key = f"{STAGES}.{index}"
            if not isinstance(entry.value, dict):
                message = f"expected a recipe such as {{name: sft, stage: sft}}, not {format_value(entry.plain)}"
                self.complain(key, message, entry.origin)
                continue
            named = entry.child(NAME) or entry.child("stage")
            name = None if named is None else named.value
            taken = [other for other, _ in entries]
            if (problem := _name_problem(name, taken)) is not None:
                self.complain(f"{key}.{NAME}", problem, entry.origin if named is None else named.origin)
                continue
            entries.append((str(name), entry))
        return entries

    def _general_overrides(self, names: Sequence[str]) -> list[Override]:
        """The overrides that are for every stage; `output` is taken out, which is the chain's."""
        general: list[Override] = []
        for override in self.overrides:
            first = override.parts[0]
            if override.parts == ("output",):
                self.output = override.value
            elif first in Recipe.model_fields:
                general.append(override)
            elif first == STAGES:
                message = "name the stage: NAME.key=value, as in " + f"{names[0] if names else 'sft'}.steps=100"
                self.complain(override.key, message, override.value.origin)
            elif first not in names and self._only_quantize_has(first):
                message = f"is a key of stage quantize alone. Name the stage: NAME.{override.key}=value"
                self.complain(override.key, message, override.value.origin)
            elif first not in names:
                guess = did_you_mean(first, [*names, *Recipe.model_fields])
                message = f"neither a stage nor a key.{guess} Stages: {', '.join(names)}"
                self.complain(override.key, message, override.value.origin)
        return general

    def _output(self) -> str | None:
        """The folder of the whole chain."""
        if self.output is None:
            self.complain("output", "missing: add 'output: ...' next to 'stages': the folder of all stages", self.whole)
        elif not isinstance(self.output.value, str) or not self.output.value.strip():
            self.complain("output", f"expected a text, not {format_value(self.output.plain)}", self.output.origin)
        else:
            return self.output.value
        return None

    def _stage(
        self, name: str, entry: Node, output: str, general: Sequence[Override], names: Sequence[str]
    ) -> ChainStage | None:
        """Reads one stage that trains, with the shared keys, its overrides and the results that it refers to; None
        where it is wrong.
        """
        problems: list[Problem] = []
        tree = deepcopy(self.shared)
        tree.origin = entry.origin
        overriding.merge(tree, _own(entry))
        assert isinstance(tree.value, dict), "a mapping laid over a mapping"
        complete(tree, [*general, *self._own_overrides(name, problems)], problems)
        folder = self._put_output(tree, name, entry, output, problems)
        self._start(tree, entry, problems)
        self._refer(tree, names[len(self.folders) :], problems)
        recipe = check(tree, problems, to_come=self.folders.values())
        if recipe is not None and (quantized := self._quantized()):
            from danlu.recipe.chained_quantize import problems_behind

            behind = problems_behind(recipe, quantized)
            problems += [replace(each, origin=tree.nearest(each.key)[0].origin) for each in behind]
        inputs = self._remember(name, tree, folder, recipe, problems)
        if recipe is None or problems:
            return None
        return ChainStage(name, loaded(recipe, tree), inputs)

    def _quantize_stage(
        self, name: str, entry: Node, output: str, general: Sequence[Override], names: Sequence[str]
    ) -> QuantizeStage | None:
        """Reads one stage that quantizes; None where it is wrong."""
        from danlu.recipe import chained_quantize, quantize_recipe

        problems: list[Problem] = []
        own_overrides = self._own_overrides(name, problems)
        tree = chained_quantize.tree_of(self.shared, _own(entry), general, own_overrides, problems)
        folder = self._put_output(tree, name, entry, output, problems)
        self._start_quantizing(tree, entry, names[len(self.folders) :], problems)
        recipe = quantize_recipe.check(tree, problems, to_come=self.folders.values())
        inputs = self._remember(name, tree, folder, recipe, problems)
        if recipe is None or problems:
            return None
        origins = {key: node.origin for key, node in tree.walk()}
        return QuantizeStage(name, quantize_recipe.LoadedQuantize(recipe, origins), inputs)

    def _remember(
        self, name: str, tree: Node, folder: str, recipe: Recipe | QuantizeRecipe | None, problems: list[Problem]
    ) -> tuple[str, ...]:
        """Keeps a stage that was read for later ones, reports its problems, and returns the names of its inputs."""
        inputs = self._inputs(tree)
        self.folders[name] = folder
        self.recipes[name] = recipe
        self._report(name, problems)
        return inputs

    def _own_overrides(self, name: str, problems: list[Problem]) -> list[Override]:
        """The overrides that are for one stage, without its name."""
        own = [Override(each.parts[1:], each.value) for each in self.overrides if each.parts[0] == name]
        problems += [Problem("", "write NAME.key=value", each.value.origin) for each in own if not each.parts]
        return [override for override in own if override.parts]

    def _put_output(self, tree: Node, name: str, entry: Node, output: str, problems: list[Problem]) -> str:
        """Writes the stage's folder into its tree, and returns it."""
        assert isinstance(tree.value, dict), "a recipe is a mapping"
        folder = f"{output.rstrip('/')}/{name}"
        if (given := tree.child("output")) is not None:
            message = f"a stage runs in its folder of the chain's output, here {output}/{name}. Leave it out"
            problems.append(Problem("output", message, given.key_origin or given.origin))
        tree.value["output"] = Node(folder, self.output.origin if self.output else entry.origin)
        return folder

    def _inputs(self, tree: Node) -> tuple[str, ...]:
        """The names of the stages read so far with a folder that a tree names."""
        read = {node.value for _, node in tree.walk() if isinstance(node.value, str)}
        return tuple(earlier for earlier, folder in self.folders.items() if folder in read)

    def _quantized(self) -> dict[str, tuple[str, QuantizeRecipe]]:
        """The stages read so far that quantize, by their folders."""
        return {
            self.folders[name]: (name, recipe)
            for name, recipe in self.recipes.items()
            if recipe is not None and not isinstance(recipe, Recipe)
        }

    def _only_quantize_has(self, key: str) -> bool:
        """Whether a key is one of stage quantize, where the chain has such a stage."""
        assert self.written is not None and isinstance(self.written.value, list), "the file has stages"
        if not any(_quantizes(entry) for entry in self.written.value):
            return False
        from danlu.recipe.chained_quantize import is_key

        return is_key(key)

    def _start_quantizing(self, tree: Node, entry: Node, later: Sequence[str], problems: list[Problem]) -> None:
        """Puts the folder of an earlier stage into `model` of a stage that quantizes: of the one that `model` or `from`
        names, or of the stage before."""
        from danlu.recipe.chained_quantize import start_problem

        assert isinstance(tree.value, dict), "a recipe is a mapping"
        model, explicit = tree.child("model"), entry.child(FROM)
        if explicit is not None and model is not None:
            message = "the model is named already. Keep one of both"
            problems.append(Problem(FROM, message, explicit.key_origin or explicit.origin))
            return
        named = explicit or model
        if named is None and not self.folders:
            return  # the check asks for a model
        earlier, origin = list(self.folders)[-1] if self.folders else "", entry.origin
        if named is not None:
            origin = named.origin
            if not isinstance(named.value, str):
                return
            if explicit is None and not named.value.startswith(_PREFIX):
                return  # a folder or a hub id
            earlier = named.value if explicit is not None else named.value.removeprefix(_PREFIX)
        tree.value["model"] = Node(self.folders.get(earlier, earlier), origin)
        key = "model" if explicit is None and model is not None else FROM
        if earlier not in self.folders:
            problems.append(Problem(key, _no_earlier_stage(earlier, list(self.folders), later), origin))
        elif (problem := start_problem(earlier, self.recipes[earlier])) is not None:
            problems.append(Problem(key, problem, origin))

    def _start(self, tree: Node, entry: Node, problems: list[Problem]) -> None:
        """Lets a stage with a model that has no start begin with the result of `from`, or of the stage before."""
        assert isinstance(tree.value, dict), "a recipe is a mapping"
        origin, explicit = entry.origin, entry.child(FROM)
        model = tree.child("model")
        has_start = model is not None and (
            not isinstance(model.value, dict) or any(model.child(key) for key in Model.one_of)
        )
        if explicit is not None:
            origin = explicit.origin
            if has_start:
                message = "the model has a start of its own. Keep one of both"
                problems.append(Problem(FROM, message, explicit.key_origin or origin))
                return
            if not isinstance(explicit.value, str):
                message = f"expected the name of an earlier stage, not {format_value(explicit.plain)}"
                problems.append(Problem(FROM, message, origin))
                return
            earlier = explicit.value
        elif has_start or not self.folders:
            return  # of the first stage the rules ask for a start
        else:
            earlier = list(self.folders)[-1]
            before, stage = self.recipes[earlier], tree.child("stage")
            if isinstance(before, Recipe) and before.stage == "reward" and (stage is None or stage.value != "reward"):
                message = f"the stage before, {earlier!r}, trains a reward model. Say which one this starts from: "
                problems.append(Problem(FROM, f"missing: {message}'from: ...'", origin))
                return
        start = {"path": Node(f"{_PREFIX}{earlier}", origin)}
        if model is None:
            tree.value["model"] = Node(start, origin)
        elif isinstance(model.value, dict):
            model.value.update(start)

    def _refer(self, tree: Node, later: Sequence[str], problems: list[Problem]) -> None:
        """Puts the folder of its result in the place of each `stages.NAME`."""
        for key, node in list(tree.walk()):
            if not isinstance(node.value, str) or not node.value.startswith(_PREFIX) or not _MODELS.fullmatch(key):
                continue
            name = node.value.removeprefix(_PREFIX)
            if name not in self.folders:
                problems.append(Problem(key, _no_earlier_stage(name, list(self.folders), later), node.origin))
                continue
            node.value = self.folders[name]
            earlier = self.recipes[name]
            if not isinstance(earlier, Recipe) or earlier.adapter is None:
                continue
            if _WHOLE_MODELS.fullmatch(key):
                message = f"stage {name!r} trains an adapter, and this takes a whole model. Name another stage"
                problems.append(Problem(key, message, node.origin))
            elif key == "model.path":
                _start_from_adapter(tree, earlier, node)

    def _report(self, name: str, problems: Sequence[Problem]) -> None:
        """Adds a stage's problems with the stage's name before their key; those of shared values are reported once."""
        for problem in problems:
            if self._is_shared(problem.origin, name):
                self.misfits.setdefault(replace(problem, reads=()), []).append(name)
            else:
                self.problems.append(replace(problem, key=f"{name}.{problem.key}" if problem.key else name))

    def _is_shared(self, origin: Origin | None, name: str) -> bool:
        """Whether something was written for every stage: next to `stages`, or as an override that names none."""
        if origin is None or not origin.is_override:
            return origin is not None and origin.place in self.shared_places
        return not any(each.value.origin.order == origin.order and each.parts[0] == name for each in self.overrides)


def _own(entry: Node) -> Node:
    """The keys of a stage without those that only a chain has."""
    assert isinstance(entry.value, dict), "a stage is a mapping"
    return Node({key: node for key, node in entry.value.items() if key not in (NAME, FROM)}, entry.origin)


def _quantizes(entry: Node) -> bool:
    """Whether a stage is a recipe of `danlu quantize`."""
    stage = entry.child("stage")
    return stage is not None and stage.value == "quantize"


def _start_from_adapter(tree: Node, earlier: Recipe, path: Node) -> None:
    """Starts a model from a stage's adapter: the base of that stage, the adapters below it, and its own.

    path: the node of `model.path`, which holds the folder of the stage.
    """
    model, folder = tree.child("model"), path.value
    assert model is not None and isinstance(model.value, dict), "the path is in it"
    below = earlier.model.adapters[:-1] if isinstance(earlier.adapter, Continue) else earlier.model.adapters
    more = model.child("adapters")
    stacked = [Node(adapter, path.origin) for adapter in [*below, str(folder)]]
    model.value["adapters"] = Node(
        [*stacked, *(more.value if more is not None and isinstance(more.value, list) else [])], path.origin
    )
    path.value = earlier.model.path


def _name_problem(name: object, taken: Sequence[str]) -> str | None:
    """Returns the fault in the name of a stage; None for a proper one."""
    if name is None:
        return "missing: add 'name: ...', or say which 'stage' it is"
    if not isinstance(name, str) or not _NAME_PATTERN.fullmatch(name):
        return f"expected letters, digits, - and _, for a folder has this name, not {format_value(name)}"
    if name in taken:
        return f"{name!r} is the name of another stage too. Give each its own 'name: ...'"
    if name in Recipe.model_fields or name in (STAGES, NAME, FROM):
        return f"{name!r} is a key of recipes, so overrides could mean either. Choose another"
    return None


def _no_earlier_stage(name: str, earlier: Sequence[str], later: Sequence[str]) -> str:
    """The message for a reference to a stage that is not there before the one that refers to it."""
    if later and name == later[0]:
        return f"{name!r} is this stage itself. Name an earlier one"
    if name in later:
        return f"stage {name!r} comes later. Put it before this one"
    there = f"Earlier ones: {', '.join(earlier)}" if earlier else "This is the first one"
    return f"no stage {name!r}.{did_you_mean(name, list(earlier))} {there}"
