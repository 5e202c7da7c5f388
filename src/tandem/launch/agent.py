"""This node's agent: hosts or joins the store, goes on until the job is over, says the node's code."""

import logging
import os
from dataclasses import dataclass, replace
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError

from tandem.errors import KILLED, PEER_LOST, PeerLostError, TandemError
from tandem.launch.generations import NodeAgent
from tandem.launch.part import Node
from tandem.launch.reach import what_is_wrong
from tandem.launch.rendezvous import (
    StopRequestedError,
    StoreLostError,
    VerdictError,
    host_store,
    is_let_in,
    join_store,
    outstay_node_0,
)
from tandem.launch.restarts import RestartBudget, is_retried
from tandem.launch.slow_ranks import SlowRanks
from tandem.launch.watchdog import Watchdog
from tandem.timeouts import LEAVE_SECONDS, RENDEZVOUS_POLL_SECONDS, STORE_READ_SECONDS
from tandem.torch_private import hasten_rendezvous

log = logging.getLogger("tandem.agent")


@dataclass(frozen=True)
class AgentReport:
    """How this node's part of the job ended. `store`: node 0's, there for the others as long as this is."""

    code: int
    reason: str
    generations: int
    store: TCPStore | None = None


def run_agent(node: Node, kind: type[NodeAgent]) -> AgentReport:
    """Run this node's ranks until the job is over, going round again as an agent of this `kind` decides."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    hasten_rendezvous(RENDEZVOUS_POLL_SECONDS)
    placement = node.placement
    server = host_store(placement) if placement.node_rank == 0 else None
    timeout = timedelta(seconds=STORE_READ_SECONDS)
    watchdog = Watchdog(
        placement.node_rank,
        placement.local_name or "localhost",
        placement.master_port,
        lambda: TCPStore(placement.master_host, placement.master_port, is_master=False, timeout=timeout),
        node.view.metrics,
    )
    node.view.on_heartbeat = watchdog.hear
    watchdog.on_beats = SlowRanks(node.view.receive, node.view.event).look
    watchdog.start()
    try:
        report = replace(_run_connections(node, kind, watchdog, server), store=server)
    finally:
        watchdog.close(server)
        node.workers.dismiss()
    if placement.node_rank != 0 and not is_retried(report.code):
        outstay_node_0(placement, LEAVE_SECONDS + node.view.linger_seconds, lambda: bool(node.stop))
    return report


def _run_connections(
    node: Node, kind: type[NodeAgent], watchdog: Watchdog, server: TCPStore | None
) -> AgentReport:
    """One agent after another, as often as the store is lost."""
    budget, patience = RestartBudget(node.config.max_restarts), node.config.master_timeout
    while True:
        agent: NodeAgent | None = None
        try:
            store = server or join_store(node.placement, patience, node.stop)
            if not is_let_in(store, node.placement, patience, node.stop, was_in=budget.generations > 0):
                continue
            agent = kind(node, store, watchdog, budget)
            code, reason = agent.run_generations()
        except StopRequestedError:
            code, reason = KILLED, f"{node.stop.name} came before training started; nothing to save"
        except VerdictError as verdict:
            code, reason = verdict.code, str(verdict)
        except RendezvousTimeoutError:
            missing = f"not all of {node.placement.nodes} nodes came within {patience:.0f} s"
            code, reason = PEER_LOST, f"{missing}; start the others, or raise --master-timeout"
            _say_what_is_wrong(node)
        except PeerLostError as error:
            code, reason = error.exit_code, str(error)
            _say_what_is_wrong(node)
        except TandemError as error:
            code, reason = error.exit_code, str(error)
        except (StoreLostError, RendezvousConnectionError, DistStoreError, DistNetworkError) as error:
            node.workers.kill()
            if agent is not None:
                agent.abandon()
            if not watchdog.has_trained:
                budget.incidents += 1
            if budget.is_spent:
                return AgentReport(PEER_LOST, f"{budget} is spent", budget.generations)
            why = error if isinstance(error, StoreLostError) else StoreLostError()
            log.warning("%s; going round again", why)
            continue
        node.workers.kill()
        if agent is not None:
            agent.leave(code, reason)
        return AgentReport(code, reason, budget.generations)


def _say_what_is_wrong(node: Node) -> None:
    """What `tandem doctor` would say of nodes that did not meet, in one block."""
    found = what_is_wrong(node.placement, os.environ)
    if found:
        log.warning("what keeps this node from the others:", extra={"table": found})
    else:
        log.info("nothing is wrong with the network as seen from here: try `tandem doctor` on each node")
