"""Draws docs/pictures/demo.svg from a finished demo: `python docs/scripts/demo_picture.py demo`.

Nothing in it is made up: the curve is that of metrics.jsonl, the answers are those of answers.json. The file follows
the viewer's colour scheme, light or dark, and needs no library to draw.
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
  path { fill: none; stroke-width: 1.4; stroke-linejoin: round }
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


def _losses(file: Path) -> list[float]:
    """The loss of every step."""
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def _curve(runs: Sequence[Sequence[float]]) -> Iterator[str]:
    total = sum(map(len, runs))
    low, high = (choose(loss for run in runs for loss in run) for choose in (min, max))

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / total

    def y(loss: float) -> float:
        return TOP + (BOTTOM - TOP) * math.log(high / loss) / math.log(high / low)

    yield _text(LEFT, 30, "Loss while it learns", "ink title")
    for tick in (value for value in (0.001, 0.01, 0.1, 1) if low <= value <= high):
        yield f'<line class="rule" x1="{LEFT}" x2="{RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        yield _text(LEFT - 8, y(tick) + 4, f"{tick:g}", "quiet small", "end")
    every = 10 ** math.floor(math.log10(total))
    for step in range(0, total + 1, every if total / every > 3 else every // 5 or 1):
        yield _text(x(step), BOTTOM + 18, f"{step}", "quiet small", "middle")
    yield _text((LEFT + RIGHT) / 2, BOTTOM + 36, "steps", "quiet small", "middle")
    before = 0
    for run, kind in zip(runs, ("read", "ask"), strict=True):
        points = " L".join(f"{x(before + step):.1f},{y(loss):.1f}" for step, loss in enumerate(run, start=1))
        yield f'<path class="{kind}" d="M{points}"/>'
        before += len(run)
    yield _text(x(len(runs[0]) / 2), y(runs[0][len(runs[0]) // 2]) - 14, "pretraining", "read-ink small", "middle")
    yield _text(RIGHT, y(runs[1][0]), "instruction tuning", "ask-ink small", "end")


def _answers(answers: dict[str, Any]) -> Iterator[str]:
    yield _text(ANSWERS, 30, "What it answers: before and after instruction tuning", "ink title")
    top = 58
    for one in _chosen(answers["shown"]):
        kind = " (only read, never asked)" if one["held_out"] else ""
        yield _text(ANSWERS, top, one["messages"][0]["content"] + kind, "ink")
        yield _text(ANSWERS + 14, top + 18, f"before: {_short(one['before'])}", "quiet small")
        yield _text(ANSWERS + 14, top + 35, f"after: {one['after']}", f"{'right' if one['right'] else 'wrong'} small")
        top += 58
    kinds = {"asked in training": "asked", "only read, never asked": "held_out", "sums never seen, GRPO": "sums"}
    for name, kind in kinds.items():
        tally = answers["right"][kind]
        line = f"right of {tally['of']} {name}: {tally['before']} before, {tally['after']} after"
        yield _text(ANSWERS, top + 4, line, "ink small")
        top += 19


def _chosen(shown: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first question of each kind and language, right or wrong."""
    first: dict[tuple[bool, bool], dict[str, Any]] = {}
    for one in shown:
        if len(one["messages"]) == 1:
            first.setdefault((one["held_out"], one["answer"].isascii()), one)
    return list(first.values())


def _short(text: str, width: int = 58) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 1]}…"


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(Path(sys.argv[1])), encoding="utf-8")
