"""Signals that ask a run to save and stop, and which of them ask twice."""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Ctrl-C; `kill` and schedulers; a terminal that is closed; the warning before a time limit (SLURM's
`--signal=USR1@120`, submitit's SIGUSR2)."""

INSISTENT_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
"""Those of which a second one stops a run at once. A closing terminal sends SIGHUP from the system and from the shell,
and a warning may be repeated: neither asks for more than the first did, and SIGTERM after a warning lets the run go on
saving."""


def heeded_signals() -> list[signal.Signals]:
    """The signals that a run handles: all but those that whoever started this process has it ignore (`nohup`).

    SIGINT is handled in any case: a shell without job control has the commands that end in `&` ignore it.
    """
    return [n for n in STOP_SIGNALS if n == signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN]
