"""Half precision: half the bytes of float32. The ranks' sums are made in it, too.

The telemetry parameter has to arrive as it is: half a precision has no room for counts and flags. So its few
numbers go beside their bucket in an all-reduce of their own, which is on its way at the same time. A small
step took 8.7 ms so, 9.2 ms with a second all-reduce behind backward, 7.5 ms without any (gloo, 2 ranks on two
busy cores, medians of 380 steps in turns).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tandem.distributed.compression.base import Bucket, refuse_sparse
from tandem.distributed.group import ProcessGroup

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Half:
    """Nothing is remembered: every step is as the first."""

    remembers = False

    def __init__(self, group: ProcessGroup, word: str) -> None:
        self._ranks, self._word, self._dtype = group.size, word, DTYPES[word]

    def attach(
        self, ddp: DistributedDataParallel, carrier: nn.Parameter, named: Mapping[str, nn.Parameter]
    ) -> None:
        refuse_sparse(ddp, self._word)
        self._carrier = carrier
        ddp.register_comm_hook(None, self._exchange)

    def keep(self, skip: Tensor) -> None:
        """There is no state."""

    def forget(self) -> None:
        """There is no state."""

    def bytes_of(self, parameters: Sequence[nn.Parameter]) -> int:
        return sum(
            p.numel() * (self._dtype.itemsize if self._narrows(p) else p.element_size()) for p in parameters
        )

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """There is no state."""

    def _narrows(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.element_size() > self._dtype.itemsize

    def _exchange(self, _state: Any, bucket: Bucket) -> torch.futures.Future[Tensor]:
        whole: Tensor = bucket.buffer()
        sent = whole.to(self._dtype) if self._narrows(whole) else whole
        pairs = [(whole, sent)]
        exact = carried(bucket, self._carrier)
        if exact is not None and sent is not whole:
            pairs.append((exact, exact.clone()))  # after the bucket, whose copy overwrites it
        *others, last = [
            dist.all_reduce(sent.div_(self._ranks), async_op=True).get_future() for _, sent in pairs
        ]

        def widen(finished: torch.futures.Future[Any]) -> Tensor:
            finished.value()  # raises what the exchange has raised
            for future in others:
                future.wait()
            for target, source in pairs:
                if target is not source:
                    target.copy_(source)
            return whole

        # NCCL's future is done once the all-reduce is enqueued. Only its own then() and wait() make a stream
        # wait for it: one that torch.futures.collect_all makes knows no device, and value() never waits.
        return last.then(widen)


def carried(bucket: Bucket, carrier: nn.Parameter) -> Tensor | None:
    """The carrier's place in the bucket; None where it travels in another."""
    pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
    return next((gradient for parameter, gradient in pairs if parameter is carrier), None)
