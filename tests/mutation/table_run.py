"""Mutations of recipes, runs, checkpoints and recorders."""

from __future__ import annotations

from mutation.table import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    # -- what is printed, and signals that ask to stop
    Mutation(
        "terminal.py",
        "        setattr(sys, name, kept)",
        "        pass",
        "test_terminal.py test_signals.py",
        only="full_disk or outlives",
    ),
    Mutation(
        "terminal.py",
        "        except (OSError, ValueError):  # ValueError",
        "        except ValueError:  # ValueError",
        "test_terminal.py",
        only="full_disk",
    ),
    Mutation(
        "terminal.py",
        "            while (written := super().write(data)) is None:",
        "            while (written := super().write(data) or 0) is None:",
        "test_terminal.py",
        only="for_the_moment",
    ),
    Mutation(
        "terminal.py",
        '    write_to_descriptor(2, f"\\n{text}\\n")',
        '    os.write(2, f"\\n{text}\\n".encode())',
        "train/test_signals.py",
        only="nobody_reads",
    ),
    Mutation(
        "cli/main.py",
        '    drop_failed_writes("stderr", *(["stdout"] if given[0] in WORKING_VERBS else []))',
        "    pass",
        "test_signals.py",
        only="outlives",
    ),
    Mutation(
        "worker_process.py",
        '    drop_failed_writes("stdout", "stderr")',
        "    pass",
        "data/test_worker_pool.py",
        only="closed_terminal",
    ),
    Mutation(
        "worker_process.py",
        "            signal.signal(number, _do_nothing)",
        "            pass",
        "data/test_worker_pool.py",
        only="closed_terminal",
    ),
    Mutation(
        "stop_signals.py",
        "signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)",
        "signal.SIGHUP)",
        "train/test_signals.py",
        only="never_insist",
    ),
    Mutation(
        "stop_signals.py",
        " or signal.getsignal(n) is not signal.SIG_IGN]",
        " or True]",
        "train/test_signals.py",
        only="nohup",
    ),
    Mutation(
        "train/signals.py",
        "        again = can_insist and self._insisted_at is not None",
        "        again = not is_first",
        "train/test_signals.py",
        only="never_insist",
    ),
    Mutation(
        "cli/launcher.py",
        "        if self.stopping is not None and number not in INSISTENT_SIGNALS | {signal.SIGQUIT}:",
        "        if False:",
        "cli/test_launcher.py",
        only="handed_on_once",
    ),
    Mutation(
        "study/runner.py",
        "        if self.stopping() and number not in INSISTENT_SIGNALS:",
        "        if False:",
        "study/test_runner.py",
        only="forwarded",
    ),
)
