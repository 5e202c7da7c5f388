"""All errors that tandem raises on purpose, with the exit codes of the processes that they end.

    TandemError
    ├── ConfigError             2    the settings or the input cannot be used (never retried)
    ├── RunTakenError           2    another launch has taken over the run directory (never retried)
    ├── CheckpointError         1    saving or reading a checkpoint failed
    │   ├── CorruptCheckpointError   a file differs from what was written
    │   └── UnloadableError     2    the files are intact, but the state cannot be loaded
    ├── CrashLoopError          1    start after start has saved nothing new (never retried)
    ├── NonFiniteError          1    loss or gradients are not finite (never retried)
    ├── ReplicaMismatchError    1    the ranks' weights differ (never retried)
    ├── ReplayMismatchError     1    a rank computes other bits than another does (never retried)
    ├── GpuLostError          134    a rank's GPU worked in an earlier generation, and does not now (retried)
    ├── RunFailedError          n    a run that this process started has ended with that code
    ├── StoppedError          137    stopped by a signal before a checkpoint could be written
    ├── StuckError            137    a process of the last generation cannot be killed
    ├── PeerLostError         200    another rank or the master is gone (retried)
    ├── DataUnavailableError  200    a server of the training data does not answer (retried)
    ├── SmallerBatchError     200    out of memory; all ranks restart with a smaller micro-batch (retried)
    └── WrongNodeError        200    a node computes wrongly; all ranks restart without it (retried)

The message of each is one line: what is wrong, what was expected, what to do.
"""

import signal
from collections.abc import Sequence
from typing import ClassVar

FINISHED = 0
FAILED = 1
MISCONFIGURED = 2
INTERRUPTED_TWICE = 130
GPU_FAILED = 134
"""The exit code of a rank whose own GPU failed.

A shell reports the same number for SIGABRT; the agent can tell them apart (launch/workers.py).
"""
KILLED = 137
STOPPED = 143
PEER_LOST = 200


SIGNALS = frozenset(signal.valid_signals())


def was_killed(code: int) -> bool:
    """Return whether a process was killed by a signal, as a shell reports it: 128+n, except 143.

    Codes such as 255, for which no signal exists, were chosen by the program.
    """
    return code - 128 in SIGNALS and code != STOPPED


def is_own(code: int) -> bool:
    """Return whether `code` is the program's own failure, which would recur.

    That is any code except success, a stop, a kill by a signal, and lost peers.
    """
    return code not in (FINISHED, STOPPED, PEER_LOST) and not was_killed(code)


def job_code(codes: Sequence[int]) -> int:
    """Combine the exit codes of several ranks or nodes into one.

    It is the first code present in this order: 2, the script's own (1..127, 255), 137/139/134, other 128+n,
    200, 143, 0.
    """

    def order(code: int) -> int:
        # Failures that a restart cannot fix come first, or a platform would retry in vain.
        if code == MISCONFIGURED:
            return 0
        if is_own(code):
            return 1
        if code in (137, 139, 134):
            return 2
        return {PEER_LOST: 4, STOPPED: 5, FINISHED: 6}.get(code, 3)

    return min(codes, key=order, default=FINISHED)


def is_retried(code: int) -> bool:
    """Return whether ranks are restarted after this code: 128+n of a signal, and 200, but not 143."""
    return code == PEER_LOST or was_killed(code)


def shell_code(exitcode: int | None) -> int:
    """Convert multiprocessing's exit code (-9) to a shell's (137)."""
    if exitcode is None:
        return KILLED
    return 128 - exitcode if exitcode < 0 else exitcode


def text_of(error: BaseException) -> str:
    """Return str(error), or the placeholder that a traceback shows if `__str__` raises."""
    try:
        return str(error)
    except (Exception, SystemExit):
        # `__str__` is the code of a user or a library, and may do anything.
        return "<exception str() failed>"


class TandemError(Exception):
    """The base of all errors of tandem; `exit_code` is the exit code of a process that it ends."""

    exit_code: ClassVar[int] = FAILED


class ConfigError(TandemError):
    """The settings, the environment or the input data cannot be used as given."""

    exit_code: ClassVar[int] = MISCONFIGURED


class RunTakenError(TandemError):
    """Another launch has taken over the run directory; nothing more may be written there."""

    exit_code: ClassVar[int] = MISCONFIGURED


class CheckpointError(TandemError):
    """A checkpoint could not be written or read."""


class CorruptCheckpointError(CheckpointError):
    """A file's size or SHA-256 differs from the manifest."""


class UnloadableError(CheckpointError):
    """A file's hash is right, but its state cannot be loaded: unknown types, or larger than the file."""

    exit_code: ClassVar[int] = MISCONFIGURED


class CrashLoopError(TandemError):
    """Several starts in a row have saved nothing new."""


class NonFiniteError(TandemError):
    """The loss or gradients are not finite."""


class ReplicaMismatchError(TandemError):
    """A rank's weights differ from the other ranks'."""


class ReplayMismatchError(TandemError):
    """A rank computes other bits from a micro-batch than another rank does.

    `nodes` have the ranks that are certainly wrong. `clean` is the last step that was checked and right.
    """

    def __init__(self, message: str, nodes: Sequence[int] = (), clean: int | None = None) -> None:
        super().__init__(message)
        self.nodes = nodes
        self.clean = clean


class GpuLostError(TandemError):
    """A rank's GPU worked in an earlier generation and does not work now."""

    exit_code: ClassVar[int] = GPU_FAILED


class RunFailedError(TandemError):
    """A run that this process started has failed: the reason on one line, and the run's exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code  # type: ignore[misc]


class StoppedError(TandemError):
    """A signal ended the run before a checkpoint was written."""

    exit_code: ClassVar[int] = KILLED


class StuckError(TandemError):
    """A process that has to end cannot be killed on this machine."""

    exit_code: ClassVar[int] = KILLED


class PeerLostError(TandemError):
    """Another rank, or the master, cannot be reached."""

    exit_code: ClassVar[int] = PEER_LOST


class DataUnavailableError(TandemError):
    """Training data could not be read before a deadline, and a later start may read it."""

    exit_code: ClassVar[int] = PEER_LOST


class SmallerBatchError(TandemError):
    """This rank ran out of memory, and all ranks restart with a smaller micro-batch."""

    exit_code: ClassVar[int] = PEER_LOST


class WrongNodeError(TandemError):
    """A node computes wrongly, and all ranks restart without it."""

    exit_code: ClassVar[int] = PEER_LOST
