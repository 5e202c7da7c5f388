"""Ownership of a run directory: one launch at a time, with a fencing token that every publication checks.

    RUN_DIR/owner/000000007    the owner's record: host, process, start time, and number of renewals

The owner is the launch that wrote the record with the largest number, which no other launch can have written.
A launch that takes over a run (`lease.py`) writes the next number. An owner that was frozen or disconnected
therefore finds, before it publishes anything, that its number is no longer the largest. Does not import
torch.
"""

import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from tandem import layout
from tandem.bounded_reader import moment, parsed
from tandem.checkpoint.storage.notes import Notes, notes_at
from tandem.errors import RunTakenError
from tandem.log import printable
from tandem.process import stat_of

NOTE_BYTES = 1024
"""Fixed length of a record. A single write rewrites it in place, so no reader sees half a record."""


class Token(NamedTuple):
    """The fencing token of one launch: the number of its record, and a unique random word."""

    number: int
    word: str


@dataclass(frozen=True)
class LeaseRecord:
    """An owner's lease record: which process owns the run, and when it renewed the lease.

    `machine` is the machine ID, if there is one, and `space` the PID namespace of `process`. `born` is the
    start time of the process in clock ticks. `since` is the start of the lease in Unix seconds (for
    messages). `renewed` is on the monotonic clock of this boot.
    """

    word: str
    host: str
    machine: str
    boot: str
    space: int
    process: int
    born: int
    job: str
    since: float
    renewed: float
    renewals: int = 0
    is_over: bool = False

    @classmethod
    def for_this_process(cls, job: str) -> "LeaseRecord":
        """Return a record of this process."""
        pid = os.getpid()
        return cls(
            word=secrets.token_hex(8),
            host=os.uname().nodename,
            machine=_first_line("/etc/machine-id"),
            boot=_first_line("/proc/sys/kernel/random/boot_id"),
            space=os.stat("/proc/self/ns/pid").st_ino,
            process=pid,
            born=_born(pid) or 0,
            # The record has a fixed length (NOTE_BYTES).
            job=job[:200],
            since=time.time(),
            renewed=time.monotonic(),
        )

    def render(self) -> bytes:
        return json.dumps(asdict(self)).encode().ljust(NOTE_BYTES - 1) + b"\n"

    @classmethod
    def parse(cls, raw: bytes | None) -> "LeaseRecord | None":
        """Return the record; None if the bytes are not a valid one."""
        try:
            found: dict[str, Any] = parsed(raw or b"")
            kinds: dict[str, Any] = {name: field.type for name, field in cls.__dataclass_fields__.items()}
            if found.keys() == kinds.keys() and all(isinstance(found[name], kinds[name]) for name in kinds):
                # `__str__` formats this number as a date, which fails for numbers that no date can represent.
                moment(found["since"])
                return cls(**found)
        except (ValueError, AttributeError):
            pass
        return None

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return printable(f"process {self.process} on {self.host}, started {since}")

    def is_seen_from(self, here: "LeaseRecord") -> bool:
        """Return True if this process can tell whether the owner runs.

        It can if both have the same boot and PID namespace, or if the machine was rebooted since.
        """
        return self._is_of_an_earlier_boot(here) or (self.boot, self.space) == (here.boot, here.space)

    def is_gone(self, here: "LeaseRecord") -> bool:
        """Return True if the owner's process, which is visible from here, has ended."""
        return self._is_of_an_earlier_boot(here) or _born(self.process) != self.born

    def is_above(self, here: "LeaseRecord") -> bool:
        """Return True if the owner is an ancestor of this process, or this process itself."""
        return self.is_seen_from(here) and not self.is_gone(here) and _is_above(self.process)

    def silence(self, here: "LeaseRecord") -> float:
        """Return the seconds since the last renewal, or 0 if the clocks cannot be compared (another boot)."""
        return max(0.0, here.renewed - self.renewed) if self.boot == here.boot else 0.0

    def _is_of_an_earlier_boot(self, here: "LeaseRecord") -> bool:
        # Containers of one image, and cloned machines, may share a machine ID. The host name must match as
        # well.
        is_same = bool(here.machine) and (self.machine, self.host) == (here.machine, here.host)
        return is_same and self.boot != here.boot


def _first_line(path: str) -> str:
    with suppress(OSError, IndexError):
        return Path(path).read_text(encoding="ascii", errors="replace").splitlines()[0]
    return ""


def _born(pid: int) -> int | None:
    """Return when a process started, in clock ticks, which identifies it if its PID is reused. None: gone."""
    fields = stat_of(pid)
    # A zombie still has its entry in /proc, but it writes nothing any more.
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def _is_above(pid: int) -> bool:
    """Return True if a process is this process or one of its ancestors."""
    above = os.getpid()
    while above > 1:
        if above == pid:
            return True
        fields = stat_of(above)
        above = int(fields[1]) if fields else 0
    # Process 1 has no parent to follow, and in a container it may be the agent.
    return above == pid


def fence(run_dir: PurePath, token: Token | None) -> Callable[[], None]:
    """Return a check that raises RunTakenError if another launch owns the run.

    The check raises OSError if the storage does not answer.
    """
    if token is None:
        return lambda: None
    return lambda: check(notes_at(run_dir / layout.OWNER), run_dir, token)


def check(notes: Notes, run_dir: PurePath, token: Token, note: LeaseRecord | None = None) -> None:
    """Check like `fence`. Write our record again if it was deleted and no larger number exists.

    The record is opened, not only listed: NFS may return an outdated listing, but asks the server about a
    file that is opened.
    """
    found = LeaseRecord.parse(notes.read(token.number))
    if found is None:
        # A rank has the token but not the record. Owners are compared by the word, so its own record will do.
        notes.create(
            token.number, (note or replace(LeaseRecord.for_this_process(""), word=token.word)).render()
        )
        found = LeaseRecord.parse(notes.read(token.number))
    last = max(notes.numbers(), default=token.number)
    if last > token.number or found is None or found.word != token.word:
        owner = LeaseRecord.parse(notes.read(last))
        raise RunTakenError(
            f"{run_dir} was taken over by {owner or 'another launch'}; this launch writes no more there. "
            "To start again, stop the other launch first or use another --run-dir"
        )
