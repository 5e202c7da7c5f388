"""Restart all ranks with a smaller micro-batch after one ran out of memory, or say what else to do."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from torch import nn

from tandem.config.slices import DataConfig
from tandem.data.batch_shares import equal_shares, halved
from tandem.distributed.group_store import open_store
from tandem.distributed.out_of_memory import OutOfMemory, is_out_of_memory
from tandem.errors import SmallerBatchError
from tandem.rank.session import RankSession
from tandem.timeouts import LEAVE_SECONDS
from tandem.torch_private import is_batchnorm

log = logging.getLogger("tandem.run")

OF_ONE_SAMPLE = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d


class OutOfMemoryHandler:
    """What a rank does when its training runs out of memory.

    `data` has the micro-batch size that is used, and `shares` each rank's samples in a batch, empty if equal.
    """

    def __init__(
        self, session: RankSession, data: DataConfig, shares: Sequence[int], model: nn.Module
    ) -> None:
        self._session = session
        sizes = shares or equal_shares(data.batch_size, session.world.size)
        normalizes = any(
            is_batchnorm(each) and not isinstance(each, OF_ONE_SAMPLE) for each in model.modules()
        )
        # BatchNorm rejects a single value per channel.
        self._now, self._half = halved(sizes, data.micro_batch_size, at_least=1 + normalizes)
        is_smaller = data.micro_batch_size != session.settings.data.micro_batch_size
        if normalizes and is_smaller and session.world.is_first:
            log.warning(
                "BatchNorm now normalizes over micro-batches of %d per rank, because larger ones ran out of "
                "memory; if that is too few, use a model without it",
                self._now,
            )
        self._evaluates = False

    def scores(self, evaluate: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Return the result of `evaluate`, and note when it runs."""
        self._evaluates = True
        scores = evaluate()
        self._evaluates = False
        return scores

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Raise SmallerBatchError if memory runs out in this block and a smaller micro-batch may fit.

        Other errors stay; the session gets advice for those about memory.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            session = self._session
            position = session.position
            connection = session.connection
            if self._evaluates and session.settings.evaluation.eval_batch_size is not None:
                session.advice = "use a smaller --eval-batch-size"
            elif self._half is None:
                session.advice = (
                    f"this is the smallest micro-batch ({self._now}): use --precision bf16, --strategy fsdp, "
                    "or a smaller model"
                )
            # Without an agent, no process would restart the ranks.
            elif connection.store is None:
                session.advice = f"use --micro-batch-size {self._half}"
            else:
                found = OutOfMemory(
                    connection.store[2], position.rank, position.node_rank, self._now, self._half
                )
                # If the store is gone, the ranks restart anyway, and will find the same.
                with contextlib.suppress(RuntimeError):
                    found.write(open_store(position, connection, timedelta(seconds=LEAVE_SECONDS)))
                raise SmallerBatchError(f"out of memory with micro-batches of {self._now}") from error
            raise
