"""A judge behind a server that answers, is busy, refuses, breaks off, says nothing, or no number."""

from __future__ import annotations

import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from danlu.core import http_client
from danlu.core.errors import RecipeError
from danlu.core.http_client import ConnectionLost, RequestRefused
from danlu.core.prompt_template import PromptTemplate, PromptTemplateError
from danlu.rewards import judge as judge_module
from danlu.rewards import runner as runner_module
from danlu.rewards.judge import Judge, NoMark, prompt_text
from danlu.rewards.protocol import JudgedAnswer
from danlu.rewards.runner import RewardPart, RewardRunner


class _Handler(BaseHTTPRequestHandler):
    """Does what the question names: says its last word, or fails so many times first."""

    seen: list[tuple[str, str | None, dict]]
    most: list[int]  # (under way, most under way)
    attempts: dict[str, int]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, self.headers.get("Authorization"), body))
        question = body["messages"][0]["content"]
        attempt = self.attempts[question] = self.attempts.get(question, 0) + 1
        self.most[0] += 1
        self.most[1] = max(self.most)
        time.sleep(0.02)
        self.most[0] -= 1
        match question.split():
            case ["silent", *_]:
                time.sleep(1)
                self.close_connection = True
            case ["busy", *_] if attempt <= 2:
                self._answer(429, {"error": {"message": "slow down"}})
            case ["breaks", *_] if attempt <= 2:
                self.close_connection = True
            case ["refuse", *_]:
                self._answer(400, {"error": {"message": "no such model"}})
            case ["nothing", *_]:
                self._answer(200, {"choices": []})
            case ["cut", *_]:
                message = {"role": "assistant", "content": question}
                self._answer(200, {"choices": [{"message": message, "finish_reason": "length"}]})
            case ["long", *_]:
                self._answer(200, {"choices": [{"message": {"content": "7" * 1000}}]})
            case _:
                self._answer(200, {"choices": [{"message": {"role": "assistant", "content": question}}]})

    def _answer(self, status: int, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        return None


@pytest.fixture
def server(monkeypatch):
    """(url, what was asked, [requests under way, most of them at a time])"""
    monkeypatch.setattr(http_client, "FIRST_PAUSE_S", 0.01)
    fields = {"seen": [], "most": [0, 0], "attempts": {}}
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), fields))
    http.daemon_threads, http.block_on_close = True, False
    threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{http.server_address[1]}/v1", fields["seen"], fields["most"]
    http.shutdown()
    http.server_close()


def judge(server, template="{completion}", **settings):
    return Judge(server[0], "the-judge", PromptTemplate.parse(template), **{"timeout_s": 5.0, **settings})


def answers(*texts):
    return [JudgedAnswer(text, {"answer": "4"}, prompt="2 + 2?") for text in texts]


def test_what_the_judge_is_asked_and_says(server):
    template = "{prompt} The answer is {answer}. Said was: {completion}"
    reward = judge(server, template, max_new_tokens=9, temperature=0.5)
    assert reward(answers("it is 5", "it is -4.5 .")) == [5, -4.5]
    path, key, body = server[1][0]
    assert (path, key) == ("/v1/chat/completions", None)
    assert body == {
        "model": "the-judge",
        "messages": [{"role": "user", "content": "2 + 2? The answer is 4. Said was: it is 5"}],
        "max_tokens": 9,
        "temperature": 0.5,
    }


def test_marks_are_read_by_the_last_match_and_scaled(server):
    reward = judge(server, pattern=r"Score: (\d+)/10", bounds=(2.0, 10.0))
    assert reward(answers("Score: 2/10, no: Score: 4/10 ?", "Score: 2/10", "Score: 10/10")) == [0.25, 0, 1]
    for said, message in [
        ("good", "pattern 'Score: .*' finds nothing in what the judge says: 'good'"),
        ("Score: 1/10", "the mark 1 is not between 2 and 10: 'Score: 1/10'"),
    ]:
        with pytest.raises(NoMark, match=message):
            reward(answers(said))
    with pytest.raises(NoMark, match=r"pattern '\(\.\*\)' finds '' in what"):
        judge(server, pattern="(.*)")(answers("word"))


@pytest.mark.parametrize(
    ("said", "mark"),
    [
        *(("3/10", 3), ("Score: 3 / 10.", 3), ("**8**/10", 8), ("8.5 out of 10", 8.5), ("I give 4 of 5", 4)),
        *(("On a scale of 1 to 10, I say 7", 7), ("7 on a scale from 1 to 10", 7), ("Rating: 4 (1-5)", 4)),
        *(("I rate it 6 on a 1-10 scale.", 6), ("[[9]]", 9), ("Score: -2", -2), ("10/10", 10), ("2 of 3 parts: 5", 5)),
        *(("<think>first 9, or 3?</think>It is 2/10", 2), ("so 9</think>\n4", 4)),
    ],
)
def test_the_mark_is_no_bound_of_the_scale_and_no_thought(server, said, mark):
    (verdict,) = judge(server).verdicts(answers(said))
    assert verdict.value == mark and verdict.extracted == f"{mark:g}" and "the judge says: " in verdict.why
    # The pattern that reads the last number, as it was: no reading beside it.
    last = judge(server, pattern=r"(-?\d+(?:\.\d+)?)\D*$")
    assert last(answers("3/10")) == [10]


@pytest.mark.parametrize("pattern", [None, r"(\d+)"])
def test_a_reply_that_is_cut_or_still_thinks_has_no_mark(server, pattern):
    with pytest.raises(NoMark, match=r"was cut off \(max_new_tokens: 512\): 'cut 7/10'"):
        judge(server, pattern=pattern)(answers("cut 7/10"))
    with pytest.raises(NoMark, match="thoughts do not end"):
        judge(server, pattern=pattern)(answers("<think>it is 7, or"))
    with pytest.raises(NoMark, match="there is no number in what" if pattern is None else "finds nothing"):
        judge(server, pattern=pattern)(answers("good"))


def test_the_judge_reads_numbers_of_columns_as_numbers(server):
    rows = [{"answer": 1e-05}, {"answer": 2e6}, {"answer": 18}, {"answer": "1e-05"}]
    judge(server, "{answer} 1")([JudgedAnswer("", row) for row in rows])
    asked = [body["messages"][0]["content"] for _, _, body in server[1]]
    assert asked == ["0.00001 1", "2000000 1", "18 1", "1e-05 1"]
    for null in (None, math.nan):
        with pytest.raises(PromptTemplateError, match=r"'answer' of the template holds nothing \(null\)"):
            judge(server, "{answer} 1")([JudgedAnswer("", {"answer": null})])


@pytest.mark.parametrize("text", ["busy 3", "breaks 3"])
def test_a_server_that_is_busy_or_breaks_off_is_asked_again(server, text):
    assert judge(server, retries=2)(answers(text)) == [3]
    assert len(server[1]) == 3
    with pytest.raises((ConnectionLost, RequestRefused), match="slow down|connection was lost"):
        judge(server, retries=1)(answers(f"{text} again"))


def test_what_the_server_will_never_answer_is_asked_once(server):
    with pytest.raises(RequestRefused, match="status 400: no such model"):
        judge(server)(answers("refuse"))
    assert len(server[1]) == 1


@pytest.mark.parametrize(
    ("text", "timeout_s", "message"),
    [
        ("silent", 0.3, "within 0.3 s"),
        ("nothing", 10.0, "no chat completion with a text"),
        ("long", 10.0, "more than 500 bytes"),
    ],
)
def test_a_judge_takes_no_longer_and_reads_no_more_than_it_may(server, monkeypatch, text, timeout_s, message):
    monkeypatch.setattr(judge_module, "MOST_BYTES", 500)
    with pytest.raises((NoMark, ConnectionLost), match=message):
        judge(server, timeout_s=timeout_s, retries=0)(answers(text))


def test_answers_are_judged_side_by_side_and_fail_apart(server):
    with RewardRunner([RewardPart("judge", judge(server, connections=4, retries=2))]) as runner:
        table = runner.score(answers(*(f"it is {number}" for number in range(12)), "refuse", "busy 7"))
    assert table.values[:12, 0].tolist() == list(range(12)) and table.values[13, 0] == 7
    (failure,) = table.failures
    assert failure.answer == 12 and failure.reason.endswith("/chat/completions: status 400: no such model")
    assert 1 < server[2][1] <= 4


def test_a_server_that_is_gone_is_not_asked_for_ever(server, monkeypatch):
    monkeypatch.setattr(runner_module, "MOST_JUDGE_FAILURES", 2)
    with RewardRunner([RewardPart("judge", judge(server, connections=2))]) as runner:
        table = runner.score(answers(*["refuse"] * 40))
    assert np.isnan(table.values).all() and len(table.failures) == 40
    assert 4 <= len(server[1]) < 10
    assert table.failures[-1].reason == "it was not called: the 4 calls before failed"


def test_the_key_is_taken_from_the_environment(server, monkeypatch):
    with pytest.raises(RecipeError, match="the environment has no JUDGE_KEY"):
        _ = judge(server, api_key_variable="JUDGE_KEY").client
    monkeypatch.setenv("JUDGE_KEY", "secret")
    judge(server, api_key_variable="JUDGE_KEY")(answers("1"))
    assert server[1][0][1] == "Bearer secret"


def test_conversations_are_shown_with_their_roles():
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1"}]
    assert prompt_text(turns) == "system: Add.\n\nuser: 1 + 1"
    assert prompt_text(turns[1:]) == prompt_text("1 + 1") == "1 + 1"
