"""Restart all ranks when one runs out of memory, or finds a node that computes wrongly.

Without enough memory, they restart with a smaller micro-batch, or the error says what else to do. A node that
computes wrongly is left out if the job can continue without it.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from torch import nn

from tandem.checkpoint.snapshot import forget_after
from tandem.config.slices import DataConfig
from tandem.data.batch_shares import equal_shares, halved
from tandem.distributed.devices import product_problem
from tandem.distributed.group_store import open_store
from tandem.distributed.restart_notes import OutOfMemory, WrongNode, is_out_of_memory, write
from tandem.errors import ReplayMismatchError, SmallerBatchError, WrongNodeError
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
                    write(open_store(position, connection, timedelta(seconds=LEAVE_SECONDS)), found)
                raise SmallerBatchError(f"out of memory with micro-batches of {self._now}") from error
            raise


def check_products(session: RankSession) -> None:
    """Multiply two matrices on each device of each rank, before the first step of a generation.

    Raises ReplayMismatchError on all ranks if a product is wrong. This takes some milliseconds.
    """
    world = session.world
    problems = [problem for device in world.devices if (problem := product_problem(device))]
    told = world.gather_json([session.position.node_rank, "; ".join(problems)])
    wrong = {rank: (node, why) for rank, (node, why) in enumerate(told) if why}
    if wrong:
        named = "; ".join(f"rank {rank} on node {node}: {why}" for rank, (node, why) in wrong.items())
        nodes = sorted({node for node, _ in wrong.values()})
        # Nothing was trained yet, so what the run resumes from is right.
        raise ReplayMismatchError(f"{named}; leave that machine out", nodes, session.resume_point.step)


class WrongNodeHandler:
    """What a rank does when --replay-check has found that a node computes wrongly."""

    def __init__(self, session: RankSession) -> None:
        self._session = session

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Raise WrongNodeError instead of ReplayMismatchError if the node can be left out.

        Otherwise, the message also says why it cannot. All that was saved after the last clean check is set
        aside first. No save may be under way after the block.
        """
        session = self._session
        try:
            yield
        except ReplayMismatchError as error:
            clean = error.clean
            why = str(error)
            # One rank decides for all, which would otherwise wait for each other in the collectives below.
            why_not = session.world.broadcast_json(self._why_not(error))
            if why_not or clean is None:
                raise ReplayMismatchError(f"{why}; {why_not}", error.nodes, clean) from error
            (node,) = error.nodes
            # Only ranks of this generation have snapshots after that check, and all of them come here.
            for region in session.grant.memories_of(session.position.local_rank):
                forget_after(region, clean)
            session.world.on_first(lambda: self._set_aside(node, clean, why))
            raise WrongNodeError(f"node {node} computes wrongly") from error

    def _why_not(self, error: ReplayMismatchError) -> str:
        """Return why the job cannot continue without the node that the error names, or ""."""
        session = self._session
        fewest = session.grant.fewest_nodes
        if session.connection.store is None:
            return "only `tandem launch` can leave a node out by itself"
        if len(error.nodes) != 1:
            return "the job leaves a node out by itself only if exactly one is certainly wrong"
        if error.nodes[0] == 0:
            return "the job cannot continue without node 0, which has the store"
        if error.clean is None:
            return "no check since the last start of the ranks was clean, so what to resume from is not known"
        if session.settings.launch.spares == 0 and fewest is None:
            return "with --spares or --elastic, the job would leave that node out and continue"
        if fewest is not None and session.position.nodes <= fewest:
            return f"without that node, fewer would be left than the {fewest} that --elastic requires"
        return ""

    def _set_aside(self, node: int, clean: int, why: str) -> None:
        """Move checkpoints after step `clean` aside, and tell the agents, which restart the ranks."""
        session = self._session
        moved_to = session.run.checkpoints.move_aside(after_step=clean)
        if moved_to is not None:
            log.warning("checkpoints after step %d may be wrong and were moved to %s", clean, moved_to)
        connection = session.connection
        assert connection.store is not None
        note = WrongNode(connection.store[2], node, why.partition("; leave that machine out")[0])
        write(open_store(session.position, connection, timedelta(seconds=LEAVE_SECONDS)), note)
