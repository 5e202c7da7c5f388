"""Decide whether the run makes progress, for /healthz, the page and `tandem health`.

Each node writes its heartbeat to TANDEM_STATE_DIR, for probes; node 0 also to the run directory, for people.
It uses only the standard library and few imports, because probes run it often.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from tandem.bounded_reader import RunFiles, content, count, finite, parsed
from tandem.layout import CONFIG, HEALTH, HEALTH_TEMPORARY, SUMMARY
from tandem.paths import identity, is_elsewhere
from tandem.text import format_duration
from tandem.timeouts import (
    NODE_TICK_SECONDS,
    OWNER_LOOK_SECONDS,
    RUN_HEALTH_SECONDS,
    RUN_HEALTH_STALE_SECONDS,
    SLACK_SECONDS,
    STALE_SECONDS,
)

if TYPE_CHECKING:
    from tandem.config.slices import LaunchConfig, ReliabilityConfig

LONGEST_LINE = 400


@dataclass(frozen=True)
class HealthLimits:
    """Limits without progress, in seconds: until all nodes joined, until the first step, per step."""

    master_timeout: float
    phase_timeout: float
    hang_timeout: float | None

    @classmethod
    def from_settings(cls, launch: "LaunchConfig", timeouts: "ReliabilityConfig") -> "HealthLimits":
        return cls(launch.master_timeout, timeouts.phase_timeout, timeouts.hang_seconds)

    def of(self, state: str) -> float:
        """Return the time limit of an agent's state or of an activity of its ranks."""
        if state in ("starting", "rendezvous"):
            return SLACK_SECONDS + self.master_timeout
        if state == "train" and self.hang_timeout is not None:
            return SLACK_SECONDS + self.hang_timeout
        return SLACK_SECONDS + self.phase_timeout


def record(state: str, step: int, quiet_seconds: float, limit_seconds: float) -> dict[str, object]:
    """Return the record that `assess` reads.

    `quiet_seconds` is the time since the run last made progress; `limit_seconds` is how long this state may
    last without progress.
    """
    now = time.time()
    return {
        "time": now, "monotonic": time.monotonic(), "state": state, "step": step,
        "last_progress": now - quiet_seconds, "limit_seconds": limit_seconds, "pid": os.getpid(),
        "machine": _machine(),
    }  # fmt: skip


@cache
def _machine() -> str:
    """Return what makes a process ID unique: the boot and the PID namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def write_health(state_dir: str | os.PathLike[str], record: Mapping[str, object]) -> None:
    """Replace STATE_DIR/health.json, creating the directory; call it once a second. Raises OSError.

    The file is not fsynced, so it is outdated after the host crashes.
    """
    os.makedirs(state_dir, exist_ok=True)
    _replace(state_dir, f"{HEALTH}.{os.getpid()}.tmp", record)


def write_run_health(run_dir: str | os.PathLike[str], record: Mapping[str, object]) -> None:
    """Replace RUN_DIR/health.json; only node 0 calls this. Raises OSError if the directory is gone."""
    _replace(run_dir, HEALTH_TEMPORARY, {**record, "folder": identity(run_dir)})


def _replace(folder: str | os.PathLike[str], name: str, record: Mapping[str, object]) -> None:
    temporary = os.path.join(folder, name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)  # what a killed writer has left
    with open(temporary, "x", encoding="utf-8") as file:  # through no link
        json.dump(record, file)
    os.replace(temporary, os.path.join(folder, HEALTH))


class Starting:
    """Reports that this node is starting, once a second until closed: the agent's reports need torch first.

    Kubernetes publishes the name of a pod only after it has started, and a failed lookup of the name is
    cached for half a minute.
    """

    def __init__(self, state_dir: str | os.PathLike[str], limits: HealthLimits) -> None:
        self._state_dir = state_dir
        self._limit = limits.of("starting")
        self._closing = threading.Event()
        self._since = time.monotonic()
        self._thread = threading.Thread(target=self._write, name="tandem-starting", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # the agent reports it if it persists
                quiet = time.monotonic() - self._since
                write_health(self._state_dir, record("starting", 0, quiet, self._limit))
            if self._closing.wait(NODE_TICK_SECONDS):
                return

    def close(self) -> None:
        self._closing.set()
        self._thread.join()


def check(
    folder: str | os.PathLike[str], now: float | None = None, stale: float = STALE_SECONDS
) -> tuple[bool, str]:
    """Return (healthy, one-line reason) from FOLDER/health.json; never raises."""
    path = os.path.join(folder, HEALTH)
    try:
        return assess(parsed(content(folder, HEALTH)), time.time() if now is None else now, stale)
    except FileNotFoundError:
        return False, f"no heartbeat: {path} does not exist"
    except OSError as error:
        return False, f"no heartbeat: {path}: {error.strerror}"
    # These are all errors of a damaged file; RecursionError is from deeply nested JSON. A probe needs an
    # answer.
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return False, f"no heartbeat: {path} is not a heartbeat"


def check_run(
    run_dir: str | os.PathLike[str], watch_seconds: float = 2 * RUN_HEALTH_SECONDS
) -> tuple[bool, str]:
    """Return the same for a run directory; the summary decides for a run that has ended.

    If the heartbeat is from another machine, whose clock may differ, and is old or from the future, watches
    for a new one, up to `watch_seconds`.
    """
    if not os.path.isdir(run_dir):
        what = "is not a directory" if os.path.exists(run_dir) else "does not exist"
        return False, f"{os.fspath(run_dir)} {what}; give the directory of a run"
    try:
        os.lstat(os.path.join(run_dir, CONFIG))
    except PermissionError as error:
        return False, f"{os.fspath(run_dir)} cannot be read: {error.strerror}; ask its owner for access"
    except OSError:
        line = "has no config.json: it is not a run, or has not started; give the directory of a run"
        return False, f"{os.fspath(run_dir)} {line}"
    summary = RunFiles(run_dir).read(SUMMARY)
    if state := summary.get("state"):
        return state == "finished", f"{state} at step {summary.get('global_step') or 0:,}"
    now = time.time()
    # `check` reports these errors.
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        found = parsed(content(run_dir, HEALTH))
        is_of_here = found.get("machine") == _machine()
        if is_of_here and is_elsewhere(found.get("folder"), run_dir):
            return False, "this is a copy, where no launch has started; give the directory of the run itself"
        written = finite(found["time"])
        if not is_of_here and abs(now - written) > RUN_HEALTH_STALE_SECONDS:
            newer = _time_of_next(run_dir, written, watch_seconds)
            if newer is None and written > now:
                return False, f"no new heartbeat in {format_duration(watch_seconds)} ({found.get('state')})"
            now = newer or now
    return check(run_dir, now, stale=RUN_HEALTH_STALE_SECONDS)


def _time_of_next(run_dir: str | os.PathLike[str], written: float, seconds: float) -> float | None:
    """Return the time in the next heartbeat after `written`; None if there is none within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (newer := finite(parsed(content(run_dir, HEALTH))["time"])) != written:
            return newer
        time.sleep(OWNER_LOOK_SECONDS)
    return None


def assess(record: Mapping[str, object], now: float, stale: float = STALE_SECONDS) -> tuple[bool, str]:
    """Judge one heartbeat, which is too old after `stale` seconds.

    Raises KeyError, TypeError or ValueError if it is not one.
    """
    state = str(record["state"])
    step = count(record["step"])
    where = f"{state} at step {step:,}"
    # Final states come first, because no heartbeat follows them.
    if state == "succeeded":
        return True, where
    if state in ("stopped", "failed"):
        return False, where
    written = finite(record["time"])
    age = now - written
    if record.get("machine") == _machine() and "monotonic" in record:
        # Unlike the other clock, this one is never set.
        age = time.monotonic() - finite(record["monotonic"])
    if age > stale:
        return False, f"last heartbeat {format_duration(age)} ago, limit {stale:.0f} s ({where})"
    pid = count(record["pid"])
    if record.get("machine", _machine()) == _machine() and not _is_alive(pid):
        return False, f"process {pid} is gone ({where})"
    # Another node's clock may be ahead of this one.
    quiet = max(0.0, written - finite(record["last_progress"])) + max(0.0, age)
    limit = float("inf") if record["limit_seconds"] is None else finite(record["limit_seconds"])
    if quiet > limit:
        return False, f"no progress for {format_duration(quiet)}, limit {format_duration(limit)} ({where})"
    return True, f"{where}, last progress {format_duration(quiet)} ago"


def main(environ: Mapping[str, str], as_json: bool = False, run_dir: str | None = None) -> int:
    """Print one line; return 0 if healthy, else 1 (Docker reserves 2)."""
    state_dir = environ.get("TANDEM_STATE_DIR")
    if run_dir is not None:
        healthy, line = check_run(run_dir)
    elif state_dir:
        healthy, line = check(state_dir)
    else:
        healthy = False
        line = "TANDEM_STATE_DIR is not set; give a run directory: tandem health RUN_DIR"
    # The line has text from a file, which may be damaged, and goes to a terminal.
    line = "".join(each if each.isprintable() else " " for each in line[:LONGEST_LINE])
    if as_json:
        print(json.dumps({"healthy": healthy, "reason": line}), flush=True)
    else:
        print(f"{'healthy' if healthy else 'unhealthy'}: {line}", flush=True)
    return 0 if healthy else 1


def _is_alive(pid: int) -> bool:
    # kill(2) takes 0 and negative numbers as process groups, and would succeed.
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    # Signal 0 only checks that the process exists. PermissionError means that it does, under another user.
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
