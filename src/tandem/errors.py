"""Every error tandem raises on purpose, each with the exit code its process ends with.

    TandemError
    ├── ConfigError             2    what the user asked for cannot be (never retried)
    ├── RunTakenError           2    another launch has taken the run directory over (never retried)
    ├── CheckpointError         1    saving or reading a checkpoint failed
    │   ├── CorruptCheckpointError   its bytes are not the bytes that were written
    │   └── UnloadableError     2    its bytes are, and no state can be made of them
    ├── CrashLoopError          1    the run ends again and again before it has saved anything (never retried)
    ├── NonFiniteError          1    loss or gradients are not finite (never retried)
    ├── ReplicaMismatchError    1    the ranks do not train the same weights (never retried)
    ├── RunFailedError          n    a run that this process started has ended with that code
    ├── StoppedError          137    stopped by a signal before a checkpoint could be written
    ├── StuckError            137    a process of the last generation cannot be ended
    └── PeerLostError         200    another rank or the master is gone (retried)

The message of each is one line: what is wrong, what was expected, what to do.
"""

import signal
from typing import ClassVar

FINISHED = 0
FAILED = 1
MISCONFIGURED = 2
INTERRUPTED_TWICE = 130
GPU_FAILED = 134
"""A rank whose own GPU has failed exits with it. SIGABRT gives the same number in a shell; for the agent they
differ (launch/workers.py)."""
KILLED = 137
STOPPED = 143
PEER_LOST = 200


SIGNALS = frozenset(signal.valid_signals())


def was_killed(code: int) -> bool:
    """By a signal, as a shell reports it: 128+n. No signal gives 255 and others: a program chose those."""
    return code - 128 in SIGNALS and code != STOPPED


def is_own(code: int) -> bool:
    """The program's own end, which it would have again: neither well, nor stopped, killed or out of peers."""
    return code not in (FINISHED, STOPPED, PEER_LOST) and not was_killed(code)


def text_of(error: BaseException) -> str:
    """The error's text, also where its own `__str__` raises: then what a traceback shows instead."""
    try:
        return str(error)
    except (Exception, SystemExit):
        return "<exception str() failed>"


class TandemError(Exception):
    """Base of all errors of tandem; `exit_code` is the exit code of a process that it ends."""

    exit_code: ClassVar[int] = FAILED


class ConfigError(TandemError):
    """The settings, the environment or the input data cannot be used as given."""

    exit_code: ClassVar[int] = MISCONFIGURED


class RunTakenError(TandemError):
    """The run directory belongs to another launch by now; nothing more may be written there."""

    exit_code: ClassVar[int] = MISCONFIGURED


class CheckpointError(TandemError):
    """A checkpoint could not be written or read."""


class CorruptCheckpointError(CheckpointError):
    """A file's size or SHA-256 differs from the manifest."""


class UnloadableError(CheckpointError):
    """A file's hash is right, and its state cannot be loaded: of unknown types, or larger than the file."""

    exit_code: ClassVar[int] = MISCONFIGURED


class CrashLoopError(TandemError):
    """Start after start has saved nothing new."""


class NonFiniteError(TandemError):
    """Loss or gradients stopped being finite."""


class ReplicaMismatchError(TandemError):
    """The weights of a rank are not those of the others."""


class GpuLostError(TandemError):
    """A rank's GPU worked in an earlier generation, and does not now."""

    exit_code: ClassVar[int] = GPU_FAILED


class RunFailedError(TandemError):
    """A run that this process started has failed: why, in one line, and with which exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code  # type: ignore[misc]


class StoppedError(TandemError):
    """A signal ended the run before a checkpoint was written."""

    exit_code: ClassVar[int] = KILLED


class StuckError(TandemError):
    """A process that must not live any more cannot be ended on this machine."""

    exit_code: ClassVar[int] = KILLED


class PeerLostError(TandemError):
    """Another rank, or the master, cannot be reached."""

    exit_code: ClassVar[int] = PEER_LOST
