"""CUDA played by the CPU: the code under test sees `cuda:0` and takes its branches, the numbers are real.

Copies, pinned memory, events, streams and whatever waits for the device are counted, each with the place in
src/tandem that asked for it. What it cannot play: that work on a stream is late, that memory runs out, and
the numbers of a kernel of CUDA's own.

`play()` begins it in this process. `run_rank` is rank/task.py's rank function on a played GPU: a test
starts `python -m played_gpu launch ...` (see `command`), which is tandem with that rank function. Each rank
writes what was counted to PLAYED_GPU_NOTES/rank-N.json.
"""

import functools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

OURS = "/src/tandem/"
WAITS = {"item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy", "nonzero"}
"""Methods for which a tensor on a GPU makes the host wait."""
COPIES = {"to", "tensor", "as_tensor"}
"""What copies to a GPU from memory that is not pinned: unless it is told not to, the host waits."""
NAME, MEMORY = "NVIDIA H200", 141 * 2**30


@dataclass
class Notes:
    """What was asked of the GPU, {what: {"file.py:function": times}}; how the group and DDP were opened."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    backends: list[str] = field(default_factory=list)
    bound_to: list[str] = field(default_factory=list)
    device_ids: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def count(self, what: str) -> None:
        place = _place()
        if place:
            self.counts.setdefault(what, Counter())[place] += 1


def _place() -> str:
    """The innermost function of tandem's on the stack, as "training/step.py:take"; "" if there is none."""
    frame: Any = sys._getframe(2)
    while frame is not None and OURS not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename.split(OURS)[1]}:{frame.f_code.co_name}" if frame is not None else ""


def _is_gpu(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.startswith("cuda")
    )


class Played(TorchFunctionMode):
    """Every function of torch's that is given a GPU gets the CPU instead; of this thread alone."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self._notes = notes

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", str(function))
        if name == "device" or function is torch.device:
            return function(*args, **kwargs)
        if name == "__get__":  # an attribute of a tensor
            is_cuda = getattr(getattr(function, "__self__", None), "__name__", "") == "is_cuda"
            return OURS in sys._getframe(1).f_code.co_filename if is_cuda else function(*args, **kwargs)
        if name == "pin_memory":
            self._notes.count("pinned copy")
            return args[0].clone()
        if kwargs.pop("pin_memory", None):
            self._notes.count("pinned memory")
        if name in WAITS:
            self._notes.count("wait")
        values = (*args, *kwargs.values())
        if any(_is_gpu(value) for value in values):
            self._notes.count("copy" if name == "to" else "on the GPU")
            if name in COPIES and not kwargs.get("non_blocking"):
                self._notes.count("wait")
            args = tuple(torch.device("cpu") if _is_gpu(each) else each for each in args)
            kwargs = {key: torch.device("cpu") if _is_gpu(each) else each for key, each in kwargs.items()}
        return function(*args, **kwargs)


def _event(notes: Notes) -> type:
    class Event:
        """Passed as soon as it is recorded; those that are recorded while `sticks` is set never pass."""

        sticks = False

        def __init__(self, enable_timing: bool = False) -> None:
            self.at: float | None = None
            self.passed = True

        def record(self, stream: Any = None) -> None:
            notes.count("event")
            self.at, self.passed = time.perf_counter(), not Event.sticks

        def query(self) -> bool:
            return self.passed

        def synchronize(self) -> None:
            notes.count("wait for an event")
            while not self.passed:
                time.sleep(1)

        def elapsed_time(self, other: "Event") -> float:
            assert self.at is not None and other.at is not None, "an event was not recorded"
            return 1e3 * (other.at - self.at)

    return Event


def _stream(notes: Notes) -> type:
    class Stream:
        """All work is done when it has been asked for."""

        def __init__(self, device: Any = None, priority: int = 0) -> None:
            notes.count("stream")

        def synchronize(self) -> None:
            notes.count("wait for a stream")

        def wait_stream(self, other: "Stream") -> None:
            notes.count("wait of a stream")

        def wait_event(self, event: Any) -> None:
            notes.count("wait of a stream")

        def record_event(self, event: Any) -> None:
            event.record(self)

    return Stream


class _Cudart:
    """CUDA's runtime, as far as memory of the host's is concerned."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self._notes.count("pinned region")
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self._notes.count("unpinned region")
        return 0


def play(gpus: int = 1, patch: Callable[[Any, str, Any], None] = setattr) -> tuple[Played, Notes]:
    """CUDA's names are played from now on; enter the mode that is given back for what makes tensors.

    A test's `patch` is monkeypatch.setattr, which takes it back.
    """
    notes, cuda = Notes(), torch.cuda
    event, stream = _event(notes), _stream(notes)
    current = stream()

    @contextmanager
    def on_stream(_stream: Any) -> Any:
        yield

    for name, value in {
        "Event": event,
        "Stream": stream,
        "stream": on_stream,
        "current_stream": lambda device=None: current,
        "synchronize": lambda device=None: notes.count("wait"),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: gpus,
        "set_device": lambda device: notes.count(f"set_device {device}"),
        "current_device": lambda: 0,
        "manual_seed": lambda seed: None,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "memory_stats": lambda device=None: {"num_alloc_retries": 0, "num_ooms": 0},
        "memory_allocated": lambda device=None: 1,
        "memory_reserved": lambda device=None: 2,
        "max_memory_allocated": lambda device=None: 3,
        "mem_get_info": lambda device=None: (MEMORY - 2**30, MEMORY),
    }.items():
        patch(cuda, name, value)
    patch(torch.Tensor, "record_stream", lambda tensor, stream: notes.count("record_stream"))
    patch(cuda, "cudart", lambda: _Cudart(notes))
    patch(cuda.nccl, "version", lambda: (2, 28, 0))
    for kind in ("accelerator", "cuda"):  # torch 2.6 has the second alone
        if hasattr(torch.optim.Optimizer, f"_{kind}_graph_capture_health_check"):
            patch(torch.optim.Optimizer, f"_{kind}_graph_capture_health_check", lambda self: None)
    _play_group(notes, patch)
    _play_loader(patch)
    autocast = torch.autocast
    patch(torch, "autocast", lambda kind, **options: autocast("cpu", **options))
    return Played(notes), notes


def _play_loader(patch: Callable[[Any, str, Any], None]) -> None:
    """A thread beside loader processes would pin what they give, outside of the mode."""
    begin = torch.utils.data.DataLoader.__init__

    @functools.wraps(begin)
    def without_pinning(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **{**options, "pin_memory": False})

    patch(torch.utils.data.DataLoader, "__init__", without_pinning)


def _play_group(notes: Notes, patch: Callable[[Any, str, Any], None]) -> None:
    """NCCL is gloo, and DDP has no GPU to move its inputs to."""
    init, spread = dist.init_process_group, DistributedDataParallel.__init__

    def init_process_group(backend: str, **options: Any) -> None:
        notes.backends.append(backend)
        of_cuda = (each for each in os.environ.items() if each[0].startswith(("TORCH_", "CUBLAS_")))
        notes.environment |= dict(of_cuda)
        notes.bound_to.append(str(options.pop("device_id", None)))
        init("gloo", **options)

    @functools.wraps(spread)
    def without_devices(self: Any, module: Any, device_ids: Any = None, **options: Any) -> None:
        notes.device_ids.append(str(device_ids))
        spread(self, module, **options)

    patch(dist, "init_process_group", init_process_group)
    patch(DistributedDataParallel, "__init__", without_devices)


@functools.cache
def _of_this_process() -> tuple[Played, Notes]:
    """As many GPUs as PLAYED_GPUS says: opened in advance they are the rank's own later.

    None where there is a file "gone" in the current folder: the driver has lost them.
    """
    mode, notes = play(gpus := int(os.environ.get("PLAYED_GPUS", "1")))
    torch.cuda.device_count = lambda: 0 if Path("gone").exists() else gpus  # type: ignore[assignment]
    return mode, notes


def run_rank(job: Any, start: Any, **more: Any) -> int:
    """rank/task.py's, on a played GPU."""
    import tandem.rank.task as real

    mode, notes = _of_this_process()
    with mode:
        code = real.run_rank(job, start, **more)
    folder = os.environ.get("PLAYED_GPU_NOTES")
    if folder:
        path = Path(folder) / f"rank-{start.position.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(vars(notes)))
    return code


def warm_up(job: Any, expected: Any = None) -> None:
    import tandem.rank.task as real

    with _of_this_process()[0]:
        real.warm_up(job, expected)


def command(*words: object) -> list[str]:
    """`tandem WORDS`, with ranks on played GPUs; to be run in `environment()`."""
    return [sys.executable, "-m", "played_gpu", *map(str, words)]


def environment(notes: Path, gpus: int = 1) -> dict[str, str]:
    """Where `command` finds what it needs; `notes` is the folder for what ranks note."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent / "src"), os.environ.get("PYTHONPATH", "")])
    own = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    return {**own, "PYTHONPATH": path, "PLAYED_GPUS": str(gpus), "PLAYED_GPU_NOTES": str(notes)}


def noted(folder: Path, rank: int = 0) -> Notes:
    """What a rank has written."""
    found = json.loads((folder / f"rank-{rank}.json").read_text())
    return Notes(**{**found, "counts": {what: Counter(of) for what, of in found["counts"].items()}})


def main() -> None:
    import played_gpu  # not __main__: this is sent to the fork server by name
    import tandem.work.task as work
    from tandem.cli import main as tandem

    work.rank_function = lambda: played_gpu.run_rank
    work.warm_up = played_gpu.warm_up
    tandem()


if __name__ == "__main__":
    main()
