"""A pipeline's timeline as a picture: a row for each rank, a box for each action, simulated or measured.

The file needs nothing from outside, and follows the viewer's colour scheme, light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from danlu.parallel.timeline import TimelineEvent
from danlu.report.report_file import ReportFile

FILE = ReportFile("schedule", "<!-- danlu schedule -->\n", "--svg")

NAMES = {
    "forward": "forward",
    "backward": "backward",
    "input": "input gradient",
    "weight": "weight gradient",
    "update": "update",
    "idle": "idle",
    "communication": "communication",
}
"""The legend's name of each colour."""
COMMUNICATION = ("send", "receive", "reduce")

LEFT, RIGHT, TOP, BOTTOM = 62, 16, 78, 34
ROW, BOX, LANE = 40, 24, 5  # heights: of a row, of the boxes of computations in it, of communication below them
MIN_WIDTH, MAX_WIDTH = 960, 6000
MIN_BOX_WIDTH = 12  # of the median box, where the picture is not too wide for it
DIGIT_WIDTH = 6.5

STYLE = """
  .page { fill: #ffffff } .ink { fill: #1f2328 } .quiet { fill: #59636e } .tick { stroke: #d1d9e0 }
  .forward { fill: #a5c8f5 } .backward { fill: #f5b97f } .input { fill: #f3a6a6 } .weight { fill: #b5d690 }
  .update { fill: #c3b4e8 } .idle { fill: #eff2f5 } .communication { fill: #6e7781 }
  .box { stroke: #ffffff; stroke-width: .7 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .ink { fill: #f0f6fc } .quiet { fill: #9198a1 } .tick { stroke: #3d444d }
    .forward { fill: #1f5a9e } .backward { fill: #8f4f14 } .input { fill: #8e3535 } .weight { fill: #476b1c }
    .update { fill: #5b4691 } .idle { fill: #1c2128 } .communication { fill: #9198a1 }
    .box { stroke: #0d1117 }
  }
  .later { fill-opacity: .55 }
  text { font: 12px -apple-system, "Segoe UI", "Noto Sans", sans-serif }
  .title { font-size: 14px; font-weight: 600 } .micro { font-size: 11px; text-anchor: middle }
"""


def timeline_svg(events: Sequence[TimelineEvent], title: str, subtitle: str, unit: str) -> str:
    """Draws a timeline.

    unit: the unit of the time axis and in tooltips: "units" of a simulation, "s" of measured times.
    """
    ranks = sorted({event.rank for event in events})
    begin, end = min(event.start_s for event in events), max(event.end_s for event in events)
    width = _width(events, end - begin)
    height = TOP + ROW * len(ranks) + BOTTOM
    scale = (width - LEFT - RIGHT) / ((end - begin) or 1.0)
    body = [f'<text class="ink title" x="{LEFT}" y="24">{escape(title)}</text>']
    body += [f'<text class="quiet" x="{LEFT}" y="42">{escape(subtitle)}</text>']
    body += _legend({event.kind for event in events if event.end_s > event.start_s})
    for row, rank in enumerate(ranks):
        body += _row([event for event in events if event.rank == rank], rank, TOP + ROW * row, begin, end, scale, unit)
    body += _axis(begin, end, scale, TOP + ROW * len(ranks), unit)
    return (
        f'{FILE.start}<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(title)}">\n<style>{STYLE}</style>\n'
        f'<rect class="page" width="{width}" height="{height}" rx="8"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _width(events: Sequence[TimelineEvent], duration: float) -> int:
    """The width with which half of all boxes have room for a number."""
    durations = sorted(event.end_s - event.start_s for event in events if event.kind in NAMES)
    durations = [duration for duration in durations if duration > 0]
    if not durations:
        return MIN_WIDTH
    wanted = MIN_BOX_WIDTH * duration / durations[len(durations) // 2] + LEFT + RIGHT
    return round(min(MAX_WIDTH, max(MIN_WIDTH, wanted)))


def _legend(kinds: set[str]) -> Iterator[str]:
    """A square and a name for each kind that is in the picture."""
    communicates = bool(kinds & {*COMMUNICATION})
    x = float(LEFT)
    for kind, name in NAMES.items():
        if kind in kinds or kind == "idle" or (kind == "communication" and communicates):
            yield f'<rect class="{kind}" x="{x:.0f}" y="53" width="11" height="11" rx="2"/>'
            yield f'<text class="quiet" x="{x + 16:.0f}" y="63">{name}</text>'
            x += 34 + DIGIT_WIDTH * len(name)


def _row(
    events: Sequence[TimelineEvent], rank: int, y: int, begin: float, end: float, scale: float, unit: str
) -> Iterator[str]:
    """A rank's name, its idle time as the ground, its computations, and its communication below them."""
    yield f'<text class="ink" x="12" y="{y + 17}">rank {rank}</text>'
    yield f'<rect class="idle" x="{LEFT}" y="{y}" width="{(end - begin) * scale:.1f}" height="{BOX}"/>'
    first = min((event.chunk for event in events if event.chunk is not None), default=0)
    for event in events:
        x, width = LEFT + (event.start_s - begin) * scale, (event.end_s - event.start_s) * scale
        if width <= 0:
            continue
        if event.kind in COMMUNICATION:
            top, height = y + BOX + 1 + (LANE if event.kind == "receive" else 0), LANE - 1
            shape = f'class="communication" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{height}"'
            yield f"<rect {shape}><title>{_tooltip(event, unit)}</title></rect>"
            continue
        later = " later" if event.chunk not in (first, None) else ""
        shape = f'class="box {event.kind}{later}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BOX}"'
        yield f"<rect {shape}><title>{_tooltip(event, unit)}</title></rect>"
        if event.micro is not None and width >= DIGIT_WIDTH * len(str(event.micro)) + 2:
            yield f'<text class="ink micro" x="{x + width / 2:.1f}" y="{y + 16}">{event.micro}</text>'


def _tooltip(event: TimelineEvent, unit: str) -> str:
    name = NAMES.get(event.kind, event.kind)
    of = "" if event.micro is None else f" of micro-batch {event.micro}"
    chunk = "" if event.chunk is None else f", chunk {event.chunk}"
    return f"{name}{of}{chunk}: {event.start_s:.6g} to {event.end_s:.6g} {unit}"


def _axis(begin: float, end: float, scale: float, y: int, unit: str) -> Iterator[str]:
    """Round times below the rows."""
    rough = ((end - begin) or 1.0) / 10
    power = 10.0 ** math.floor(math.log10(rough))
    size = next((power * factor for factor in (1, 2, 5) if power * factor >= rough), power * 10)
    for count in range(math.floor((end - begin) / size + 1e-9) + 1):
        x = LEFT + count * size * scale
        last = f" {unit}" if count == 0 else ""
        yield f'<path class="tick" d="M{x:.1f} {y} v5"/>'
        yield f'<text class="quiet" x="{x:.1f}" y="{y + 18}" text-anchor="middle">{count * size:g}{last}</text>'
