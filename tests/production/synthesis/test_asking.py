"""Requests that are asked once: servers that are busy, die, garble or refuse, a journal that is torn, a budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders.scripted_endpoint import ScriptedEndpoint, question, serving

from danlu.core import http_client
from danlu.core.errors import CheckpointError, ModelError, RecipeError, ResourceError
from danlu.core.http_client import ConnectionLost
from danlu.production.synthesis.asking import Asking, Budget, BudgetSpent
from danlu.production.synthesis.endpoint import Endpoint
from danlu.production.synthesis.journal import Journal
from danlu.production.synthesis.requests import Answered, Draw, Key, Message, Request


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def server() -> Iterator[ScriptedEndpoint]:
    with serving(ScriptedEndpoint(lambda body: f"answer to {question(body)}")) as script:
        yield script


def endpoint(server: ScriptedEndpoint, **settings: Any) -> Endpoint:
    return Endpoint(server.url, "scripted", **{"timeout_s": 5.0, "in_flight": 3, "retries": 4, **settings})


def requests(*texts: str, **settings: Any) -> list[Request]:
    return [
        Request(Key(0, 1, f"row{number}", 0), (Message("user", text),), **settings) for number, text in enumerate(texts)
    ]


def answers(answered: list[Answered]) -> list[tuple[str, str]]:
    return [(each.completion.text, each.completion.finish) for each in answered]


def ask(server: ScriptedEndpoint, file: Path, *texts: str, budget: Budget | None = None, **settings: Any) -> Asking:
    asking = Asking(Journal(file), budget or Budget())
    asking.answers(endpoint(server, **settings), requests(*texts), "answer")
    return asking


def test_faults_are_asked_again_and_nothing_is_lost(server: ScriptedEndpoint, tmp_path: Path) -> None:
    def fault(text: str, attempt: int) -> Any:
        kind = text.split()[0]
        last = {"busy": 2, "break": 3, "garble": 2, "hopeless": 99, "refuse": 99, "length": 99, "empty": 99}.get(
            kind, 0
        )
        name = "garble" if kind == "hopeless" else kind
        return name if attempt <= last else None

    server.faults = fault
    texts = [f"{kind} {n}" for n in range(3) for kind in ("fine", "busy", "break", "garble", "length")]
    texts += ["hopeless 0", "refuse 0", "empty 0"]
    asking = Asking(Journal(tmp_path / "journal"), Budget())
    told = asking.answers(endpoint(server, price=(1.0, 2.0)), requests(*texts), "answer")
    for text, (answer, finish) in zip(texts, answers(told), strict=True):
        kind = text.split()[0]
        expected = {"length": "length", "hopeless": "garbled", "refuse": "refused"}.get(kind, "stop")
        wanted = "" if kind in ("hopeless", "refuse", "empty") else f"answer to {text}"
        assert (answer, finish) == (wanted, expected), text
    assert server.most[1] <= 3
    assert sorted(server.answered.values()) == [1] * (len(texts) - 2)  # whatever failed before, each is answered once
    assert "against the rules" in told[-2].completion.detail and "no completion" in told[-3].completion.detail
    spent = asking.journal.spent
    assert spent.tokens == sum(each.completion.tokens for each in told) > 80
    assert spent.cost == pytest.approx(
        sum(1 * c.prompt_tokens + 2 * c.completion_tokens for c in _completions(told)) / 1e6
    )
    # All of it is in the file: another process has the same answers, and asks nothing.
    count = server.asked.total()
    again = Asking(Journal(tmp_path / "journal"), Budget())
    assert again.answers(endpoint(server), requests(*texts), "answer") == told
    assert server.asked.total() == count and again.journal.spent == spent
    # Another question with the same key is asked, and so is the same one of another model.
    asking.answers(endpoint(server), requests("fine 9"), "answer")
    assert server.asked.total() == count + 1


def _completions(told: list[Answered]) -> list[Any]:
    return [each.completion for each in told]


def test_a_server_that_dies_leaves_its_answers_and_the_rest_is_asked_later(
    server: ScriptedEndpoint, tmp_path: Path
) -> None:
    texts = [f"question {number}" for number in range(12)]
    server.dies_after = 7
    with pytest.raises(ConnectionLost, match=f"{server.url}: the connection was lost"):
        ask(server, tmp_path / "journal", *texts, retries=1)
    assert server.answered.total() == 7
    arrived = (tmp_path / "journal").read_bytes()
    assert arrived.count(b"\n") == 7
    (tmp_path / "journal").write_bytes(arrived[:-40])  # a kill within the last line: that one is asked again
    server.dies_after = None
    asking = ask(server, tmp_path / "journal", *texts)
    assert asking.asked == 12 - 6
    assert sorted(server.answered.values()) == [1] * 11 + [2]
    asking.journal.close()
    lines = (tmp_path / "journal").read_text().splitlines()
    lines[3] = lines[3].replace("completion", "compulsion")
    (tmp_path / "journal").write_text("\n".join([*lines, ""]))
    with pytest.raises(CheckpointError, match=r"journal:4: this line is no answer"):
        Journal(tmp_path / "journal")


def test_an_interruption_keeps_what_is_under_way(server: ScriptedEndpoint, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    texts = [f"question {number}" for number in range(12)]
    server.latency_s = 0.02
    asking = Asking(Journal(tmp_path / "journal"), Budget(), interrupt)
    with pytest.raises(KeyboardInterrupt):
        asking.answers(endpoint(server), requests(*texts), "answer")
    assert 4 < server.answered.total() == asking.journal.spent.answers < 12
    ask(server, tmp_path / "journal", *texts)
    assert sorted(server.answered.values()) == [1] * 12


def test_a_server_that_refuses_all_ends_the_run_and_one_request_does_not(
    server: ScriptedEndpoint, tmp_path: Path
) -> None:
    server.faults = lambda text, attempt: "refuse" if "bad" in text else None
    ask(server, tmp_path / "a", "good", "bad 1", "bad 2")
    with pytest.raises(ResourceError, match="against the rules"):
        ask(server, tmp_path / "b", "bad 1", "bad 2")
    assert (tmp_path / "b").read_bytes() == b""  # once the server is mended they are asked again
    server.faults = lambda text, attempt: "key"
    with pytest.raises(ResourceError, match="status 401: wrong key"):
        ask(server, tmp_path / "c", "good")


def test_the_budget_ends_a_run_that_goes_on_with_a_larger_one(server: ScriptedEndpoint, tmp_path: Path) -> None:
    texts = [f"question {number}" for number in range(20)]  # 2 + 4 tokens each
    with pytest.raises(BudgetSpent) as spent:
        ask(server, tmp_path / "journal", *texts, budget=Budget(tokens=30), in_flight=1)
    assert "30 of 30 tokens are spent, by 5 answers. answer has 5 of 20 answers" in str(spent.value)
    assert "The same command with a larger budget goes on" in str(spent.value)
    with pytest.raises(BudgetSpent, match=r"7e-05 of 6.9e-05 of money"):
        ask(server, tmp_path / "j2", *texts, budget=Budget(cost=6.9e-5), in_flight=1, price=(1.0, 3.0))
    asking = ask(server, tmp_path / "journal", *texts, budget=Budget(tokens=1e6))
    assert asking.asked == 15 and set(server.answered.values()) == {1, 2}  # 2: of the other journal


def test_what_is_not_there_is_said_before_anything_is_asked(
    server: ScriptedEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint(server).check(top_logprobs=0)
    endpoint(server).check(top_logprobs=20)
    with pytest.raises(ModelError, match="asked for log-probabilities of 64 tokens .* gives those of 20"):
        endpoint(server).check(top_logprobs=64)
    server.has_logprobs = False
    with pytest.raises(ModelError, match="and gives none"):
        endpoint(server).check(top_logprobs=5)
    with pytest.raises(ModelError, match="no model 'other'. It has scripted: mend model.name"):
        Endpoint(server.url, "other").check(top_logprobs=0)
    with pytest.raises(ResourceError, match=r"http://127.0.0.1:9/v1: .* start it, or mend model.url"):
        Endpoint("http://127.0.0.1:9/v1", "scripted").check(top_logprobs=0)
    with pytest.raises(RecipeError, match="NO_SUCH_KEY"):
        Endpoint(server.url, "scripted", "NO_SUCH_KEY")
    monkeypatch.setenv("THE_KEY", "secret")
    endpoint(server, key_variable="THE_KEY").check(top_logprobs=0)
    list(endpoint(server, key_variable="THE_KEY").generate(requests("hello")))
    assert server.keys == {None, "Bearer secret"}


def test_thoughts_are_no_part_of_an_answer(server: ScriptedEndpoint) -> None:
    server.answer = lambda body: "<think>score: 10?</think>\nIt is four."
    (answered,) = endpoint(server).generate(requests("hello"))
    assert answered.completion.text == "It is four."


def test_draws_follow_from_the_key_alone() -> None:
    key = Key(3, 1, "row", 2)
    draws = [Draw(key) for _ in range(2)]
    assert len({draw.sample(range(1000), 5).__repr__() for draw in draws}) == 1
    others = [Key(4, 1, "row", 2), Key(3, 2, "row", 2), Key(3, 1, "raw", 2), Key(3, 1, "row", 3)]
    assert len({Draw(each).uniform() for each in (key, *others)}) == 5
    assert len({Request(each).seed for each in (key, *others)}) == 5
    draw = Draw(key)
    counts = [0] * 3
    for _ in range(3000):
        counts["abc".index(draw.weighted("abc", [1, 2, 3]))] += 1
    assert all(abs(count - 500 * (number + 1)) < 110 for number, count in enumerate(counts)), counts  # 4 deviations
    assert sorted(draw.sample("abcd", 9)) == list("abcd")
    assert {draw.integer(3) for _ in range(60)} == {0, 1, 2}


def test_a_question_has_its_hash() -> None:
    plain = requests("a")[0]
    changes: list[dict[str, Any]] = [
        {"temperature": 0.5}, {"top_p": 0.5}, {"max_new_tokens": 5}, {"stop": ("x",)}, {"top_logprobs": 2},
        {"prompt": "a"},
    ]  # fmt: skip
    others = [requests("a", **change)[0] for change in changes] + requests("b")
    digests = {each.digest("model") for each in others} | {plain.digest("model"), plain.digest("other")}
    assert len(digests) == len(others) + 2
    assert requests("a", parents=("p",), columns={"type": "x"})[0].digest("model") == plain.digest("model")
    assert json.loads(json.dumps(plain.key)) == list(plain.key)
