"""The session of a rank: the processes that it has started, and who of them hears a stop signal."""

import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tandem.process import Process, living, send
from tandem.signals import SCHEDULERS_SIGNALS

LOADER = "pt_data_worker"
"""What torch calls the processes of a DataLoader: their rank needs batches until it has stopped."""


def ask(leader: int, number: int) -> list[int]:
    """Send a stop signal to a rank and what it has started; the processes that have a handler for it.

    Every process of the rank's session gets it, but for loader processes, and for helpers without a handler
    below a process with one: they serve until that has stopped. Who has no handler for SIGUSR1 or SIGUSR2
    gets SIGTERM: it would end without having saved.
    """
    session = {pid: each for pid, each in living().items() if each.session == leader}
    heard, covered = list[int](), dict[int, bool]()
    if leader not in session:  # it has just been forked
        send(number, [leader])
    for each in _parents_first(session, leader):
        sent = _instead(each.pid, number)
        hears, is_covered = has_handler(each.pid, sent), covered.get(each.parent, False)
        covered[each.pid] = hears or is_covered
        if each.name != LOADER and (hears or not is_covered):
            send(sent, [each])
            heard += [each.pid] if hears else []
    return heard


def _instead(pid: int, number: int) -> int:
    """What a process gets in place of a signal that it does not know."""
    knows = number not in SCHEDULERS_SIGNALS or has_handler(pid, number)
    return number if knows else signal.SIGTERM


def _parents_first(session: Mapping[int, Process], leader: int) -> list[Process]:
    """With the leader, and with those whose parent is no more."""
    found = [each for each in session.values() if each.pid == leader or each.parent not in session]
    for above in found:  # which grows
        found += [each for each in session.values() if each.parent == above.pid and each.pid != leader]
    return found


def has_handler(pid: int, number: int) -> bool:
    """Whether a process has installed a handler for a signal, in whatever language."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
