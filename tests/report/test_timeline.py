"""Timelines as pictures and as text."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from danlu.parallel.schedules import schedule
from danlu.planning.action_times import ActionTimes
from danlu.planning.pipeline_simulation import simulate
from danlu.report.timeline_svg import LEFT, MAX_WIDTH, timeline_svg
from danlu.report.timeline_text import text_timeline

SVG = "{http://www.w3.org/2000/svg}"


def boxes(picture: str) -> list[tuple[str, ElementTree.Element]]:
    """(tooltip, rectangle) of every action that is drawn."""
    rectangles = ElementTree.fromstring(picture).iter(f"{SVG}rect")
    return [(title.text or "", rect) for rect in rectangles if (title := rect.find(f"{SVG}title")) is not None]


def test_every_action_has_a_box_where_its_time_is() -> None:
    events = simulate(schedule("zbv", 2, 2, 4), ActionTimes(send=0.25, update=0.5))
    drawn = boxes(timeline_svg(events, "title", "subtitle", "s"))
    lasting = [event for event in events if event.end_s > event.start_s]
    assert len(drawn) == len(lasting) > 50
    end = max(event.end_s for event in events)
    (first,) = [rect for title, rect in drawn if title.startswith("forward of micro-batch 2, chunk 0:")]
    (event,) = [e for e in events if (e.kind, e.chunk, e.micro) == ("forward", 0, 2)]
    width = float(ElementTree.fromstring(timeline_svg(events, "", "", "s")).get("width") or 0)
    scale = (width - LEFT - 16) / end
    assert float(first.get("x") or 0) == pytest.approx(LEFT + event.start_s * scale, abs=0.1)
    assert float(first.get("width") or 0) == pytest.approx(scale, abs=0.1)
    rows = {rect.get("y") for title, rect in drawn if title.startswith("forward")}
    assert len(rows) == 2
    assert "later" in next(
        rect.get("class") or "" for title, rect in drawn if "forward of micro-batch 0, chunk 3" in title
    )


def test_a_picture_needs_nothing_from_outside_and_has_both_colour_schemes() -> None:
    picture = timeline_svg(simulate(schedule("gpipe", 2, 1, 2)), "<&>", '"', "units")
    assert "&lt;&amp;&gt;" in picture
    assert re.findall(r"https?://[^\"]*", picture) == ["http://www.w3.org/2000/svg"]
    assert "prefers-color-scheme: dark" in picture and "<script" not in picture
    light, dark = picture.split("prefers-color-scheme")
    for name in ("page", "ink", "forward", "backward", "input", "weight", "update", "idle", "communication"):
        assert f".{name} {{" in light and f".{name} {{" in dark


def test_the_legend_has_what_is_drawn() -> None:
    picture = timeline_svg(simulate(schedule("gpipe", 2, 1, 2)), "", "", "units")
    assert ">forward<" in picture and ">backward<" in picture and ">idle<" in picture
    assert ">input gradient<" not in picture and ">communication<" not in picture and ">update<" not in picture


def test_long_timelines_are_wide_but_not_without_end() -> None:
    widths = [
        float(ElementTree.fromstring(timeline_svg(simulate(schedule("1f1b", 2, 1, m)), "", "", "s")).get("width") or 0)
        for m in (2, 50, 400)
    ]
    assert widths == sorted(widths) and widths[0] == 960 and widths[-1] == MAX_WIDTH


def test_text_has_a_column_for_each_unit() -> None:
    lines = text_timeline(simulate(schedule("1f1b", 2, 1, 3)), 1.0, 80)
    assert lines is not None
    assert lines[:4] == [
        "rank 0  FF..BBFBB.BB",
        "        01  00211 22",
        "rank 1  .FBBFBBFBB..",
        "         000111222",
    ]
    assert len(lines) == 5
    (_, _, _, _, _, later) = text_timeline(simulate(schedule("zbv", 2, 2, 4)), 1.0, 80) or []
    assert later.startswith("small letters")


def test_what_is_too_wide_or_not_in_units_is_not_drawn_as_text() -> None:
    events = simulate(schedule("1f1b", 2, 1, 3))
    assert text_timeline(events, 1.0, 18) is None
    assert text_timeline([replace(events[0], end_s=1.25), *events[1:]], 1.0, 80) is None
    assert text_timeline([], 1.0, 80) is None
