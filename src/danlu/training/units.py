"""Formats bytes, counts, seconds and lists of names for messages and progress lines."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN_NAMES = 3


def format_bytes(count: float) -> str:
    """`1234567` -> "1.18 MiB": binary units, three significant digits."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        # 1000, not 1024: "1001 KiB" has a digit more than its neighbours.
        if abs(size) < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{_three_digits(size)} {unit}"
        size /= 1024
    return f"{_three_digits(size)} TiB"


def format_count(count: int) -> str:
    """`61706` -> "61,706"; from a million on `7300000` -> "7.3M"."""
    return f"{count:,}" if count < 10**6 else f"{count / 1e6:,.1f}M"


def parameters_and_trained(parameters: int, trained: int) -> str:
    """Formats counts of parameters: `44,192 parameters, 5,760 of them trained (13.03%)`."""
    if trained == parameters:
        return f"{format_count(parameters)} parameters, all trained"
    share = f"{format_count(trained)} of them trained ({trained / parameters:.2%})"
    return f"{format_count(parameters)} parameters, {share}"


def format_duration(seconds: float) -> str:
    """`3725.4` -> "1:02:05"; a day and more -> "2d 03:04:05"."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d {hour:02d}:{minute:02d}:{second:02d}" if days else f"{hour}:{minute:02d}:{second:02d}"


def first_few(names: Sequence[str], rest: str = "more") -> str:
    """`a, b, c and 4 more`: the first few of the names, and how many there are of the `rest`."""
    hidden = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {hidden} {rest}" if hidden > 0 else "")


def _three_digits(size: float) -> str:
    return f"{size:.2f}" if abs(size) < 9.995 else f"{size:.1f}" if abs(size) < 99.95 else f"{size:.0f}"
