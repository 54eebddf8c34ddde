"""Which runs a study has, what its folders tell of them, and the table: on folders written by hand."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest
from builders.study_folders import write_run, write_study

from danlu.core.errors import ResourceError
from danlu.report import study_page
from danlu.report.study_results import RunSummary, Study, read_study
from danlu.report.study_table import aligned, as_csv, markdown, remarks, table

# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """Three ranks, each with two seeds; one run is half done and one not begun."""
    folder = tmp_path / "study"
    names = {
        f"rank-{rank}_seed-{seed}": {"adapter.rank": str(rank), "seed": str(seed)}
        for rank in (16, 4, 8) for seed in (1, 0)
    }  # fmt: skip
    write_study(folder, names)
    for rank, seed, last, best in ((4, 0, 2.5, 2.25), (4, 1, 2.0, 2.0), (8, 0, 1.5, 1.5), (8, 1, 1.0, 0.5)):
        write_run(
            folder / f"rank-{rank}_seed-{seed}",
            {1: 4.0, 2: 3.0 + seed},
            {1: best, 2: last},
            trained_parameters=10 * rank,
            seconds=600.0 + 10 * seed,
            tokens_per_second=500.0 * (1 + seed),
            result={"path": "model", "bytes": 2**18 * rank},
        )
    write_run(folder / "rank-16_seed-0", {1: 4.0, 7: 3.5}, finished=False)
    return folder


def test_runs_in_the_order_of_their_values(ranks: Path) -> None:
    study = read_study(ranks)
    assert [(one.values["adapter.rank"], one.values["seed"]) for one in study.results] == [
        (rank, seed) for rank in ("4", "8", "16") for seed in ("0", "1")
    ]
    assert study.varied == ("adapter.rank",)
    assert [len(group.results) for group in study.groups] == [2, 2]
    assert [one.name for one in study.unfinished] == ["rank-16_seed-0", "rank-16_seed-1"]
    assert [one.step for one in study.unfinished] == [7, 0]
    first = study.results[0]
    assert first.losses == ((1, 4.0), (2, 3.0)) and first.evaluations == ((1, 2.25), (2, 2.5))


def test_words_keep_the_order_they_came_in(tmp_path: Path) -> None:
    folder = write_study(tmp_path, {name: {"optimizer.kind": name} for name in ("muon", "adamw", "lion")})
    assert [one.name for one in read_study(folder).results] == ["muon", "adamw", "lion"]


def test_a_step_that_was_gone_through_twice_counts_once_and_a_torn_line_not_at_all(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study", {"run": {"seed": "0"}})
    run = write_run(folder / "run")
    lines = ['{"step": 1, "loss": 4}', '{"step": 2, "loss": "nan"}', '{"step": 2, "event": "rewind"}']
    lines += ['{"step": 2, "loss": 3}', '{"step": 2, "lo', '{"step": 2, "eval_loss": "inf"}', '{"step": 3, "lo']
    (run / "metrics.jsonl").write_text("\n".join(lines))
    (result,) = read_study(folder).results
    assert result.losses == ((1, 4.0), (2, 3.0)) and result.evaluations == ((2, math.inf),)


def test_a_study_that_cannot_be_read(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study", {"run": {"seed": "0"}})
    run = write_run(folder / "run")
    (run / "summary.json").write_text('{"seconds": 1}')
    with pytest.raises(ResourceError, match=r"summary.json: not what danlu train wrote \(KeyError\('evaluation'\)\)"):
        read_study(folder)
    for broken in ("{", "[]", '{"keys": ["a"], "runs": [{"name": "x", "values": {}}]}'):
        (folder / "study.json").write_text(broken)
        with pytest.raises(ResourceError, match="study.json: not what danlu study wrote"):
            read_study(folder)


# -- the table --------------------------------------------------------------------------------------------------------


def test_the_table(ranks: Path) -> None:
    study = read_study(ranks)
    headings, four, eight = table(study)
    assert dict(zip(headings, four, strict=True)) == {
        "rank": "4",
        "seeds": "2",
        "trained": "40",
        "share, %": "4.00",
        "time, min": "10.1 ± 0.1",
        "tokens/s": "750 ± 354",
        "peak memory, MiB": "300 ± 0",
        "eval loss, last": "2.2500 ± 0.3536",
        "eval loss, best": "2.1250 ± 0.1768",
        "result, MiB": "1.00",
    }
    assert eight[:4] == ["8", "2", "80", "8.00"]
    assert list(remarks(study)) == [
        "lowest evaluation loss: adapter.rank 8 (1.0000)",
        "± is the standard deviation over seeds",
        "not finished: rank-16_seed-0, stopped after step 7",
        "not finished: rank-16_seed-1, not begun",
    ]


def test_one_seed_has_no_spread_and_rows_without_evaluation_have_the_training_loss(tmp_path: Path) -> None:
    folder = write_study(tmp_path, {name: {"a.b": name} for name in ("x", "y")})
    write_run(folder / "x", {1: 4.0, 2: 3.25}, seconds=5.0)
    write_run(folder / "y", {1: 4.0, 2: 3.5}, {2: 3.0}, tokens_per_second=None, peak_memory_bytes=80 * 2**30)
    study = read_study(folder)
    headings, x, y = table(study)
    assert "seeds" not in headings and "eval loss, last" not in headings
    row = dict(zip(headings, x, strict=True))
    assert (row["train loss, last"], row["time, s"], row["tokens/s"], row["peak memory, MiB"]) == (
        "3.2500", "5.00", "80.0", "300",
    )  # fmt: skip
    assert y[headings.index("tokens/s")] == "–" and y[headings.index("peak memory, MiB")] == "81,920"
    assert list(remarks(study)) == []


def test_losses_that_are_no_numbers_are_shown_and_never_the_lowest(tmp_path: Path) -> None:
    folder = write_study(tmp_path, {f"{n}-{seed}": {"a.b": n, "seed": seed} for n in ("x", "y") for seed in ("0", "1")})
    for name in ("x-0", "x-1", "y-0"):
        write_run(folder / name, evaluations={1: 3.0})
    write_run(folder / "y-1", evaluations={1: 2.0}, evaluation={"last": "nan", "best": "nan"})
    study = read_study(folder)
    headings, _, y = table(study)
    assert y[headings.index("eval loss, last")] == "nan ± nan"
    assert next(remarks(study)) == "lowest evaluation loss: a.b x (3.0000)"


def test_columns_line_up(ranks: Path) -> None:
    text = aligned(table(read_study(ranks)))
    lines = text.splitlines()
    assert len(lines) == 3 and len(set(map(len, lines))) == 1
    assert [line.index("%") for line in lines[:1]] == [lines[1].index("4.00") + 3]


def test_csv_has_every_run_and_every_number(ranks: Path) -> None:
    study = read_study(ranks)
    rows = list(csv.DictReader(io.StringIO(as_csv(study))))
    assert [row["run"] for row in rows] == [result.name for result in study.results]
    for row, result in zip(rows, study.results, strict=True):
        assert row["adapter.rank"] == result.values["adapter.rank"] and int(row["step"]) == result.step
        assert (row["finished"] == "true") == (result.summary is not None)
        for field in RunSummary.__dataclass_fields__:
            assert row[field] == ("" if result.summary is None else str(getattr(result.summary, field)))


def test_markdown(ranks: Path) -> None:
    study = read_study(ranks)
    page = markdown(study, "ranks", ["cost.png"])
    headings, *lines = table(study)
    assert page.startswith(f"# ranks\n\n| {' | '.join(headings)} |\n| --: |")
    assert page.count("\n| ") == 2 + len(lines)
    assert page.endswith("- not finished: rank-16_seed-1, not begun\n\n![cost.png](cost.png)\n")


def test_an_empty_study_has_no_groups() -> None:
    assert Study(("seed",), ()).groups == []


def test_a_page_has_the_table_and_the_curves(ranks: Path) -> None:
    study = read_study(ranks)
    text = study_page.page(study, "study <b>")
    assert text.startswith("<!doctype html>\n<!-- danlu study -->\n") and "Study study &lt;b&gt;" in text
    assert "4 of 6 runs finished" in text and all(cell in text for line in table(study) for cell in line)
    assert [title for title in ("Evaluation loss", "Training loss") if text.count(title) != 2] == []
    assert text.count("<polyline") == 4 + 5
