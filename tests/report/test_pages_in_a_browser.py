"""Pages as a browser lays them out, on a phone and on a wide screen, light and dark; skipped where there is none."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from builders.study_folders import write_run, write_study
from builders.tiny_world import danlu, tiny_world
from matplotlib.image import imread

from danlu.parallel.collective_traffic import Row
from danlu.report import study_page, verification_page
from danlu.report.run_page import page
from danlu.report.run_report import report_of
from danlu.report.study_results import read_study
from danlu.report.verification import Check, Finding, Module, Verification

pytestmark = pytest.mark.slow

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
BROWSER = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
WIDTHS = (390, 1440)
SCHEMES = {"dark": 0, "light": 1}
"""Blink's numbers of preferred colour schemes."""
MEASURE = """
<script>
const box = element => element.getBoundingClientRect();
const lines = cell => {
  const range = document.createRange(); range.selectNodeContents(cell);
  return new Set([...range.getClientRects()].map(each => Math.round(each.bottom))).size;
};
const texts = [...document.querySelectorAll("td")].filter(cell => !cell.childElementCount);
const cells = texts.filter(cell => /^[-\\d.,e±%/ ]+$/.test(cell.textContent.trim()));
const pre = document.createElement("pre");
const figures = [...document.querySelectorAll("figure")];
const folded = [...document.querySelectorAll("details")];
const measured = {
  width: document.documentElement.clientWidth,
  overflow: document.documentElement.scrollWidth,
  numbers: cells.length,
  stacked: cells.filter(cell => lines(cell) > 1).map(cell => cell.textContent),
  charts: figures.filter(each => box(each).width > 0).length,
  narrowest: Math.min(9999, ...[...document.querySelectorAll("svg")].map(each => box(each).width).filter(each => each)),
  untitled: figures.filter(each => !each.querySelector("figcaption").textContent).length,
  steps: [...document.querySelectorAll("svg text:not([dy])")].map(each => each.textContent),
  folded: folded.map(each => each.querySelectorAll("figure").length),
};
pre.id = "measured"; pre.textContent = JSON.stringify(measured); document.body.append(pre);
</script>
"""


def run_page(folder: Path) -> str:
    """The report of a run with numbers of all sizes, long names, and curves that never change."""
    folder.mkdir()
    recipe = {"stage": "rl", "model": "gone", "data": {"train": "gone.jsonl"}, "output": "run"}
    rewards = [{"kind": "length", "most": 5}]
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "rewards": rewards}))
    (folder / "environment.json").write_text("{}")
    lines = [
        {"step": step, "loss": -1e-7 * step, "reward": step / 7, "kl/k3": 1.2345e-05 * step, "no_signal": 0.125,
         "tokens_per_second": 123456.789 + step, "grad_norm": 1 / step, "loss/a_long_name_of_a_file.jsonl": 1 / step}
        for step in range(1, 1000)
    ]  # fmt: skip
    event = {"step": 3, "event": "spike", "reason": "grad" * 60}
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, event]))
    return page(report_of(folder, "stopped"))


def study(folder: Path) -> str:
    """The page of a study of two keys with long values."""
    names = {
        f"rank-{rank}": {"adapter.rank": str(rank), "data.train": f"rows-{rank}-of-a-long-name.jsonl"}
        for rank in (4, 64)
    }
    write_study(folder, names)
    for number, name in enumerate(names):
        losses = {step: 4 / step + number for step in range(1, 30)}
        write_run(folder / name, losses, {10: 2.0, 20: 1.5 + number}, trained_parameters=123456789, seconds=6000.0)
    return study_page.page(read_study(folder), folder.name)


def preview(folder: Path) -> str:
    """The preview of the rows of a small recipe."""
    page = folder.with_suffix(".html")
    assert danlu("preview", tiny_world().recipe(folder), "--html", page) == 0
    return page.read_text(encoding="utf-8")


def verification(folder: Path) -> str:
    """The page of a layout that computes something else, with long names, and with the traffic of a step."""
    wrong, right = Check("gradients", 0.5, 1.2e-6, "layers.31.mlp.experts.gate_up_proj.weight, step 3"), 3.4e-7
    names = ["embed_tokens", *(f"layers.{number}.attention" for number in range(32)), "lm_head"]
    modules = [
        Module(name, 123456789, Check("gradients", right, 1.2e-6), Check("weights", right, 1e-6)) for name in names
    ]
    modules[-1] = replace(modules[-1], gradients=wrong)
    found = Verification(
        recipe=f"{folder.name}-of-a-long-name.yaml",
        layout="zero3, data 2, tensor 2, sequence, pipeline 2, experts 2",
        processes=16,
        about=(
            "model: llama with 1.2B parameters, shrunk to 24,512",
            "precision: fp32",
            "changes: " + "data.path, " * 20,
        ),
        checks=(Check("loss", right, 1e-6, "loss of step 1"), wrong),
        modules=tuple(modules),
        finding=Finding(
            "gradients of step 1", "lm_head.weight", "x2 (data parallel)", "a sum that is made twice, " * 4
        ),
        seconds=123.4,
    )
    rows = [
        Row("shard", kind, "parameters and gradients", 1234, Fraction(10**9), Fraction(2 * 10**9), 0) for kind in KINDS
    ]
    return verification_page.page(found, rows)


PAGES: dict[str, Callable[[Path], str]] = {
    "report": run_page,
    "study": study,
    "preview": preview,
    "verification": verification,
}
KINDS = ("all-gather", "reduce-scatter")
CHARTS = ("report", "study")


def browse(*arguments: str) -> str:
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def measured(text: str, folder: Path, width: int) -> dict[str, Any]:
    """The measures of a page by a script, which the page itself forbids."""
    file = folder / "measured.html"
    file.write_text(
        re.sub(r"<meta http-equiv[^>]*>", "", text).replace("</body>", f"{MEASURE}</body>"), encoding="utf-8"
    )
    dumped = browse(f"--window-size={width},900", "--dump-dom", file.as_uri())
    values: dict[str, Any] = json.loads(html.unescape(dumped.split('<pre id="measured">')[1].split("</pre>")[0]))
    return values


@pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here: apt-get install chromium-headless-shell, or CHROMIUM=PATH"
)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_pages_fit_their_screen(name: str, width: int, tmp_path: Path) -> None:
    text = PAGES[name](tmp_path / name)
    found = measured(text, tmp_path, width)
    assert found["width"] == width and found["overflow"] <= width
    assert found["numbers"] > 10 and found["stacked"] == []
    assert found["untitled"] == 0 and found["narrowest"] >= 300
    assert all(re.fullmatch(r"(step )?[\d,]+", label) for label in found["steps"])
    if name in CHARTS:
        assert found["charts"] >= 2 and found["steps"] and found["folded"] == ([1] if name == "report" else [])
    if width == WIDTHS[0] and name in CHARTS:  # control
        broken = text.replace(".scroll th, .scroll td { white-space: nowrap }", "td { overflow-wrap: anywhere }")
        broken = broken.replace(".scroll { overflow-x: auto }", "")
        found = measured(broken, tmp_path, width)
        assert found["stacked"] or found["overflow"] > width
    for scheme, number in SCHEMES.items():
        picture = tmp_path / f"{name}-{width}-{scheme}.png"
        file = tmp_path / "page.html"
        file.write_text(text, encoding="utf-8")
        size = [f"--window-size={width},1600", f"--blink-settings=preferredColorScheme={number}"]
        browse(*size, f"--screenshot={picture}", file.as_uri())
        pixels = (255 * imread(picture)[..., :3].mean(-1)).astype(np.uint8)
        assert pixels.shape == (1600, width)
        ground = np.bincount(pixels.ravel()).argmax()
        assert (ground < 60) if scheme == "dark" else (ground > 200)
        assert (np.abs(pixels.astype(int) - int(ground)) > 60).mean() > 0.005  # something is drawn on it
