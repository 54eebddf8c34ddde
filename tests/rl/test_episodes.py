"""Rollouts of several turns: which ids are asked, what is trained, what a template that rewrites history begins."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from builders.chat_templates import QWEN3
from builders.tiny_world import tiny_world

from danlu.core.errors import DataError
from danlu.data.prompts import Prompt
from danlu.data.tokenizer import Tokenizer, load_tokenizer
from danlu.data.tool_calls import ReadCalls
from danlu.inference.episode import episode_metrics
from danlu.inference.request import Completion, Request
from danlu.parallel.comm import ALONE
from danlu.rewards.environments.protocol import Reply, TurnText
from danlu.rewards.environments.tools import Toolbox
from danlu.rewards.environments.workers import EnvironmentWorkers
from danlu.rl.episodes import Episodes
from danlu.rl.estimators import LAST_VALUE, VALUE_OLD, GaeEstimator, GroupEstimator, Judged
from danlu.rl.experience_trees import ADVANTAGE, SAMPLED, answer_tree
from danlu.rl.open_episode import EpisodeRules, environment_seed
from danlu.rl.rollout_sampler import GREEDY_NUMBERS
from danlu.rl.turn_rendering import TurnRenderer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(tiny_world().tokenizer))


def thinking(tokenizer, tmp_path):
    """The same tokenizer with a template that leaves out the thoughts of earlier turns."""
    file = tmp_path / "qwen3.jinja"
    file.write_text(QWEN3)
    return load_tokenizer(str(tiny_world().tokenizer), str(file))


@dataclass
class Script:
    """Answers with given texts, turn by turn, and keeps what it was asked."""

    tokenizer: Tokenizer
    texts: list
    finish: str = "stop"
    asked: list = field(default_factory=list)

    def generate(self, requests):
        turn = len(self.asked)
        self.asked.append(list(requests))
        end = self.tokenizer.end_of_turn_ids[0]
        completions = []
        for request in requests:
            text = self.texts[turn % len(self.texts)]
            tokens = self.tokenizer.encode(text) + ([end] if self.finish == "stop" else [])
            drawn = [-float(turn + 1)] * len(tokens)
            completions.append(
                Completion(request.number, 0, tokens, drawn, drawn, None, [turn] * len(tokens), text, self.finish)
            )
        return completions


@dataclass
class Says:
    """Environments that give these replies one after the other: the first to the row, then to each answer."""

    replies_: list
    calls: list = field(default_factory=list)

    def replies(self, calls):
        self.calls.append(list(calls))
        return [self.replies_[len(call.answers)] for call in calls]

    def end_episodes(self):
        self.calls.append("end")

    def close(self):
        pass


def user(text, reward=None, role="user"):
    return Reply((TurnText(text, role),), reward)


DONE = Reply((), 1.0, done=True)
QUESTION = "Which door?"


def prompt_of(tokenizer):
    ids = tuple(tokenizer.encode(tokenizer.template().render([{"role": "user", "content": QUESTION}], prompt=True)))
    return Prompt(ids, {"number": 1}, QUESTION, "rows.jsonl:1")


def played(tokenizer, texts, replies, *, finish="stop", samples=1, number=3, max_turns=4, max_length=200, tools=()):
    engine, says = Script(tokenizer, texts, finish), Says(replies)
    renderer = TurnRenderer(tokenizer, frozenset(tokenizer.end_of_turn_ids), tools=tools)
    episodes = Episodes(says, EpisodeRules(renderer, max_turns, max_length, True, 0), ALONE)
    prompt = prompt_of(tokenizer)
    request = Request(number, prompt.tokens, max_new_tokens=50, samples=samples)
    return episodes.answer(engine.generate, [request], [prompt]), engine, says


def tree(tokenizer, episodes, **facts):
    facts = {"reward": [1.0] * len(episodes), "group": [2.0] * len(episodes), **facts}
    return answer_tree(prompt_of(tokenizer).tokens, episodes, "row", facts).samples[0]


def test_what_the_environment_says_is_appended_to_the_ids_that_were_drawn(tokenizer):
    replies = [Reply(), user("closed"), user("locked", 0.5), DONE]
    (episode,), engine, _ = played(tokenizer, ["the left", "the  right ", "none"], replies)
    asked = [request.prompt for (request,) in engine.asked]
    assert asked[0] == prompt_of(tokenizer).tokens
    end = tokenizer.end_of_turn_ids[0]
    for turn, text in enumerate(["the left", "the  right "]):
        history = (*asked[turn], *tokenizer.encode(text), end)
        assert asked[turn + 1][: len(history)] == history  # ids of the history as they were
        added = tokenizer.decode(asked[turn + 1][len(history) :])
        said = ("closed", "locked")[turn]
        assert (
            added == f"\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
        )  # the end token is not there twice
    assert (episode.reward, episode.finish, episode.answers, episode.text) == (1.5, "stop", 3, "none")
    assert [turn["content"] for turn in episode.turns] == ["the left", "closed", "the  right ", "locked", "none"]


def test_answers_are_trained_with_their_end_tokens_and_nothing_else_is(tokenizer):
    (episode,), _, _ = played(tokenizer, ["the left", "none"], [Reply(), user("closed"), DONE])
    sample = tree(tokenizer, [episode])
    end = tokenizer.end_of_turn_ids[0]
    trained = sample.tokens[sample.weights > 0].tolist()
    assert trained == [*tokenizer.encode("the left"), end, *tokenizer.encode("none"), end] == episode.tokens
    untrained = tokenizer.decode(sample.tokens[sample.weights == 0].tolist())
    assert "closed" in untrained and "left" not in untrained
    assert sample.columns[SAMPLED][sample.weights > 0].tolist() == episode.drawn
    assert set(sample.columns[SAMPLED][sample.weights == 0].tolist()) == {0.0}
    assert len(sample.branches) == 2


def test_a_template_that_rewrites_history_begins_a_branch(tokenizer, tmp_path):
    rewriting = thinking(tokenizer, tmp_path)
    texts = ["<think>\nhm\n</think>\n\nleft", "right"]
    (episode,), engine, _ = played(rewriting, texts, [Reply(), user("closed"), DONE])
    second = rewriting.decode(engine.asked[1][0].prompt)
    assert "hm" not in second and "left<|im_end|>" in second
    sample = tree(rewriting, [episode], length=[9.0])
    assert [branch.parent for branch in sample.branches] == [-1, 0, 0]
    assert sample.tokens[sample.weights > 0].tolist() == episode.tokens
    stem, *own = (sample.tokens[branch.start : branch.stop].tolist() for branch in sample.branches)
    assert [*stem, *own[1]] == [*engine.asked[1][0].prompt, *rewriting.encode("right"), rewriting.end_of_turn_ids[0]]
    np.testing.assert_array_equal(sample.facts["length"], np.array([np.nan, 9, np.nan], np.float32))
    np.testing.assert_array_equal(sample.facts["group"], np.array([np.nan, 2, 2], np.float32))
    # Control: behind the result of a tool this template leaves the thought where it is.
    (same,), _, _ = played(rewriting, texts, [Reply(), user("closed", role="tool"), DONE])
    assert len(same.segments) == 1 and len(tree(rewriting, [same]).branches) == 2
    assert episode_metrics([[episode, same]])["history_rewritten"] == 0.5


def test_draws_of_a_sample_go_on_with_its_own_numbers(tokenizer):
    _, engine, _ = played(tokenizer, ["left"], [Reply(), user("no"), DONE], samples=2)
    keys = [[(request.random_number, request.draw_sample) for request in turn] for turn in engine.asked]
    assert keys == [[(3, 0), (3, 1)]] * 2
    numbers = [request.number for turn in engine.asked for request in turn]
    assert numbers[:2] == numbers[2:] and len(set(numbers)) == 2 and min(numbers) > 2 * GREEDY_NUMBERS


def test_positions_that_begin_anew_draw_other_numbers(tokenizer, tmp_path):
    rewriting = thinking(tokenizer, tmp_path)
    _, engine, _ = played(rewriting, ["<think>\nhm\n</think>\n\nleft"], [Reply(), user("closed"), DONE])
    first, second = (request.random_number for (request,) in engine.asked)
    assert first != second


@pytest.mark.parametrize(
    ("replies", "changes", "finish", "turns", "reward"),
    [
        ([Reply(), *[user("more", 0.25)] * 3], {"max_turns": 3}, "turns", 3, 0.75),
        ([Reply(), *[user("more")] * 3], {"max_turns": 3}, "turns", 3, 0.0),
        ([Reply(), user("more " * 40), DONE], {"max_length": 60}, "length", 1, 0.0),
        ([Reply(), user("more", 0.5), DONE], {"finish": "length"}, "length", 1, 0.5),
        ([Reply(), DONE], {"finish": "context"}, "context", 1, 1.0),
    ],
)
def test_an_episode_without_end_is_cut_off(tokenizer, replies, changes, finish, turns, reward):
    (episode,), _, _ = played(tokenizer, ["left"], replies, **changes)
    assert (episode.finish, episode.answers, episode.reward) == (finish, turns, reward)
    assert episode.is_truncated and episode.failure is None


def test_no_request_leaves_the_room_of_the_episode(tokenizer):
    _, engine, _ = played(tokenizer, ["left"], [Reply(), user("more"), user("more"), DONE], max_length=60)
    assert all(len(request.prompt) + request.max_new_tokens <= 60 for turn in engine.asked for request in turn)
    assert engine.asked[0][0].max_new_tokens > engine.asked[-1][0].max_new_tokens


def test_what_fails_has_no_reward_and_no_trained_token(tokenizer):
    (episode,), _, says = played(tokenizer, ["left"], [Reply(), Reply(failure="ValueError: no door")])
    assert (episode.failure, episode.reward, episode.finish) == ("ValueError: no door", None, "abort")
    assert says.calls[-1] == "end"
    (never,), engine, _ = played(tokenizer, ["left"], [Reply(failure="it raised")])
    assert not engine.asked and not never.tokens
    sample = tree(tokenizer, [never])
    assert len(sample.branches) == 2 and not sample.weights.any()


def test_the_first_words_of_an_environment_stand_behind_the_question(tokenizer):
    (episode,), engine, _ = played(tokenizer, ["left"], [user("There are two doors."), DONE])
    asked = tokenizer.decode(engine.asked[0][0].prompt)
    assert asked == f"<|im_start|>user\n{QUESTION}\n\nThere are two doors.<|im_end|>\n<|im_start|>assistant\n"
    sample = tree(tokenizer, [episode])
    assert sample.tokens[: sample.branches[0].stop].tolist() == list(
        prompt_of(tokenizer).tokens[: sample.branches[0].stop]
    )
    assert tokenizer.decode(sample.tokens[sample.weights > 0].tolist()).startswith("left")


def test_an_answer_that_a_stop_string_ended_is_closed_by_the_template(tokenizer):
    _, engine, _ = played(tokenizer, ["left"], [Reply(), user("no"), DONE], finish="stop_string")
    added = tokenizer.decode(engine.asked[1][0].prompt[len(engine.asked[0][0].prompt) :])
    assert added.startswith("left<|im_end|>\n<|im_start|>user\nno")


def test_a_template_without_tool_messages_is_refused(tokenizer, tmp_path):
    file = tmp_path / "users.jinja"
    file.write_text(
        "{% for m in messages if m.role != 'tool' %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    plain = load_tokenizer(str(tiny_world().tokenizer), str(file))
    (episode,), _, _ = played(plain, ["left"], [Reply(), user("no", role="tool"), DONE])
    assert episode.failure is not None and "does not show messages of role tool" in episode.failure
    (episode,), _, _ = played(plain, ["left"], [Reply(), user("no"), DONE])
    assert episode.failure is None


def test_a_history_that_shares_nothing_with_the_prompt_is_refused(tokenizer):
    (episode,), _, _ = played(tokenizer, ["left"], [Reply(), DONE])
    with pytest.raises(DataError, match="begins a conversation that goes on with another token"):
        answer_tree([episode.segments[0].prompt[0] + 1, 2, 3], [episode], "row", {})


def judged(tokenizer, episodes, rewards, **scores):
    item = answer_tree(prompt_of(tokenizer).tokens, episodes, "row", {})
    return Judged(
        [item],
        np.array(rewards, np.float64).reshape(-1, 1),
        [1.0],
        np.zeros(len(episodes), np.int64),
        np.array([len(episode.tokens) for episode in episodes]),
        np.array([episode.is_truncated for episode in episodes]),
        **scores,
    )


def test_all_answers_of_an_episode_have_its_advantage(tokenizer, tmp_path):
    rewriting = thinking(tokenizer, tmp_path)
    texts = ["<think>\nhm\n</think>\n\nleft", "right"]
    episodes, _, _ = played(rewriting, texts, [Reply(), user("closed"), DONE], samples=2)
    (item,), _ = GroupEstimator(scale="none").estimate(judged(rewriting, episodes, [1.0, 0.0]))
    (sample,) = item.samples
    column = sample.columns[ADVANTAGE]
    assert set(column[sample.weights == 0].tolist()) == {0.0}
    count = len(episodes[0].tokens)
    assert column[sample.weights > 0].tolist() == [0.5] * count + [-0.5] * len(episodes[1].tokens)
    masked, _ = GroupEstimator(scale="none").estimate(judged(rewriting, episodes, [1.0, np.nan]))
    assert masked[0].samples[0].weights.sum() == count


def test_values_pass_over_what_the_environment_said(tokenizer):
    """GAE over the answers' tokens is that of the same tokens without anything between."""
    episodes, _, _ = played(tokenizer, ["left", "right"], [Reply(), user("closed"), DONE])
    drawn = episodes[0].tokens
    values = np.linspace(-1, 1, len(drawn))
    alone = Completion(0, 0, drawn, episodes[0].drawn, episodes[0].drawn, None, [0] * len(drawn), "", "stop")
    advantages = []
    for completion in (episodes[0], alone):
        item = answer_tree(prompt_of(tokenizer).tokens, [completion], "row", {})
        weights = item.samples[0].weights
        column = np.full(len(weights), 7.0)  # what a critic would say elsewhere is of no account
        column[weights > 0] = values
        scores = {"token_scores": [{VALUE_OLD: column}], "branch_scores": [{LAST_VALUE: np.array([5.0, 3.0])}]}
        estimator = GaeEstimator(1.0, 0.9, False)
        (estimated,), _ = estimator.estimate(judged(tokenizer, [completion], [1.0], **scores))
        advantages.append(estimated.samples[0].columns[ADVANTAGE][weights > 0])
        assert not estimated.samples[0].columns[ADVANTAGE][weights == 0].any()
    np.testing.assert_array_equal(advantages[0], advantages[1])
    assert len(set(advantages[0].tolist())) > 1


def test_greedy_answers_meet_the_same_environment():
    assert environment_seed(0, 5) == environment_seed(0, GREEDY_NUMBERS + 5)
    assert len({environment_seed(0, 5), environment_seed(1, 5), environment_seed(0, 6)}) == 3


def test_results_of_tools_are_turns_of_the_conversation_and_are_not_trained(tokenizer, tmp_path):
    """Qwen's template shows the policy the tools, and their results behind the very ids of its call."""
    file = tmp_path / "my_tools.py"
    file.write_text(
        'def double(n: int) -> int:\n    """Doubles.\n\n    Args:\n        n: a number.\n    """\n    return 2 * n\n'
    )
    qwen, toolbox = thinking(tokenizer, tmp_path), Toolbox.read([f"{file}:double"])
    schemas = toolbox.schemas()
    toolbox = replace(toolbox, read_calls=ReadCalls.of(qwen.template(tools=True), schemas))
    call = '<tool_call>\n{"name": "double", "arguments": {"n": 21}}\n</tool_call>'
    engine = Script(qwen, [call, "42"])
    renderer = TurnRenderer(qwen, frozenset(qwen.end_of_turn_ids), tools=schemas)
    rules = EpisodeRules(renderer, 4, 2000, False, 0)
    episodes = Episodes(EnvironmentWorkers(toolbox, count=1), rules, ALONE)
    turns = [{"role": "user", "content": QUESTION}]
    prompt = Prompt(
        tuple(qwen.encode(qwen.template(tools=True).render(turns, schemas, True))), {}, QUESTION, "rows.jsonl:1"
    )
    assert '"name": "double"' in qwen.decode(list(prompt.tokens))
    try:
        request = Request(0, prompt.tokens, max_new_tokens=50)
        (episode,) = episodes.answer(engine.generate, [request], [prompt])
    finally:
        episodes.close()
    (first,), (second,) = engine.asked
    drawn = [*qwen.encode(call), qwen.end_of_turn_ids[0]]
    assert second.prompt[: len(first.prompt) + len(drawn)] == (*first.prompt, *drawn)
    said = qwen.decode(list(second.prompt[len(first.prompt) + len(drawn) :]))
    assert "<tool_response>\n42\n</tool_response>" in said
    assert (episode.text, episode.answers, episode.finish, episode.reward) == ("42", 2, "stop", None)
    facts = {"reward": [1.0], "group": [0.0]}
    sample = answer_tree(prompt.tokens, [episode], "row", facts).samples[0]
    assert sample.tokens[sample.weights > 0].tolist() == [*drawn, *qwen.encode("42"), qwen.end_of_turn_ids[0]]
    assert episode_metrics([[episode]])["tool_errors"] == 0
