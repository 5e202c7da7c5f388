"""Gradient compression for DDP: half precision (`Half`), or low-rank factors (`PowerSGD`).

During backward, DDP passes its buckets to a hook one after another, and at the end it waits for the futures
that the hook returned. One bucket contains the telemetry parameter, which each hook must exchange unchanged.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from tandem.config.slices import ExchangeConfig
from tandem.distributed.group import ProcessGroup
from tandem.errors import ConfigError

Bucket = GradBucket
"""DDP requires this type in the signature of a hook."""


class Compression:
    """The exchange of DDP's gradients, and the state that it needs from step to step, by default none."""

    remembers = False
    """True if there is a state, which differs between ranks."""

    def attach(
        self, ddp: DistributedDataParallel, carrier: nn.Parameter, named: Mapping[str, nn.Parameter]
    ) -> None:
        """Take over the exchange of `ddp`, except for `carrier`; `named` has the parameters by name."""
        raise NotImplementedError

    def commit(self, skip: Tensor) -> None:
        """Keep the changes of the state after a step, unless the step was skipped (`skip` above 0)."""

    def rollback(self) -> None:
        """Discard, before a step, the changes of an exchange after which `commit` was not called."""

    def bytes_of(self, parameters: Sequence[nn.Parameter]) -> int:
        """Return how many bytes a rank passes to the all-reduce in a step."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return the state to save, complete on rank 0; all ranks call this."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state` on every rank, without communication."""


def refuse_sparse(modules: nn.Module, word: str) -> None:
    """Raise ConfigError if a module has sparse gradients."""
    for name, module in modules.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ConfigError(
                f"--gradient-compression {word}: the gradients of {name} are sparse; remove the setting, "
                "or create it with sparse=False"
            )


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Half(Compression):
    """Casts gradients to bf16 or fp16, half the bytes of float32. The sums over ranks have this type, too.

    Half precision is too narrow for the counts and flags in the telemetry parameter. Its few numbers
    therefore use a separate all-reduce, which runs in parallel with its bucket. A small step took 8.7 ms this
    way, 9.2 ms with a second all-reduce after backward, and 7.5 ms with neither. These are medians of 380
    alternating steps (gloo, 2 ranks on two busy cores).
    """

    def __init__(self, group: ProcessGroup, word: str) -> None:
        self._ranks = group.size
        self._word = word
        self._dtype = DTYPES[word]

    def attach(
        self, ddp: DistributedDataParallel, carrier: nn.Parameter, named: Mapping[str, nn.Parameter]
    ) -> None:
        refuse_sparse(ddp, self._word)
        self._carrier = carrier
        ddp.register_comm_hook(None, self._exchange)

    def bytes_of(self, parameters: Sequence[nn.Parameter]) -> int:
        return sum(
            p.numel() * (self._dtype.itemsize if self._narrows(p) else p.element_size()) for p in parameters
        )

    def _narrows(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.element_size() > self._dtype.itemsize

    def _exchange(self, _state: Any, bucket: Bucket) -> Future[Tensor]:
        whole: Tensor = bucket.buffer()
        sent = whole.to(self._dtype) if self._narrows(whole) else whole
        pairs = [(whole, sent)]
        exact = carried(bucket, self._carrier)
        if exact is not None and sent is not whole:
            pairs.append((exact, exact.clone()))  # after the bucket, whose copy overwrites it
        # Values are divided before they are added, because their sum could overflow in fp16.
        *others, last = [
            dist.all_reduce(sent.div_(self._ranks), async_op=True).get_future() for _, sent in pairs
        ]

        def widen(finished: Future[Any]) -> Tensor:
            finished.value()  # raises the exchange's error, if there is one
            for future in others:
                future.wait()
            for target, source in pairs:
                if target is not source:
                    target.copy_(source)
            return whole

        # NCCL's future is done once the all-reduce is enqueued. Only its own then() and wait() make a stream
        # wait for it: a future from torch.futures.collect_all has no device, and value() never waits.
        return last.then(widen)


def carried(bucket: Bucket, carrier: nn.Parameter) -> Tensor | None:
    """Return the carrier's part of the bucket; None if it is in another bucket."""
    pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
    return next((gradient for parameter, gradient in pairs if parameter is carrier), None)


WORTH = 2
"""A matrix is sent as factors if they have less than 1/WORTH of its elements."""


class PowerSGD(Compression):
    """PowerSGD (Vogels, Karimireddy, Jaggi 2019): exchange a gradient matrix as two low-rank factors.

    For a gradient M [n, m] of each rank, plus the error of earlier steps, and rank r:

        P = mean of M Q over ranks      Q [m, r] from the previous step
        P^ = an orthonormal basis of P
        Q = mean of M^T P^ over ranks
        M becomes P^ Q^T; each rank keeps its own M - P^ Q^T for the next step (error feedback)

    A step needs two all-reduces for all matrices together: first the Ps together with everything that is not
    compressed (vectors, small matrices, the telemetry parameter), then the Qs. They start when the last
    bucket is ready, so backward does not hide them, but there is little left to hide.

    torch has a hook with the same algorithm, which works bucket by bucket in gloo's threads. With more than
    one bucket, the all-reduces of different ranks overtake each other, and the processes abort (torch 2.15,
    gloo, 16 buckets). It also applies error feedback to uncompressed values, which would corrupt the
    telemetry parameter, and a NaN stays in the errors forever. The state here is keyed by parameter names, so
    it does not depend on buckets. The state is, per matrix, this rank's error, and Q, which is equal on all
    ranks.
    """

    remembers = True

    def __init__(self, group: ProcessGroup, rank: int) -> None:
        """Raises ConfigError if the ranks' CPUs would not compute the same bits."""
        self._group = group
        self._rank = rank
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
        # On GPUs, the factors do not depend on CPU threads.
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

    def rollback(self) -> None:
        self._next = {}

    def commit(self, skip: Tensor) -> None:
        """Commit the state of the step, unless it was skipped. On GPUs, the host does not wait for `skip`."""
        if self._group.device.type == "cpu" and bool(skip):
            self._next = {}
        for name, (error, q) in self._next.items():
            if self._group.device.type != "cpu":
                error = torch.where(skip > 0, self._error(name, error), error)
                q = torch.where(skip > 0, self._q(name), q)
            self._errors[name] = error
            self._qs[name] = q
        self._next = {}

    def state(self) -> dict[str, Any]:
        """Return {"q": {name: Q}, "errors": {name: [rank 0's, rank 1's, ...]}} on rank 0, on the CPU."""
        errors = {name: self._gathered(error) for name, error in self._errors.items()}
        return {"q": {name: q.cpu() for name, q in self._qs.items()}, "errors": errors}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state.

        With a different number of ranks, each gets the mean of the errors, whose sum counts.
        """
        device = self._group.device
        self._qs = {name: q.to(device).clone() for name, q in state.get("q", {}).items()}
        for name, errors in state.get("errors", {}).items():
            own_error = (
                errors[self._group.rank] if len(errors) == self._group.size else sum(errors) / len(errors)
            )
            self._errors[name] = own_error.to(device).clone()

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self._group.size)] if self._group.is_first else None
        dist.gather(tensor, parts)
        return [part.cpu() for part in parts or ()]

    def _is_worth_it(self, parameter: Tensor) -> bool:
        return parameter.dim() > 1 and WORTH * self._factors(parameter) < parameter.numel()

    def _factors(self, parameter: Tensor) -> int:
        """Return the number of elements of P and Q."""
        rows, columns = _matrix(parameter).shape
        return min(self._rank, rows, columns) * (rows + columns)

    def _error(self, name: str, like: Tensor) -> Tensor:
        return self._errors[name] if name in self._errors else torch.zeros_like(like)

    def _q(self, name: str) -> Tensor:
        """Return Q. The first Q is drawn from a seed per matrix, so it is equal on all ranks."""
        if name not in self._qs:
            rows, columns = _matrix(self._names[name]).shape
            generator = torch.Generator().manual_seed(list(self._names).index(name))
            drawn = torch.randn(columns, min(self._rank, rows, columns), generator=generator)
            self._qs[name] = drawn.to(self._group.device)
        return self._qs[name]

    def _collect(self, _state: Any, bucket: Bucket) -> Future[Tensor]:
        """Collect the buckets as DDP's hook; the last bucket of a step starts the exchange of all of them."""
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
        """Exchange all buckets.

        It ends on a thread of the backend; errors there are raised where DDP waits.
        """
        buckets = self._buckets
        gradients = self._gradients
        self._buckets = []
        self._gradients = {}
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
                    # MKL counts threads per thread, and a new thread of the backend would start with all
                    # cores. On some CPUs, a matrix product then has other bits than on the other ranks.
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
            # torch.cat needs at least one tensor, and the model may have no matrix that is worth compressing.
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
    """Return an orthonormal basis whose span includes `columns`, even if those are dependent or zero."""
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


def _used_here(tensors: Iterable[Tensor]) -> None:
    """Keep the GPU memory of `tensors`, allocated on another stream, until the current stream is done.

    A callback of NCCL's future runs on its own stream, which may still read memory that the host frees.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 0 else tensor.reshape(1, 1)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _parts(flat: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """Split `flat` into views with the shapes of `like`."""
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return (piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True))


def compression(config: ExchangeConfig, group: ProcessGroup) -> Compression | None:
    """Return the compression for --gradient-compression; all ranks call this.

    Raises ConfigError if it cannot be used.
    """
    if config.gradient_compression == "none":
        return None
    if config.powersgd_rank is not None:
        return PowerSGD(group, config.powersgd_rank)
    return Half(group, config.gradient_compression)


def ddp_arguments(config: ExchangeConfig) -> dict[str, Any]:
    """Return DDP's arguments for the settings that are only passed on."""
    size = {} if config.bucket_mb is None else {"bucket_cap_mb": config.bucket_mb}
    return {**size, "find_unused_parameters": config.find_unused}
