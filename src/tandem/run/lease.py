"""Lease on a run directory: acquire it, renew it, and take over one whose owner has exited.

On the owner's machine, its process shows whether it is alive. Elsewhere, a lease is alive if its record
changes while another launch watches it, so the clocks of two machines are never compared. Does not import
torch.
"""

import hashlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from tandem import layout
from tandem.bounded_reader import moment, parsed
from tandem.checkpoint.storage.lease_records import LeaseRecords, lease_records_at
from tandem.errors import ConfigError, RunTakenError, StoppedError
from tandem.log import printable
from tandem.platforms.detection import Placement
from tandem.platforms.environment import LOOPBACK
from tandem.process import boot_id, stat_of
from tandem.timeouts import OWNER_EXPIRY_SECONDS, OWNER_LOOK_SECONDS, OWNER_RENEW_SECONDS

log = logging.getLogger("tandem.run")

# Ownership of a run directory: one launch at a time, with a fencing token that every publication checks.
#
#     RUN_DIR/owner/000000007    the owner's record: host, process, start time, and number of renewals
#
# The owner is the launch that wrote the record with the largest number, which no other launch can have
# written. A launch that takes over a run (`lease.py`) writes the next number. An owner that was frozen or
# disconnected therefore finds, before it publishes anything, that its number is no longer the largest. Does
# not import torch.

NOTE_BYTES = 1024
"""Fixed length of a record. A single write replaces it in place, so no reader sees half a record."""


class Token(NamedTuple):
    """The fencing token of one launch: the number of its record, and a unique random word."""

    number: int
    word: str


@dataclass(frozen=True)
class LeaseRecord:
    """An owner's lease record: which process owns the run, and when it renewed the lease.

    `machine` is the machine ID, if there is one, and `space` the PID namespace of `process`. `born` is the
    start time of the process in clock ticks. `since` is the start of the lease in Unix seconds (for
    messages). `renewed` is on the monotonic clock of this boot. `place` is a hash of the run directory's
    path, because a copy of a run contains the lease of the original.
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
    place: str = ""

    @classmethod
    def for_this_process(cls, job: str, run_dir: PurePath | None = None) -> "LeaseRecord":
        """Return a record of this process."""
        pid = os.getpid()
        return cls(
            word=secrets.token_hex(8),
            host=os.uname().nodename,
            machine=_first_line("/etc/machine-id"),
            boot=boot_id(),
            space=os.stat("/proc/self/ns/pid").st_ino,
            process=pid,
            born=_born(pid) or 0,
            # The record has a fixed length (NOTE_BYTES).
            job=job[:200],
            since=time.time(),
            renewed=time.monotonic(),
            place="" if run_dir is None else _hash_of_path(run_dir),
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

    def may_be_copied(self, here: "LeaseRecord") -> bool:
        """Return True if the record was written under another path: a copy, or the same directory."""
        is_other_path = bool(self.place and here.place) and self.place != here.place
        return is_other_path and self.is_seen_from(here)

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


def _hash_of_path(run_dir: PurePath) -> str:
    path = os.path.realpath(run_dir) if isinstance(run_dir, Path) else str(run_dir)
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


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
    return lambda: check(lease_records_at(run_dir / layout.OWNER), run_dir, token)


def check(notes: LeaseRecords, run_dir: PurePath, token: Token, note: LeaseRecord | None = None) -> None:
    """Check like `fence`. Write our record again if it was deleted and no larger number exists.

    The record is opened, not only listed: NFS may return an outdated listing, but asks the server about a
    file that is opened.
    """
    found = LeaseRecord.parse(notes.read(token.number))
    if found is None:
        # A rank has the token but not the record. Owners are compared by the word, so any record of its own
        # will do.
        own = note or replace(LeaseRecord.for_this_process(""), word=token.word)
        if notes.create(token.number, own.render()):
            log.warning(
                "%s/%s was removed, or the run directory moved, during this run; the run continues in the "
                "directory of this name, which may lack earlier checkpoints and files",
                run_dir,
                layout.OWNER,
            )
        found = LeaseRecord.parse(notes.read(token.number))
    last = max(notes.numbers(), default=token.number)
    if last > token.number or found is None or found.word != token.word:
        owner = LeaseRecord.parse(notes.read(last))
        raise RunTakenError(
            f"{run_dir} was taken over by {owner or 'another launch'}; this launch writes no more there. "
            "To start again, stop the other launch first or use another --run-dir"
        )


STARTED_ONCE = ("kubeflow-v1", "kubeflow-v2", "jobset", "indexed-job", "compose")
"""Platforms that restart a node only after its last start has ended."""


class Lease:
    """The lease of this launch on its run directory, held until `close`; a thread renews the record `note`.

    With a token but no note, the lease belongs to an agent that is an ancestor of this process. With neither,
    the directory could not be written to; `problem` is the error, and the caller decides whether it matters.
    """

    def __init__(
        self,
        run_dir: PurePath,
        token: Token | None = None,
        note: LeaseRecord | None = None,
        problem: OSError | None = None,
        renew_seconds: float = OWNER_RENEW_SECONDS,
    ) -> None:
        self.token = token
        self.problem = problem
        self.lost = ""
        """A one-line message that names the new owner; empty while the lease is ours."""
        self._run_dir = run_dir
        self._note = note
        self._renew_seconds = renew_seconds
        self._closing = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._keep, name="tandem-owner", daemon=True)
        if note is not None:
            self._thread.start()

    def _keep(self) -> None:
        notes = lease_records_at(self._run_dir / layout.OWNER)
        while not self.lost and not self._closing.wait(self._renew_seconds):
            try:
                self._renew(notes)
                self._has_failed = False
            except RunTakenError as error:
                self.lost = str(error)
            except OSError as error:
                # A volume may be unavailable for a while. Each publication checks the token itself, so a
                # missed renewal alone does no harm.
                if not self._has_failed:
                    log.warning("cannot renew the lease on %s: %s; will keep trying", self._run_dir, error)
                self._has_failed = True

    def _renew(self, notes: LeaseRecords) -> None:
        assert self.token is not None and self._note is not None
        note = replace(self._note, renewed=time.monotonic(), renewals=self._note.renewals + 1)
        # Check before the rewrite, which on an object store would recreate a record that a new owner has
        # removed.
        check(notes, self._run_dir, self.token, note)
        notes.rewrite(self.token.number, note.render())
        self._note = note

    def check(self) -> None:
        """Raise RunTakenError once the renewal thread has seen that another launch owns the run."""
        if self.lost:
            raise RunTakenError(self.lost)

    def confirm_ownership(self) -> bool:
        """Return True if the lease is ours, or was when the storage last answered."""
        try:
            fence(self._run_dir, self.token)()
        except RunTakenError as error:
            self.lost = str(error)
        except OSError:
            pass
        return not self.lost

    def close(self) -> None:
        """Release the lease: delete the first record, or mark a later one as over.

        A later record stays: it proves to earlier owners that their numbers are no longer the largest.
        """
        self._closing.set()
        if self._note is None or self.token is None:
            return
        # The thread must not renew the record after it has been marked as over.
        self._thread.join(self._renew_seconds)  # with a limit, because the volume may hang
        notes = lease_records_at(self._run_dir / layout.OWNER)
        try:
            check(notes, self._run_dir, self.token, self._note)
            if self.token.number == 1:
                notes.remove(1)
            else:
                notes.rewrite(self.token.number, replace(self._note, is_over=True).render())
        except (RunTakenError, OSError) as error:  # the next launch sees that this process is gone
            log.debug("the lease on %s was not released: %s", self._run_dir, error)


def acquire(
    run_dir: PurePath,
    job: str = "",
    should_stop: Callable[[], bool] = lambda: False,
    expiry: float = OWNER_EXPIRY_SECONDS,
    renew_seconds: float = OWNER_RENEW_SECONDS,
) -> Lease:
    """Acquire the lease on the run directory.

    `job` identifies a job that its platform may restart on another machine, but only after the job has ended.
    A lease of the same job is therefore taken over immediately. A lease that is not renewed for `expiry`
    seconds is lost; ours is renewed every `renew_seconds`. Raises ConfigError while another launch owns the
    run, and StoppedError if `should_stop` becomes true.
    """
    notes = lease_records_at(run_dir / layout.OWNER)
    try:
        while True:
            numbers = notes.numbers()
            # Created again in each round, because `renewed` must be current after a wait.
            here = LeaseRecord.for_this_process(job, run_dir)
            last = max(numbers, default=0)
            raw = notes.read(last) if last else None
            found = LeaseRecord.parse(raw)
            # Ranks and helper processes share the lease of the agent that started them.
            if found is not None and not found.is_over and found.is_above(here):
                return Lease(run_dir, Token(last, found.word))
            if last and not _may_take(notes, run_dir, last, raw, here, should_stop, expiry):
                continue  # the record has changed: read it again
            # While this process was delayed, other launches may have created larger numbers and removed this
            # one, so that creating it again succeeds.
            if notes.create(last + 1, here.render()) and max(notes.numbers()) == last + 1:
                # Remove it only now, because a launch that starts in between must find a record.
                for old in numbers:
                    notes.remove(old)
                return Lease(run_dir, Token(last + 1, here.word), here, renew_seconds=renew_seconds)
    except OSError as error:
        # Not every caller needs to write, so the caller decides whether this is an error.
        return Lease(run_dir, problem=error)


@contextmanager
def held(
    run_dir: PurePath, placement: Placement, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[Lease]:
    """Hold the lease in this block, for the job of `placement`. Raises as `acquire` does."""
    with closing(acquire(run_dir, restarted_as(placement), should_stop)) as lease:
        yield lease


def restarted_as(placement: Placement) -> str:
    """Return a name for this job that stays the same when its nodes are restarted; "" if there is none.

    Only platforms that restart a node after its last start has ended have one. For example, a pod's name
    belongs to one job, and the next pod of that name is created only after the last one was deleted.
    """
    if placement.job or placement.platform not in STARTED_ONCE:
        return placement.job
    # A loopback master is the same for every job, so the name of the pod or container identifies this one.
    is_name = placement.master_host not in ("localhost", LOOPBACK)
    name = placement.master_host if is_name else os.uname().nodename
    return f"{placement.platform} {name}:{placement.master_port}"


def refuse_if_owned(run_dir: PurePath) -> None:
    """Raise ConfigError if another launch on this machine certainly owns the run."""
    found = owner_here(run_dir)
    if found is not None:
        raise _refusal(run_dir, found)


def owner_here(run_dir: PurePath) -> LeaseRecord | None:
    """Return the lease of a launch here that certainly owns the run; None if it is an ancestor of ours."""
    notes = lease_records_at(run_dir / layout.OWNER)
    here = LeaseRecord.for_this_process("", run_dir)
    with suppress(OSError):
        if (last := max(notes.numbers(), default=0)) and (found := LeaseRecord.parse(notes.read(last))):
            if not found.is_over and not found.is_above(here) and _lives(found, here):
                return found
    return None


def _lives(found: LeaseRecord, here: LeaseRecord, expiry: float = OWNER_EXPIRY_SECONDS) -> bool:
    """Return True if the owner's process is visible, running, and has renewed its lease recently."""
    # A frozen process (SIGSTOP, `docker pause`) is visible but renews nothing, and loses the run like an
    # unreachable one. So does the owner of the run that this one was copied from.
    is_running = found.is_seen_from(here) and not found.is_gone(here) and not found.may_be_copied(here)
    return is_running and found.silence(here) <= expiry


def _refusal(run_dir: PurePath, found: LeaseRecord) -> ConfigError:
    return ConfigError(
        f"{run_dir} is in use by another launch ({found}); wait for it to end, stop it "
        f"(`kill {found.process}` on {found.host}), or use another --run-dir"
    )


def _may_take(
    notes: LeaseRecords,
    run_dir: PurePath,
    number: int,
    raw: bytes | None,
    here: LeaseRecord,
    should_stop: Callable[[], bool],
    expiry: float,
) -> bool:
    """Return True if the owner has exited or lost its lease; log why, unless it released the lease itself.

    False: the record has changed, so read it again. Raises ConfigError if the owner lives, StoppedError.
    """
    found = LeaseRecord.parse(raw)
    if found is None:
        # The record may be damaged, or of another version with other fields. A renewal changes its bytes in
        # any case.
        why = _watch(notes, run_dir, number, raw, expiry, should_stop, expiry)
    elif found.is_over:
        return True
    elif _lives(found, here, expiry):
        raise _refusal(run_dir, found)
    elif found.is_seen_from(here) and found.is_gone(here):
        why = "which has exited"
    elif here.job and found.job == here.job and not found.may_be_copied(here):
        why = "an earlier start of this job"
    else:
        # Silence on this boot's clock counts. Another machine's clock cannot be compared, so its lease gets
        # the full time.
        left = expiry - found.silence(here)
        why = _watch(notes, run_dir, number, raw, left, should_stop, expiry)
    if why:
        log.info("taking %s over from %s, %s", run_dir, found or "an unknown launch", why)
    return bool(why)


def _watch(
    notes: LeaseRecords,
    run_dir: PurePath,
    number: int,
    raw: bytes | None,
    seconds: float,
    should_stop: Callable[[], bool],
    expiry: float,
) -> str:
    """Watch a record for `seconds`; return why it may be taken over, or "" if it was removed or released.

    Raises ConfigError once the record is renewed, and StoppedError.
    """
    deadline = time.monotonic() + seconds
    found = LeaseRecord.parse(raw)
    if seconds > 0:
        owner = found or "an unknown launch"
        log.info(
            "%s is in use by %s: waiting up to %.0f s to see whether it is alive", run_dir, owner, seconds
        )
    while time.monotonic() < deadline:
        if should_stop():
            raise StoppedError(
                f"stopped while waiting for another launch to release {run_dir}; nothing to save"
            )
        time.sleep(OWNER_LOOK_SECONDS)
        if (now := notes.read(number)) != raw:
            seen = LeaseRecord.parse(now)
            if seen is None or seen.is_over:
                return ""
            raise _refusal(run_dir, seen)
    return f"which has not renewed its lease for {expiry:.0f} s"
