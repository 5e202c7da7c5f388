"""What tandem uses of torch that torch does not promise: here and nowhere else, each with a way without it.

Each was looked at in torch 2.6, 2.11 and 2.15; `_dump_fr_trace_json` takes no `backend` in 2.11 and is not
there in 2.6.

| name | without it |
|---|---|
| `batchnorm._NormBase` | the public BatchNorm classes |
| `Variable._execution_engine` | the wait for other ranks counts as backward: no straggler is named |
| `_amp_foreach_non_finite_check_and_unscale_` | one `isfinite` for each gradient, slower |
| `GradScaler._found_inf_per_device` | the gradients are looked at once more |
| `Optimizer._step_supports_amp_scaling` | the host reads in each step whether to take it |
| `_foreach_copy_` | one copy for each tensor, slower |
| `DistributedDataParallel._get_ddp_logging_data` | no figure for hidden communication |
| `_dump_fr_trace_json`, `_dump_nccl_trace_json` | the report of a hang has no list of collectives |
| `dynamic_rendezvous._delay`, `_state_holder._cache_duration` | a rendezvous takes up to 1 s longer |
| `dynamic_rendezvous.get_method_name` | a rendezvous takes 0.25 s longer |
| `_state_holder.state.participants` | who is waited for is not counted |
| `dynamic_rendezvous._RendezvousState`, `_NodeDesc` | `tandem launch` ends with 2 |
| `DynamicRendezvousHandler._stop_heartbeats` | the engine may complain of a lost store at the end |
| `_RendezvousExitOp`, `_op_executor` | an elastic job goes on 5 s after a node has left it, not at once |
| `_workers`, `_shutdown`, `_remove_worker_pids` of a DataLoader | a rank that fails waits for its loaders |
| `torch._dynamo.callback_handler` | a compilation after the first step counts as the phase it is in |
| `torch._inductor.config.deterministic` | --deterministic: a new container may compile other kernels |
| `distributed_c10d._world.pg_map` | the store of a group is known by MASTER_ADDR and MASTER_PORT alone |
| `torch._dynamo` | the first ranks start a few seconds later |

Not here: the methods that torch's SimpleElasticAgent documents for its subclasses (launch/generations.py),
and its `_assign_worker_ranks`, overridden there to heed signals: were it renamed, a stop just when nodes have
met would wait for up to a minute (tests/unit/test_round.py).
tests/unit/test_torch_private.py takes them away one by one; pyproject.toml bounds torch at the newest known.
"""

import contextlib
import inspect
import json
import sys
import threading
import time
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
    """DDP's argument for buffers: torch 2.15 renamed it and warns about the old name."""
    parameters = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    new = "forward_sync_buffers"
    return {new if new in parameters else "broadcast_buffers": broadcasts}


def is_batchnorm(module: nn.Module) -> bool:
    """Whether the module keeps running statistics as BatchNorm does."""
    return isinstance(module, getattr(nn.modules.batchnorm, "_NormBase", _PUBLIC_BATCHNORMS))


def after_gradients(loss: Tensor, call: Callable[[], None]) -> None:
    """Have `call()` run in the backward of `loss` when all gradients are computed, before DDP waits.

    DDP waits for its buckets in a callback at the end of backward, queued when the last of them is ready.
    Callbacks run in the order of queueing, and this one is queued before the first gradient.
    """

    def at_start(gradient: Tensor) -> None:
        with contextlib.suppress(AttributeError):
            torch.autograd.Variable._execution_engine.queue_callback(call)

    loss.register_hook(at_start)  # type: ignore[no-untyped-call]


def around_the_wait(before: Callable[[], None], behind: Callable[[], None]) -> None:
    """Call `before()` when all gradients are computed, and `behind()` when DDP has waited for other ranks'.

    To be called in the backward pass itself, by a hook; where the loss is known, see `after_gradients`.
    """

    def then() -> None:
        before()
        queue(behind)  # behind DDP's, which was queued before the first callback ran

    with contextlib.suppress(AttributeError):
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(then)


def around_compilation(before: Callable[[], None], behind: Callable[[], None]) -> None:
    """Call `before()` and `behind()` around each compilation in this process, on the thread that compiles.

    Only where something has imported the compiler: nothing else can compile.
    """
    handler = getattr(sys.modules.get("torch._dynamo"), "callback_handler", None)
    if handler is not None:
        with contextlib.suppress(AttributeError):
            handler.register_start_callback(lambda *_: before())
            handler.register_end_callback(lambda *_: behind())


def compile_deterministically() -> None:
    """Let torch.compile choose no kernel by timing it."""
    with contextlib.suppress(ImportError):
        from torch._inductor import config

        if hasattr(config, "deterministic"):
            config.deterministic = True


def note_nonfinite(tensors: Sequence[Tensor], found: Tensor, one: Tensor) -> None:
    """Set the scalar `found` to 1 if any value is not finite; all on one device and of one type.

    `one` is a scalar 1 there: the kernel multiplies by it, which GradScaler needs and this does not.
    """
    kernel = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)
    if kernel is not None:
        kernel(tensors, found, one)
        return
    for tensor in tensors:
        found.copy_(torch.maximum(found, (~torch.isfinite(tensor).all()).to(found.dtype)))


def has_overflowed(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether `scaler.unscale_(optimizer)`, just called, met what is not finite. Waits for the device."""
    if hasattr(scaler, "_found_inf_per_device"):
        return any(bool(value) for value in scaler._found_inf_per_device(optimizer).values())
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    values = (gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients)
    return not all(bool(torch.isfinite(each).all()) for each in values)


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step leaves itself out when its `found_inf` is above 0, without the host's knowing."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def copy_all(targets: list[Tensor], sources: list[Tensor], non_blocking: bool = False) -> None:
    """Copy each source into its target."""
    copy = getattr(torch, "_foreach_copy_", None)
    if copy is not None and targets:  # it refuses empty lists
        copy(targets, sources, non_blocking=non_blocking)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=non_blocking)


def hidden_sync_seconds(model: nn.Module) -> float:
    """Seconds of the gradient all-reduce behind backward's own work, in the last step that DDP sampled.

    From DDP's own counters; 0.0 where there are none.
    """
    try:
        numbers = model._get_ddp_logging_data()  # type: ignore[operator]
        return float(max(0, int(numbers.get("backward_compute_comm_overlap_time", 0)))) / 1e9
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return 0.0


def flight_record() -> bytes:
    """torch's flight recorder as JSON: the last collectives of this rank. Empty where there is none.

    Never raises: the thread that asks is the one that says where this rank is.
    """
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if dist.is_initialized():
            records = [*_records(dist.get_backend())]
            return next((each for each in records if json.loads(each).get("entries")), records[-1])
    return b""


def _records(backend: str) -> Iterator[bytes]:
    """What each recorder has that may be a group's: NCCL's older group keeps its own, and the one of torch
    2.15 that is called "nccl", too, writes under another name."""
    from torch._C import _distributed_c10d

    if backend == "nccl":
        with contextlib.suppress(Exception):
            yield bytes(_distributed_c10d._dump_nccl_trace_json())  # type: ignore[attr-defined,unused-ignore]
    try:
        for name in ("nccl2", backend) if backend == "nccl" else (backend,):
            yield bytes(_distributed_c10d._dump_fr_trace_json(backend=name))
    except TypeError:  # until 2.11 there was one recorder
        yield bytes(_distributed_c10d._dump_fr_trace_json())


def hasten_rendezvous(poll_seconds: float) -> None:
    """Take two waits out of the engine's rendezvous that have no setting.

    Between two looks at the shared state it pauses for 1 s: 50 ms are enough, one small read per node. And
    each event that it records asks `inspect.stack` for the caller's name, with source text of every frame:
    0.25 s a rendezvous; `sys._getframe` knows the same.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    engine = vars(dynamic_rendezvous)
    original = engine.get("_delay")
    if original is not None and original.__module__ != __name__:

        def pause(seconds: float | tuple[float, float]) -> None:
            original(poll_seconds if seconds == 1 else seconds)

        engine["_delay"] = pause
    if "get_method_name" in engine:
        engine["get_method_name"] = lambda depth=2: sys._getframe(depth).f_code.co_name


def hasten_handler(handler: Any, poll_seconds: float) -> None:
    """The other half of that pause: how long the handler takes what it last read for the present state."""
    holder = getattr(handler, "_state_holder", None)
    if holder is not None and hasattr(holder, "_cache_duration"):
        holder._cache_duration = poll_seconds


def listening_at(descriptor: int | None) -> dict[str, Any]:
    """A TCPStore's arguments to serve at a listening descriptor; None: it opens its own port.

    libuv's store takes none before torch 2.11 (seen in 2.6), the older one does.
    """
    if descriptor is None:
        return {}
    old = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11)
    return {"master_listen_fd": descriptor, **({"use_libuv": False} if old else {})}


def handler_pace(alive_seconds: int, attempts: int, most_backoff_seconds: float) -> dict[str, Any]:
    """A rendezvous handler's arguments: a node that is silent for so many times so long is lost, and who was
    too late to write into the shared state waits up to so long. torch 2.6 takes none: 15 s, and no wait.
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
    """The addresses of the nodes that have come to the rendezvous; None where the handler does not say."""
    with contextlib.suppress(AttributeError, TypeError):
        return [str(node.addr) for node in handler._state_holder.state.participants]
    return None


def rendezvous_kinds() -> tuple[Any, Any]:
    """The classes of the rendezvous state, and of a node in it. Raises ConfigError where there are none."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    try:
        return dynamic_rendezvous._RendezvousState, dynamic_rendezvous._NodeDesc
    except AttributeError as error:
        raise ConfigError(
            f"tandem does not support the rendezvous of torch {torch.__version__}; install torch 2.6 to 2.15"
        ) from error


def stop_keep_alive(handler: Any) -> None:
    """The handler says no more that this node lives.

    The engine waits for its thread, which may stand in a read of a store that does not answer.
    """

    def stop() -> None:
        with contextlib.suppress(Exception):
            handler._stop_heartbeats()

    stopping = threading.Thread(target=stop, name="tandem-stopping", daemon=True)
    stopping.start()
    stopping.join(LEAVE_SECONDS)


def leave_rendezvous(handler: Any) -> None:
    """Take this node out of the rendezvous, as before it joins again. Raises RendezvousError."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    exit_kind = getattr(dynamic_rendezvous, "_RendezvousExitOp", None)
    executor = getattr(handler, "_op_executor", None)
    if exit_kind is not None and executor is not None:
        executor.run(exit_kind(), time.monotonic() + LEAVE_SECONDS)


def import_what_ddp_imports() -> None:
    """Import now what DDP's constructor imports when it is called: 900 modules."""
    with contextlib.suppress(ImportError):
        import torch._dynamo  # noqa: F401


def end_loader_processes(iterator: Any) -> None:
    """Kill the processes of a DataLoader's iterator, and keep it from waiting for them at its own end.

    torch 2.6 to 2.15 (dataloader.py, _shutdown_workers): it may hang where one of them was killed.
    """
    if getattr(iterator, "_worker_pids_set", False) and hasattr(torch._C, "_remove_worker_pids"):
        torch._C._remove_worker_pids(id(iterator))  # else their end is an error of this process
        iterator._worker_pids_set = False
    iterator._shutdown = True
    for worker in getattr(iterator, "_workers", ()):
        worker.kill()


def stores_of_groups() -> list[Any]:
    """The stores below the process groups that are open in this process, without their prefixes."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        return [without_prefixes(store) for _, store in c10d._world.pg_map.values()]  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):
        return []


def without_prefixes(store: Any) -> Any:
    """The store that a PrefixStore is on."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
