"""PowerSGD (Vogels, Karimireddy, Jaggi 2019): a gradient matrix travels as two thin factors.

For a gradient M [n, m] of each rank, plus what earlier steps have left of it, and rank r:

    P = mean of M Q over ranks      Q [m, r] from the step before
    P^ = an orthonormal basis of P
    Q = mean of M^T P^ over ranks
    M becomes P^ Q^T; each rank keeps its own M - P^ Q^T for the next step (error feedback)

Two all-reduces a step for all matrices together: the Ps along with everything that is sent as it is (vectors,
small matrices, the telemetry parameter), then the Qs. They begin when the last bucket is there, so nothing is
hidden behind backward, but there is little left to hide.

torch has a hook of the same algorithm, which does this bucket by bucket from gloo's threads. With more than
one bucket the ranks' all-reduces overtake each other, and the processes abort (torch 2.15, gloo, 16 buckets).
It feeds errors back for what it sends as it is, too, which would spoil the telemetry parameter, and keeps a
NaN in them for ever. The state here goes by the names of parameters, so it does not depend on buckets.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from tandem.distributed.compression.base import Bucket, refuse_sparse
from tandem.distributed.group import ProcessGroup
from tandem.errors import ConfigError

WORTH = 2
"""A matrix is sent as factors where that is less than one part in so many of its elements."""


class PowerSGD:
    """What it remembers: for each matrix this rank's error, and Q, which is equal on all ranks."""

    remembers = True

    def __init__(self, group: ProcessGroup, rank: int) -> None:
        """Raises ConfigError where the ranks' CPUs would not come to the same bits."""
        self._group, self._rank = group, rank
        self._errors: dict[str, Tensor] = {}
        self._qs: dict[str, Tensor] = {}
        self._next: dict[str, tuple[Tensor, Tensor]] = {}
        self._buckets: list[tuple[Tensor, Future[Any]]] = []
        self._gradients: dict[int, Tensor] = {}
        if group.device.type == "cuda" and len(group.devices) > 1:
            raise ConfigError(
                "--gradient-compression powersgd sends all factors in one piece, but --devices-per-rank puts "
                "them on several GPUs; use bf16 or none"
            )
        self._threads = torch.get_num_threads()
        threads = group.gather(self._threads) if group.device.type == "cpu" else [1]
        if len(set(threads)) > 1:
            raise ConfigError(
                "--gradient-compression powersgd computes the same factors on every rank, but the ranks have "
                f"{', '.join(map(str, sorted(set(threads))))} threads; use --threads {min(threads)}"
            )

    def attach(
        self, ddp: DistributedDataParallel, carrier: nn.Parameter, named: Mapping[str, nn.Parameter]
    ) -> None:
        refuse_sparse(ddp, "powersgd")
        self._names = {name: p for name, p in named.items() if p.requires_grad}
        for name, parameter in self._names.items():
            if parameter.dtype != torch.float32:
                raise ConfigError(
                    f"--gradient-compression powersgd needs parameters in torch.float32, but {name} is in "
                    f"{parameter.dtype}; use bf16 or none"
                )
        self._matrices = {name: p for name, p in self._names.items() if self._is_worth_it(p)}
        left = [p for name, p in self._names.items() if name not in self._matrices]
        self._plain = [*left, carrier]
        ddp.register_comm_hook(None, self._collect)

    def bytes_of(self, parameters: Sequence[nn.Parameter]) -> int:
        return sum(
            p.element_size() * (self._factors(p) if self._is_worth_it(p) else p.numel()) for p in parameters
        )

    def forget(self) -> None:
        self._next = {}

    def keep(self, skip: Tensor) -> None:
        """On GPUs nobody waits for `skip`."""
        if self._group.device.type == "cpu" and bool(skip):
            self._next = {}
        for name, (error, q) in self._next.items():
            if self._group.device.type != "cpu":
                error = torch.where(skip > 0, self._error(name, error), error)
                q = torch.where(skip > 0, self._q(name), q)
            self._errors[name], self._qs[name] = error, q
        self._next = {}

    def state(self) -> dict[str, Any]:
        """{"q": {name: Q}, "errors": {name: [of rank 0, of rank 1, ...]}}, on rank 0, on the CPU."""
        errors = {name: self._gathered(error) for name, error in self._errors.items()}
        return {"q": {name: q.cpu() for name, q in self._qs.items()}, "errors": errors}

    def load(self, state: Mapping[str, Any]) -> None:
        """With another number of ranks each gets the mean of the errors: only their mean counts in a sum."""
        device = self._group.device
        self._qs = {name: q.to(device).clone() for name, q in state.get("q", {}).items()}
        for name, errors in state.get("errors", {}).items():
            mine = errors[self._group.rank] if len(errors) == self._group.size else sum(errors) / len(errors)
            self._errors[name] = mine.to(device).clone()

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self._group.size)] if self._group.is_first else None
        dist.gather(mine, parts)
        return [part.cpu() for part in parts or ()]

    def _is_worth_it(self, parameter: Tensor) -> bool:
        return parameter.dim() > 1 and WORTH * self._factors(parameter) < parameter.numel()

    def _factors(self, parameter: Tensor) -> int:
        """Elements of P and Q."""
        rows, columns = _matrix(parameter).shape
        return min(self._rank, rows, columns) * (rows + columns)

    def _error(self, name: str, like: Tensor) -> Tensor:
        return self._errors[name] if name in self._errors else torch.zeros_like(like)

    def _q(self, name: str) -> Tensor:
        """At the start drawn from a seed of the matrix's own: equal on all ranks, and nothing to save."""
        if name not in self._qs:
            rows, columns = _matrix(self._names[name]).shape
            generator = torch.Generator().manual_seed(list(self._names).index(name))
            drawn = torch.randn(columns, min(self._rank, rows, columns), generator=generator)
            self._qs[name] = drawn.to(self._group.device)
        return self._qs[name]

    def _collect(self, _state: Any, bucket: Bucket) -> Future[Tensor]:
        """DDP's hook: the last bucket of a step starts the exchange of all of them."""
        device = self._group.device
        answer: Future[Any] = Future() if device.type == "cpu" else Future(devices=[device])
        self._buckets.append((bucket.buffer(), answer))
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._gradients[id(parameter)] = gradient
        if bucket.is_last():
            self._exchange()

        def finished(done: Future[Any]) -> Tensor:
            outcome = done.value()
            if isinstance(outcome, Exception):
                raise outcome
            value: Tensor = outcome
            return value

        return answer.then(finished)

    @torch.no_grad()
    def _exchange(self) -> None:
        """Ends on a thread of the backend; what goes wrong there is raised where DDP waits."""
        buckets, gradients, self._buckets, self._gradients = self._buckets, self._gradients, [], {}
        ranks = self._group.size
        plain = [gradients[id(p)] for p in self._plain]
        targets = {name: gradients[id(p)] for name, p in self._matrices.items()}
        whole = {n: _matrix(g) + self._error(n, _matrix(g)) for n, g in targets.items()}
        ps = [whole[name] @ orthonormal(self._q(name)) for name in whole]
        first = _flat([*plain, *ps]).div_(ranks)

        def guarded(step: Any) -> Any:
            @torch.no_grad()
            def call(done: Future[Any]) -> None:
                try:
                    # MKL counts threads for each thread anew, and a new one of the backend's would begin with
                    # all cores: on some CPUs a product then has other bits than on the other ranks.
                    torch.set_num_threads(self._threads)
                    done.value()
                    _used_here(whole.values())
                    step()
                except Exception as error:
                    for _, answer in buckets:
                        answer.set_result(error)

            return call

        def after_first() -> None:
            parts = _parts(first, [*plain, *ps])
            for gradient in plain:
                gradient.copy_(next(parts))
            bases = {name: orthonormal(next(parts)) for name in whole}
            qs = [whole[name].T @ basis for name, basis in bases.items()]
            second = _flat([*qs, plain[-1][:0]]).div_(ranks)

            def after_second() -> None:
                for (name, basis), q in zip(bases.items(), _parts(second, qs), strict=False):
                    arrived = basis @ q.T
                    self._next[name] = whole[name] - arrived, q.clone()
                    targets[name].copy_(arrived.view_as(targets[name]))
                for buffer, answer in buckets:
                    answer.set_result(buffer)

            dist.all_reduce(second, async_op=True).get_future().then(guarded(after_second))

        dist.all_reduce(first, async_op=True).get_future().then(guarded(after_first))


def orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis whose span has that of `columns` in it, also where those are dependent or zero."""
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


def _used_here(tensors: Iterable[Tensor]) -> None:
    """On a GPU: the memory of `tensors`, made on another stream, is kept until this stream is done.

    A callback of NCCL's future runs on a stream of its own, and frees on the host what that still reads.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 0 else tensor.reshape(1, 1)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _parts(flat: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """`flat` cut into views of the shapes of `like`."""
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return (piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True))
