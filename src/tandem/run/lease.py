"""How a launch makes a run directory its own, keeps it, and finds one whose owner is gone. Imports no torch.

Whether an owner lives is seen on its own machine by its process, elsewhere by whether its note changes while
somebody watches: no clock of one machine is compared with another's.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePath

from tandem import layout
from tandem.checkpoint.storage.notes import Notes, notes_at
from tandem.errors import ConfigError, RunTakenError, StoppedError
from tandem.platforms.environment import LOOPBACK
from tandem.platforms.placement import Placement
from tandem.run.owner import Note, Token, check, fence
from tandem.timeouts import OWNER_EXPIRY_SECONDS, OWNER_LOOK_SECONDS, OWNER_RENEW_SECONDS

log = logging.getLogger("tandem.run")

STARTED_ONCE = ("kubeflow-v1", "kubeflow-v2", "jobset", "indexed-job", "compose")
"""Platforms that start a node again only after its last start has ended."""


class Claim:
    """A run directory that is this launch's until `close`; a thread renews its `note` meanwhile.

    Without a note it is lent by the agent that this process comes from, or, without a token either, not to
    be had: the directory cannot be written to, which is a `problem` of whoever has to.
    """

    def __init__(
        self,
        run_dir: PurePath,
        token: Token | None = None,
        note: Note | None = None,
        problem: OSError | None = None,
    ) -> None:
        self.token, self.problem, self.lost = token, problem, ""
        """`lost`: who has taken the run over, in a line; empty while it is ours."""
        self._run_dir, self._note = run_dir, note
        self._closing, self._has_failed = threading.Event(), False
        self._thread = threading.Thread(target=self._keep, name="tandem-owner", daemon=True)
        if note is not None:
            self._thread.start()

    def _keep(self) -> None:
        notes = notes_at(self._run_dir / layout.OWNER)
        while not self.lost and not self._closing.wait(OWNER_RENEW_SECONDS):
            try:
                self._renew(notes)
                self._has_failed = False
            except RunTakenError as error:
                self.lost = str(error)
            except OSError as error:
                if not self._has_failed:
                    log.warning("cannot renew the lease on %s: %s; will keep trying", self._run_dir, error)
                self._has_failed = True

    def _renew(self, notes: Notes) -> None:
        assert self.token is not None and self._note is not None
        note = replace(self._note, renewed=time.monotonic(), renewals=self._note.renewals + 1)
        check(notes, self._run_dir, self.token, note)
        notes.rewrite(self.token.number, note.render())
        self._note = note

    def check(self) -> None:
        """Raises RunTakenError once the thread has seen that the run is no longer ours."""
        if self.lost:
            raise RunTakenError(self.lost)

    def look(self) -> bool:
        """Whether the run is ours, or was when its storage last answered."""
        try:
            fence(self._run_dir, self.token)()
        except RunTakenError as error:
            self.lost = str(error)
        except OSError:
            pass
        return not self.lost

    def close(self) -> None:
        """The launch is over. A first one leaves no note, later ones have to: their number stays taken."""
        self._closing.set()
        if self._note is None or self.token is None:
            return
        self._thread.join(OWNER_RENEW_SECONDS)  # its volume may hang
        notes = notes_at(self._run_dir / layout.OWNER)
        try:
            check(notes, self._run_dir, self.token, self._note)
            if self.token.number == 1:
                notes.remove(1)
            else:
                notes.rewrite(self.token.number, replace(self._note, is_over=True).render())
        except (RunTakenError, OSError) as error:  # the next launch finds that this process is gone
            log.debug("the lease on %s was not released: %s", self._run_dir, error)


def claim(run_dir: PurePath, job: str = "", should_stop: Callable[[], bool] = lambda: False) -> Claim:
    """Make the run this launch's own.

    `job` names what its platform starts again, elsewhere too, but only once it has ended: a note of the same
    job is taken over at once. Raises ConfigError while the run belongs to another launch, StoppedError.
    """
    notes = notes_at(run_dir / layout.OWNER)
    try:
        while True:
            numbers, here = notes.numbers(), Note.mine(job)
            last = max(numbers, default=0)
            raw = notes.read(last) if last else None
            found = Note.parse(raw)
            if found is not None and not found.is_over and found.is_above(here):
                return Claim(run_dir, Token(last, found.word))
            if last and not _may_take(notes, run_dir, last, raw, here, should_stop):
                continue  # it has changed: look again
            if notes.create(last + 1, here.render()) and max(notes.numbers()) == last + 1:
                for old in numbers:
                    notes.remove(old)
                return Claim(run_dir, Token(last + 1, here.word), here)
    except OSError as error:
        return Claim(run_dir, problem=error)


def restarted_as(placement: Placement) -> str:
    """What names this job wherever its platform starts it again, after its last start has ended; "": nothing.

    A pod's own name is that of one job, and its successor is made when it is gone.
    """
    if placement.job or placement.platform not in STARTED_ONCE:
        return placement.job
    is_name = placement.master_host not in ("localhost", LOOPBACK)
    name = placement.master_host if is_name else os.uname().nodename
    return f"{placement.platform} {name}:{placement.master_port}"


def refuse_if_owned(run_dir: PurePath) -> None:
    """Raises ConfigError where the run certainly belongs to another launch on this machine."""
    found = owner_here(run_dir)
    if found is not None:
        raise _refusal(run_dir, found)


def owner_here(run_dir: PurePath) -> Note | None:
    """The launch on this machine, none that this process comes from, to which the run certainly belongs."""
    notes, here = notes_at(run_dir / layout.OWNER), Note.mine("")
    with suppress(OSError):
        if (last := max(notes.numbers(), default=0)) and (found := Note.parse(notes.read(last))):
            if not found.is_over and not found.is_above(here) and _lives(found, here):
                return found
    return None


def _lives(found: Note, here: Note) -> bool:
    """Whether its process is seen to run, and has renewed its note not long ago."""
    is_running = found.is_seen_from(here) and not found.is_gone(here)
    return is_running and found.silence(here) <= OWNER_EXPIRY_SECONDS


def _refusal(run_dir: PurePath, found: Note) -> ConfigError:
    return ConfigError(
        f"{run_dir} is in use by another launch ({found}); wait for it to end, stop it "
        f"(`kill {found.process}` on {found.host}), or use another --run-dir"
    )


def _may_take(
    notes: Notes,
    run_dir: PurePath,
    number: int,
    raw: bytes | None,
    here: Note,
    should_stop: Callable[[], bool],
) -> bool:
    """Whether the launch of this note is over, which is said in a line where it has not said so itself.

    False: look again. Raises ConfigError for one that lives, StoppedError.
    """
    found = Note.parse(raw)
    if found is None:
        why = _watch(notes, run_dir, number, raw, OWNER_EXPIRY_SECONDS, should_stop)
    elif found.is_over:
        return True
    elif _lives(found, here):
        raise _refusal(run_dir, found)
    elif found.is_seen_from(here) and found.is_gone(here):
        why = "which has exited"
    elif here.job and found.job == here.job:
        why = "an earlier start of this job"
    else:
        left = OWNER_EXPIRY_SECONDS - found.silence(here)
        why = _watch(notes, run_dir, number, raw, left, should_stop)
    if why:
        log.info("taking %s over from %s, %s", run_dir, found or "an unknown launch", why)
    return bool(why)


def _watch(
    notes: Notes,
    run_dir: PurePath,
    number: int,
    raw: bytes | None,
    seconds: float,
    should_stop: Callable[[], bool],
) -> str:
    """Look for `seconds` whether a note is renewed: why it may be taken over, or "" where it is gone.

    Raises ConfigError once it is renewed, StoppedError.
    """
    deadline, found = time.monotonic() + seconds, Note.parse(raw)
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
            seen = Note.parse(now)
            if seen is None or seen.is_over:
                return ""
            raise _refusal(run_dir, seen)
    return f"which has not renewed its lease for {OWNER_EXPIRY_SECONDS:.0f} s"
