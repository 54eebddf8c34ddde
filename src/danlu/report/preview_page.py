"""A preview as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from danlu import __version__
from danlu.data.preview import Overview, ShownRow, ShownSample
from danlu.recipe.sections import Data, Recipe
from danlu.report import preview_content as content
from danlu.report.html_page import HtmlPage
from danlu.types import Pack

PAGE = HtmlPage("preview")


def page(
    name: str, recipe: Recipe, rows: Sequence[ShownRow], overview: Overview, most: int | None, refusal: str | None
) -> str:
    """The whole page.

    Args:
        name: of the recipe.
        most: tokens shown of a sample; None for all.
        refusal: why a run would not begin; None if it would.
    """
    body = [
        f"<p>{escape(_settings(recipe))}</p>",
        *_refusal(refusal),
        *_rows(rows, recipe.data, most),
        *_packs(overview, recipe),
        *_counts(overview, recipe),
    ]
    return PAGE.written(f"danlu preview of {name}", f"Preview of {name}", body, STYLE)


def _settings(recipe: Recipe) -> str:
    data = recipe.data
    said = [
        f"stage {recipe.stage}",
        f"tokenizer {recipe.model.tokenizer or recipe.model.path}",
        f"max_length {content.count(data.max_length)}",
        f"overlong {data.overlong}",
        f"packing {data.packing.kind}",
    ]
    if recipe.stage == "sft":
        said.append(f"train_on {data.train_on}")
    return f"{' · '.join(said)} · danlu {__version__}"


def _refusal(refusal: str | None) -> Iterator[str]:
    if refusal is not None:
        yield '<section class="refused"><h2>A run refuses this data</h2>'
        yield f"<p>{_lines(refusal)}</p>"
        yield "<p>The counts below are of all rows, as far as they can be read.</p></section>"


def _rows(rows: Sequence[ShownRow], data: Data, most: int | None) -> Iterator[str]:
    if not rows:
        return
    yield "<section><h2>Rows</h2>"
    trained, context = (text.partition(":")[2] for text in (content.TRAINED, content.CONTEXT))
    yield f'<ul class="legend"><li><span class="run trained"><span>trained</span></span>{trained}</li>'
    yield f'<li><span class="run"><span>context</span></span>{context}</li>'
    for reason in content.reasons_in(rows):
        tag = content.name(reason)
        yield f'<li><b class="tag r-{tag}">{tag}</b> {escape(content.ABOUT[reason])}</li>'
    for sign, meaning in content.SIGNS.items():
        yield f"<li><code>{sign}</code> {escape(meaning)}</li>"
    yield f"</ul><p>{content.FIRST_TOKEN[0].upper()}{content.FIRST_TOKEN[1:]}.</p>"
    for row in rows:
        yield f"<article><h3>{escape(content.title(row, data))}</h3>"
        for remark in content.remarks(row, data):
            yield f'<p class="remark">{_lines(remark)}</p>'
        samples = content.samples_of(row, most)
        for number, sample in enumerate(samples, 1):
            yield f"<p>{content.measure_of(sample, number, len(row.samples))}</p>"
            yield f'<div class="tokens">{"".join(_tokens(sample, most))}</div>'
        if more := len(row.samples) - len(samples):
            yield f"<p>… {content.many(more, 'sample')} of this row not shown</p>"
        yield "</article>"
    yield "</section>"


def _tokens(sample: ShownSample, most: int | None) -> Iterator[str]:
    for run in content.runs_of(sample, most):
        if run.omitted:
            yield f'<span class="omitted">… {content.tokens(run.omitted)} not shown</span>'
        reason = content.name(run.reason)
        trained = " trained" if run.weight else ""
        shown = reason if run.weight in (0, 1) else f"{reason} x{run.weight:g}"
        yield f'<span class="run r-{reason}{trained}"><b class="tag">{shown}{" · trained" if trained else ""}</b>'
        for place in range(run.start, run.stop):
            text = sample.texts[place]
            about = f"{reason}, {run.state}, token {place} of the sample, id {sample.tokens[place]}"
            special = ' class="special"' if sample.special[place] else ""
            yield f'<span{special} title="{about}">{escape(content.visible(text))}</span>'
            if "\n" in text:
                yield "<br>"
        yield "</span>"


def _packs(overview: Overview, recipe: Recipe) -> Iterator[str]:
    packed = overview.train.packed
    if packed is None:
        return
    yield f"<section><h2>Packed sequences</h2><p>{escape(content.packs_title(packed, recipe.data))}</p>"
    if packed.first:
        yield "<table><thead><tr><th>sequence</th><th>filled</th><th>documents (tokens, row)</th></tr></thead><tbody>"
        for number, pack in enumerate(packed.first):
            yield f"<tr><th>{number}</th><td>{_bar(pack, recipe.data)}</td><td>{_documents(pack)}</td></tr>"
        yield "</tbody></table>"
    if (said := content.steps(recipe, overview)) is not None:
        yield f"<p>{escape(said)}</p>"
    yield "</section>"


def _bar(pack: Pack, data: Data) -> str:
    share = f"{pack.tokens / data.max_length:.1%}"
    parts = "".join(
        f'<i style="width:{len(sample.tokens) / data.max_length:.2%}" title="{escape(content.document(sample))}"></i>'
        for sample in pack.samples
    )
    return f'<span class="pack" role="img" aria-label="{share} full">{parts}</span> {share}'


def _documents(pack: Pack) -> str:
    named = [escape(content.document(sample)) for sample in pack.samples[: content.MOST_DOCUMENTS]]
    if more := len(pack.samples) - len(named):
        rest = "".join(f"<li>{escape(content.document(sample))}</li>" for sample in pack.samples[-more:])
        return f"{' · '.join(named)}<details><summary>{more} more</summary><ul>{rest}</ul></details>"
    return " · ".join(named)


def _counts(overview: Overview, recipe: Recipe) -> Iterator[str]:
    for warning in content.warnings(overview):
        yield f'<p class="remark">{escape(warning)}</p>'
    for heading, side in content.sides(overview, recipe.data):
        yield f"<section><h2>{escape(heading[0].upper() + heading[1:])}</h2><table><tbody>"
        if overview.eval is not None and side is overview.eval and side.packed is not None:
            yield f"<tr><th>packs</th><td>{escape(content.packs_title(side.packed, recipe.data))}</td></tr>"
        for fact in content.facts(side, recipe.data):
            yield f"<tr><th>{escape(fact.label)}</th><td>{escape(fact.value)}{_below(fact)}</td></tr>"
        yield "</tbody></table></section>"


def _below(fact: content.Fact) -> str:
    examples = "".join(f"<li>{_lines(example)}</li>" for example in fact.examples)
    most = max((share for _, _, share in fact.bars), default=1.0)
    bars = "".join(
        f"<tr><th>{escape(name)}</th><td>{content.count(number)}</td><td>{share:.1%}</td>"
        f'<td><span class="bar" style="width:{12 * share / most:.2f}em"></span></td></tr>'
        for name, number, share in fact.bars
    )
    return (f"<ul>{examples}</ul>" if examples else "") + (
        f'<table class="bars"><tbody>{bars}</tbody></table>' if bars else ""
    )


def _lines(text: str) -> str:
    return "<br>".join(map(escape, text.splitlines()))


_COLOURS = {  # on a light ground, on a dark one; each with a contrast of 4.5 or more
    "template": ("#57606a", "#9198a1"),
    "system": ("#a21caf", "#e879f9"),
    "user": ("#0e7490", "#22d3ee"),
    "assistant": ("#15803d", "#4ade80"),
    "reasoning": ("#a16207", "#facc15"),
    "tool": ("#1d4ed8", "#60a5fa"),
    "end-of-turn": ("#b91c1c", "#f87171"),
    "bos": ("#be185d", "#f472b6"),
    "eos": ("#b91c1c", "#f87171"),
    "text": ("#15803d", "#4ade80"),
    "prompt": ("#0e7490", "#22d3ee"),
    "completion": ("#15803d", "#4ade80"),
}


def _rules(dark: bool) -> str:
    return "\n".join(f".r-{name} {{ --c: {values[dark]} }}" for name, values in _COLOURS.items())


STYLE = f"""
:root {{ --c: #57606a }}
{_rules(dark=False)}
@media (prefers-color-scheme: dark) {{
:root {{ --c: #9198a1 }}
{_rules(dark=True)}
}}
h3 {{ margin: 1.5rem 0 0; font-family: ui-monospace, monospace }}
article > p {{ margin: .3rem 0; color: var(--quiet) }}
p.remark {{ color: var(--ink); border-left: 4px solid var(--quiet); padding-left: .6rem; overflow-wrap: anywhere }}
.refused {{ border: 2px solid var(--wrong); border-radius: 6px; padding: 0 1rem }}
.legend {{ display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; list-style: none; color: var(--quiet) }}
.tokens {{
  font: 14px/2 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  border: 1px solid var(--line); border-radius: 6px; padding: .5rem;
}}
.omitted {{ display: block; color: var(--quiet) }}
.run > span {{ box-shadow: inset -1px 0 0 var(--line); padding: .15em 0; unicode-bidi: isolate }}
.run.trained > span {{
  background: color-mix(in srgb, var(--c) 22%, transparent);
  text-decoration: underline 2px var(--c); text-underline-offset: 3px;
}}
.run > .special {{ font-weight: 700 }}
.tag {{
  font: 700 10px/1 system-ui, sans-serif; color: var(--c); border: 1px solid var(--c); border-radius: 3px;
  padding: 1px 3px; margin: 0 3px; vertical-align: 2px; user-select: none;
}}
th {{ white-space: nowrap }}
td {{ overflow-wrap: anywhere }}
.bars td {{ text-align: right; font-variant-numeric: tabular-nums }}
.bars td:last-child {{ text-align: left }}
.bar {{ display: inline-block; height: .7em; background: var(--one) }}
.pack {{ display: inline-flex; width: 14rem; height: .8em; border: 1px solid var(--line) }}
.pack i {{ background: var(--one) }}
.pack i:nth-child(even) {{ background: var(--other) }}
"""
