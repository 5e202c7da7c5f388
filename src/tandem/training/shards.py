"""Read a sharded checkpoint on all ranks at a start, and check that all can write."""

import errno
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

from tandem.checkpoint.sharded import Rows, read_rows
from tandem.checkpoint.storage import remote_at
from tandem.checkpoint.store import CheckpointStore
from tandem.config.address import RemotePath, address
from tandem.distributed.group import ProcessGroup
from tandem.errors import CheckpointError, ConfigError, CorruptCheckpointError, UnloadableError

KINDS = {kind.__name__: kind for kind in (CorruptCheckpointError, UnloadableError, CheckpointError)}
"""The read errors that ranks report to each other; the first is the most serious."""

FULL = "full"


class ShardedReading:
    """Reads each rank's rows of a checkpoint. Rank 0 chooses the checkpoint, the others follow.

    `state`: this rank's part of the last checkpoint that all ranks could read.
    """

    def __init__(self, world: ProcessGroup, rows: Rows) -> None:
        self._world = world
        self._rows = rows
        self.state: dict[str, Any] | None = None

    def read(self, store: CheckpointStore, step: int) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Return (rank 0's part of the state, info). Only rank 0 calls this, while the others `follow`.

        Raises any rank's error on rank 0.
        """
        self._world.broadcast_json([str(store.directory), step])
        return self._read(store, step)

    def end(self) -> None:
        """Return on all ranks once rank 0 calls this; until then, the other ranks take part in its reads."""
        if self._world.is_first:
            self._world.broadcast_json(None)
            return
        while (order := self._world.broadcast_json(None)) is not None:
            where, step = order
            with suppress(CheckpointError):  # rank 0 raises it
                self._read(CheckpointStore(address(where)), step)

    def _read(self, store: CheckpointStore, step: int) -> tuple[dict[str, Any], Mapping[str, Any]]:
        self.state = None
        state: dict[str, Any] = {}
        info: Mapping[str, Any] = {}
        kind = problem = ""
        try:
            state, info = read_rows(store, step, self._rows)
        except CheckpointError as error:
            kind = next(name for name, each in KINDS.items() if isinstance(error, each))
            problem = str(error)
        told = self._world.gather_json([kind, problem])
        for name, error_of_kind in KINDS.items():
            for rank, (theirs, what) in enumerate(told):
                if theirs == name:
                    self._confirm(store, step, rank, name, what)
                    raise error_of_kind(what if rank == 0 else f"rank {rank}: {what}")
        self.state = state
        return state, info

    def _confirm(self, store: CheckpointStore, step: int, rank: int, kind: str, what: str) -> None:
        """Raise CheckpointError on rank 0 if only another rank sees damage: its node has a bad mount.

        Otherwise, rank 0 would quarantine one valid checkpoint after another.
        """
        if self._world.is_first and rank > 0 and kind == CorruptCheckpointError.__name__:
            store.verify(step)
            raise CheckpointError(
                f"rank {rank} cannot read checkpoint step {step}, which is valid on node 0: {what}; check "
                "that the same volume is mounted on its node"
            )


def check_shared(world: ProcessGroup, where: PurePath) -> None:
    """Raise ConfigError on all ranks unless each node can write where rank 0 writes checkpoints.

    Rank 0 creates a file with a random name in `where`, which the other nodes must find. The other nodes
    write one, too.
    """
    if world.position.nodes == 1:
        return
    name = f".tmp-shared-{secrets.token_hex(8)}"
    problem = _attempt(lambda: _create(where / name)) if world.is_first else ""
    name, problem = world.broadcast_json([name, problem])
    if problem == FULL:
        return
    if problem:
        raise _no_access(0, where, problem)
    is_other = world.position.local_rank == 0 and not world.is_first
    if is_other:
        problem = _attempt(lambda: _find_and_write(where, name, f"{name}-{world.rank}"))
    told = world.gather_json([world.position.node_rank, problem])
    if world.is_first:
        _attempt(lambda: _remove(where / name))
    for node, what in told:
        if what and what != FULL:
            raise _no_access(node, where, what)


def _no_access(node: int, where: PurePath, problem: str) -> ConfigError:
    return ConfigError(
        f"node {node} cannot write to the run directory {where}: {problem}; with --strategy fsdp each node "
        "saves its shards: mount one volume on all nodes, or use an address such as s3://, or --strategy ddp"
    )


def _attempt(action: Callable[[], None]) -> str:
    """Return why `action` failed; empty if it did not, and FULL for a full volume.

    A full volume is not an error here: someone may free space, and until then each save logs the problem.
    """
    try:
        action()
    except OSError as error:
        return FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
    return ""


def _find_and_write(where: PurePath, name: str, own: str) -> None:
    if isinstance(where, RemotePath):
        found = remote_at(where).read(where / name) is not None
    else:
        found = Path(where / name).exists()
    if not found:
        raise FileNotFoundError(f"it is another directory than on node 0, because {name} is missing")
    _create(where / own)
    _remove(where / own)


def _create(path: PurePath) -> None:
    if isinstance(path, RemotePath):
        remote_at(path).write(path, b"shared")
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(b"shared")


def _remove(path: PurePath) -> None:
    if isinstance(path, RemotePath):
        remote_at(path).delete(path.parent, [path.name])
        return
    Path(path).unlink(missing_ok=True)
