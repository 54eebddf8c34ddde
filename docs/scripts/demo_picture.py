"""Draws docs/pictures/demo.svg from a finished demo: `python docs/scripts/demo_picture.py demo`.

Nothing in it is made up: the curve is that of metrics.jsonl, the answers are those of answers.json. The file is readable
on light and dark pages (it follows the viewer's colour scheme) and needs no library to draw.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).resolve().parents[1] / "pictures" / "demo.svg"
WIDTH, HEIGHT = 880, 340
LEFT, TOP, RIGHT, BOTTOM = 52, 58, 400, 290  # of the curve
ANSWERS = 448  # where the answers begin
SHOWN = 4

STYLE = """
  .page { fill: #ffffff } .ink { fill: #1f2328 } .quiet { fill: #59636e } .rule { stroke: #d1d9e0 }
  .read { stroke: #0969da } .ask { stroke: #bc4c00 } .read-ink { fill: #0969da } .ask-ink { fill: #bc4c00 }
  .right { fill: #1a7f37 } .wrong { fill: #d1242f }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .ink { fill: #f0f6fc } .quiet { fill: #9198a1 } .rule { stroke: #3d444d }
    .read { stroke: #4493f8 } .ask { stroke: #f0883e } .read-ink { fill: #4493f8 } .ask-ink { fill: #f0883e }
    .right { fill: #3fb950 } .wrong { fill: #f85149 }
  }
  text { font: 13px -apple-system, "Segoe UI", "Noto Sans", "Noto Sans CJK SC", sans-serif }
  .title { font-weight: 600; font-size: 14px } .small { font-size: 11.5px }
  path { fill: none; stroke-width: 1.8; stroke-linejoin: round }
"""


def picture(folder: Path) -> str:
    """The SVG of a finished demo in `folder`."""
    runs = [_losses(folder / stage / "metrics.jsonl") for stage in ("pretrain", "sft")]
    answers = json.loads((folder / "answers.json").read_text(encoding="utf-8"))
    body = "\n".join((*_curve(runs), *_answers(answers)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="Loss of the demo, and its answers before and after instruction tuning">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>\n{body}\n</svg>\n'
    )


def _losses(file: Path) -> list[tuple[float, float]]:
    """(seconds since the run began, loss) of every step."""
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [(line["elapsed_s"], line["loss"]) for line in lines if "loss" in line]


def _curve(runs: Sequence[Sequence[tuple[float, float]]]) -> Iterator[str]:
    total = sum(run[-1][0] for run in runs)
    low = 10 ** math.floor(math.log10(min(loss for run in runs for _, loss in run)))
    high = max(loss for run in runs for _, loss in run)

    def x(seconds: float) -> float:
        return LEFT + (RIGHT - LEFT) * seconds / total

    def y(loss: float) -> float:
        return TOP + (BOTTOM - TOP) * math.log(high / loss) / math.log(high / low)

    yield _text(LEFT, 30, "Loss while it learns", "ink title")
    for tick in (value for value in (0.01, 0.03, 0.1, 0.3, 1, 3) if low <= value <= high):
        yield f'<line class="rule" x1="{LEFT}" x2="{RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        yield _text(LEFT - 8, y(tick) + 4, f"{tick:g}", "quiet small", "end")
    every = next(step for step in (5, 10, 20, 30, 60, 120, 300, 600) if total / step <= 6)
    for seconds in range(0, int(total) + 1, every):
        yield _text(x(seconds), BOTTOM + 18, f"{seconds} s", "quiet small", "middle")
    before = 0.0
    for run, kind, label in zip(runs, ("read", "ask"), ("pretraining", "instruction tuning"), strict=True):
        points = " L".join(f"{x(before + seconds):.1f},{y(loss):.1f}" for seconds, loss in run)
        yield f'<path class="{kind}" d="M{points}"/>'
        before += run[-1][0]
    yield _text(x(runs[0][-1][0] * 0.35), y(runs[0][len(runs[0]) // 3][1]) - 12, "pretraining", "read-ink small")
    yield _text(x(before) - 4, y(runs[1][0][1]) - 2, "instruction tuning", "ask-ink small", "end")


def _answers(answers: dict[str, Any]) -> Iterator[str]:
    yield _text(ANSWERS, 30, "What it answers: before and after instruction tuning", "ink title")
    single = [one for one in answers["shown"] if len(one["messages"]) == 1]
    chosen = [one for one in single if not one["held_out"]][:2] + [one for one in single if one["held_out"]][:2]
    top = 58
    for one in chosen[:SHOWN]:
        kind = " (only read, never asked)" if one["held_out"] else ""
        yield _text(ANSWERS, top, one["messages"][0]["content"] + kind, "ink")
        yield _text(ANSWERS + 14, top + 18, f"before: {_short(one['before'])}", "quiet small")
        yield _text(ANSWERS + 14, top + 35, f"after: {one['after']}", f"{'right' if one['right'] else 'wrong'} small")
        top += 58
    for name, kind in (("asked in training", "asked"), ("only read, never asked", "held_out")):
        tally = answers["right"][kind]
        line = f"right of {tally['of']} {name}: {tally['before']} before, {tally['after']} after"
        yield _text(ANSWERS, top + 4, line, "ink small")
        top += 19


def _short(text: str, width: int = 58) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 1]}…"


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(Path(sys.argv[1])), encoding="utf-8")
