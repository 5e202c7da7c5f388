"""Every error tandem raises on purpose, each with the exit code its process ends with.

    TandemError
    ├── ConfigError             2    what the user asked for cannot be (never retried)
    ├── RunTakenError           2    another launch has taken the run directory over (never retried)
    ├── CheckpointError         1    saving or reading a checkpoint failed
    │   └── CorruptCheckpointError   its bytes are not the bytes that were written
    ├── CrashLoopError          1    the run ends again and again before it has saved anything (never retried)
    ├── NonFiniteError          1    loss or gradients are not finite (never retried)
    ├── ReplicaMismatchError    1    the ranks do not train the same weights (never retried)
    ├── StoppedError          137    stopped by a signal before a checkpoint could be written
    └── PeerLostError         200    another rank or the master is gone (retried)

The message of each is one line: what was got, what is valid, what to type next.
"""

from typing import ClassVar

FINISHED = 0
FAILED = 1
MISCONFIGURED = 2
INTERRUPTED_TWICE = 130
GPU_FAILED = 134
"""What a process ends with that NCCL's watchdog aborts (SIGABRT) when CUDA fails: one fault has one code."""
KILLED = 137
STOPPED = 143
PEER_LOST = 200


class TandemError(Exception):
    """Base of the tree; `exit_code` is the code of the process that it ends."""

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


class CrashLoopError(TandemError):
    """Start after start has saved nothing new."""


class NonFiniteError(TandemError):
    """Loss or gradients stopped being finite."""


class ReplicaMismatchError(TandemError):
    """The weights of a rank are not those of the others."""


class StoppedError(TandemError):
    """A signal ended the run before a checkpoint was written."""

    exit_code: ClassVar[int] = KILLED


class PeerLostError(TandemError):
    """Another rank, or the master, cannot be reached."""

    exit_code: ClassVar[int] = PEER_LOST
