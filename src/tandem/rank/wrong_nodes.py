"""Find nodes that compute wrongly, and restart all ranks without them, where a spare may take their place."""

import contextlib
import logging
from collections.abc import Iterator
from datetime import timedelta

from tandem.checkpoint.snapshot import forget_after
from tandem.distributed.devices import product_problem
from tandem.distributed.group_store import open_store
from tandem.distributed.restart_notes import WrongNode
from tandem.errors import ReplayMismatchError, WrongNodeError
from tandem.rank.session import RankSession
from tandem.timeouts import LEAVE_SECONDS

log = logging.getLogger("tandem.run")


@contextlib.contextmanager
def leaving_out(session: RankSession) -> Iterator[None]:
    """Raise WrongNodeError instead of ReplayMismatchError if the node can be left out.

    All that was saved after the last clean check is set aside first. No save may be under way after the
    block. Node 0 decides who takes a place, so it is not left out itself.
    """
    try:
        yield
    except ReplayMismatchError as error:
        clean = error.clean
        why = str(error)
        has_spares = session.settings.launch.spares > 0 and session.connection.store is not None
        if not has_spares or clean is None or len(error.nodes) != 1 or error.nodes[0] == 0:
            raise
        node = error.nodes[0]
        grant = session.grant
        local_rank = session.position.local_rank
        for region in (*grant.shared_memories[local_rank:][:1], *grant.own_memories(local_rank)):
            forget_after(region, clean)
        session.world.on_first(lambda: _set_aside(session, node, clean, why))
        raise WrongNodeError(f"node {node} computes wrongly") from error


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


def _set_aside(session: RankSession, node: int, clean: int, why: str) -> None:
    """Move checkpoints after step `clean` aside, and tell the agents, which restart the ranks."""
    moved_to = session.run.checkpoints.move_aside(after_step=clean)
    if moved_to is not None:
        log.warning("checkpoints after step %d may be wrong and were moved to %s", clean, moved_to)
    connection = session.connection
    assert connection.store is not None
    note = WrongNode(connection.store[2], node, why.partition("; leave that machine out")[0])
    note.write(open_store(session.position, connection, timedelta(seconds=LEAVE_SECONDS)))
