"""Everything that tandem uses of torch's private API, in one place, each with a fallback.

Each was checked in torch 2.6, 2.11 and 2.15. `_dump_fr_trace_json` has no argument `backend` in 2.11, and
does not exist in 2.6.

| name | without it |
|---|---|
| `batchnorm._NormBase` | the public BatchNorm classes |
| `Variable._execution_engine` | the wait for other ranks counts as backward: no straggler is reported |
| `distributed._broadcast_coalesced` | waits for buffers count as own time: a straggler may not be reported |
| `_functional_collectives.wait_tensor`, `wait_tensors` | the same for waits of DTensors |
| `_amp_foreach_non_finite_check_and_unscale_` | one `isfinite` for each gradient, slower |
| `GradScaler._found_inf_per_device` | the gradients are checked once more |
| `Optimizer._step_supports_amp_scaling` | the host reads in each step whether to skip it |
| `_foreach_copy_` | one copy for each tensor, slower |
| `DistributedDataParallel._get_ddp_logging_data` | no number for hidden communication |
| `_dump_fr_trace_json`, `_dump_nccl_trace_json` | the report of a hang has no list of collectives |
| `dynamic_rendezvous._delay`, `_state_holder._cache_duration` | a rendezvous takes up to 1 s longer |
| `dynamic_rendezvous.get_method_name` | a rendezvous takes 0.25 s longer |
| `_state_holder.state.participants` | the nodes that are missing are not reported |
| `dynamic_rendezvous._RendezvousState`, `_NodeDesc` | `tandem launch` exits with 2 |
| `DynamicRendezvousHandler._stop_heartbeats` | the engine may report a lost store at the end |
| `_RendezvousExitOp`, `_op_executor` | an elastic job continues 5 s after a node has left, not at once |
| `_workers`, `_shutdown`, `_remove_worker_pids` of a DataLoader | a rank that fails waits for its loaders |
| `_utils.ExceptionWrapper` | a batch that cannot be sent is an error of the task's code, in torch's words |
| `autograd._profiler_enabled` | two profilers at once are reported in torch's words |
| `cuda.memory._snapshot`, `_record_memory_history` | `tandem memory` has no snapshot of GPUs |
| `torch._dynamo.callback_handler` | a later compilation counts as part of its phase |
| `torch._inductor.config.deterministic` | --deterministic: a new container may compile other kernels |
| `distributed_c10d._world.pg_map` | the store of a group is known by MASTER_ADDR and MASTER_PORT alone |
| `torch._dynamo` | the first ranks start a few seconds later |
| `nn.init._no_grad_trunc_normal_` | `--strategy fsdp`: each rank builds a whole model that calls it |
| `_subclasses.fake_tensor` | `--strategy fsdp`: each rank builds the whole model |

Not in the table: the methods that torch's SimpleElasticAgent documents for its subclasses
(launch/generations.py), and its `_assign_worker_ranks`, which is overridden there to react to signals. If
torch renamed it, a stop just after nodes have joined would wait for up to a minute
(tests/unit/test_generation_sync.py).

tests/unit/test_torch_private.py removes the names one by one; pyproject.toml limits torch to the newest
version checked.
"""

import contextlib
import inspect
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tandem.errors import ConfigError
from tandem.timeouts import LEAVE_SECONDS

_PUBLIC_BATCHNORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def buffer_argument(broadcasts: bool) -> dict[str, Any]:
    """Return DDP's argument for buffer broadcasts.

    torch 2.15 renamed it and warns about the old name.
    """
    parameters = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    new = "forward_sync_buffers"
    return {new if new in parameters else "broadcast_buffers": broadcasts}


def is_batchnorm(module: nn.Module) -> bool:
    """Return whether the module keeps running statistics as BatchNorm does."""
    return isinstance(module, getattr(nn.modules.batchnorm, "_NormBase", _PUBLIC_BATCHNORMS))


def after_gradients(loss: Tensor, call: Callable[[], None]) -> None:
    """Call `call()` in the backward pass of `loss` when all gradients are computed, before DDP waits.

    DDP waits for its buckets in a callback at the end of backward, which it queues when its last bucket is
    ready. Callbacks run in queue order, and this one is queued before the first gradient. See
    docs/architecture.md#measuring-a-ranks-own-time.
    """

    def at_start(gradient: Tensor) -> None:
        with contextlib.suppress(AttributeError):
            torch.autograd.Variable._execution_engine.queue_callback(call)

    loss.register_hook(at_start)  # type: ignore[no-untyped-call]


def hook_gradient_wait(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before()` when all gradients are computed, and `after()` when DDP has waited for other ranks.

    Call this in the backward pass, from a hook. If the loss is known, see `after_gradients`.
    """

    def then() -> None:
        before()
        queue(after)  # after DDP's callback, which was queued before the first callback ran

    with contextlib.suppress(AttributeError):
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(then)


def waiting_calls() -> list[tuple[Any, str]]:
    """Return (owner, name) of the calls in which Python code waits for other ranks.

    The functions of `torch.distributed` all wait in `Work.wait`. Functional collectives, which DTensors use,
    and the broadcast of DDP's buffers wait in C++. The first is only listed if it has been imported.
    """
    import torch.distributed as dist

    names = {
        getattr(dist, "Work", None): ("wait",),
        getattr(dist, "ProcessGroup", None): ("monitored_barrier",),
        dist: ("_broadcast_coalesced",),
        sys.modules.get("torch.distributed._functional_collectives"): ("wait_tensor", "wait_tensors"),
    }
    return [(owner, name) for owner, each in names.items() for name in each if hasattr(owner, name)]


def is_compiling() -> bool:
    return torch.compiler.is_compiling()


def around_compilation(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before()` and `after()` around each compilation in this process, on the compiling thread.

    Does nothing if the compiler has not been imported, because then nothing can compile.
    """
    handler = getattr(sys.modules.get("torch._dynamo"), "callback_handler", None)
    if handler is not None:
        with contextlib.suppress(AttributeError):
            handler.register_start_callback(lambda *_: before())
            handler.register_end_callback(lambda *_: after())


def compile_deterministically() -> None:
    """Keep torch.compile from choosing kernels by timing them."""
    with contextlib.suppress(ImportError):
        from torch._inductor import config

        if hasattr(config, "deterministic"):
            config.deterministic = True


def note_nonfinite(tensors: Sequence[Tensor], found: Tensor, one: Tensor) -> None:
    """Set the scalar `found` to 1 if any value is not finite; all tensors have one device and dtype.

    `one` is a scalar 1 on the device. The kernel multiplies by it, which only GradScaler needs.
    """
    kernel = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)
    if kernel is not None:
        kernel(tensors, found, one)
        return
    for tensor in tensors:
        found.copy_(torch.maximum(found, (~torch.isfinite(tensor).all()).to(found.dtype)))


def has_overflowed(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the last `scaler.unscale_(optimizer)` found a non-finite value. Waits for the device."""
    if hasattr(scaler, "_found_inf_per_device"):
        return any(bool(value) for value in scaler._found_inf_per_device(optimizer).values())
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    values = (gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients)
    return not all(bool(torch.isfinite(each).all()) for each in values)


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer skips a step on the device when its `found_inf` is above 0."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def copy_all(targets: list[Tensor], sources: list[Tensor], non_blocking: bool = False) -> None:
    copy = getattr(torch, "_foreach_copy_", None)
    if copy is not None and targets:  # it rejects empty lists
        copy(targets, sources, non_blocking=non_blocking)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=non_blocking)


def hidden_sync_seconds(model: nn.Module) -> float:
    """Return the seconds of gradient all-reduce that overlapped with backward, in DDP's last sampled step.

    From DDP's own counters; 0.0 if there are none.
    """
    try:
        numbers = model._get_ddp_logging_data()  # type: ignore[operator]
        return float(max(0, int(numbers.get("backward_compute_comm_overlap_time", 0)))) / 1e9
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return 0.0


def flight_record() -> bytes:
    """Return torch's flight recorder as JSON: the last collectives of this rank; empty if there is none.

    Never raises, because the calling thread also sends the rank's heartbeats.
    """
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if dist.is_initialized():
            records = [*_records(dist.get_backend())]
            return next((each for each in records if json.loads(each).get("entries")), records[-1])
    return b""


def _records(backend: str) -> Iterator[bytes]:
    """Yield the content of each recorder that may belong to the group.

    NCCL's older group has its own recorder, and the group of torch 2.15 that is also called "nccl" uses
    another name.
    """
    from torch._C import _distributed_c10d

    if backend == "nccl":
        with contextlib.suppress(Exception):
            yield bytes(_distributed_c10d._dump_nccl_trace_json())  # type: ignore[attr-defined,unused-ignore]
    try:
        for name in ("nccl2", backend) if backend == "nccl" else (backend,):
            yield bytes(_distributed_c10d._dump_fr_trace_json(backend=name))
    except TypeError:  # until 2.11 there was one recorder
        yield bytes(_distributed_c10d._dump_fr_trace_json())


def shorten_rendezvous_waits(poll_seconds: float) -> None:
    """Shorten two waits in the rendezvous engine that have no setting.

    It pauses for 1 s between two reads of the shared state; 50 ms are enough, at one small read per node. And
    for each event it calls `inspect.stack` for the caller's name, which reads the source of every frame and
    takes 0.25 s per rendezvous; `sys._getframe` returns the same.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    engine = vars(dynamic_rendezvous)
    original = engine.get("_delay")
    # Only once: a second call would wrap this function again.
    if original is not None and original.__module__ != __name__:

        def pause(seconds: float | tuple[float, float]) -> None:
            # 1 is the pause between two reads. The other pauses are random, to separate nodes, and stay.
            original(poll_seconds if seconds == 1 else seconds)

        engine["_delay"] = pause
    if "get_method_name" in engine:
        engine["get_method_name"] = lambda depth=2: sys._getframe(depth).f_code.co_name


def shorten_handler_waits(handler: Any, poll_seconds: float) -> None:
    """Shorten how long the handler treats its last read of the state as current.

    See `shorten_rendezvous_waits`.
    """
    holder = getattr(handler, "_state_holder", None)
    if holder is not None and hasattr(holder, "_cache_duration"):
        holder._cache_duration = poll_seconds


def listening_at(descriptor: int | None) -> dict[str, Any]:
    """Return a TCPStore's arguments to serve on a listening descriptor; without one, it opens its own port.

    Before torch 2.11 (observed in 2.6), libuv's store does not accept one; the older store does.
    """
    if descriptor is None:
        return {}
    old = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11)
    return {"master_listen_fd": descriptor, **({"use_libuv": False} if old else {})}


def handler_intervals(alive_seconds: int, attempts: int, most_backoff_seconds: float) -> dict[str, Any]:
    """Return a rendezvous handler's arguments for its heartbeat and backoff times.

    A node is lost after `attempts` silent intervals of `alive_seconds`. A node whose write to the shared
    state came too late waits up to `most_backoff_seconds`. torch 2.6 has no such arguments: 15 s, and no
    wait.
    """
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    wanted = {
        "keep_alive_interval": alive_seconds,
        "keep_alive_max_attempt": attempts,
        "cas_backoff_max_seconds": most_backoff_seconds,
    }
    known = inspect.signature(DynamicRendezvousHandler.from_backend).parameters
    return {name: value for name, value in wanted.items() if name in known}


def nodes_here(handler: Any) -> list[str] | None:
    """Return the addresses of the nodes that have joined the rendezvous; None if they are unknown."""
    with contextlib.suppress(AttributeError, TypeError):
        return [str(node.addr) for node in handler._state_holder.state.participants]
    return None


def rendezvous_kinds() -> tuple[Any, Any]:
    """Return the classes of the rendezvous state and of a node in it.

    Raises ConfigError if this torch has none.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    try:
        return dynamic_rendezvous._RendezvousState, dynamic_rendezvous._NodeDesc
    except AttributeError as error:
        raise ConfigError(
            f"tandem does not support the rendezvous of torch {torch.__version__}; install torch 2.6 to 2.15"
        ) from error


def stop_keep_alive(handler: Any, limit: float = LEAVE_SECONDS) -> None:
    """Stop the handler's heartbeats for this node.

    The engine waits for its thread, which may be blocked in a read of a store that does not answer, so the
    wait ends after `limit` seconds.
    """

    def stop() -> None:
        with contextlib.suppress(Exception):
            handler._stop_heartbeats()

    stopping = threading.Thread(target=stop, name="tandem-stopping", daemon=True)
    stopping.start()
    stopping.join(limit)


def leave_rendezvous(handler: Any) -> None:
    """Remove this node from the rendezvous, as before it joins again. Raises RendezvousError."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    exit_kind = getattr(dynamic_rendezvous, "_RendezvousExitOp", None)
    executor = getattr(handler, "_op_executor", None)
    if exit_kind is not None and executor is not None:
        # The engine's deadlines are times of the monotonic clock.
        executor.run(exit_kind(), time.monotonic() + LEAVE_SECONDS)


def import_what_ddp_imports() -> None:
    """Import the 900 modules that DDP's constructor would import when it is called."""
    with contextlib.suppress(ImportError):
        import torch._dynamo  # noqa: F401


def end_loader_processes(iterator: Any) -> None:
    """Kill the processes of a DataLoader's iterator, and keep it from waiting for them at its own end.

    In torch 2.6 to 2.15 (dataloader.py, _shutdown_workers), it may hang if one of them was killed.
    """
    if getattr(iterator, "_worker_pids_set", False) and hasattr(torch._C, "_remove_worker_pids"):
        # Otherwise torch's SIGCHLD handler treats their end as this process's error.
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    iterator._shutdown = True
    for worker in getattr(iterator, "_workers", ()):
        worker.kill()


def loader_pids(iterator: Any) -> list[int]:
    """Return the IDs of the processes of a DataLoader's iterator; empty if they are unknown."""
    return [worker.pid for worker in getattr(iterator, "_workers", ())]


def worker_failure(error: BaseException) -> Any:
    """Return what a DataLoader's process sends in place of a batch, so that its iterator raises `error`."""
    wrapper = getattr(torch._utils, "ExceptionWrapper", None)
    raised = (type(error), error, error.__traceback__)
    return error if wrapper is None else wrapper(raised, "in a loader process")


def stores_of_groups() -> list[Any]:
    """Return the stores of the open process groups of this process, without their prefixes."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        return [without_prefixes(store) for _, store in c10d._world.pg_map.values()]  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):
        return []


def without_prefixes(store: Any) -> Any:
    """Return the store that a PrefixStore is based on."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def is_profiling() -> bool:
    """Return whether a profiler of torch records the calling thread."""
    enabled = getattr(torch.autograd, "_profiler_enabled", None)
    return bool(enabled is not None and enabled())


def quiet_profiler() -> None:
    """Silence the profiler's own log. Call this before its first use, when it reads its log level.

    Without a GPU, a CUDA build of torch logs an error that does not matter for a CPU profile.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def memory_snapshot(while_recorded: Callable[[], None]) -> Any:
    """Return the CUDA allocator's snapshot, with the Python lines of allocations in `while_recorded`.

    pytorch.org/memory_viz shows it. Ends a recording that the program has started itself.
    """
    memory: Any = torch.cuda.memory
    record = getattr(memory, "_record_memory_history", lambda *_, **__: None)
    record(stacks="python")
    try:
        while_recorded()
        return getattr(memory, "_snapshot", lambda: None)()
    finally:
        record(enabled=None)


class FakeTensors:
    """torch's tensors with a device and a shape, but without memory."""

    def __init__(self) -> None:
        """Raise ImportError or AttributeError if torch has no such tensors."""
        from torch._subclasses import fake_tensor
        from torch.utils import _python_dispatch

        self.kind: type[Tensor] = fake_tensor.FakeTensor
        self.paused: Callable[[], contextlib.AbstractContextManager[Any]] = (
            _python_dispatch._disable_current_modes
        )
        """In this block, tensors are real, and no mode of torch sees operations."""
        self._mode: Callable[..., Any] = fake_tensor.FakeTensorMode
        self._last: Any = None

    @contextlib.contextmanager
    def mode(self) -> Iterator[Callable[[], None]]:
        """In this block, created tensors are fake. Yields a function to call after each operation."""
        # An operation without a rule for fake tensors would otherwise run on zeros.
        mode = self._mode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._last = mode
        mode.__deepcopy__ = lambda _memo: mode  # a copied tensor's view would not be in its memory
        # torch keeps weak references to results, and does not swap a tensor that has one in Module.to().
        with mode, warnings.catch_warnings():
            # A copy of a tensor looks whether it has memory.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield mode.fake_tensor_converter.meta_converter.tensor_memo.clear

    def is_of_last_mode(self, tensor: Tensor) -> bool:
        """Return whether a fake tensor was created in the last block of `mode`, and not by torch.compile."""
        return getattr(tensor, "fake_mode", None) is self._last

    @contextlib.contextmanager
    def whole_calls(self, note: Callable[..., Tensor]) -> Iterator[None]:
        """In this block, call `note(function, ...)` instead of each function that reads what it has drawn."""
        real = getattr(nn.init, "_no_grad_trunc_normal_", None)
        if real is None:
            yield
            return

        def noted(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
            if isinstance(tensor, self.kind):
                return note(real, tensor, *args, **options)
            made: Tensor = real(tensor, *args, **options)
            return made

        nn.init._no_grad_trunc_normal_ = noted
        try:
            yield
        finally:
            nn.init._no_grad_trunc_normal_ = real

    def own_attributes(self, tensor: Tensor) -> dict[str, Any]:
        """Return the attributes of a fake tensor that are not torch's."""
        with self._mode():
            torchs = vars(torch.empty(0))
        return {name: value for name, value in vars(tensor).items() if name not in torchs}
