"""Observe the optimizer steps of an unmodified program: one line of digests for each step.

The audit puts a copy of this file on PYTHONPATH as the module `sitecustomize`, so Python imports it before
the program. It imports nothing from tandem, draws no random numbers and changes no tensor. It leaves out
anything that it cannot read, and an error here never reaches the program.

A line is a JSON object. Each digest is 16 hexadecimal digits:

    opt      which optimizer, in the order of their first steps
    params   each parameter before the step
    state    the optimizer's state of each of them, "" if it has none
    grads    all their gradients
    lr       the learning rate of each parameter group
    inputs   what the model received in each forward pass before the step; rows: each of its samples
    indices  the positions in the dataset of these batches, if they are from a DataLoader
    pass     counts the passes over a DataLoader
    rng      the random states before the first forward pass, by library
    buffers  the buffers of the model, such as BatchNorm's statistics
    scale    the scale of a GradScaler
    world    the number of ranks
"""

import hashlib
import importlib.abc
import importlib.util
import itertools
import json
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

FOLDER = "TANDEM_AUDIT_STEPS"
"""The variable with the directory for the lines: one file per process, named RANK-PID."""
MOST_STEPS = 20_000
MOST_BYTES = 2**20
"""The digest of a larger tensor is of evenly spaced elements: a lost state differs everywhere."""
MOST_ROWS = 256
MOST_AHEAD = 16
"""Batches that a framework may fetch before it uses the first one."""


def digest(parts: Iterable[bytes]) -> str:
    total = hashlib.blake2b(digest_size=8)
    for part in parts:
        total.update(part)
    return total.hexdigest()


def tensors_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the tensors in nested lists, tuples and mappings."""
    if hasattr(value, "untyped_storage"):
        yield value
    elif depth < 4 and isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each, depth + 1)
    elif depth < 4 and isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each, depth + 1)


def _parameters(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


class Observer:
    """The hooks, and their records since the last step."""

    def __init__(self, torch: Any, folder: str) -> None:
        self._torch = torch
        self._folder = folder
        self._file: int | None = None
        self._optimizers: dict[int, int] = {}
        self._count = 0
        self._batches: deque[tuple[int, Sequence[object], set[str]]] = deque(maxlen=MOST_AHEAD)
        self.scale: float | None = None
        self._forget()

    def _forget(self) -> None:
        self._outer: Any = None  # the first module called since the last step
        self._entry: Any = None  # the first one that received tensors by position
        self._inputs: list[str] = []
        self._rows: list[str] = []
        self._indices: list[object] = []
        self._pass: int | None = None
        self._rng: dict[str, str] = {}
        self._buffers = ""

    def before_forward(self, module: Any, inputs: Any) -> None:
        """Record the inputs of a training pass; a hook of every module."""
        # torch.compile would otherwise compile the hook into the model.
        if self._torch.compiler.is_compiling() or not module.training or not self._torch.is_grad_enabled():
            return
        try:
            if self._outer is None:
                self._outer = module
                self._rng = self._random_states()
                self._buffers = digest(self._bytes(each) for each in module.buffers())
            if self._entry is None and next(tensors_in(inputs), None) is not None:
                self._entry = module
            if module is self._entry:
                self._record_inputs(inputs)
        except Exception:  # the program must not notice
            self._entry = self._entry or module

    def _record_inputs(self, inputs: Any) -> None:
        found = list(tensors_in(inputs))
        self._inputs.append(digest(self._bytes(each) for each in found))
        if self._batches:
            self._record_position({digest([self._bytes(each)]) for each in found})
        first = found[0].detach()
        if first.dim() and len(first) <= MOST_ROWS:
            first = first.cpu()
            self._rows += [digest([self._bytes(row)]) for row in first]

    def _record_position(self, inputs: set[str]) -> None:
        """Find the batch that the model received: frameworks fetch more batches before they use the first."""
        last, *ahead = self._batches
        # Search the batch that was found last at the end, because most are used once.
        found = max([*ahead, last], key=lambda each: len(inputs & each[2]))
        if not inputs & found[2]:  # the program has augmented, split or moved it
            found = self._batches[-1]
        while self._batches[0] is not found:
            self._batches.popleft()
        self._pass, indices, _ = found
        self._indices += indices if len(indices) <= MOST_ROWS else ()

    def forget_batches(self) -> None:
        """Leave out positions until the next batch, because one could not be read."""
        self._batches.clear()

    def after_fetch(self, data_pass: int, indices: Any, batch: Any) -> None:
        """Record a batch of a DataLoader."""
        is_plain = isinstance(indices, list | tuple) and all(isinstance(each, int) for each in indices)
        tensors = {digest([self._bytes(each)]) for each in tensors_in(batch)}
        self._batches.append((data_pass, indices if is_plain else (), tensors))

    def before_step(
        self, optimizer: Any, arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
        """Write the line of one step; a hook of every optimizer.

        A closure does the forward and backward pass inside the step, as in Lightning. The line is then
        written after it; the result replaces the arguments of the step.
        """
        if self._count >= MOST_STEPS:
            return None
        self._count += 1
        try:
            with self._torch.no_grad():
                before = self._before(optimizer)
            closure = options.get("closure") or (arguments[1] if len(arguments) > 1 else None)
            if not callable(closure):
                self._write(optimizer, before)
                return None
            observed = self._observed(optimizer, before, closure)
        except Exception:  # the program must not notice
            self._forget()
            return None
        if options.get("closure"):
            return arguments, {**options, "closure": observed}
        return (arguments[0], observed, *arguments[2:]), options

    def _observed(
        self, optimizer: Any, before: Mapping[str, Any], closure: Callable[[], Any]
    ) -> Callable[[], Any]:
        lines = iter([before])

        def observed() -> Any:
            self._forget()
            found = closure()
            # Some optimizers call it several times.
            for line in lines:
                self._write(optimizer, line)
            return found

        return observed

    def _write(self, optimizer: Any, before: Mapping[str, Any]) -> None:
        try:
            with self._torch.no_grad():
                line = json.dumps({**before, **self._passes(optimizer)})
            # One write per line, so that SIGKILL loses at most the last one.
            os.write(self._open(), f"{line}\n".encode())
        except Exception:  # the program must not notice
            return
        finally:
            self._forget()

    def _before(self, optimizer: Any) -> dict[str, Any]:
        """Describe the state at the start of the step."""
        groups = optimizer.param_groups
        params = _parameters(optimizer)
        return {
            "opt": self._optimizers.setdefault(id(optimizer), len(self._optimizers)),
            "params": [digest([self._bytes(each)]) for each in params],
            "state": [
                self._state(optimizer.state[each]) if each in optimizer.state else "" for each in params
            ],
            "lr": [float(group.get("lr", 0.0)) for group in groups],
        }

    def _passes(self, optimizer: Any) -> dict[str, Any]:
        """Describe the forward and backward passes of the step."""
        params = _parameters(optimizer)
        grads = [digest([self._bytes(each.grad)]) for each in params if each.grad is not None]
        return {
            # Sort them, because a restart may list the parameters in another order.
            "grads": digest(each.encode() for each in sorted(grads)),
            "inputs": self._inputs,
            "rows": self._rows,
            "indices": self._indices,
            "pass": self._pass,
            "rng": self._rng,
            "buffers": self._buffers,
            "scale": self.scale,
            "world": self._world(),
        }

    def _state(self, state: Any) -> str:
        if not state:
            return ""
        parts = []
        for name in sorted(state, key=str):
            value = state[name]
            parts.append(f"{name}=".encode())
            found = list(tensors_in(value))
            parts += [self._bytes(each) for each in found] or [repr(value).encode()]
        return digest(parts)

    def _bytes(self, tensor: Any) -> bytes:
        tensor = tensor.detach()
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
        if tensor.is_sparse:
            tensor = tensor.coalesce().values()
        flat = tensor.reshape(-1)
        if (size := flat.numel() * flat.element_size()) > MOST_BYTES:
            flat = flat[:: -(-size // MOST_BYTES)]
        raw: bytes = flat.cpu().contiguous().view(self._torch.uint8).numpy().tobytes()
        return raw

    def _random_states(self) -> dict[str, str]:
        torch = self._torch
        found = {"torch": digest([self._bytes(torch.get_rng_state())])}
        found["python"] = digest([repr(random.getstate()).encode()])
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["cuda"] = digest([self._bytes(torch.cuda.get_rng_state())])
        if numpy := sys.modules.get("numpy"):
            _, keys, position, *_ = numpy.random.get_state()
            found["numpy"] = digest([keys.tobytes(), str(position).encode()])
        return found

    def _world(self) -> int:
        group = sys.modules.get("torch.distributed")
        if group is not None and group.is_available() and group.is_initialized():
            return int(group.get_world_size())
        return 1

    def _open(self) -> int:
        # Open it at the first step, because most processes of a job never step.
        if self._file is None:
            name = f"{os.environ.get('RANK', '0')}-{os.getpid()}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(os.path.join(self._folder, name), flags, 0o600)
        return self._file


def observe_loaders(observer: Observer, dataloader: Any) -> None:
    """Record the positions of each batch that a DataLoader returns, and the passes over it.

    torch has no public hook for this. Without these private methods, the samples are known by their contents
    only.
    """
    base = dataloader._BaseDataLoaderIter
    next_index, next_batch, reset = base._next_index, base.__next__, base._reset
    passes = itertools.count(1)

    def with_index(self: Any) -> Any:
        found = next_index(self)
        self.__dict__.setdefault("_audit_fetched", []).append(found)
        return found

    def with_batch(self: Any) -> Any:
        found = next_batch(self)
        if "_audit_pass" not in self.__dict__:
            self._audit_pass = next(passes)
        # Workers fetch ahead, but a loader returns batches in the order of their indices.
        fetched = self.__dict__.get("_audit_fetched") or [()]
        try:
            observer.after_fetch(self._audit_pass, fetched.pop(0), found)
        except Exception:  # the program must not notice
            observer.forget_batches()
        return found

    def with_reset(self: Any, *arguments: Any, **options: Any) -> Any:
        self.__dict__.pop("_audit_fetched", None)
        self.__dict__.pop("_audit_pass", None)
        return reset(self, *arguments, **options)

    base._next_index, base.__next__, base._reset = with_index, with_batch, with_reset


def observe_scalers(observer: Observer, scaler: Any) -> None:
    step = scaler.step

    def with_scale(self: Any, *arguments: Any, **options: Any) -> Any:
        observer.scale = float(self.get_scale())
        return step(self, *arguments, **options)

    scaler.step = with_scale


def install(torch: Any, folder: str) -> None:
    """Install the hooks; a hook that this version of torch does not have is left out."""
    observer = Observer(torch, folder)
    # torch.optim has no attribute of this name.
    optimizers = importlib.import_module("torch.optim.optimizer")
    steps: list[Callable[[], object]] = [
        lambda: optimizers.register_optimizer_step_pre_hook(observer.before_step),
        lambda: torch.nn.modules.module.register_module_forward_pre_hook(observer.before_forward),
        lambda: observe_loaders(observer, torch.utils.data.dataloader),
        lambda: observe_scalers(observer, torch.amp.grad_scaler.GradScaler),
    ]
    for step in steps:
        try:
            step()
        except Exception:  # with an older or newer torch, the audit knows less
            continue


class AfterTorch(importlib.abc.MetaPathFinder):
    """Calls `install` once the program has imported torch. An import here would slow down all programs."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                install(module, self._folder)

            loader.exec_module = exec_module
        return spec


def main() -> None:
    """Prepare the hooks, and run the `sitecustomize` that this file has hidden, if any."""
    if folder := os.environ.get(FOLDER):
        sys.meta_path.insert(0, AfterTorch(folder))
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [each for each in sys.path if os.path.abspath(each or ".") != here]
    ours = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ImportError:
        pass
    sys.modules.setdefault(__name__, ours)


if __name__ == "sitecustomize":
    main()
