"""A plan as lines of text: memory by part, seconds by operation, the whole training, and what was assumed.

Plans are read as JSON, from `danlu plan` or from the plan.json of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_GIB, _MIB = 2**30, 2**20
_SMALL = 0.005
"""Kinds of operations that take a smaller share of a step are summed up."""
PARTS = {
    "weights": "weights",
    "adapter": "adapter",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "average": "average of weights",
    "activations": "activations",
    "logits": "logits and loss",
    "packed": "a packed matrix made dense",
    "gathered": "gathered parameters",
    "stash": "stashed weights",
}
"""Parts of the memory by the names of `MemoryParts` -> their names in a text."""
_MOST_CHANGES = 5
_ELLIPSIS = 12
"""Stages of a pipeline that are shown."""


def plan_lines(values: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yields the lines of a plan; name: of the recipe or the run."""
    layout, batch, machine = values["layout"], values["batch"], values["machine"]
    count = layout["processes"]
    processes = "one process" if count == 1 else f"{count:,} processes ({layout['degrees']})"
    yield f"{name} on {_machine(machine)}: {processes}"
    micro_batches = "1 micro-batch" if batch["micro_batches"] == 1 else f"{batch['micro_batches']:,} micro-batches"
    each = " in each data rank" if count > 1 else ""
    yield (
        f"a step: {micro_batches} of {batch['micro']:,} x {batch['max_length']:,} tokens{each}, {batch['tokens']:,} "
        "tokens in all"
    )
    if values["rollout"] is None:
        yield f"documents: {_documents(values['documents'])}"
    yield from _verdict(values)
    yield ""
    yield from _memory_lines(values)
    yield ""
    yield from _seconds_lines(values) if values["rollout"] is None else _rollout_lines(values)
    if values["assumptions"]:
        yield ""
        yield "== assumed"
        yield from (f"  {sentence}" for sentence in values["assumptions"])


def _verdict(values: Mapping[str, Any]) -> Iterator[str]:
    """Whether the step fits into the memory that the process may take, where that is known."""
    memory, machine = values["memory"], values["machine"]
    if values["fits"] is None:
        return
    taken = memory["allocated"] if memory["reserved"] is None else memory["reserved"]
    available = machine.get("available_bytes", machine["memory_bytes"])
    free = " that are free now" if available < machine["memory_bytes"] else ""
    unit, divisor = ("GiB", _GIB) if taken >= _GIB else ("MiB", _MIB)
    verdict = "it fits" if values["fits"] else "it does NOT fit"
    yield f"{verdict}: {taken / divisor:,.2f} {unit} of {available / _GIB:,.1f} GiB{free} ({taken / available:.1%})"


def change_lines(changes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the lines of single changes with which a step takes less memory, as `lighter_plans` gives them."""
    fitting = [change for change in changes if change["fits"]]
    if fitting:
        yield "== each of these changes alone makes it fit"
    elif changes:
        yield "== no single change makes it fit; these save most"
    else:
        yield "== nothing that was tried saves memory: take more or larger cards (--on)"
        return
    rows = []
    for change in fitting or changes[:_MOST_CHANGES]:
        by = "" if change["seconds"] is None else f"{change['seconds']:.3g} s a step"
        rows.append((change["change"], f"{change['taken'] / _GIB:.2f} GiB", by, change["note"]))
    yield from (f"  {line}" for line in aligned_rows(rows, ends_with_text=True))


def neighbour_lines(layouts: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of neighbouring layouts, as `neighbouring_layouts` gives them, with their differences to the
    plan's own; values: the plan."""
    own, seconds = values["memory"], values["seconds"]
    taken = own["allocated"] if own["reserved"] is None else own["reserved"]
    rows = [["", "GiB", "", "seconds", "", "exposed", "bubble"]]
    figures = [] if seconds is None else [f"{seconds[key]:.4g}" for key in ("total", "exposed", "bubble")]
    total, exposed, bubble = figures or ("", "", "")
    rows.append(["this layout", f"{taken / _GIB:.2f}", "", total, "", exposed, bubble])
    for layout in layouts:
        more = f"{(layout['taken'] - taken) / _GIB:+.2f}"
        row = [layout["change"], f"{layout['taken'] / _GIB:.2f}", more]
        if layout["seconds"] is None or seconds is None:
            row += [""] * 4
        else:
            row += [f"{layout['seconds']:.4g}", f"{layout['seconds'] / seconds['total'] - 1:+.1%}"]
            row += [f"{layout[key]:.4g}" for key in ("exposed", "bubble")]
        rows.append(row)
    yield "== neighbouring layouts, fastest first"
    yield from (f"  {line}" for line in aligned_rows(rows))


def layout_lines(layouts: Sequence[Mapping[str, Any]], name: str) -> Iterator[str]:
    """Yields the lines of the fastest layouts, as `run.plan_search.fastest_layouts` gives them."""
    machine, count = layouts[0]["plan"]["machine"], layouts[0]["plan"]["layout"]["processes"]
    yield f"{name} on {_machine(machine)}: the fastest layouts of {count:,} processes that fit"
    rows = [["", "seconds", "tokens/s", "MFU", "GiB", "settings"]]
    for number, layout in enumerate(layouts, 1):
        plan = layout["plan"]
        mfu = "" if plan["mfu"] is None else f"{plan['mfu']:.1%}"
        row = [str(number), f"{plan['seconds']['total']:.4g}", f"{plan['tokens_per_second']:,.0f}", mfu]
        rows.append([*row, f"{plan['memory']['allocated'] / _GIB:.2f}", " ".join(layout["settings"])])
    yield from (f"  {line}" for line in aligned_rows(rows, ends_with_text=True))


def limit_lines(limits: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yields the lines of the largest batch, length and model that fit, as `run.plan_limits.limits` gives them."""
    count = limits["processes"]
    each = "one process" if count == 1 else f"{count:,} processes"
    yield f"{name} on {limits['card']} with {limits['memory_bytes'] / _GIB:.2f} GiB: {each}"
    micro, length, model = limits["micro"], limits["max_length"], limits["model"]
    rows = [
        ["largest batch.micro", *_limit(micro, "1 sequence does not fit"), f"of {limits['per_step']:,} in a step"],
        [
            "largest data.max_length",
            *_limit(length, "64 tokens do not fit"),
            f"of {limits['context_length']:,} positions",
        ],
        ["largest model", *_limit(model, "the smallest does not fit"), "of published sizes, with batch.micro=1"],
    ]
    yield from (f"  {line}" for line in aligned_rows(rows, ends_with_text=True))


def _limit(limit: Mapping[str, Any] | None, none: str) -> tuple[str, str]:
    if limit is None:
        return none, ""
    value = limit["value"]
    return value if isinstance(value, str) else f"{value:,}", f"{limit['taken'] / _GIB:.2f} GiB"


def _machine(machine: Mapping[str, Any]) -> str:
    nodes, each, memory = machine["nodes"], machine["cards_per_node"], machine["memory_bytes"]
    cards = f"{each} x {machine['card']}" if each > 1 or nodes > 1 else machine["card"]
    room = f" ({memory / _GIB:.1f} GiB each)" if memory else ""
    return f"{nodes} nodes of {cards}{room}" if nodes > 1 else f"{cards}{room}"


def _documents(documents: Mapping[str, Any]) -> str:
    if documents["rows"] is None:
        return "full packs, as the token cache has no rows of this recipe (danlu preview fills it)"
    mean = documents["tokens"] / documents["rows"]
    return (
        f"{_counted(documents['rows'], 'row')} of {_counted(documents['tokens'], 'token')} from the "
        f"{documents['source']}, {mean:,.0f} on "
        f"average, at most {documents['longest']:,}"
    )


def _memory_lines(values: Mapping[str, Any]) -> Iterator[str]:
    memory, stages = values["memory"], values["stages"]
    of_stage = f", of pipeline stage {memory['stage']}, which needs most" if stages else ""
    if memory.get("device"):
        of_stage = f", on {memory['device']}{', which needs most' if stages else ''}"
    yield f"== memory of a process at the peak of a step{of_stage}"
    unit, divisor = ("GiB", _GIB) if memory["allocated"] >= _GIB else ("MiB", _MIB)

    def size(count: float) -> str:
        return f"{count / divisor:,.2f} {unit}"

    rows = [(PARTS.get(part, part), size(count)) for part, count in memory["parts"].items() if count]
    rows += [("KV cache of rollouts", size(memory["kv_cache"]))] if memory["kv_cache"] else []
    rows += [("copies of weights in rollouts", size(memory["engine_copies"]))] if memory["engine_copies"] else []
    rows += [("communication buffers", size(memory["communication"]))] if memory["communication"] else []
    rows.append(("allocated", size(memory["allocated"])))
    if memory["reserved"] is not None:
        rows.append(("reserved by the allocator", size(memory["reserved"])))
    yield from (f"  {line}" for line in aligned_rows(rows))
    if len(memory["by_role"]) > 1:
        yield f"  models: {', '.join(f'{role} {size(count)}' for role, count in memory['by_role'].items())}"
    if stages:
        sizes = [f"{each.get('device') or ''} {size(each['allocated'])}".strip() for each in stages[:_ELLIPSIS]]
        shown = ", ".join(sizes)
        kind = "device" if memory.get("device") else "stage"
        yield f"  by {kind}: {shown}{', ...' if len(stages) > _ELLIPSIS else ''}"
    host = {name: count for name, count in memory["host"].items() if count}
    if host:
        yield f"  host memory: {', '.join(f'{name} {size(count)}' for name, count in host.items())}"
    disk = f"  disk: {size(values['checkpoint_bytes'])} each checkpoint"
    if "result_bytes" in values:  # plan.json of an older run has neither
        kept, result = values["checkpoints_kept"], values["result_bytes"]
        disk += f", {kept} are kept; {size(result)} the result"
    yield disk


def _seconds_lines(values: Mapping[str, Any]) -> Iterator[str]:
    seconds, training = values["seconds"], values["training"]
    if seconds is None:
        yield f"== seconds of a step: unknown, as {_unmeasured(values['layout']['processes'])} or name a cluster (--on)"
        yield from (f"  {line}" for line in _training(training))
        return
    total = seconds["total"]
    yield f"== seconds of a step: {total:.4g}"
    kinds = sorted(seconds["compute"].items(), key=lambda entry: -entry[1])
    large = [(kind, of_kind) for kind, of_kind in kinds if of_kind >= _SMALL * total]
    other = sum(of_kind for kind, of_kind in kinds) - sum(of_kind for kind, of_kind in large)
    rows = [
        (kind, f"{of_kind:.4g}", f"{of_kind / total:.1%}")
        for kind, of_kind in [*large, *([("other operations", other)] if other > 0 else [])]
    ]
    if any(seconds["communication"].values()):
        rows.append(("communication, exposed", f"{seconds['exposed']:.4g}", f"{seconds['exposed'] / total:.1%}"))
    if values["layout"]["pipeline"] > 1:
        rows.append(("pipeline bubble", f"{seconds['bubble']:.4g}", f"{seconds['bubble'] / total:.1%}"))
    yield from (f"  {line}" for line in aligned_rows(rows))
    axes = {axis: of_axis for axis, of_axis in seconds["communication"].items() if of_axis}
    if axes:
        listed = ", ".join(f"{axis} {of_axis:.4g}" for axis, of_axis in axes.items())
        yield f"  communication by axis, what computation hides included: {listed}"
    mfu = "" if values["mfu"] is None else f", MFU {values['mfu']:.1%}"
    yield f"  {values['tokens_per_second']:,.0f} tokens/s{mfu}"
    if seconds["extrapolated"]:
        yield "  some sizes lie beyond those that were measured"
    yield from (f"  {line}" for line in _training(training))


def _rollout_lines(values: Mapping[str, Any]) -> Iterator[str]:
    rollout = values["rollout"]
    steps = "the step that trains" if rollout["steps"] == 1 else f"the {rollout['steps']} steps that train"
    yield f"== seconds of a rollout and of {steps} on it: {rollout['total']:.4g}"
    rows = []
    for phase, seconds in rollout["phases"].items():
        share = "" if seconds is None or not rollout["total"] else f"{seconds / rollout['total']:.1%}"
        rows.append((phase, "unknown" if seconds is None else f"{seconds:.4g}", share))
    yield from (f"  {line}" for line in aligned_rows(rows))
    if rollout["slower"] is not None:
        waits = "the trainer waits for answers" if rollout["slower"] == "rollouts" else "answers wait for the trainer"
        yield f"  answers are drawn while the trainer works: {waits}"
    yield from (f"  {line}" for line in _training(values["training"]))


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _unmeasured(processes: int) -> str:
    several = f" --processes {processes}" if processes > 1 else ""
    return f"this machine was not measured. Run danlu bench machine{several},"


def _training(training: Mapping[str, Any]) -> Iterator[str]:
    price = "" if training["price"] is None else f", {training['price']:,.2f} in price"
    if training["steps"] is not None:
        hours = "" if training["hours"] is None else f": {training['hours']:,.2f} hours{price}"
        yield f"{_counted(training['steps'], 'step')}, {training['tokens']:,} tokens{hours}"
    elif (hours := training["hours_per_billion_tokens"]) is not None:
        yield f"{hours:,.2f} hours for a billion tokens"


def aligned_rows(rows: Sequence[Sequence[str]], *, ends_with_text: bool = False) -> Iterator[str]:
    """Yields rows as lines with columns of one width: the first flush left, the others flush right, but for a last one
    of texts."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        if ends_with_text:
            cells[-1] = rest[-1]
        yield "  ".join(cells).rstrip()
