"""Stage synthesize as a whole, with a scripted endpoint: bytes, accounts, kills, budgets, and what is refused."""

from __future__ import annotations

import json
import re
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.docs_scripts import TOP
from builders.fork_server import SERVER
from builders.scripted_endpoint import ScriptedEndpoint, question, serving, synthetic_answer
from builders.synthesis_worker import run_recipe
from builders.tiny_world import CONFIG, World, danlu, tokenise_here

from danlu.core import http_client
from danlu.core.errors import DataError, RecipeError
from danlu.production.ledger import read_ledger
from danlu.production.synthesis.asking import BudgetSpent
from danlu.production.synthesis.stage import JOURNAL, Synthesized, expected_requests, prepare, synthesize
from danlu.recipe.synthesize_recipe import load_synthesize_recipe

STEPS: list[dict[str, Any]] = [
    {"kind": "self-instruct", "rows": 6, "per_request": 3, "shots": {"seed": 2, "made": 1}},
    {"kind": "answer", "samples": 2},
    {"kind": "judge", "rubric": "rubric.md", "votes": 2, "swap": True},
    {"kind": "pairs", "by": "judge", "margin": 0.5},
    {"kind": "deduplicate", "by": "minhash"},
]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def server() -> Iterator[ScriptedEndpoint]:
    with serving(ScriptedEndpoint(synthetic_answer)) as script:
        yield script


def write(folder: Path, server: ScriptedEndpoint, **changes: Any) -> Path:
    (folder / "rubric.md").write_text("Right, and short.")
    (folder / "types.yaml").write_text("- {name: writing, about: stories}\n- {name: sums, about: sums, share: 3}\n")
    seeds = [
        {"instruction": text, "instances": [{"input": "", "output": "x"}]} for text in ("Name five fish.", "Say it.")
    ]
    (folder / "seeds.jsonl").write_text("".join(f"{json.dumps(seed)}\n" for seed in seeds))
    values: dict[str, Any] = {
        "stage": "synthesize",
        "model": {"url": server.url, "name": "scripted", "price": [1, 2], "retries": 3},
        "data": {"seeds": str(folder / "seeds.jsonl"), "types": str(folder / "types.yaml")},
        "steps": [{**step, **({"rubric": str(folder / "rubric.md")} if "rubric" in step else {})} for step in STEPS],
        "output": str(folder / "made"),
    }
    values |= changes
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not None}))
    return file


def run(file: Path, *overrides: str) -> Synthesized:
    return synthesize(prepare(load_synthesize_recipe(file, overrides)[0]))


def content(folder: Path) -> dict[str, bytes]:
    """All files of a data set but the kept work; the page has the folder's name."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in files
        if not any(part.startswith(".") for part in file.relative_to(folder).parts)
    }


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted((folder / "rows").iterdir()) for line in file.read_text().splitlines()]


def test_pairs_from_seeds(server: ScriptedEndpoint, tmp_path: Path) -> None:
    file = write(tmp_path, server)
    result = run(file)
    rows = rows_of(tmp_path / "made")
    assert len(rows) == result.rows >= 2
    for row in rows:
        assert [message["role"] for message in row["prompt"]] == ["user"]
        assert row["chosen"][0]["content"] != row["rejected"][0]["content"]
        assert row["margin"] >= 0.5 and row["type"] in ("writing", "sums")
        assert row["provenance"]["model"] == "scripted" and row["provenance"]["seed"] == 0
        assert row["provenance"]["steps"] == ["self-instruct", "answer"]
    lines = {line.id: line for line in read_ledger(tmp_path / "made" / "ledger.jsonl.zst")}
    for row in rows:  # from a pair to its prompt, and on to the seeds that were shown
        (prompt,) = row["provenance"]["parents"]
        parents = lines[prompt].provenance
        assert parents is not None and 2 <= len(parents.parents) <= 3
        assert lines[prompt].outcome == "changed" and all(parent in lines for parent in parents.parents)
        assert lines[row["id"]].outcome == "kept"
    assert sum(line.outcome == "kept" for line in lines.values()) == len(rows) == result.outcomes["kept"]
    assert all(line.decisive is not None for line in lines.values() if line.outcome == "dropped")
    card = json.loads((tmp_path / "made" / "data-card.json").read_text())
    assert card["models"] == ["scripted"] and card["answers"] == server.answered.total() == result.asked
    assert card["judges"]["steps.2"]["position_bias"] is not None and card["cost"] > 0
    assert str(tmp_path / "made") not in json.dumps(card)
    assert any("marks for the first place" in note for note in result.notes)
    assert set(server.answered.values()) == {1}

    # Again, from the journal; then with other numbers of requests under way, and faults: the same bytes.
    before = content(tmp_path / "made")
    assert run(file).asked == 0 and content(tmp_path / "made") == before
    count = server.asked.total()
    server.faults = lambda text, attempt: "busy" if attempt <= len(text) % 3 else None
    assert (
        run(file, "output=" + str(tmp_path / "other" / "made"), "model.in_flight=1", "budget.tokens=1e9").asked
        == result.asked
    )
    assert content(tmp_path / "other" / "made") == before and server.asked.total() > count + result.asked
    # The control: another seed of the recipe makes other rows.
    run(file, "output=" + str(tmp_path / "third" / "made"), "seed=1")
    assert content(tmp_path / "third" / "made") != before


def test_a_budget_that_is_spent_midway(server: ScriptedEndpoint, tmp_path: Path) -> None:
    file = write(tmp_path, server, model={"url": server.url, "name": "scripted", "in_flight": 2})
    whole = run(file, "output=" + str(tmp_path / "whole" / "made"))
    for tokens in (50, 500, 1500):
        with pytest.raises(BudgetSpent, match="The same command with a larger budget goes on"):
            run(file, f"budget.tokens={tokens}")
    assert not (tmp_path / "made" / "data-card.json").exists()
    assert 0 < run(file, "budget.tokens=1e7").asked < whole.asked
    assert content(tmp_path / "made") == content(tmp_path / "whole" / "made")
    assert set(server.answered.values()) == {2}  # once for each folder


def test_other_beginnings_and_ends(server: ScriptedEndpoint, tmp_path: Path) -> None:
    """Documents, magpie, evolve, best, rejection and distill; each row trains as it is."""
    (tmp_path / "texts.jsonl").write_text('{"text": "The bridge was built in 1932."}\n{"text": "Ice floats."}\n')
    documents = {"data": {"documents": str(tmp_path / "texts.jsonl")}}
    run(write(tmp_path, server, steps=[{"kind": "from-documents", "questions": 2}], **documents))
    rows = rows_of(tmp_path / "made")
    assert len(rows) == 4 and all(row["messages"][1]["content"].endswith(".") for row in rows)

    judge = {"kind": "judge", "rubric": str(tmp_path / "rubric.md")}
    magpie = {"kind": "magpie", "rows": 5, "header": "<|user|>\n", "stop": ["<|end|>"]}
    steps = [magpie, {"kind": "evolve", "rounds": 2}, {"kind": "answer", "samples": 2}, judge, {"kind": "best"}]
    run(write(tmp_path, server, steps=steps, data=None, output=str(tmp_path / "magpie")))
    rows = rows_of(tmp_path / "magpie")
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows) == 15
    assert sum("evolved_by" in row for row in rows) == 10 and all(row["score"] >= 1 for row in rows)
    raw = [body for body in map(json.loads, server.asked) if "prompt" in body]
    assert len(raw) == 5 and all(body["prompt"] == "<|user|>\n" and body["stop"] == ["<|end|>"] for body in raw)

    (tmp_path / "sums.jsonl").write_text("".join(f'{{"prompt": "{n} + 1?", "answer": "{n + 1}"}}\n' for n in range(9)))
    server.answer = lambda body: f"It is {ord(question(body)[0]) - ord('0') + 1 + body['seed'] % 2}"
    rejection = [
        {"kind": "answer", "samples": 6},
        {"kind": "rejection", "rewards": [{"kind": "numeric", "column": "answer"}]},
    ]
    sums = {"data": {"seeds": str(tmp_path / "sums.jsonl")}}
    run(write(tmp_path, server, steps=rejection, output=str(tmp_path / "sums"), **sums))
    rows = rows_of(tmp_path / "sums")
    assert 5 <= len(rows) <= 9 and all(
        row["messages"][1]["content"] == f"It is {int(row['messages'][0]['content'][0]) + 1}" for row in rows
    )

    distill = [{"kind": "distill", "top_k": 3}]
    run(write(tmp_path, server, steps=distill, output=str(tmp_path / "distilled"), **sums))
    row = rows_of(tmp_path / "distilled")[0]
    assert row["teacher_logprobs"][0] == [["t0", -0.5], ["t1", -1.0], ["t2", -1.5]]


def test_what_is_refused_before_anything_is_asked(server: ScriptedEndpoint, tmp_path: Path) -> None:
    def message(error: type[Exception], **changes: Any) -> str:
        with pytest.raises(error) as raised:
            prepare(load_synthesize_recipe(write(tmp_path, server, **changes))[0])
        return str(raised.value)

    judge = {"kind": "judge", "rubric": "nowhere.md"}
    benchmark = {"kind": "decontaminate", "against": "test.jsonl"}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("recipe.yaml:1:7 data.seeds: is missing: answer begins with tasks", {"data": {}, "steps": ["answer"]}),
        ("steps.0.kind: unknown kind 'answr'. Did you mean 'answer'?", {"steps": ["answr"]}),
        ("steps.1.rubric: no file or folder 'nowhere.md'", {"steps": ["answer", judge]}),
        ("steps.1.against.0.path: no file or folder 'test.jsonl'", {"steps": ["answer", benchmark]}),
        ("steps.0: judge looks at answers, and no step before makes any", {"steps": [STEPS[2]]}),
        ("steps.1: pairs compares scores, and no step before gives any: add judge", {"steps": ["answer", "pairs"]}),
        ("steps.0.samples: at temperature 0 all answers to a prompt are equal", {
            "steps": [{"kind": "answer", "samples": 2, "temperature": 0}]}),
        ("steps.0.header: is needed for a server", {"steps": [{"kind": "magpie", "rows": 3}]}),
        ("model.key: the environment has no NO_SUCH_KEY, which should hold the key of http", {
            "model": {"url": server.url, "name": "scripted", "key": "env:NO_SUCH_KEY"}}),
        ("model: name either a folder (path) or a server (url and name)", {"model": {"name": "scripted"}}),
        ("budget.cost: needs the price of every model", {
            "model": {"url": server.url, "name": "scripted"}, "budget": {"cost": 3}}),
    ]  # fmt: skip
    for expected, changes in cases:
        assert expected in message(RecipeError, **changes), expected
    (tmp_path / "bad.jsonl").write_text('{"instruction": "Say it."}\n{"text": "no prompt"}\n')
    assert "bad.jsonl:2: no prompt" in message(DataError, data={"seeds": str(tmp_path / "bad.jsonl")})
    (tmp_path / "empty.jsonl").write_text("")
    assert "empty.jsonl" in message(DataError, data={"seeds": str(tmp_path / "empty.jsonl")})
    numeric = [{"kind": "answer"}, {"kind": "rejection", "rewards": [{"kind": "numeric", "column": "answer"}]}]
    assert "seeds.jsonl:1: reward numeric reads the column 'answer'" in message(DataError, steps=numeric, data={
        "seeds": str(tmp_path / "seeds.jsonl")})  # fmt: skip
    assert not server.asked
    server.faults = lambda text, attempt: "empty"
    file = write(tmp_path, server, steps=["answer"], data={"seeds": str(tmp_path / "seeds.jsonl")})
    with pytest.raises(DataError, match=r"steps.0: answer leaves no row: answer.empty 2"):
        run(file)


def test_the_documented_recipe_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (TOP / "docs" / "synthesis.md").read_text(encoding="utf-8")
    block = re.search(r"(?:^ {4}.*\n)+", page, re.MULTILINE)
    assert block is not None
    (tmp_path / "recipe.yaml").write_text(textwrap.dedent(block[0]))
    for name in ("seed_tasks.jsonl", "task_types.yaml", "rubric.md"):
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="recipe.yaml:2:.* the environment has no API_KEY"):
        load_synthesize_recipe(Path("recipe.yaml"))
    monkeypatch.setenv("API_KEY", "secret")
    recipe, _ = load_synthesize_recipe(Path("recipe.yaml"))
    assert [step.kind for step in recipe.steps] == [step["kind"] for step in STEPS]
    assert (recipe.budget.tokens, recipe.model.price) == (5e6, (0.1, 0.4))


def test_the_requests_are_counted_before(server: ScriptedEndpoint, tmp_path: Path, capsys: Any) -> None:
    file = write(tmp_path, server)
    expected = expected_requests(prepare(load_synthesize_recipe(file)[0]))
    assert expected == [
        ("self-instruct", 2), ("answer", 12), ("judge", 24), ("pairs", 0), ("deduplicate", 0)
    ]  # fmt: skip
    assert danlu("synthesize", file, "--dry-run") == 0
    assert "38 requests in all; nothing was asked or written" in capsys.readouterr().err
    assert not server.asked and not (tmp_path / "made").exists()
    assert run(file).asked <= 38 + 4


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [1, 2])
def test_kills_at_any_instant(server: ScriptedEndpoint, tmp_path: Path, in_flight: int) -> None:
    """20 kills: each request is asked once, but for those under way at a kill; the bytes are as without any."""
    file = write(tmp_path, server)
    more = "steps.0.rows=18"
    run(file, more, f"output={tmp_path / 'whole' / 'made'}")
    once = server.answered.copy()
    server.answered.clear()
    server.asked.clear()
    server.latency_s = 0.01
    journal, kills = tmp_path / "made" / JOURNAL, 0

    def lines() -> int:
        return journal.read_bytes().count(b"\n") if journal.exists() else 0

    while True:
        before = lines()
        process = SERVER.Process(target=run_recipe, args=(file, [more, f"model.in_flight={in_flight}"]))
        process.start()
        while process.is_alive() and kills < 20:
            if lines() > before + kills % 7:  # some of them within the writing of a line, or of the data set
                process.kill()
                kills += 1
                break
            time.sleep(0.001)
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert kills == 20
    assert content(tmp_path / "made") == content(tmp_path / "whole" / "made")
    assert server.asked.keys() == once.keys()
    again = sum(count - 1 for count in server.asked.values())
    assert again <= kills * in_flight, "more was asked again than was under way"


@pytest.mark.end_to_end
@pytest.mark.parametrize("steps", [["self-instruct", "answer"], ["self-instruct", "answer", "judge", "pairs"]])
def test_seeds_become_a_data_set_that_trains(
    server: ScriptedEndpoint, tiny_world: World, tmp_path: Path, shared_data: Path, steps: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The 175 seed tasks of self-instruct (arXiv:2212.10560) to a data set, and on to a model."""
    tokenise_here(monkeypatch)
    seeds = shared_data / "instruct" / "self_instruct_seed_tasks.jsonl"
    chosen = [{**step} for step in STEPS if step["kind"] in steps]
    chosen[0] = {"kind": "self-instruct", "rows": 40}
    for step in chosen:
        if "rubric" in step:
            step["rubric"] = str(tmp_path / "rubric.md")
    file = write(tmp_path, server, data={"seeds": str(seeds)}, steps=chosen)
    assert danlu("synthesize", file) == 0
    assert len(list(read_ledger(tmp_path / "made" / "ledger.jsonl.zst"))) > 175
    stage, batch = ("dpo", {"rows": 4}) if "pairs" in steps else ("sft", {"sequences": 4})
    config = {**CONFIG, "max_position_embeddings": 512}
    recipe = tiny_world.values(tmp_path / "run", stage=stage, steps=3, schedule=None, batch=None)
    recipe |= {"model": {"tokenizer": str(tiny_world.tokenizer), "config": config}, "batch": batch}
    recipe |= {"data": {**recipe["data"], "train": str(tmp_path / "made"), "max_length": 512}}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(recipe))
    assert danlu("train", tmp_path / "train.yaml") == 0
    assert (tmp_path / "run" / "model").is_dir()
