"""Open the process group, exchange values, close it.

All ranks call everything here together; no caller puts a call under `if rank == 0`.
"""

import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.distributed.batchnorm import synchronized
from tandem.distributed.group_store import announce, check_same_kind, forget_dump_signal, limited, open_store
from tandem.distributed.peers import is_gpu_failure, is_of_cuda
from tandem.distributed.position import Connection, Position
from tandem.errors import ConfigError, GpuLostError, PeerLostError, TandemError
from tandem.telemetry.stragglers import PendingGather
from tandem.text import first_line, in_one_line
from tandem.torch_private import is_batchnorm

T = TypeVar("T")
# Data passes through the device in pieces of this size: a whole state may not fit there next to the model.
BROADCAST_CHUNK_BYTES = 64 * 2**20
TAKEN = re.compile("EADDRINUSE|[Aa]ddress already in use")
SAME_GPU = re.compile("Duplicate GPU detected|Multiple Ranks are using the same GPU")
"""The messages of NCCL up to 2.29, and from 2.30 on."""


_kept: list[Any] = []
"""Groups that this process has opened, kept alive until it ends.

The destructor of a group joins gloo's threads, while one of those may wait for the GIL that the destructor
holds (torch 2.6: 7 of 40 runs did not end; torch 2.15: none).
"""


class ProcessGroup:
    """An open process group, from `ProcessGroup.open` to `close`."""

    def __init__(
        self,
        position: Position,
        device: torch.device,
        devices: tuple[torch.device, ...] = (),
        store: Any = None,
    ) -> None:
        self.position = position
        self.store = store
        """The store through which the ranks have connected."""
        self.device = device
        self.devices = devices or (device,)
        """All devices of this rank. The first, `device`, has the batches, the loss and exchanged values."""
        self.rank = position.rank
        self.size = position.world_size

    @property
    def is_first(self) -> bool:
        """True for rank 0, the only rank that writes files and reports."""
        return self.rank == 0

    @classmethod
    def open(
        cls,
        position: Position,
        connection: Connection,
        device: torch.device,
        timeout_seconds: float,
        devices: tuple[torch.device, ...] = (),
        connect_seconds: float | None = None,
        had_gpu: bool = False,
    ) -> "ProcessGroup":
        """Join the group; every rank of the job calls this. Raises PeerLostError.

        `timeout_seconds` limits every collective, and must allow for compilation in the first step; the
        watchdog detects hangs. Once all ranks have met, `connect_seconds` limits how long they may take to
        connect (default: the same); then the process ends (see `group_store.py`). `had_gpu`: see `Grant`.
        """
        timeout = timedelta(seconds=timeout_seconds)
        connecting: AbstractContextManager[None] = nullcontext()
        try:
            store = open_store(position, connection, timeout)
            if position.world_size > 1:
                # The others cannot open their group before rank 0 reaches `check_same_kind`.
                if position.rank == 0:
                    forget_dump_signal(store)
                announce(store, position)
                check_same_kind(store, position, device.type)
                limit = connect_seconds or timeout_seconds
                connecting = limited(store, position, connection, device.type, limit)
            with connecting:
                dist.init_process_group(
                    store=store,
                    rank=position.rank,
                    world_size=position.world_size,
                    timeout=timeout,
                    **_bind(device, devices),
                )
                _kept.append(dist.group.WORLD)
                if device.type == "cuda":  # NCCL connects here at the latest
                    dist.all_reduce(torch.zeros(1, device=device))
                    torch.cuda.synchronize(device)
        except (RuntimeError, ValueError, OSError) as error:
            # A new process may recover the GPU. The caller exits with another code for that, so the error is
            # not changed.
            if is_gpu_failure(error):
                raise
            raise _why_not_open(error, position, connection.master, had_gpu) from error
        return cls(position, device, devices, store)

    @property
    def ddp_devices(self) -> list[torch.device] | None:
        """DDP's `device_ids`: DDP moves inputs to the device of a model that is on a single GPU."""
        return [self.device] if self.device.type == "cuda" and len(self.devices) == 1 else None

    def close(self) -> None:
        """Leave after success. After a failure, just exit, because destroying the group would deadlock."""
        dist.destroy_process_group()

    def synchronize_batchnorm(self, model: nn.Module) -> nn.Module:
        """Make every BatchNorm use the global batch: torch's layer on GPUs, tandem's on CPUs.

        A single rank has the whole global batch and keeps its layers.
        """
        if self.size == 1:
            return model
        if self.device.type != "cuda":
            return synchronized(model)
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        assert isinstance(converted, nn.Module)
        return converted

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sum over ranks in float64 (exact for counts below 2**53)."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def mean(self, values: Tensor) -> Tensor:
        """Return the element-wise mean over ranks of a tensor on the device, without waiting for it."""
        if self.size == 1:
            return values
        # all_reduce works in place, and the caller keeps its values.
        total = values.clone()
        dist.all_reduce(total)
        return total / self.size

    def gather(self, value: int) -> list[int]:
        """Gather an integer below 2**63 from every rank, ordered by rank, on all ranks."""
        own_value = torch.tensor([value], device=self.device)
        parts = [torch.empty_like(own_value) for _ in range(self.size)]
        dist.all_gather(parts, own_value)
        return [int(part) for part in parts]

    def gather_rows(self, row: Sequence[float]) -> "PendingGather":
        """Start to gather every rank's row of equal length, in float64, without waiting.

        On busy cores, the exchange takes 2 to 3 ms, during which the next step can run.
        """
        own_row = torch.tensor(row, dtype=torch.float64, device=self.device)
        rows = torch.empty(self.size * len(row), dtype=torch.float64, device=self.device)
        return PendingGather(
            dist.all_gather_into_tensor(rows, own_row, async_op=True), own_row, rows.view(self.size, -1)
        )

    def gather_json(self, value: object) -> list[Any]:
        """Gather a JSON value from every rank, ordered by rank, on all ranks; for rare and small values."""
        payload = bytearray(json.dumps(value).encode())
        lengths = self.gather(len(payload))
        # all_gather needs equal sizes. JSON ignores the spaces at the end.
        padded = torch.frombuffer(payload.ljust(max(lengths), b" "), dtype=torch.uint8).to(self.device)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [json.loads(part.cpu().numpy().tobytes()) for part in parts]

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Gather every rank's bytes on rank 0, ordered by rank, in chunks of 64 MiB; empty on other ranks."""
        lengths = self.gather(len(payload))
        parts = [payload]
        for rank in range(1, self.size):
            received = bytearray()
            for start in range(0, lengths[rank], BROADCAST_CHUNK_BYTES):
                stop = min(start + BROADCAST_CHUNK_BYTES, lengths[rank])
                if self.rank == rank:
                    chunk = torch.frombuffer(bytearray(payload[start:stop]), dtype=torch.uint8)
                    # Point to point: all_gather would need the memory for all payloads on every rank.
                    dist.send(chunk.to(self.device), dst=0)
                elif self.is_first:
                    chunk = torch.empty(stop - start, dtype=torch.uint8, device=self.device)
                    dist.recv(chunk, src=rank)
                    received += chunk.cpu().numpy().tobytes()
            parts.append(bytes(received))
        return parts if self.is_first else []

    def rotate_bytes(self, payload: bytes, shift: int) -> bytes:
        """Send bytes to the rank `shift` before this one, and return those of the rank `shift` after it."""
        lengths = self.gather(len(payload))
        source = (self.rank + shift) % self.size
        sent = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self.device)
        received = torch.empty(lengths[source], dtype=torch.uint8, device=self.device)
        operations = [
            dist.P2POp(dist.isend, sent, (self.rank - shift) % self.size),
            dist.P2POp(dist.irecv, received, source),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received.cpu().numpy().tobytes()

    def broadcast_bytes(self, payload: bytes | None, source: int = 0) -> bytes:
        """Broadcast a rank's bytes to every rank, in chunks of 64 MiB; other ranks pass None."""
        size = torch.tensor([len(payload) if payload is not None else 0], device=self.device)
        dist.broadcast(size, src=source)
        total = int(size.item())
        parts = io.BytesIO()
        for start in range(0, total, BROADCAST_CHUNK_BYTES):
            length = min(BROADCAST_CHUNK_BYTES, total - start)
            if payload is not None:
                # A copy, because torch warns about tensors over read-only bytes.
                chunk = torch.frombuffer(bytearray(payload[start : start + length]), dtype=torch.uint8)
                chunk = chunk.to(self.device)
            else:
                chunk = torch.empty(length, dtype=torch.uint8, device=self.device)
            dist.broadcast(chunk, src=source)
            parts.write(chunk.cpu().numpy().tobytes())
        return parts.getvalue()

    def broadcast_json(self, value: object, source: int = 0) -> Any:
        """Broadcast a rank's JSON value to every rank."""
        mine = json.dumps(value).encode() if self.rank == source else None
        return json.loads(self.broadcast_bytes(mine, source))

    def on_first(self, action: Callable[[], T]) -> T | None:
        """Return the result of `action` on rank 0, None elsewhere. Its ConfigError is raised on all ranks."""
        result = None
        problem = ""
        if self.is_first:
            try:
                result = action()
            # Without this, the other ranks would wait in the broadcast until its timeout.
            except ConfigError as error:
                problem = str(error)
        if problem := str(self.broadcast_json(problem)):
            raise ConfigError(problem)
        return result

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Broadcast rank 0's buffers (running statistics) to all ranks, even those made by a forward pass."""
        buffers = dict(model.named_buffers())
        # Only layers other than BatchNorm create or reshape buffers in a forward pass, so only they need the
        # exchange of forms.
        if has_buffers_beside_batchnorm(model):
            forms = {n: [str(b.dtype).removeprefix("torch."), [*b.shape]] for n, b in buffers.items()}
            for name, (dtype, shape) in self.broadcast_json(forms).items():
                if forms.get(name) != [dtype, shape]:
                    owner, _, last = name.rpartition(".")
                    buffer = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                    model.get_submodule(owner)._buffers[last] = buffers[name] = buffer
                dist.broadcast(buffers[name], src=0)
            return
        for buffer in buffers.values():
            dist.broadcast(buffer, src=0)

    def check_same_settings(self, settings: Mapping[str, object]) -> None:
        """Raise ConfigError for the first key in which this rank differs from rank 0."""
        reference = self.broadcast_json(dict(settings))
        # Rank 0's values went through JSON, which turns tuples into lists.
        own = json.loads(json.dumps(dict(settings)))
        different = [key for key in sorted({*reference, *own}) if reference.get(key) != own.get(key)]
        # All ranks must exit together; one that continued would wait for the others in its next collective.
        if self.sum([float(bool(different))])[0] == 0:
            return
        if different:
            key = different[0]
            raise ConfigError(
                f"node {self.position.node_rank} and node 0 were started with different settings: "
                f"{key} is {own.get(key)!r} here and {reference.get(key)!r} there; "
                "use the same value on all nodes"
            )
        raise PeerLostError("another node was started with different settings; see its log")

    def once_per_node(self, action: Callable[[], None]) -> None:
        """Run `action` on local rank 0 of every node while the others wait; all ranks fail if one does."""
        error: Exception | None = None
        if self.position.local_rank == 0:
            try:
                action()
            # Keep the error until the sum, in which the other ranks wait.
            except Exception as caught:
                error = caught
        failed = self.sum([float(error is not None)])[0]
        if error is not None:
            raise error
        if failed:
            raise PeerLostError("preparing the data failed on another node; see its log")


def _why_not_open(
    error: Exception, position: Position, master: tuple[str, int] | None, had_gpu: bool
) -> TandemError:
    """Return the error for this rank if `error` was raised while the group opened."""
    if TAKEN.search(str(error)):
        port = master[1] if master else os.environ.get("MASTER_PORT")
        return ConfigError(
            f"port {port}, the rendezvous port of the ranks, is in use by another program on this host, "
            "maybe by an earlier run; stop it, or give all ranks another MASTER_PORT"
        )
    if SAME_GPU.search(str(error)):
        return ConfigError(
            f"{position} got the same GPU as another rank, but NCCL needs one GPU per rank; "
            "set --nproc to the number of GPUs, or use --device cpu"
        )
    if is_of_cuda(error):
        kind = GpuLostError if had_gpu else ConfigError
        full = (
            "; another process may hold its memory, see nvidia-smi" if "out of memory" in str(error) else ""
        )
        return kind(f"{position} cannot use its GPU: {first_line(error)}{full}; or use --device cpu")
    return PeerLostError(f"cannot join the process group as {position}: {in_one_line(error)}")


def _bind(device: torch.device, devices: Sequence[torch.device]) -> dict[str, Any]:
    """Select this process's device; return the arguments of `init_process_group` for it.

    A rank with one GPU binds its group to it; otherwise torch 2.15 guesses by the global rank. A model on
    several GPUs has gradients on each, which only NCCL's older group supports. In the newer one, DDP's
    backward also does not overlap with its communication (see launch/torch_variables.py).
    """
    if device.type != "cuda":
        return {"backend": "gloo"}
    # A user's code without an explicit device then uses this GPU, too.
    torch.cuda.set_device(device)
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")  # read when the first group opens
    return {"backend": "nccl"} if len(devices) > 1 else {"backend": "nccl", "device_id": device}


def has_buffers_beside_batchnorm(module: nn.Module) -> bool:
    """Return True if a layer other than BatchNorm has a buffer, even one that is still None."""
    return any(child._buffers for child in module.modules() if not is_batchnorm(child))


# Observe the collectives that user code calls, before they run.

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
SAME_SHAPES = ("allreduce", "all_reduce", "allgather", "all_gather", "reduce_scatter", "broadcast")
"""Collectives for which every rank must pass tensors of the same shapes."""


class CollectiveObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that calls `meet(name, shapes)` before each collective; an error from it stops the call.

    `shapes`: those of all its tensors, or empty for a collective whose shapes may differ between ranks.
    """

    def __init__(self, meet: Callable[[str, list[list[int]]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meet = meet

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # c10d's operators have names such as allgather_ and _allgather_base_.
        name = func.name().partition("::")[2].partition(".")[0]
        # wait_tensor starts nothing: it waits for a collective that has been seen already.
        if func.namespace in NAMESPACES and not name.startswith("wait"):
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            alike = any(word in name for word in SAME_SHAPES)
            self._meet(name.strip("_"), [[*each.shape] for each in tensors] if alike else [])
        return func(*args, **(kwargs or {}))
