"""Decide whether the run makes progress, for /healthz, the page and `tandem health`.

It uses only the standard library and few imports, because probes run it often.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.reading import content, count, finite, parsed
from tandem.timeouts import NODE_TICK_SECONDS, SLACK_SECONDS, STALE_SECONDS
from tandem.words import lasting

if TYPE_CHECKING:
    from tandem.config.slices import LaunchConfig, ReliabilityConfig

FILE_NAME = "health.json"


@dataclass(frozen=True)
class Limits:
    """Limits without progress, in seconds: until all nodes joined, until the first step, per step."""

    master_timeout: float
    phase_timeout: float
    hang_timeout: float | None

    @classmethod
    def asked(cls, launch: "LaunchConfig", timeouts: "ReliabilityConfig") -> "Limits":
        """Return the limits from the settings."""
        return cls(launch.master_timeout, timeouts.phase_timeout, timeouts.hang_seconds)

    def of(self, state: str) -> float:
        """Return the limit of what a node does: a state of its agent, or an activity of its ranks."""
        if state in ("starting", "rendezvous"):
            return SLACK_SECONDS + self.master_timeout
        if state == "train" and self.hang_timeout is not None:
            return SLACK_SECONDS + self.hang_timeout
        return SLACK_SECONDS + self.phase_timeout


def record(state: str, step: int, last_progress: float, limit_seconds: float) -> dict[str, object]:
    """Return the record that `judge` reads.

    `last_progress` is when the run last made progress (Unix seconds); `limit_seconds` is how long this state
    may last without progress.
    """
    return {
        "time": time.time(), "state": state, "step": step, "last_progress": last_progress,
        "limit_seconds": limit_seconds, "pid": os.getpid(),
    }  # fmt: skip


def write_health(state_dir: str | os.PathLike[str], record: Mapping[str, object]) -> None:
    """Replace STATE_DIR/health.json, creating the directory; call it once a second. Raises OSError.

    The file is not fsynced, so it is outdated after the host crashes.
    """
    os.makedirs(state_dir, exist_ok=True)
    path = os.path.join(state_dir, FILE_NAME)
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(temporary, path)


class Starting:
    """Reports that this node is starting, once a second until closed: the agent's reports need torch first.

    Kubernetes publishes the name of a pod only after it has started, and a failed lookup of the name is
    cached for half a minute.
    """

    def __init__(self, state_dir: str | os.PathLike[str], limits: Limits) -> None:
        self._state_dir, self._limit, self._closing = state_dir, limits.of("starting"), threading.Event()
        self._since = time.time()
        self._thread = threading.Thread(target=self._write, name="tandem-starting", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # the agent reports it if it persists
                write_health(self._state_dir, record("starting", 0, self._since, self._limit))
            if self._closing.wait(NODE_TICK_SECONDS):
                return

    def close(self) -> None:
        self._closing.set()
        self._thread.join()


def check(state_dir: str | os.PathLike[str], now: float | None = None) -> tuple[bool, str]:
    """Return (healthy, one-line reason) from STATE_DIR/health.json; never raises."""
    path = os.path.join(state_dir, FILE_NAME)
    try:
        return judge(parsed(content(state_dir, FILE_NAME)), time.time() if now is None else now)
    except FileNotFoundError:
        return False, f"no heartbeat: {path} does not exist"
    except OSError as error:
        return False, f"no heartbeat: {path}: {error.strerror}"
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return False, f"no heartbeat: {path} is not a heartbeat"


def judge(record: Mapping[str, object], now: float) -> tuple[bool, str]:
    """Judge one record. Raises KeyError, TypeError or ValueError if it is not a record."""
    state, step = str(record["state"]), count(record["step"])
    where = f"{state} at step {step:,}"
    if state == "succeeded":
        return True, where
    if state in ("stopped", "failed"):
        return False, where
    age = now - finite(record["time"])
    if age > STALE_SECONDS:
        return False, f"last heartbeat {lasting(age)} ago, limit {STALE_SECONDS:.0f} s ({where})"
    pid = count(record["pid"])
    if not _is_alive(pid):
        return False, f"process {pid} is gone ({where})"
    quiet = max(0.0, now - finite(record["last_progress"]))
    limit = float("inf") if record["limit_seconds"] is None else finite(record["limit_seconds"])
    if quiet > limit:
        return False, f"no progress for {lasting(quiet)}, limit {lasting(limit)} ({where})"
    return True, f"{where}, last progress {lasting(quiet)} ago"


def main(environ: Mapping[str, str], as_json: bool = False) -> int:
    """Print one line; return 0 if healthy, else 1 (Docker reserves 2)."""
    state_dir = environ.get("TANDEM_STATE_DIR")
    if not state_dir:
        healthy, line = False, "TANDEM_STATE_DIR is not set; set it to the directory that tandem launch uses"
    else:
        healthy, line = check(state_dir)
    if as_json:
        print(json.dumps({"healthy": healthy, "reason": line}), flush=True)
    else:
        print(f"{'healthy' if healthy else 'unhealthy'}: {line}", flush=True)
    return 0 if healthy else 1


def _is_alive(pid: int) -> bool:
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
