"""The layouts in which a recipe trains fastest on a cluster: all of a space, by a rising lower bound. No torch.

The space is a tree: a cut of the model, a size of micro-batches, a kind of recomputation, a schedule, a way to shard.
Branches wait by the least seconds that a step in them takes (`search_bounds`), the least first; one that comes up is
divided, or bounded more closely. One choice alone is bounded by its own chunks, then waits by the seconds of its plan,
and its memory is computed when no other bound is below them; where it does not fit, what it may offload is
tried. What is left when the best plans are below all bounds
cannot be among them, so the result is that of planning all (branch and bound). Choices that do not fit into the memory
of the devices are left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum

from danlu.core.errors import RecipeError
from danlu.parallel.layout import layout_of
from danlu.planning.choice import Choice, Space
from danlu.planning.layout_problems import layout_problems
from danlu.planning.plan_cache import PlanCache
from danlu.planning.search_bounds import Bounds
from danlu.planning.step import StepPlanner
from danlu.planning.step_plan import StepPlan
from danlu.planning.target import Target
from danlu.planning.workload import Workload
from danlu.recipe.rules import problems as recipe_problems


@dataclass(frozen=True, order=True)
class Candidate:
    """A choice that fits, with its plan; ordered by seconds, then bytes, then the choice."""

    seconds: float
    bytes: int
    choice: Choice
    plan: StepPlan = field(compare=False)


class _Level(IntEnum):
    """How far a branch is divided and bounded."""

    MICRO_BATCH = 0
    RECOMPUTE = 1
    SCHEDULE = 2
    BOUNDED = 3
    SHARING = 4
    MAY_FIT = 5
    TIMED = 6


def search(workload: Workload, space: Space, target: Target, top: int = 10) -> list[Candidate]:
    """The fastest choices of a space that fit into the target's memory, the fastest first.

    Where nothing fits, they are the fastest of those that offload something in addition.
    Raises RecipeError where no speeds are known, and where nothing fits.
    """
    if target.training_speeds(compiled=workload.recipe.compile) is None:
        raise RecipeError(
            "a search compares seconds, and the speed of this machine is not known. Run danlu bench machine, or name a "
            "cluster with --on"
        )
    without = replace(space, offloads=space.offloads[:1])
    searched = _Search(workload, without, target, top)
    if best := searched.run():
        return best
    if space.offloads[1:]:
        searched = _Search(workload, space, target, top)
        if best := searched.run():
            return best
    where = f"no layout of {target.cluster.ranks} x {target.cluster.card.name}"
    if refused := searched.refused_by:
        raise RecipeError([f"{where} that holds this recipe can train it", *refused])
    raise RecipeError(f"{where} holds this recipe")


class _Search:
    def __init__(self, workload: Workload, space: Space, target: Target, top: int) -> None:
        self.workload, self.space, self.target, self.top = workload, space, target, top
        self.cache = PlanCache(workload, target)
        self.bounds = Bounds(workload, target, self.cache)
        self.best: list[Candidate] = []
        self._planners: dict[Choice, StepPlanner] = {}
        """Those of single choices that wait."""
        self._fitting: dict[Choice, bool] = {}
        """Whether choices fit that offload a part of what others do."""
        self._refused: Choice | None = None
        """One that might fit, which a run refuses."""
        self._plans_any = False

    def run(self) -> list[Candidate]:
        """Returns the best choices."""
        ranks = self.target.cluster.ranks
        waiting = [
            (self.bounds.quick(choice), _Level.MICRO_BATCH, choice)
            for cut in self.space.cuts(self.workload, ranks)
            for choice in self.space.micro_batches(self.workload, cut, ranks)
        ]
        heapq.heapify(waiting)
        if not waiting:
            self._refused = Choice()
        while waiting:
            least, level, choice = heapq.heappop(waiting)
            if self._is_too_slow(least):
                break
            if level == _Level.TIMED:
                branches = self._judge(least, choice, self._planners.pop(choice))
            else:
                branches = self._branches(least, level, choice)
            for bound, deeper, branch in branches:
                heapq.heappush(waiting, (max(least, bound), deeper, branch))
        return self.best

    @property
    def refused_by(self) -> list[str]:
        """Why a run refuses a choice, where it refuses all that might fit."""
        if self._plans_any or self._refused is None:
            return []
        return refusals(replace(self.workload, recipe=self._refused.recipe(self.workload.recipe)), self.target)

    def _branches(self, least: float, level: _Level, choice: Choice) -> Iterator[tuple[float, _Level, Choice]]:
        """Yields the parts of a branch with their bounds, of which none is that of the whole branch."""
        ranks, bounds = self.target.cluster.ranks, self.bounds
        match level:
            case _Level.MICRO_BATCH:
                for kind in self.space.recompute:
                    branch = choice._replace(recompute=kind)
                    yield bounds.quick(branch), _Level.RECOMPUTE, branch
            case _Level.RECOMPUTE:
                for branch in self.space.scheduled(self.workload, choice, ranks):
                    if self._may_fit(branch):
                        yield bounds.waiting(branch), _Level.SCHEDULE, branch
            case _Level.SCHEDULE:
                yield bounds.close(choice), _Level.BOUNDED, choice
            case _Level.BOUNDED:
                for branch in self.space.sharings(self.workload, choice, ranks):
                    possible = [branch] if self._holds(branch) else self._offloading(branch)
                    if not possible:
                        continue
                    # Layers of a model that is not sharded compute more.
                    computed = least if branch.shard != "none" else max(least, bounds.close(branch))
                    bound = computed + bounds.of_data_ranks(branch)
                    yield from ((max(bound, bounds.copies(each)), _Level.SHARING, each) for each in possible)
            case _Level.SHARING:
                planner = planner_of(self.workload, choice, self.target, self.cache)
                if planner is None:
                    self._refused = choice
                    return
                self._plans_any = True
                if planner.may_fit(self.target.cluster.card.memory_bytes):
                    self._planners[choice] = planner
                    yield planner.least_seconds, _Level.MAY_FIT, choice
                elif variants := self._offloading(choice):
                    least = planner.least_seconds
                    yield from ((max(least, bounds.copies(each)), _Level.SHARING, each) for each in variants)
            case _Level.MAY_FIT:
                yield self._planners[choice].seconds, _Level.TIMED, choice

    def _may_fit(self, choice: Choice) -> bool:
        """Whether it might fit, were its states sharded among as many ranks as there are."""
        fewest = list(self.space.fewest_states(choice, self.target.cluster.ranks))
        return any(self._holds(each._replace(offload=offload)) for offload in self.space.offloads for each in fewest)

    def _holds(self, choice: Choice) -> bool:
        """Whether a card and its host might hold it, by bounds of its bytes."""
        is_held = self.bounds.bytes(choice) <= self.target.cluster.card.memory_bytes
        return is_held and self.bounds.host_bytes(choice) <= self.target.host_room_bytes

    def _offloading(self, choice: Choice) -> list[Choice]:
        """A choice that does not fit with each thing offloaded that might make it fit, in no fewer seconds."""
        if choice.offload:
            return []
        return [each for offload in self.space.offloads[1:] if self._holds(each := choice._replace(offload=offload))]

    def _is_too_slow(self, seconds: float) -> bool:
        return len(self.best) == self.top and seconds > self.best[-1].seconds

    def _judge(self, least: float, choice: Choice, planner: StepPlanner) -> Iterator[tuple[float, _Level, Choice]]:
        """Puts a choice among the best where it fits and needs all that it offloads; where it does not fit, yields
        those that offload more."""
        if not planner.fits(self.target.cluster.card.memory_bytes):
            yield from ((least, _Level.SHARING, each) for each in self._offloading(choice))
        elif not any(map(self._fits, self.space.smaller_offloads(choice))):
            self.best = sorted([*self.best, _candidate(choice, planner)])[: self.top]

    def _fits(self, choice: Choice) -> bool:
        """Whether a choice without all that another offloads fits."""
        if choice not in self._fitting:
            self._fitting[choice] = self._holds(choice) and self._planned_to_fit(choice)
        return self._fitting[choice]

    def _planned_to_fit(self, choice: Choice) -> bool:
        planner = planner_of(self.workload, choice, self.target, self.cache)
        return planner is not None and planner.fits(self.target.cluster.card.memory_bytes)


def planner_of(workload: Workload, choice: Choice, target: Target, cache: PlanCache) -> StepPlanner | None:
    """The planner of a choice; None where `refusals` has something against it."""
    own = replace(workload, recipe=choice.recipe(workload.recipe))
    if refusals(own, target):
        return None
    return StepPlanner(own, layout_of(own.recipe.parallel, target.cluster.ranks), target, cache)


def refusals(workload: Workload, target: Target) -> list[str]:
    """Why a run refuses the recipe of a workload before it reads a model; empty where it does not."""
    try:
        layout = layout_of(workload.recipe.parallel, target.cluster.ranks)
    except RecipeError as error:
        return error.problems
    wrong = [f"{each.key}: {each.message}" for each in recipe_problems(workload.recipe)]
    return [*wrong, *layout_problems(workload, layout, target.device_type)]


def evaluate(workload: Workload, choice: Choice, target: Target, cache: PlanCache) -> Candidate | None:
    """The plan of a choice; None where it does not fit, or no recipe may say it."""
    planner = planner_of(workload, choice, target, cache)
    if planner is None or not planner.fits(target.cluster.card.memory_bytes):
        return None
    return _candidate(choice, planner)


def _candidate(choice: Choice, planner: StepPlanner) -> Candidate:
    plan = planner.plan()
    return Candidate(planner.seconds, plan.worst.memory.allocated, choice, plan)
