"""Replays a rollout of a run of stage rl, token by token: the run is restored before it, with the recorded rewards.

The steps from the nearest checkpoint before the rollout, or from the start, are taken again. Nothing is judged again: a
judge would answer otherwise, and a reward may be gone. Output goes to a temporary folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import numpy as np
import torch

from danlu.assembly.parallelize import Placed
from danlu.core.errors import CheckpointError, RecipeError, TrainingError
from danlu.core.run_files import CHECKPOINTS, ENVIRONMENT, METRICS, RECIPE, ROLLOUTS, SUMMARY
from danlu.core.small_files import parse_json
from danlu.parallel.ranks import Ranks
from danlu.recipe import Loaded, Recipe, load
from danlu.recipe.policy_scores import objective_section
from danlu.recipe.sections import Parallel
from danlu.rewards.protocol import JudgedAnswer, StepRewards
from danlu.rewards.runner import RewardFailure, RewardPart, RewardTable
from danlu.rl.recorded_engine import RecordedEngine, RunLengths
from danlu.rl.rollout_sampler import GREEDY_NUMBERS
from danlu.run.train import Log, train
from danlu.stages.environments import episode_engine
from danlu.stages.prompt_reader import RolloutBuilder
from danlu.stages.protocols import PlacedStage, Stage, StageData
from danlu.stages.reader import chat_tokenizer_of
from danlu.stages.reinforcement import AnsweringDecoder
from danlu.stages.rollout import embedded_engine, grammars_of
from danlu.stages.table import STAGES
from danlu.training.checkpoints.loading import read_state
from danlu.training.checkpoints.store import CheckpointStore
from danlu.training.environment import changes_that_matter, describe_environment
from danlu.training.loop import take_step
from danlu.training.metrics import read_metrics
from danlu.training.run_folder import Start, run_recipe
from danlu.training.state import Run

RecordedRollouts = Mapping[int, Sequence[Mapping[str, Any]]]
"""The lines of rollouts.jsonl by the first step that is trained on their rollout."""
RecordedVersions = Mapping[tuple[int, int], RunLengths]
"""Versions of the answers of asynchronous rollouts, by the number of the prompt and the sample."""


@dataclass(frozen=True)
class Difference:
    """The first difference of a replayed rollout from the recorded one."""

    step: int
    """The first that is trained on the rollout."""
    number: int
    """The number of the prompt in the run."""
    row: str
    sample: int
    position: int
    """The position of the token in the answer."""
    recorded: int | None
    """A token id; None where the answer has ended."""
    replayed: int | None

    def __str__(self) -> str:
        recorded, replayed = ("no token" if token is None else str(token) for token in (self.recorded, self.replayed))
        return (
            f"rollout of step {self.step}, prompt {self.number} ({self.row}), sample {self.sample}, token "
            f"{self.position}: {recorded} recorded, {replayed} now"
        )


@dataclass(frozen=True)
class Replayed:
    """The result of a replay."""

    step: int
    """The first that is trained on the rollout."""
    from_step: int
    """The step of the checkpoint that the replay began with; 0: the start of the run."""
    rollouts: int
    """The number of rollouts that were replayed and compared, with those of the steps between."""
    answers: int
    """The number of answers of the requested rollout."""
    tokens: int
    difference: Difference | None


class RecordedRewards:
    """The `Rewards` of a replay: the rewards in rollouts.jsonl for the answer with this number and sample.

    Args:
        rollouts: the rollouts with the answered prompts.
        resampled: whether prompts without signal were replaced: they are not recorded, and had equal rewards.
    """

    def __init__(self, recipe: Recipe, rollouts: RecordedRollouts) -> None:
        self.parts = [RewardPart(name, _not_asked, weight) for name, weight in recipe.reward_weights.items()]
        self.resampled = objective_section(recipe).resample > 0
        self.rewards: dict[tuple[int, int], Mapping[str, float | None]] = {}
        self.steps: dict[tuple[int, int], Mapping[str, Mapping[str, Sequence[Any]]]] = {}
        for line in (line for lines in rollouts.values() for line in lines):
            for sample, answer in enumerate(line["answers"]):
                self.rewards[line["number"], sample] = answer["rewards"]
                self.steps[line["number"], sample] = answer.get("steps", {})
            if (greedy := line.get("greedy_rewards")) is not None:
                self.rewards[GREEDY_NUMBERS + line["number"], 0] = greedy

    def score(self, answers: Sequence[JudgedAnswer]) -> RewardTable:
        """The recorded rewards. Raises TrainingError for an answer that has none."""
        values = np.array([self._recorded(answer) for answer in answers]).reshape(len(answers), len(self.parts))
        failures = [
            RewardFailure(self.parts[part].name, answer, "recorded as not given", declined=True)
            for answer, part in np.argwhere(np.isnan(values)).tolist()
        ]
        steps = {
            (number, part): StepRewards(tuple(own[each.name]["ends"]), tuple(own[each.name]["values"]))
            for number, answer in enumerate(answers)
            for part, each in enumerate(self.parts)
            if each.name in (own := self.steps.get((answer.number, answer.sample), {}))
        }
        return RewardTable(values, failures, steps)

    def close(self) -> None:
        """Does nothing: there are no files to close."""

    def _recorded(self, answer: JudgedAnswer) -> list[float]:
        rewards = self.rewards.get((answer.number, answer.sample))
        if rewards is None and self.resampled:
            return [0.0] * len(self.parts)  # any number, if it is everyone's: the prompt is replaced again
        if rewards is None:
            raise TrainingError(f"{ROLLOUTS} has no rewards of sample {answer.sample} of prompt {answer.number}")
        if lacking := [part.name for part in self.parts if part.name not in rewards]:
            raise TrainingError(f"{ROLLOUTS} has no reward {lacking[0]} of prompt {answer.number}")
        recorded = (rewards[part.name] for part in self.parts)
        return [np.nan if value is None else value for value in recorded]


def _not_asked(answers: Sequence[JudgedAnswer]) -> Sequence[float | None]:
    """The reward of a part with recorded values, which is never called."""
    raise AssertionError("a replay asks for no rewards")


class ReplayBuilder(RolloutBuilder):
    """A `ModelBuilder` that gives its policy recorded rewards, and draws its asynchronous answers with the weights of
    recorded versions."""

    def __init__(self, recipe: Recipe, stage: Stage, rewards: RecordedRewards, versions: RecordedVersions) -> None:
        super().__init__(recipe, stage)
        self.rewards, self.versions = rewards, versions

    def place(self, ranks: Ranks, device: torch.device, start: Start | None, stage_data: StageData) -> PlacedStage:
        """Places the trained policy, and the frozen models."""
        placed = super().place(ranks, device, start, stage_data)
        assert isinstance(placed.policy, AnsweringDecoder), "stage rl trains one"
        policy = replace(placed.policy, rewards=lambda recipe: self.rewards, asynchronous_engine=self._recorded_engine)
        return replace(placed, policy=policy)

    def _recorded_engine(self, recipe: Recipe, placed: Placed, cache_gib: float) -> RecordedEngine:
        chat = chat_tokenizer_of(recipe, placed.subject.model.config)
        assert placed.parallel.alone, "one process replays"
        grammars = grammars_of(recipe, chat, placed.subject.model.config.vocab_size)
        engine = embedded_engine(recipe, placed, decode=chat.decode, grammars=grammars, cache_gib=cache_gib)
        play = None if recipe.environment is None else partial(episode_engine, recipe, chat, placed.subject)
        return RecordedEngine(engine, self.versions, play)


class _Comparison:
    """Compares rollouts with recorded ones as they are made."""

    def __init__(self, recorded: RecordedRollouts, file: Path) -> None:
        self.recorded, self.file = recorded, file
        self.lines = 0
        self.rollouts: list[int] = []

    def difference(self) -> Difference | None:
        """The first difference in rollouts that have been made since the last call."""
        lines = [json.loads(line) for line in self.file.read_bytes().splitlines()]
        replayed = _by_step(lines[self.lines :])
        self.lines = len(lines)
        self.rollouts += replayed
        differences = (first_difference(self.recorded[step], of_step) for step, of_step in replayed.items())
        return next((difference for difference in differences if difference is not None), None)


def replay(run: Path, step: int, *, log: Log, stream: TextIO | None = None) -> Replayed:
    """Makes the rollout that a step of a run was trained on again, and compares all its tokens.

    Stops at the first difference, of the rollouts between too. The run's folder is only read.
    Raises RecipeError where the run has no such step or has no rollouts, CheckpointError where the rollout cannot be
    made again, and the errors of a run.
    """
    recipe = run_recipe(run)
    if recipe.stage != "rl":
        raise RecipeError(
            f"{run}: a run of stage {recipe.stage}, which has no rollouts. `danlu replay` is for stage rl"
        )
    per_rollout = recipe.batch.updates * recipe.batch.passes
    first = (step - 1) // per_rollout * per_rollout + 1
    checkpoint = _checkpoint_before(run, first)
    from_step = 0 if checkpoint is None else checkpoint[0]
    recorded = _recorded_rollouts(run, recipe, range(from_step + 1, first + 1))
    wanted = [between for between in range(from_step + 1, first + 1) if (between - 1) % per_rollout == 0]
    _check_complete(run, recipe, recorded, wanted, from_start=checkpoint is None)
    _refuse_rewinds(run, from_step, first)
    versions = _recorded_versions(run, recipe, recorded) if recipe.rollout.staleness > 0 else {}
    stage = STAGES["rl"]
    rewards = RecordedRewards(recipe, recorded)
    stage = replace(stage, builder=lambda recipe, stage: ReplayBuilder(recipe, stage, rewards, versions))
    resume = "never" if checkpoint is None else str(checkpoint[1])
    outcome: list[Replayed] = []

    def rehearse(rehearsed: Run) -> None:
        _warn_of_changes(run, rehearsed, log)
        outcome.append(_repeated(rehearsed, recorded, first, from_step, log))

    with TemporaryDirectory(prefix="danlu-replay-") as folder:
        loaded = _loaded(run, Path(folder) / "run", recipe, from_start=checkpoint is None, log=log)
        train(loaded, resume=resume, log=log, stream=stream, dry_run=True, stage=stage, rehearse=rehearse)
    (replayed,) = outcome
    return replayed


def first_difference(recorded: Sequence[Mapping[str, Any]], replayed: Sequence[Mapping[str, Any]]) -> Difference | None:
    """The first difference between the tokens of a rollout's lines; None where they are the same.

    Raises CheckpointError where the prompts are others.
    """
    for line, other in zip(recorded, replayed, strict=True):
        if (line["number"], line["row"]) != (other["number"], other["row"]):
            raise CheckpointError(
                f"the rollout of step {line['step']} asks prompt {other['number']} ({other['row']}) where {ROLLOUTS} "
                f"has prompt {line['number']} ({line['row']}): the rows of data.train have changed since"
            )
        for sample, (answer, again) in enumerate(zip(line["answers"], other["answers"], strict=True)):
            if (position := _first_other(answer["tokens"], again["tokens"])) is not None:
                tokens = (_token(answer["tokens"], position), _token(again["tokens"], position))
                return Difference(line["step"], line["number"], line["row"], sample, position, *tokens)
    return None


def _first_other(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """The first position at which two answers differ."""
    longest = max(len(tokens), len(others))
    return next((place for place in range(longest) if _token(tokens, place) != _token(others, place)), None)


def _token(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def _repeated(run: Run, recorded: RecordedRollouts, first: int, from_step: int, log: Log) -> Replayed:
    """Takes the steps up to the rollout and replays it, comparing the rollouts on the way."""
    assert run.metrics is not None, "one process replays"
    comparison = _Comparison(recorded, run.metrics.path.with_name(ROLLOUTS))
    difference = None
    while difference is None and run.state.step < first - 1:
        take_step(run)
        difference = comparison.difference()
        log(f"step {run.state.step} of {first - 1} repeated")
    if difference is None:
        run.data_loader.source.at(run.data_loader.next)
        difference = comparison.difference()
    answers = [answer for line in recorded[first] for answer in line["answers"]]
    tokens = sum(len(answer["tokens"]) for answer in answers)
    return Replayed(first, from_step, len(comparison.rollouts), len(answers), tokens, difference)


def _loaded(run: Path, output: Path, recipe: Recipe, *, from_start: bool, log: Log) -> Loaded:
    """The run's recipe with another output, in micro-batches as the run had them, and with nothing shown elsewhere.

    All is done in this process, whatever processes the run had.
    """
    overrides = [f"output={json.dumps(str(output))}", "log.tensorboard=false", "log.wandb=null"]
    if recipe.parallel != Parallel():
        log("replayed in one process: what the run's layout summed over processes may round otherwise")
        overrides += ["parallel={}", "log.timeline=null"]
    complete = [info for info in CheckpointStore(run / CHECKPOINTS).checkpoints() if info.complete]
    if from_start and complete:  # found again it could differ, and with it how sums are rounded
        overrides.append(f"batch.micro={read_state(complete[-1].path)['micro']}")
    return load(run / RECIPE, overrides)


def _checkpoint_before(run: Path, first: int) -> tuple[int, Path] | None:
    """Returns (step, folder) of the last checkpoint from which the rollout of step `first` is still to be made."""
    infos = [info for info in CheckpointStore(run / CHECKPOINTS).checkpoints() if info.complete and info.step < first]
    return (infos[-1].step, infos[-1].path) if infos else None


def _recorded_rollouts(run: Path, recipe: Recipe, steps: range) -> RecordedRollouts:
    """The rollouts that begin in one of the steps. Raises CheckpointError where they cannot be read."""
    lines = []
    try:
        with (run / ROLLOUTS).open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):  # being written, or torn by a kill
                    break
                content = _recorded_line(line, f"{run / ROLLOUTS}:{number}")
                if content["step"] in steps:
                    lines.append(content)
    except OSError as error:
        raise CheckpointError(f"{run / ROLLOUTS}: cannot be read: {error.strerror}") from error
    return _by_step(lines)


def _recorded_line(line: bytes, where: str) -> dict[str, Any]:
    """A line of rollouts.jsonl. Raises CheckpointError for one that no run has written."""
    try:
        content = parse_json(line)
        whole = {"step", "number", "row", "answers"} <= content.keys()
        if whole and all({"tokens", "rewards"} <= answer.keys() for answer in content["answers"]):
            return dict(content)
    except (ValueError, AttributeError, TypeError):
        pass
    raise CheckpointError(f"{where}: not a line that a run of stage rl writes")


def _by_step(lines: Sequence[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_step.setdefault(line["step"], []).append(line)
    return by_step


def _check_complete(
    run: Path, recipe: Recipe, recorded: RecordedRollouts, wanted: Sequence[int], *, from_start: bool
) -> None:
    """Raises CheckpointError where a rollout that has to be repeated is not recorded."""
    lacking = [step for step in wanted if len(recorded.get(step, ())) != recipe.batch.prompts]
    if lacking == [wanted[-1]]:
        raise CheckpointError(
            f"{run / ROLLOUTS}: has no whole rollout of step {wanted[-1]}: the run has not made it yet, or its lines "
            "are gone"
        )
    if lacking:
        advice = " There is no checkpoint after it; a run keeps more with checkpoint.keep_every" if from_start else ""
        raise CheckpointError(
            f"{run / ROLLOUTS}: has no whole rollout of step {lacking[0]}, which has to be repeated before that of "
            f"step {wanted[-1]} can be made again.{advice}"
        )


def _recorded_versions(run: Path, recipe: Recipe, recorded: RecordedRollouts) -> RecordedVersions:
    """The versions of the weights that drew the answers of asynchronous rollouts.

    Raises CheckpointError where they are not recorded for all answers that the steps depend on.
    """
    if objective_section(recipe).resample:
        raise CheckpointError(
            f"{run}: prompts without signal were replaced (objective.resample), and with which weights their answers "
            f"were drawn is not in {ROLLOUTS}: asynchronous rollouts after them cannot be made again"
        )
    if recipe.rollout.engine in ("vllm", "sglang"):
        raise CheckpointError(
            f"{run}: {recipe.rollout.engine} drew the answers next to the trainer, by random numbers of its own: its "
            "asynchronous rollouts cannot be made again"
        )
    versions = {}
    for line in (line for lines in recorded.values() for line in lines):
        for sample, answer in enumerate(line["answers"]):
            own = answer.get("versions")
            if own is None or sum(count for _, count in own) != len(answer["tokens"]):
                raise CheckpointError(
                    f"{run / ROLLOUTS}: does not say with which weights sample {sample} of prompt {line['number']} was "
                    "drawn in an asynchronous rollout"
                )
            versions[line["number"], sample] = own
    return versions


def _refuse_rewinds(run: Path, from_step: int, first: int) -> None:
    """Raises CheckpointError where the run went back in between: rows that it left out then were trained on before."""
    for line in read_metrics(run / METRICS) if (run / METRICS).is_file() else ():
        if line.get("event") == "rewind" and from_step < line["step"] and line.get("back_to", 0) < first:
            raise CheckpointError(
                f"{run}: went back from step {line['step']} to step {line['back_to']} after a spike, and no checkpoint "
                f"lies between that and step {first}: {ROLLOUTS} has not all that was trained on"
            )


def _warn_of_changes(run: Path, rehearsed: Run, log: Log) -> None:
    """Logs the differences between the machine that trained and this one, and the parts of a run that depend on
    timing."""
    warning = "tokens may differ where nothing is wrong"
    recipe = run_recipe(run)
    if recipe.rollout.staleness > 0 and recipe.numerics != "exact":
        log(f"{warning}: what is computed together followed from time, and numerics: {recipe.numerics} rounds by that")
    if recipe.rollout.staleness > 0 and recipe.rollout.engine == "http":
        log(
            f"{warning}: answers of danlu serve are drawn here again; those of vLLM and SGLang had other random numbers"
        )
    if (run / ENVIRONMENT).is_file():
        current = describe_environment(rehearsed.learner.device)
        for line in changes_that_matter(json.loads((run / ENVIRONMENT).read_text()), current):
            log(f"{warning}: {line}")
    peak = json.loads((run / SUMMARY).read_text())["peak"] if (run / SUMMARY).is_file() else None
    if peak is not None and peak["processes"] > 1:
        log(f"{warning}: {peak['processes']} processes trained, and one replays, which adds gradients in another order")
