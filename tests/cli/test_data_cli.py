"""`danlu data`: a recipe over files, the account of a row, the page, single steps; and what is refused."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders.curated_sets import bytes_of, texts_of, write_rows, write_sources
from builders.tiny_world import danlu

from danlu.curation.personal.step import Personal as PersonalStep
from danlu.production.ledger import read_ledger
from danlu.production.shards import SHARD_ROWS

RECIPE = """stage: curate
data: [documents.jsonl, chats.jsonl, questions.jsonl]
steps:
  - repair
  - {kind: quality, rules: [{kind: gopher, words: [4, 1000], stop_words: 0, alphabetic: 0.5}]}
  - {kind: deduplicate, by: [exact, minhash], words: 3, at_least: 0.6}
  - personal
workers: 1
output: out
"""


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_sources(tmp_path)
    (tmp_path / "clean.yaml").write_text(RECIPE, encoding="utf-8")


@pytest.mark.usefixtures("_here")
def test_clean_explain_and_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert danlu("data", "clean", "clean.yaml") == 0
    assert "in out (" in capsys.readouterr().err
    card = json.loads(Path("out/data-card.json").read_text(encoding="utf-8"))
    assert "workers" not in card["recipe"] and "output" not in card["recipe"]  # they change no byte
    lines = list(read_ledger(Path("out/ledger.jsonl.zst")))
    duplicate = next(line for line in lines if line.decisive and line.decisive.step == "deduplicate.minhash")
    for name in (duplicate.id[:12], duplicate.where):
        assert danlu("data", "explain", name, "out") == 0
        shown = capsys.readouterr().out
        assert f"{duplicate.id} ({duplicate.where}" in shown
        assert "deduplicate.minhash: dropped, near duplicate (0." in shown and "stays" in shown
    assert danlu("data", "explain", "zzz", "out") == 3
    assert "no row has the id or the place 'zzz'" in capsys.readouterr().err

    assert danlu("data", "report", "out") == 0
    assert "dropped by deduplicate.minhash: near duplicate" in capsys.readouterr().out
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "quality.gopher: words" in page and page.count("<line") >= 8  # histograms with their bounds
    text = json.loads(Path("documents.jsonl").read_text(encoding="utf-8").splitlines()[duplicate.row])["text"]
    assert duplicate.source or f"<pre>{text[:20]}" in page or duplicate.id not in page
    assert danlu("data", "clean", "clean.yaml") == 0  # the page is no reason to refuse the folder
    assert "out has this data set already" in capsys.readouterr().err

    assert danlu("data", "clean", "clean.yaml", "steps.2.at_least=0.9") == 6
    assert "by other steps or settings. Choose another `output`" in capsys.readouterr().err
    assert danlu("data", "clean", "clean.yaml", "steps.2.at_least=0.9", "--overwrite") == 0
    Path("out/notes.txt").touch()
    assert danlu("data", "clean", "clean.yaml") == 6
    assert "holds something other than a data set of danlu (notes.txt)" in capsys.readouterr().err


@pytest.mark.usefixtures("_here")
def test_a_bad_row_and_ctrl_c_say_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(PersonalStep, "measure", interrupt)
        assert danlu("data", "clean", "clean.yaml") == 130
    assert "what is done is kept in out, and the same command goes on from there" in capsys.readouterr().err
    assert danlu("data", "clean", "clean.yaml") == 0

    with Path("documents.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": 5}\n')
    assert danlu("data", "clean", "clean.yaml", "--overwrite") == 3
    said = capsys.readouterr().err
    assert "'text' must be a string, not an int" in said and "Set on_bad_row: skip" in said
    assert danlu("data", "clean", "clean.yaml", "--overwrite", "on_bad_row=skip") == 0


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("_here")
def test_single_steps_and_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    assert danlu("data", "stats", "documents.jsonl", "chats.jsonl", "--json") == 0
    documents, chats = json.loads(capsys.readouterr().out)
    texts = texts_of(72)
    assert (documents["rows"], documents["formats"]) == (72, {"text": 72})
    assert documents["characters"] == sum(map(len, texts)) and documents["repeated"] == 72 - len(set(texts))
    assert chats["messages_of_rows"]["50"] == 2
    assert danlu("data", "dedup", "documents.jsonl", "--by", "exact", "--out", "unique") == 0
    rows = [json.loads(line)["text"] for line in Path("unique/rows/00000.jsonl").read_text("utf-8").splitlines()]
    assert rows == list(dict.fromkeys(texts))
    assert danlu("data", "decontaminate", "documents.jsonl", "--against", "none.jsonl", "--out", "x") == 2
    assert "danlu data decontaminate: steps.0.against.0.path: no file or folder 'none.jsonl'" in capsys.readouterr().err
    assert not Path("x").exists()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.usefixtures("_here")
def test_killed_at_random_instants(workers: int) -> None:
    """Twenty kills, ten with each number of workers: the bytes of a run without any."""
    write_rows(Path("documents.jsonl"), ({"text": text} for text in texts_of(2 * SHARD_ROWS)))
    command = [sys.executable, "-P", "-m", "danlu", "data", "clean", "clean.yaml", f"workers={workers}"]
    begin = time.monotonic()
    subprocess.run([*command, "output=whole/out"], check=True, stderr=subprocess.DEVNULL)
    seconds, draw, kills = time.monotonic() - begin, random.Random(workers), 0
    while kills < 10:
        process = subprocess.Popen([*command, "output=killed/out"], stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            process.wait(draw.uniform(0.1, 0.5) * seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
        else:  # it came to its end
            assert process.returncode == 0
            assert bytes_of(Path("killed/out")) == bytes_of(Path("whole/out"))
            for card in Path("killed/out").glob("data-card.json"):
                card.unlink()  # as before its last step
            for file in Path("killed/out/.work").rglob("marks-*"):
                file.unlink()
    subprocess.run([*command, "output=killed/out"], check=True, stderr=subprocess.DEVNULL)
    assert bytes_of(Path("killed/out")) == bytes_of(Path("whole/out"))
