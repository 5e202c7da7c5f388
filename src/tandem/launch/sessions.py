"""Send stop signals to a rank's session, that is, to the rank and the processes that it has started."""

import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tandem.process import Process, living, send
from tandem.signals import SCHEDULERS_SIGNALS

LOADER = "pt_data_worker"
"""torch's name for the processes of a DataLoader. Their rank needs batches until it has stopped."""


def signal_session(leader: int, number: int) -> list[int]:
    """Send a stop signal to a rank and what it has started; return the processes that have a handler for it.

    Every process of the rank's session gets it, except DataLoader processes, and helpers without a handler
    below a process with one: they have to serve until that has stopped. A process without a handler for
    SIGUSR1 or SIGUSR2 gets SIGTERM instead, because their default action would end it without a save.
    """
    session = {pid: each for pid, each in living().items() if each.session == leader}
    heard = list[int]()
    covered = dict[int, bool]()
    if leader not in session:  # it has just been forked and not yet called setsid
        send(number, [leader])
    for each in _parents_first(session, leader):
        sent = _instead(each.pid, number)
        hears = has_handler(each.pid, sent)
        is_covered = covered.get(each.parent, False)
        covered[each.pid] = hears or is_covered
        if each.name != LOADER and (hears or not is_covered):
            send(sent, [each])
            heard += [each.pid] if hears else []
    return heard


def _instead(pid: int, number: int) -> int:
    """Return the signal for a process: SIGTERM if it has no handler for a scheduler's signal."""
    knows = number not in SCHEDULERS_SIGNALS or has_handler(pid, number)
    return number if knows else signal.SIGTERM


def _parents_first(session: Mapping[int, Process], leader: int) -> list[Process]:
    """Return the processes of a session, parents before children.

    Includes the leader and those whose parent is gone.
    """
    found = [each for each in session.values() if each.pid == leader or each.parent not in session]
    for above in found:  # the list grows while it is iterated over
        found += [each for each in session.values() if each.parent == above.pid and each.pid != leader]
    return found


def has_handler(pid: int, number: int) -> bool:
    """Return whether a process has installed a handler for a signal, in any language (SigCgt of proc(5))."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
