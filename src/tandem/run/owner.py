"""Who a run directory belongs to: one launch at a time, and a token that each publication is checked against.

    RUN_DIR/owner/000000007    the owner's note: host, process, since when, and how often it has renewed it

The owner is whoever wrote the note with the largest number, which nobody else can have written. A launch
that takes a run over (`lease.py`) writes the next number, so an owner that was frozen or cut off, and comes
back, finds that its number is no longer the largest before it publishes anything. Imports no torch.
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
from tandem.checkpoint.storage.notes import Notes, notes_at
from tandem.errors import RunTakenError
from tandem.log import printable
from tandem.process import stat_of
from tandem.reading import moment, parsed

NOTE_BYTES = 1024
"""A note is rewritten in place, by one write of this length: no reader sees half of one."""


class Token(NamedTuple):
    """The fencing token of one launch: the number of its note, and a word that is in no other."""

    number: int
    word: str


@dataclass(frozen=True)
class Note:
    """What an owner says of itself.

    `machine` is the machine's own name for itself, where it has one, `space` the namespace that process
    numbers count in. `since` in Unix seconds, for people; `renewed` on the clock of this boot.
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
    def mine(cls, job: str) -> "Note":
        """This process's."""
        pid = os.getpid()
        return cls(
            word=secrets.token_hex(8),
            host=os.uname().nodename,
            machine=_first_line("/etc/machine-id"),
            boot=_first_line("/proc/sys/kernel/random/boot_id"),
            space=os.stat("/proc/self/ns/pid").st_ino,
            process=pid,
            born=_born(pid) or 0,
            job=job[:200],
            since=time.time(),
            renewed=time.monotonic(),
        )

    def render(self) -> bytes:
        return json.dumps(asdict(self)).encode().ljust(NOTE_BYTES - 1) + b"\n"

    @classmethod
    def parse(cls, raw: bytes | None) -> "Note | None":
        """None for what is not one."""
        try:
            found: dict[str, Any] = parsed(raw or b"")
            kinds: dict[str, Any] = {name: field.type for name, field in cls.__dataclass_fields__.items()}
            if found.keys() == kinds.keys() and all(isinstance(found[name], kinds[name]) for name in kinds):
                moment(found["since"])
                return cls(**found)
        except (ValueError, AttributeError):
            pass
        return None

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return printable(f"process {self.process} on {self.host}, started {since}")

    def is_seen_from(self, here: "Note") -> bool:
        """Whether its process can be looked for here: it is gone, or among this machine's."""
        return self._is_of_an_earlier_boot(here) or (self.boot, self.space) == (here.boot, here.space)

    def is_gone(self, here: "Note") -> bool:
        """Whether its process, which is seen from here, has ended."""
        return self._is_of_an_earlier_boot(here) or _born(self.process) != self.born

    def is_above(self, here: "Note") -> bool:
        """Whether this process comes from it."""
        return self.is_seen_from(here) and not self.is_gone(here) and _is_above(self.process)

    def silence(self, here: "Note") -> float:
        """Seconds since it was renewed, as far as they are known here: at least so many."""
        return max(0.0, here.renewed - self.renewed) if self.boot == here.boot else 0.0

    def _is_of_an_earlier_boot(self, here: "Note") -> bool:
        is_same = bool(here.machine) and (self.machine, self.host) == (here.machine, here.host)
        return is_same and self.boot != here.boot


def _first_line(path: str) -> str:
    with suppress(OSError, IndexError):
        return Path(path).read_text(encoding="ascii", errors="replace").splitlines()[0]
    return ""


def _born(pid: int) -> int | None:
    """When a process began, in the kernel's ticks: tells it from a later one of this number. None: gone."""
    fields = stat_of(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def _is_above(pid: int) -> bool:
    """Whether a process is one that this one comes from."""
    above = os.getpid()
    while above > 1:
        if above == pid:
            return True
        fields = stat_of(above)
        above = int(fields[1]) if fields else 0
    return above == pid


def fence(run_dir: PurePath, token: Token | None) -> Callable[[], None]:
    """What raises RunTakenError once the run is no longer this launch's; OSError where nobody can tell."""
    if token is None:
        return lambda: None
    return lambda: check(notes_at(run_dir / layout.OWNER), run_dir, token)


def check(notes: Notes, run_dir: PurePath, token: Token, note: Note | None = None) -> None:
    """As the `fence`. An own note that somebody has removed is written anew, if it is still the largest.

    It is opened, not just listed: NFS shows old listings, and asks the server for a file that is opened.
    """
    found = Note.parse(notes.read(token.number))
    if found is None:
        notes.create(token.number, (note or replace(Note.mine(""), word=token.word)).render())
        found = Note.parse(notes.read(token.number))
    last = max(notes.numbers(), default=token.number)
    if last > token.number or found is None or found.word != token.word:
        owner = Note.parse(notes.read(last))
        raise RunTakenError(
            f"{run_dir} was taken over by {owner or 'another launch'}; this launch writes no more there. "
            "To start again, stop the other launch first or use another --run-dir"
        )
