"""The report of a run: on folders written by hand, unfinished, torn and hostile ones among them."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from danlu.cli.main import main
from danlu.report import run_record
from danlu.report.rollout_samples import MAX_CHARACTERS, MAX_REASONS, OTHER_REASONS, read_samples, shortened
from danlu.report.run_charts import HEIGHT, MAX_POINTS, WIDTH, charts
from danlu.report.run_page import MAX_EVENTS, page
from danlu.report.run_record import RunRecord, read_record
from danlu.report.run_report import as_json, report_of, table
from danlu.training import run_folder

HOSTILE = "</pre><script>alert(1)</script>{{ 7 * 7 }}\x1b[2J\u202e\"'&"


def answer(text: str, **rewards: float | None) -> dict[str, Any]:
    return {"text": text, "finish": "stop", "tokens": [1, 2, 3], "rewards": rewards}


def step_line(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": -0.5, "tokens": 100, "tokens_per_second": 50.0, **more}


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of stage rl with two updates of a rollout, five steps behind, and two rewards of which one failed."""
    folder = tmp_path / "run"
    folder.mkdir()
    rewards = [{"kind": "length", "most": 5, "weight": 2.0}, {"kind": "exact", "column": "answer"}]
    recipe = {"stage": "rl", "model": "gone", "data": {"train": "gone.jsonl"}, "rewards": rewards, "output": "run"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "batch": {"prompts": 2, "updates": 2}}))
    (folder / "environment.json").write_text("{}")
    times = {"rollout_s": 0.75, "reward_s": 0.25, "scoring_s": 0.0}
    steps = [step_line(step, reward=float(step), **{"reward/length": step / 2}, **times) for step in range(1, 6)]
    evaluation = {"step": 4, "eval_loss": -2.0, "eval_reward": 2.0, "eval_s": 1.0}
    event = {"step": 3, "event": "spike", "reason": HOSTILE}
    write_lines(folder / "metrics.jsonl", [*steps[:4], evaluation, event, steps[4]])
    answers = [answer("best", length=3.0, exact=0.0), answer("worst", length=0.0, exact=1.0)]
    failed = {**answer("failed", length=None, exact=None), "failures": ["exact: no column", "length: hangs"]}
    rollouts = [
        {"step": step, "number": step, "row": "p.jsonl:1", "prompt": "Q", "answers": [*answers, failed]}
        for step in (1, 3, 5)
    ]
    write_lines(folder / "rollouts.jsonl", rollouts)
    return folder


def test_curves_are_read_though_what_the_recipe_names_is_gone(run: Path) -> None:
    record = read_record(run)
    assert record.recipe is not None and record.recipe.stage == "rl"
    assert record.steps["reward"] == {step: float(step) for step in range(1, 6)}
    assert record.evaluations == {"loss": {4: -2.0}, "reward": {4: 2.0}, "s": {4: 1.0}}
    assert [event["event"] for event in record.events] == ["spike"]
    assert record.damaged_lines == 0 and record.last_step == 5


def test_a_rollouts_times_are_those_of_the_step_that_made_it(run: Path) -> None:
    record = read_record(run)
    assert record.steps["rollout_s"] == {1: 0.75, 3: 0.75, 5: 0.75}
    # Of 100 tokens at 50 a second: the step takes 2 seconds.
    assert record.steps["update_s"] == {1: 1.0, 2: 2.0, 3: 1.0, 4: 2.0, 5: 1.0}


def test_a_step_that_took_less_than_what_is_counted_in_it_took_no_time_beside(run: Path) -> None:
    slow = {"rollout_s": 3.0, "reward_s": 0.25, "scoring_s": 0.0}
    speed = {"tokens_per_second": 0.0}  # of a step without a clock
    write_lines(run / "metrics.jsonl", [step_line(1, reward=1.0, **slow), {**step_line(2, reward=1.0), **speed}])
    assert read_record(run).steps["update_s"] == {1: 0.0}


def test_names_of_metrics_are_kept_up_to_a_bound(run: Path) -> None:
    names = {f"x{number}": 1.0 for number in range(run_record.MAX_NAMES)}
    write_lines(run / "metrics.jsonl", [step_line(1), step_line(2, **names), step_line(3)])
    steps = read_record(run).steps
    assert run_record.MAX_NAMES <= len(steps) <= run_record.MAX_NAMES + 1  # and the seconds of steps
    assert steps["loss"].keys() == {1, 2, 3}


def test_a_line_that_is_being_written_is_left_out_and_a_damaged_one_is_counted(run: Path) -> None:
    whole = read_record(run).steps
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 1.0')
    assert read_record(run).steps == whole and read_record(run).damaged_lines == 0
    with (run / "metrics.jsonl").open("a") as file:
        file.write('\n[1]\n{"loss": 3}\n{"step": 7, "loss": "nan"}\n')
    record = read_record(run)
    assert record.damaged_lines == 3
    assert math.isnan(record.steps["loss"][7]) and record.last_step == 7


def test_samples_are_the_best_and_worst_by_the_weighted_sum_of_the_first_and_the_last_rollout(run: Path) -> None:
    samples = read_samples(run, {"length": 2.0, "exact": 1.0})
    assert [rollout.step for rollout in samples.rollouts] == [1, 5]
    first = samples.rollouts[0]
    assert [(one.answer, one.total) for one in (*first.best, *first.worst)] == [("best", 6.0), ("worst", 1.0)]
    assert (samples.prompts, samples.answers) == (3, 9)
    assert samples.failures == {"exact: no column": 3, "length: hangs": 3}
    # Control: other weights turn the order round.
    turned = read_samples(run, {"length": 0.1, "exact": 1.0}).rollouts[0]
    assert [one.answer for one in (*turned.best, *turned.worst)] == ["worst", "best"]


def test_no_sample_is_both_among_the_best_and_the_worst(run: Path) -> None:
    answers = [answer(str(value), length=float(value)) for value in range(8)]
    write_lines(run / "rollouts.jsonl", [{"step": 1, "prompt": "Q", "row": "r", "answers": answers}])
    (rollout,) = read_samples(run, {}).rollouts
    assert [one.answer for one in rollout.best] == ["7", "6", "5"]
    assert [one.answer for one in rollout.worst] == ["0", "1", "2"]


def test_reasons_are_counted_up_to_a_bound(run: Path) -> None:
    failed = [{**answer("a"), "failures": [f"r: {number}"]} for number in range(MAX_REASONS + 7)]
    write_lines(run / "rollouts.jsonl", [{"step": 1, "prompt": "Q", "row": "r", "answers": failed}])
    failures = read_samples(run, {}).failures
    assert len(failures) == MAX_REASONS + 1 and failures[OTHER_REASONS] == 7


@pytest.mark.parametrize(
    "line",
    [
        {"step": 1, "answers": [{"text": 5, "tokens": 3, "rewards": [1], "failures": 4}, 7]},
        {"step": 1, "answers": [{"text": None, "rewards": {"length": "high"}}], "prompt": [{"role": 3}, 4]},
        {"step": "1", "answers": []},
        {"answers": {}},
    ],
)
def test_lines_of_other_shapes_end_nothing(run: Path, line: dict[str, Any]) -> None:
    write_lines(run / "rollouts.jsonl", [line])
    assert page(report_of(run, "stopped")).endswith("</html>\n")


class Markup(HTMLParser):
    """Counts tags, and collects attributes that load something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loading: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loading += [name for name, _ in attrs if name in ("src", "href") or name.startswith("on")]


def test_the_page_has_texts_of_models_as_texts(run: Path) -> None:
    answers = [answer(HOSTILE, length=1.0), answer("fine", length=0.0)]
    line = {"step": 1, "row": HOSTILE, "prompt": [{"role": "user", "content": HOSTILE}], "answers": answers}
    failed = {**answers[0], "failures": [HOSTILE], "finish": HOSTILE, "rewards": {HOSTILE: 1.0}}
    write_lines(run / "rollouts.jsonl", [line, {**line, "answers": [failed]}])
    write_lines(run / "metrics.jsonl", [step_line(1, **{HOSTILE: 1.0}), {"step": 1, "event": HOSTILE}])
    text = page(report_of(run, "running"))
    markup = Markup()
    markup.feed(text)
    assert "script" not in markup.tags and markup.loading == []
    assert "&lt;script&gt;alert(1)" in text and "{{ 7 * 7 }}" in text  # control: it is there
    assert "\x1b" not in text and "\u202e" not in text
    assert text.startswith("<!doctype html>\n<!-- danlu report -->\n")


def test_of_many_events_the_first_are_shown_and_the_others_counted(run: Path) -> None:
    events = [{"step": step, "event": "spike", "reason": f"number {step}."} for step in range(1, MAX_EVENTS + 4)]
    write_lines(run / "metrics.jsonl", [step_line(1), *events])
    shown = page(report_of(run, "stopped"))
    assert f"number {MAX_EVENTS}." in shown and f"number {MAX_EVENTS + 1}." not in shown and "3 more" in shown


def test_long_texts_are_shown_from_both_ends() -> None:
    text = "a" * 5000 + "b" * 5000
    short = shortened(text)
    assert short.startswith("a" * (MAX_CHARACTERS // 2)) and short.endswith("b" * (MAX_CHARACTERS // 2))
    assert "8,000 characters not shown" in short
    assert shortened("as it is") == "as it is"


def test_charts_of_a_run_hold_its_curves_and_evaluations(run: Path) -> None:
    by_title = {chart.title: chart for chart in charts(read_record(run))}
    assert [line.name for line in by_title["Reward"].lines] == ["reward", "eval_reward"]
    assert [line.dashed for line in by_title["Reward"].lines] == [False, True]
    assert [line.name for line in by_title["Parts of the reward"].lines] == ["reward/length"]
    assert next(iter(by_title)) == "Reward" and "Loss" in by_title
    first, second = by_title["Reward"].lines[0].paths[0].split()[0:2]
    assert float(first.split(",")[0]) < float(second.split(",")[0])  # steps go to the right
    assert float(first.split(",")[1]) > float(second.split(",")[1])  # and higher values are above


def record_of(curve: dict[int, float]) -> RunRecord:
    return RunRecord(Path("run"), None, {"loss": curve})


@pytest.mark.parametrize(
    "heights",
    [[0.0], [1.0, 1.0], [-1e308, 1e308], [1e-300, 2e-300], [math.inf, 1.0, 2.0], [5.0, math.nan, 6.0], [0.0, 5e-324]],
)
def test_every_point_lies_within_its_chart(heights: list[float]) -> None:
    (chart,) = charts(record_of(dict(enumerate(heights, 1))))
    numbers = [float(text) for path in chart.lines[0].paths for text in re.split("[ ,]", path)]
    numbers += [float(text) for dot in chart.lines[0].dots for text in dot]
    assert numbers and all(0 <= number <= max(WIDTH, HEIGHT) for number in numbers)
    assert 2 <= len(chart.y_ticks) <= 7


def test_a_line_is_broken_where_a_value_is_not_finite() -> None:
    (chart,) = charts(record_of({1: 1.0, 2: 2.0, 3: math.nan, 4: 3.0, 5: 4.0, 6: math.inf, 7: 1.0}))
    (line,) = chart.lines
    assert len(line.paths) == 2 and len(line.dots) == 1


def test_long_curves_are_means() -> None:
    (chart,) = charts(record_of({step: float(step % 2) for step in range(1, 10_001)}))
    (line,) = chart.lines
    assert line.mean_over == 25 and len(line.paths[0].split()) == MAX_POINTS
    (chart,) = charts(record_of(dict.fromkeys(range(1, MAX_POINTS + 2), 1.0)))
    assert len(chart.lines[0].paths[0].split()) == MAX_POINTS // 2 + 1  # one more than fit already


def test_without_finite_values_there_is_no_chart() -> None:
    assert charts(record_of({1: math.nan})) == []


def test_steps_are_whole_and_curves_that_never_change_are_flat() -> None:
    (chart,) = charts(record_of({step: float(step) for step in range(1, 2 * MAX_POINTS + 2)}))
    assert [label for _, label in chart.x_ticks] == ["step 1", f"{MAX_POINTS + 1:,}", f"{2 * MAX_POINTS + 1:,}"]
    assert not chart.flat
    (chart,) = charts(record_of({1: 0.5, 2: 0.5}))
    assert chart.flat and [label for _, label in chart.x_ticks] == ["step 1", "2"]
    (chart,) = charts(record_of({1: 0.5}))
    assert not chart.flat  # one step says nothing of the next


def test_the_table_says_how_each_metric_went(run: Path) -> None:
    rows = {row[0]: row[1:] for row in table(report_of(run, "stopped"))}
    assert rows["reward"] == ["1", "5", "1", "5"]
    assert rows["eval_reward"] == ["2", "2", "2", "2"]


def test_json_has_no_numbers_that_json_has_not(run: Path) -> None:
    write_lines(run / "metrics.jsonl", [step_line(1, reward="nan"), step_line(2, reward=1.0)])
    content = as_json(report_of(run, "stopped"))
    parsed = json.loads(json.dumps(content, allow_nan=False))
    assert parsed["metrics"]["reward"] == {"first": "nan", "last": 1.0, "lowest": 1.0, "highest": 1.0}
    assert parsed["failures"] == {"exact: no column": 3, "length: hangs": 3}


def test_a_run_of_another_stage_has_its_metrics_too(run: Path) -> None:
    (run / "rollouts.jsonl").unlink()
    lines = [step_line(step, margin=0.1 * step, **{"loss/a": 1.0, "loss/b": 2.0}) for step in (1, 2)]
    write_lines(run / "metrics.jsonl", lines)
    titles = {chart.title: [line.name for line in chart.lines] for chart in charts(read_record(run))}
    assert titles["margin"] == ["margin"] and titles["loss"] == ["loss/a", "loss/b"]
    assert next(iter(titles)) == "Loss" and "Reward" not in titles


def test_the_command_writes_into_the_runs_folder_and_prints_the_table(run: Path, capsys: Any) -> None:
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").read_text().startswith("<!doctype html>\n<!-- danlu report -->\n")
    assert main(["report", str(run)]) == 0  # over its own page
    said = capsys.readouterr().out
    assert "stage rl, stopped, step 5" in said and "reward/length" in said and "3 x exact: no column" in said
    assert main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 5


def test_the_command_refuses_what_is_no_run_and_files_that_are_not_its_own(
    run: Path, tmp_path: Path, capsys: Any
) -> None:
    assert main(["report", str(tmp_path)]) != 0
    assert "no run is in this folder" in capsys.readouterr().err
    other = tmp_path / "other.html"
    other.write_text("mine")
    assert main(["report", str(run), "--out", str(other)]) != 0
    assert "--out" in capsys.readouterr().err and other.read_text() == "mine"


def test_a_run_before_its_first_step_has_a_report(run: Path, capsys: Any) -> None:
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        (run / name).unlink()
    assert main(["report", str(run)]) == 0
    assert "no step has been logged yet" in capsys.readouterr().out


def test_a_run_without_checkpoint_begins_again_among_its_rollouts_and_report(run: Path) -> None:
    (run / "report.html").write_text("page")
    run_folder.check_output_folder(run)
    (run / "mine.txt").write_text("mine")  # control
    with pytest.raises(Exception, match=r"mine\.txt"):
        run_folder.check_output_folder(run)
