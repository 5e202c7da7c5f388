"""Run this node's agent: host or join the store, run generations until the job ends, return the exit code.

For the rules that this module and `generations.py` implement, see docs/architecture.md#who-decides-restarts.
"""

import logging
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError

from tandem.errors import KILLED, PEER_LOST, PeerLostError, TandemError, is_retried
from tandem.launch.code_watch import CodeWatch
from tandem.launch.connectivity import Connect, find_problems
from tandem.launch.generations import NodeAgent
from tandem.launch.inspection import Inspector
from tandem.launch.inspection_socket import InspectionSocket
from tandem.launch.node_context import NodeContext, RestartBudget
from tandem.launch.recovery import Recovery
from tandem.launch.rendezvous import (
    JobEndedError,
    StopRequestedError,
    StoreLostError,
    is_admitted,
    wait_for_end_of_node_0,
)
from tandem.launch.rendezvous_state import poll_intervals
from tandem.launch.secret import SECRET
from tandem.launch.spares import PlaceLostError, Places, places_of
from tandem.launch.watchdog import SlowRanks, Watchdog
from tandem.telemetry.hangs import Beat
from tandem.timeouts import LEAVE_SECONDS
from tandem.torch_private import shorten_rendezvous_waits

log = logging.getLogger("tandem.agent")


@dataclass(frozen=True)
class AgentReport:
    """How this node's part of the job ended.

    `store` is the agents' store on node 0; the other nodes can read from it while this object is alive.
    `has_left` means that the other nodes continue without this one.
    """

    code: int
    reason: str
    generations: int
    store: TCPStore | None = None
    has_left: bool = False


def run_agent(node: NodeContext) -> AgentReport:
    """Run this node's ranks until the job is over, with one agent per connection to the store."""
    # Without this, torch starts one more TCPStore on rank 0 and passes its address to the ranks
    # (dynamic_rendezvous.py, `next_rendezvous`). tandem's ranks use the agents' store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    placement = node.placement
    # torch's engine polls once a second, which every restart would have to wait for.
    shorten_rendezvous_waits(poll_intervals(placement.nodes).poll_seconds)
    # Start it once, not per connection: the other nodes keep using this store while this agent rejoins.
    server = node.endpoint.host() if placement.node_rank == 0 else None
    if server is not None and node.endpoint.is_open:
        text = "this job has no secret (%s): anyone who can reach port %d can end it; see docs/security.md"
        log.warning(text, SECRET, placement.master_port)
    watchdog = Watchdog(
        placement.node_rank,
        placement.local_name or "localhost",
        node.endpoint.address[1],
        node.endpoint.connect,
        node.view.metrics,
    )
    node.view.on_heartbeat = watchdog.record_heartbeat
    inspector = Inspector(node)
    slow_ranks = SlowRanks(node.view.receive, node.view.event)

    def know(beats: Sequence[Beat]) -> None:
        inspector.note(beats)
        slow_ranks.look(beats)

    watchdog.on_beats = know
    watchdog.on_exchange = inspector.look
    watchdog.is_master_frozen = node.endpoint.probe().is_frozen
    node.view.inspect_by(inspector.ask)
    watchdog.start()
    places = places_of(node, inspector.take_place)
    try:
        with InspectionSocket(node, inspector) if placement.node_rank == 0 else nullcontext():
            report = replace(_run_connections(node, watchdog, server, places), store=server)
    finally:
        places.end(server)
        watchdog.close(server)
        node.workers.end_standby()
    # Node 0 has the log with the cause, and a platform cleans up when the first container exits. A node that
    # the platform restarts (a retried code), or that has left an elastic job, need not wait.
    if placement.node_rank != 0 and not is_retried(report.code) and not report.has_left:
        wait_for_end_of_node_0(placement, LEAVE_SECONDS + node.view.linger_seconds, lambda: bool(node.stop))
    return report


def _run_connections(
    node: NodeContext, watchdog: Watchdog, server: TCPStore | None, places: Places
) -> AgentReport:
    """Run one agent per connection to the store; rejoin the rendezvous when the connection is lost."""
    budget = RestartBudget(node.config.max_restarts)
    patience = node.config.master_timeout
    code_watch = CodeWatch(node.work, node.grant(0, node.resume).imports_file)
    recovery: Recovery | None = None
    while True:
        agent: NodeAgent | None = None
        try:
            store = server or node.endpoint.join(patience, node.stop)
            if not is_admitted(store, node.placement, patience, node.stop, was_in=budget.generations > 0):
                # Node 0 exited while this node waited to be let in; connect to its successor.
                continue
            placed = places.wait_for_place(node, store, watchdog)
            recovery = recovery.connect(placed, store) if recovery else Recovery(placed, store)
            agent = NodeAgent(placed, store, watchdog, budget, places, code_watch, recovery)
            code, reason = agent.run_generations()
        except PlaceLostError:
            node.workers.kill()
            if agent is not None:
                agent.withdraw()
            continue
        except StopRequestedError:
            # 137, not 143: a stop during the rendezvous saves nothing, and 143 promises a checkpoint.
            code = KILLED
            reason = _stopped(node, watchdog.has_ever_trained)
        except JobEndedError as result:
            # Every node exits with the same code and reason, whichever node found them.
            code = result.code
            reason = str(result)
        except RendezvousTimeoutError:
            missing = f"not all of {node.placement.nodes} nodes joined within {patience:.0f} s"
            code = PEER_LOST
            reason = f"{missing}; start the others, or raise --master-timeout"
            # This node reached the store, so the check can read there which nodes are missing.
            _say_what_is_wrong(node, node.endpoint.connect)
        except PeerLostError as error:
            code = error.exit_code
            reason = str(error)
            # This node was not admitted, so the proxy server would also refuse the check's own connection.
            _say_what_is_wrong(node)
        except TandemError as error:
            code = error.exit_code
            reason = str(error)
        except (StoreLostError, RendezvousConnectionError, DistStoreError, DistNetworkError) as error:
            # The ranks use the same store. Those of a script may have survived, but cannot meet the next
            # generation's.
            node.workers.kill()
            if agent is not None:
                agent.abandon()
            if not watchdog.has_trained and (agent is not None or not node.placement.spares):
                # After a finished step, the loss of the store is node 0's failure and is charged there.
                # Before one, the same cause would recur at every attempt, so the loss uses this node's
                # budget.
                budget.incidents += 1
            if budget.is_spent:
                return AgentReport(PEER_LOST, f"{budget} is spent", budget.generations)
            why = error if isinstance(error, StoreLostError) else StoreLostError()
            log.warning("%s; rejoining the rendezvous", why)
            continue
        node.workers.kill()
        has_left = agent is not None and agent.leave(code, reason)
        return AgentReport(code, reason, budget.generations, has_left=has_left)


def _stopped(node: NodeContext, has_trained: bool) -> str:
    """Return the reason for a stop that arrived during the rendezvous."""
    if not has_trained:
        return f"{node.stop.name} came before training started; nothing to save"
    why = f"{node.stop.name} came while the ranks were restarting; nothing new was saved"
    return f"{why}; run the same command again to resume from the last save"


def _say_what_is_wrong(node: NodeContext, connect: Connect | None = None) -> None:
    """Log what `tandem doctor` would find wrong between the nodes, as one block.

    `connect` opens the agents' store, if this node was let in there.
    """
    found = find_problems(node.placement, os.environ, connect)
    if found:
        log.warning("connectivity problems found on this node:", extra={"table": found})
    else:
        log.info("found no network problem from this node; run `tandem doctor` on each node")
