"""This node's agent: hosts or joins the store, runs worlds until the job is over, says the node's code."""

import logging
import os
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistStoreError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError

from tandem.errors import KILLED, PEER_LOST, PeerLostError
from tandem.launch.generations import AgentOptions, Ledger, NodeAgent, spent
from tandem.launch.rendezvous import (
    StopRequestedError,
    StoreLostError,
    VerdictError,
    host_store,
    join_store,
)
from tandem.launch.view import NodeView
from tandem.launch.watchdog import Watchdog
from tandem.launch.workers import RankProcesses
from tandem.platforms.placement import Placement
from tandem.signals import StopFlag
from tandem.timeouts import RENDEZVOUS_POLL_SECONDS, STORE_READ_SECONDS
from tandem.torch_private import hasten_rendezvous

log = logging.getLogger("tandem.agent")


@dataclass(frozen=True)
class AgentReport:
    """How this node's part of the job ended."""

    code: int
    reason: str
    worlds_opened: int


def run_node(
    placement: Placement,
    ranks: RankProcesses,
    options: AgentOptions,
    stop: StopFlag,
    view: NodeView,
) -> AgentReport:
    """Run this node's ranks until the job is over, going round again as the exit codes say."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    hasten_rendezvous(RENDEZVOUS_POLL_SECONDS)
    server = host_store(placement) if placement.node_rank == 0 else None
    watchdog = Watchdog(
        placement.node_rank,
        placement.local_name or "localhost",
        placement.master_port,
        lambda: TCPStore(
            placement.master_host,
            placement.master_port,
            is_master=False,
            timeout=timedelta(seconds=STORE_READ_SECONDS),
        ),
        view.metrics,
    )
    view.on_heartbeat = watchdog.hear
    watchdog.start()
    try:
        return _run_connections(placement, ranks, options, stop, view, watchdog, server)
    finally:
        watchdog.close(server)
        ranks.dismiss()


def _run_connections(
    placement: Placement,
    ranks: RankProcesses,
    options: AgentOptions,
    stop: StopFlag,
    view: NodeView,
    watchdog: Watchdog,
    server: TCPStore | None,
) -> AgentReport:
    """One agent after another, as often as the store is lost."""
    ledger = Ledger()
    while True:
        agent: NodeAgent | None = None
        try:
            store = server or join_store(placement, options.master_timeout, stop)
            agent = NodeAgent(placement, ranks, options, stop, store, view, watchdog, ledger)
            code, reason = agent.run_worlds()
        except StopRequestedError:
            code, reason = KILLED, f"{stop.name} came before training started; nothing to save"
        except VerdictError as verdict:
            code, reason = verdict.code, str(verdict)
        except RendezvousTimeoutError:
            missing = f"not all of {placement.nodes} nodes came within {options.master_timeout:.0f} s"
            code, reason = PEER_LOST, f"{missing}; start the others, or raise --master-timeout"
        except PeerLostError as error:
            code, reason = PEER_LOST, str(error)
        except (StoreLostError, RendezvousConnectionError, DistStoreError):
            ranks.kill()
            if not watchdog.has_trained:
                ledger.incidents += 1
            if ledger.incidents > options.max_restarts:
                return AgentReport(PEER_LOST, spent(options), ledger.worlds)
            log.warning("the store on node 0 is gone; going round again")
            continue
        ranks.kill()
        if agent is not None:
            agent.leave(code)
        return AgentReport(code, reason, ledger.worlds)
