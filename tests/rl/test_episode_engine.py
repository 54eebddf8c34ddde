"""Episodes that an engine draws beside the trainer: those of lock-step, however long each environment takes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import pytest
import torch
from builders.tiny_world import tiny_world

from danlu.data.prompts import Prompt
from danlu.data.tokenizer import load_tokenizer
from danlu.inference.chat_tokenizer import ChatTokenizer
from danlu.inference.completion_bytes import from_bytes, to_bytes
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine_state import completion_state, episode_from_state, request_from_json, request_to_json
from danlu.inference.request import Request, SamplingOptions
from danlu.models.hf_folder import resolve_folder
from danlu.models.loading import load
from danlu.parallel.comm import ALONE
from danlu.rewards.environments.protocol import Reply, TurnText
from danlu.rl.episode_engine import EpisodeEngine
from danlu.rl.episodes import Episodes
from danlu.rl.open_episode import EpisodeRules
from danlu.rl.turn_rendering import TurnRenderer

QUESTIONS = ["Which door?", "Left or right?", "Who is there?"]


def reply_to(call):
    """Of an environment of three turns, the last of which is worth the answers' letters."""
    if not call.answers:
        return Reply((TurnText(f"You are {call.row['name']}."),))
    if len(call.answers) == 3:
        return Reply((), float(sum(map(len, call.answers))), done=True)
    return Reply((TurnText(f"{len(call.answers)} {call.answers[-1][:3]}"),))


@dataclass
class Doors:
    """Environments that reply when they are asked, but for those of slow prompts, which wait until they are let."""

    slow: set = field(default_factory=set)
    calls: list = field(default_factory=list)
    ended: list = field(default_factory=list)
    asked: list = field(default_factory=list)

    def replies(self, calls):
        return [reply_to(call) for call in calls]

    def end_episodes(self):
        pass

    def ask(self, call):
        self.calls.append(call)
        self.asked.append(call)

    def receive(self, longest_s):
        ready = [call for call in self.calls if call.key[0] not in self.slow]
        self.calls = [call for call in self.calls if call.key[0] in self.slow]
        return [(call.key, reply_to(call)) for call in ready]

    def end_episode(self, key):
        self.ended.append(key)

    def close(self):
        pass


@pytest.fixture(scope="module")
def world():
    """A tokenizer, the rules of episodes, and two models."""
    chat = ChatTokenizer(load_tokenizer(str(tiny_world().tokenizer)))
    rules = EpisodeRules(TurnRenderer(chat.tokenizer, chat.stop_ids), 4, 120, True, 0)
    models = []
    for seed in (0, 1):
        model = load(resolve_folder(str(tiny_world().base)), dtype=torch.float32, device=torch.device("cpu"))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        models.append(model.requires_grad_(False))
    return chat, rules, models


def asked(chat, samples=2):
    requests = []
    for number, question in enumerate(QUESTIONS):
        ids = tuple(chat.encode_chat_prompt(question))
        source = Prompt(ids, {"name": f"number {number}"}, question, f"rows.jsonl:{number}")
        sampling = SamplingOptions(seed=5, top_p=0.98)
        requests.append(Request(number, ids, sampling, 9, samples, stop_strings=("e", "a"), source=source))
    return requests


def copied(model):
    other = load(resolve_folder(str(tiny_world().base)), dtype=torch.float32, device=torch.device("cpu"))
    other.load_state_dict(model.state_dict())
    return other.requires_grad_(False)


def engine_of(world, model=0, doors=None, most_growing=256):
    chat, rules, models = world
    engine = EmbeddedEngine(copied(models[model]), decode=chat.decode)
    return EpisodeEngine(engine, doors or Doors(), rules, most_growing=most_growing)


def in_lock_step(world, model=0):
    chat, rules, models = world
    engine = EmbeddedEngine(models[model], decode=chat.decode)
    requests = asked(chat)
    return Episodes(Doors(), rules, ALONE).answer(engine.generate, requests, [each.source for each in requests])


def drawn_until(engine, count):
    episodes = []
    while len(episodes) < count:
        episodes += engine.step()
    return sorted(episodes, key=lambda each: (each.number, each.sample))


def plain(episodes):
    return [(each.tokens, each.segments, each.turns, each.reward, each.finish, each.text) for each in episodes]


@pytest.mark.parametrize("most_growing", [1, 256])
def test_the_same_episodes_are_played_as_in_lock_step(world, most_growing):
    doors = Doors()
    engine = engine_of(world, doors=doors, most_growing=most_growing)
    for request in asked(world[0]):
        engine.submit(request)
    episodes = drawn_until(engine, 6)
    expected = in_lock_step(world)
    assert plain(episodes) == plain(expected)
    assert [each.answers for each in expected].count(3) > 2  # several turns, most of them
    assert sorted(doors.ended) == [(number, sample) for number in range(3) for sample in range(2)]
    assert engine.unfinished == 0 and engine.is_stuck
    assert plain(in_lock_step(world, 1)) != plain(expected)  # control


def test_the_slowest_environment_holds_no_other_up(world):
    doors = Doors(slow={0})
    engine = engine_of(world, doors=doors)
    for request in asked(world[0]):
        engine.submit(request)
    others = drawn_until(engine, 4)
    assert {each.number for each in others} == {1, 2} and engine.unfinished == 2
    assert engine.step() == [] and not engine.is_stuck
    doors.slow.clear()
    assert plain([*drawn_until(engine, 2), *others]) == plain(in_lock_step(world))


def test_an_older_episode_goes_on_before_a_later_one_begins(world):
    doors = Doors()
    engine = engine_of(world, doors=doors, most_growing=1)
    for request in asked(world[0], samples=1):
        engine.submit(request)
    drawn_until(engine, 3)
    answered = [call.key[0] for call in doors.asked if call.answers]
    # The second takes the place of the first while its environment is asked; the third waits until one of both is over.
    assert answered.index(2) > 4 and sorted(set(answered)) == [0, 1, 2]


def test_turns_go_on_under_other_weights_and_say_under_which(world):
    engine = engine_of(world)
    for request in asked(world[0]):
        engine.submit(request)
    before = [episode for _ in range(6) for episode in engine.step()]
    engine.update(4, world[2][1].named_parameters())
    later = drawn_until(engine, 6 - len(before))
    episodes = sorted([*before, *later], key=lambda each: (each.number, each.sample))
    expected = in_lock_step(world)
    mixed = [(each, other) for each, other in zip(episodes, expected, strict=True) if len(set(each.versions)) > 1]
    assert len(mixed) > 2 and any(each.answers > 1 for each, _ in mixed)
    for each, other in mixed:
        before = each.versions.index(4)
        assert each.versions == [0] * before + [4] * (len(each.tokens) - before)
        assert each.tokens[:before] == other.tokens[:before]
    assert any(each.tokens != other.tokens for each, other in mixed)  # control: the weights do count


@pytest.mark.parametrize("steps", [0, 1, 7, 14, 20])
def test_a_state_is_taken_up_where_it_was_left(world, steps):
    requests = {request.number: request for request in asked(world[0])}
    engine = engine_of(world)
    for request in requests.values():
        engine.submit(request)
    received = [episode for _ in range(steps) for episode in engine.step()]
    state = json.loads(json.dumps(engine.state()))
    doors = Doors()
    again = engine_of(world, doors=doors)
    again.restore(with_sources(state, requests))
    assert json.loads(json.dumps(again.state())) == state  # before there are weights, too
    episodes = sorted([*received, *drawn_until(again, 6 - len(received))], key=lambda each: (each.number, each.sample))
    assert plain(episodes) == plain(in_lock_step(world))
    known = [len(answer["replies"]) for entry in state["requests"] for answer in entry["answers"]]
    assert sum(call.key[0] in requests and len(call.replies) == 0 for call in doors.asked) <= 2 * known.count(0)


def with_sources(state, requests):
    entries = [
        {**entry, "request": {**entry["request"], "source": requests[entry["request"]["number"]].source}}
        for entry in state["requests"]
    ]
    return {"requests": entries}


def test_episodes_come_through_pipes_and_checkpoints_as_they_are(world):
    episodes = in_lock_step(world)
    states = [json.loads(json.dumps(completion_state(episode))) for episode in episodes]
    again = [episode_from_state(episode.number, state) for episode, state in zip(episodes, states, strict=True)]
    for came in (again, from_bytes(to_bytes(episodes))):
        for one, other in zip(episodes, came, strict=True):
            assert replace(one, support=None) == replace(other, support=None)
            assert [each.ids.tolist() for each in one.support] == [each.ids.tolist() for each in other.support]
    engine = engine_of(world)
    request = asked(world[0])[0]
    fields = json.loads(json.dumps(request_to_json(request)))
    assert request_from_json(fields) == request
    entry = {"request": {**fields, "source": request.source}, "answers": states[:2]}
    engine.restore({"requests": [entry]})
    assert engine.state()["requests"][0]["answers"] == states[:2]
    assert plain(engine.step()) == plain(episodes[:2])
