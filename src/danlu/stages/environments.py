"""Environments of a recipe of stage `rl`: the players of its answers' turns, in the trainer and in rollout
processes."""

from __future__ import annotations

from danlu.assembly.parallelize import Subject
from danlu.data.tool_calls import ReadCalls
from danlu.inference.chat_tokenizer import ChatTokenizer
from danlu.inference.request import SamplingOptions
from danlu.parallel.comm import Group
from danlu.recipe import Recipe
from danlu.recipe.sections import AgentSection, EnvironmentSection, Tools
from danlu.rewards.environments.build import agent_processes, environment_workers, tool_schemas
from danlu.rewards.environments.workers import EnvironmentWorkers
from danlu.rl.episode_engine import EpisodeEngine
from danlu.rl.episodes import Episodes
from danlu.rl.open_episode import EpisodeRules
from danlu.rl.rollout_sampler import PlaysEpisodes
from danlu.rl.rollout_worker import WorkerEngine
from danlu.rl.turn_rendering import TurnRenderer


def episodes_of(
    recipe: Recipe, chat: ChatTokenizer, subject: Subject, sampling: SamplingOptions, world: Group
) -> PlaysEpisodes | None:
    """Returns the player of the turns of answers that the trainer draws itself; None where the recipe has no
    environment.

    sampling: for the agents' requests. Raises the errors of `environment_workers` and `agent_processes`.
    """
    section = recipe.environment
    if section is None:
        return None
    rules = _rules(recipe, chat, subject)
    if isinstance(section, AgentSection):
        # An HTTP server, which other runs of the stage do without.
        from danlu.rl.agent_episodes import AgentEpisodes
        from danlu.serving.agent_endpoint import AgentEndpoint

        endpoint = AgentEndpoint(section.host, section.port, sampling, chat.tokenizer)
        agents = agent_processes(section)
        return AgentEpisodes(agents, endpoint, rules.renderer, section, rules.max_length, recipe.seed, world)
    return Episodes(_workers(section, chat), rules, world)


def episode_engine(recipe: Recipe, chat: ChatTokenizer, subject: Subject, engine: WorkerEngine) -> EpisodeEngine:
    """Returns an engine that answers with episodes; `engine` draws their turns. Raises the errors of
    `environment_workers`."""
    assert recipe.environment is not None, "episodes have an environment"
    workers = _workers(recipe.environment, chat)
    return EpisodeEngine(engine, workers, _rules(recipe, chat, subject), most_growing=recipe.rollout.sequences)


def _workers(section: EnvironmentSection, chat: ChatTokenizer) -> EnvironmentWorkers:
    """The processes of environments, which read calls in the form of the chat template."""
    if not isinstance(section, Tools):
        return environment_workers(section)
    return environment_workers(section, ReadCalls.of(chat.tokenizer.template(tools=True), tool_schemas(section)))


def _rules(recipe: Recipe, chat: ChatTokenizer, subject: Subject) -> EpisodeRules:
    section = recipe.environment
    assert section is not None, "episodes have an environment"
    renderer = TurnRenderer(
        chat.tokenizer,
        chat.stop_ids | chat.split_stops(recipe.rollout.stop_strings)[0],
        recipe.data.system,
        tool_schemas(section),
        frozenset(chat.silent_ids),
    )
    room = min(recipe.data.max_length, subject.model.config.context_length - len(subject.virtual_token_ids))
    return EpisodeRules(renderer, section.max_turns, room, section.gives_reward, recipe.seed)
