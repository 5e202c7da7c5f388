"""Connect to node 0's stores: directly, or through its TLS proxy if the job has a secret.

docs/architecture.md#with-a-secret describes both ways.
"""

import contextlib
import logging
import time
from dataclasses import replace
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tandem.errors import PeerLostError, TandemError
from tandem.launch.rendezvous import (
    END_KEY,
    LEFT_KEY,
    NODES_KEY,
    MasterProbe,
    StopRequestedError,
    StoreLostError,
    host_store,
    join_store,
    publish_job_result,
    serve,
    stay_until_all_left,
    wait_for_master,
)
from tandem.launch.rendezvous_state import STATE_KEY, is_complete
from tandem.launch.secret import SECRET
from tandem.launch.tls_proxy import ProxyClient, ProxyRefusedError, ProxyServer, is_proxy
from tandem.log import log_if_slow
from tandem.platforms.detection import Placement
from tandem.platforms.environment import LOOPBACK
from tandem.signals import StopFlag
from tandem.timeouts import ANNOUNCE_SECONDS, MASTER_RETRY_SECONDS, REFUSED_RETRY_SECONDS, STORE_READ_SECONDS

log = logging.getLogger("tandem.agent")

AGENTS_STORE = 0
"""The number of the agents' store at the proxy server. A store of ranks has its port as number."""


class StoreEndpoint:
    """The stores of one job, as one node reaches them; `key` is derived from the job's secret, if it has one.

    Other nodes have a proxy client for the agents' store and one for their ranks' store. A script has a new
    store in each generation, so the second client's target changes.
    """

    def __init__(self, placement: Placement, key: bytes | None) -> None:
        self.asked = placement
        self.placement = placement.by_loopback()
        # Nothing leaves a single host, so its stores listen on loopback and need no secret.
        self._key = key = None if placement.is_one_host else key
        self._agents_proxy = (
            ProxyClient(self.placement.master, key, AGENTS_STORE) if key and placement.node_rank else None
        )
        self._ranks_proxy: ProxyClient | None = None
        self._proxy_server: ProxyServer | None = None
        self._agents_port = self._ranks_port = 0  # of the stores behind this host's proxy server

    @property
    def is_open(self) -> bool:
        """Return whether the store serves any host that can reach the port."""
        return self._key is None and not self.placement.is_one_host

    @property
    def address(self) -> tuple[str, int]:
        """Return the address of the agents' store for this node's agent and ranks.

        On node 0 it is valid after `host`.
        """
        # Node 0 connects by loopback: its own name may be published only once it is ready.
        if self.placement.node_rank == 0 and not self.placement.is_one_host:
            return LOOPBACK, self._agents_port or self.placement.master_port
        return (LOOPBACK, self._agents_proxy.port) if self._agents_proxy else self.placement.master

    def of_ranks(self, host: str, port: int) -> tuple[str, int]:
        """Return the same for the store at `host`:`port` that node 0 hosts for ranks."""
        if self._key is None:
            return host, port
        if self.placement.node_rank == 0:
            return LOOPBACK, port
        # One client serves all generations: only the store that it asks for changes.
        self._ranks_proxy = self._ranks_proxy or ProxyClient(self.placement.master, self._key, port)
        self._ranks_proxy.name = port
        return LOOPBACK, self._ranks_proxy.port

    def host(self) -> TCPStore:
        """Start the agents' store, on node 0. Raises PeerLostError if the port is taken."""
        if self._key is None:
            return host_store(self.placement)
        store = host_store(self._here())
        self._agents_port = int(store.port)
        try:
            self._proxy_server = ProxyServer(self.placement.master_port, self._key)
        except OSError as error:
            raise PeerLostError(
                f"cannot listen on port {self.placement.master_port}: {error.strerror or error}; "
                "another job may be using it; choose another port with --master HOST:PORT"
            ) from error
        self._proxy_server.open(AGENTS_STORE, self._agents_port)
        return store

    def host_for_ranks(self) -> tuple[TCPStore, str]:
        """Start a store on node 0 for the ranks of one generation; return it and its public address."""
        if self._proxy_server is None:
            # Each generation needs a new store, and so any free port. See docs/architecture.md#user-scripts.
            store = serve(self.placement, 0)
        else:
            store = serve(self._here(), 0)
            # The last generation's ranks must not reach the new store, nor keep the old one alive.
            if self._ranks_port:
                self._proxy_server.close(self._ranks_port)
            self._ranks_port = int(store.port)
            self._proxy_server.open(self._ranks_port, self._ranks_port)
        return store, f"{self.placement.master_host}:{store.port}"

    def _here(self) -> Placement:
        # The proxy has the master's port, so the kernel chooses another. For a single host, `serve` listens
        # on its address only.
        return replace(self.placement, master_host=LOOPBACK, master_port=0, nodes_share_host=True)

    def join(self, timeout_seconds: float, stop: StopFlag) -> TCPStore:
        """Connect to the agents' store from another node, once node 0 answers and admits it.

        Raises StoreLostError, StopRequestedError, TandemError.
        """
        host, port = self.placement.master
        ends = time.monotonic() + timeout_seconds
        logged = ""
        while True:
            left = max(0.0, ends - time.monotonic())
            try:
                return self._join(left, stop)
            # Retried: the secret may be on its way to one of the nodes, or too many nodes connect at once.
            except ProxyRefusedError as error:
                why = f"{host}:{port} refused this node: {error}"
            if not left:
                raise PeerLostError(why)
            if why != logged:
                logged = why
                log.warning("%s; retrying for %.0f s", why, left)
            time.sleep(min(REFUSED_RETRY_SECONDS, left))

    def _join(self, seconds: float, stop: StopFlag) -> TCPStore:
        """Try once. Raises RefusedError, and what `join` raises."""
        wait_for_master(*self.placement.master, seconds, lambda: bool(stop))
        if stop:
            raise StopRequestedError
        if self._agents_proxy is not None:
            self._agents_proxy.check()
        # torch's client would retry against a proxy server for a minute, with a stack trace for each attempt.
        elif self.is_open:
            with log_if_slow("waiting for an answer from {}:{}".format(*self.placement.master)):
                has_proxy = is_proxy(self.placement.master)
            if has_proxy:
                raise ProxyRefusedError(f"node 0 has a secret, but this node has none; set {SECRET}")
        return join_store(self.placement, self.address, seconds, lambda: bool(stop))

    def connect(self) -> TCPStore:
        """Open one more connection to the agents' store."""
        return TCPStore(*self.address, is_master=False, timeout=timedelta(seconds=STORE_READ_SECONDS))

    def probe(self) -> MasterProbe:
        """Return a probe of the agents' store, which finds out why it does not answer."""
        return MasterProbe(*self.placement.master, self.connect)


def announce(endpoint: StoreEndpoint, code: int, reason: str = "", stop: StopFlag | None = None) -> None:
    """Tell the nodes that connect within ANNOUNCE_SECONDS why this node ends the job before it starts.

    A node other than node 0 reports its error to node 0. It can end only its own job, not one whose nodes
    have all joined, nor an elastic job, which can start without this node.
    """
    placement = endpoint.placement
    if placement.nodes == 1:
        return
    progress = log_if_slow(
        f"telling the other nodes, for up to {ANNOUNCE_SECONDS:.0f} s; press Ctrl-C to stop"
    )
    meant = TandemError, StoreLostError, StopRequestedError, RuntimeError, ValueError
    # The caller exits with the announced error; an error of the announcement must not replace it.
    with progress, contextlib.suppress(*meant):
        if placement.node_rank == 0:
            store = endpoint.host()
            publish_job_result(store, code, reason)
            store.set(END_KEY, "1")
            left = store.add(LEFT_KEY, 1)
            stay_until_all_left(store, placement.nodes, left, ANNOUNCE_SECONDS, lambda: bool(stop))
        elif placement.elastic is None and stop is not None:
            deadline = time.monotonic() + ANNOUNCE_SECONDS
            store = endpoint.join(ANNOUNCE_SECONDS, stop)
            # With another number of nodes, node 0 may belong to another launch.
            if store.get(NODES_KEY) == str(placement.nodes).encode() and _is_missed(store, stop, deadline):
                publish_job_result(store, code, f"node {placement.node_rank}: {reason}")
                store.add(LEFT_KEY, 1)


def _is_missed(store: TCPStore, stop: StopFlag, deadline: float) -> bool:
    """Return whether nodes wait for this one. Nodes that train do not, unless they have just lost it.

    Waits for up to `deadline` (monotonic seconds) while they train. Raises ValueError for an invalid state.
    """
    while store.check([STATE_KEY]) and is_complete(store.get(STATE_KEY)):
        if stop or time.monotonic() > deadline:
            return False
        time.sleep(MASTER_RETRY_SECONDS)
    return True
