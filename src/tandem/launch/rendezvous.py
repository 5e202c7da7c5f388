"""Where nodes meet: the store on node 0, torch's rendezvous made quick, and the job's verdict.

Each wait here looks at signals and at whether another node has ended the job.
"""

import contextlib
import logging
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from tandem.distributed.group import first_line
from tandem.errors import FAILED, PeerLostError
from tandem.launch.liveness import OwnClock
from tandem.platforms.placement import Placement
from tandem.signals import StopFlag
from tandem.timeouts import (
    ANNOUNCE_SECONDS,
    LAST_CALL_SECONDS,
    LEAVE_SECONDS,
    LEFT_POLL_SECONDS,
    MASTER_ANSWER_SECONDS,
    MASTER_RETRY_SECONDS,
    STORE_READ_SECONDS,
    WAITING_WORD_SECONDS,
)

log = logging.getLogger("tandem.agent")

RUN_ID = "tandem"
VERDICT_KEY = "tandem/verdict"
LEFT_KEY = "tandem/left"
JOB_KEY = "tandem/job"


class StopRequestedError(Exception):
    """A stop signal came while the agent waited for other nodes."""


class VerdictError(Exception):
    """Another node ended the job with this code."""

    def __init__(self, code: int, why: str | None = None) -> None:
        super().__init__(why or f"another node ended the job with code {code}")
        self.code = code


class StoreLostError(Exception):
    """The store on node 0 is gone, or what it holds is not of use."""

    def __init__(self, why: str = "the store on node 0 is gone") -> None:
        super().__init__(why)


class WatchfulBackend(C10dRendezvousBackend):
    """torch's c10d backend; each poll of a waiting node also looks at signals and at the job's verdict.

    Whether others live is judged by this node's own clock (`liveness.py`).
    """

    def __init__(self, store: TCPStore, before_poll: Callable[[], None]) -> None:
        super().__init__(store, RUN_ID)
        self._before_poll, self._clock = before_poll, OwnClock(LAST_CALL_SECONDS)

    def get_state(self) -> Any:
        """(state, token), or None where there is none yet."""
        self._before_poll()
        read = super().get_state()
        return None if read is None else (self._clock.received(read[0]), read[1])

    def set_state(self, state: bytes, token: Any = None) -> Any:
        """(state, token, whether it is this one), or None."""
        read = super().set_state(self._clock.sent(state), token)
        return None if read is None else (self._clock.received(read[0]), *read[1:])


def raise_verdict(store: TCPStore) -> None:
    """Raises VerdictError once another node has ended the job, StoreLostError.

    Anyone who reaches the store can write there: what is no exit code is a failure that nothing mends.
    """
    try:
        if not store.check([VERDICT_KEY]):
            return
        text = store.get(VERDICT_KEY).decode(errors="replace")
    except RuntimeError as error:
        raise StoreLostError from error
    if text.isdecimal() and int(text) <= 255:
        raise VerdictError(int(text))
    raise VerdictError(FAILED, f"the job's verdict in the store is {text[:40]!r}, which is no exit code")


def check_all_are_in(placement: Placement, nodes: int) -> None:
    """A rendezvous of `nodes` is what this job was asked to be. Raises StoreLostError: go round again."""
    if placement.elastic is None and nodes != placement.nodes:
        asked = f"{nodes} of {placement.nodes} nodes"
        raise StoreLostError(f"the rendezvous let {asked} begin, and none trains without the others")


def host_store(placement: Placement) -> TCPStore:
    """The store that all agents and ranks meet at; raises PeerLostError when its port is taken."""
    try:
        store = TCPStore(
            placement.master_host,
            placement.master_port,
            is_master=True,
            multi_tenant=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_READ_SECONDS),
        )
        store.set(JOB_KEY, placement.job)
        return store
    except (RuntimeError, ValueError) as error:
        raise PeerLostError(
            f"cannot serve at {placement.master_host}:{placement.master_port}: {str(error).splitlines()[0]}; "
            "is another job on this port? choose another with --master HOST:PORT"
        ) from error


def join_store(placement: Placement, timeout_seconds: float, stop: StopFlag) -> TCPStore:
    host, port = placement.master_host, placement.master_port
    wait_for_master(host, port, timeout_seconds, lambda: bool(stop))
    if stop:
        raise StopRequestedError
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STORE_READ_SECONDS))
        job = store.get(JOB_KEY).decode()
    except (RuntimeError, ValueError) as error:
        raise StoreLostError from error
    if job != placement.job:
        raise PeerLostError(
            f"{host}:{port} is served by {job or 'another job'}, and this is {placement.job or 'not that'}; "
            "choose another port with --master HOST:PORT"
        )
    return store


def wait_for_master(host: str, port: int, timeout_seconds: float, should_stop: Callable[[], bool]) -> None:
    """Wait until the master's name resolves and its port answers, saying every few seconds for what.

    The name is resolved at every try: a pod made anew has a new address. Returns early when
    `should_stop()` says so; raises PeerLostError after `timeout_seconds`.
    """
    started = time.monotonic()
    next_word = started + 1.0
    while not should_stop():
        try:
            socket.create_connection((host, port), timeout=MASTER_ANSWER_SECONDS).close()
            return
        except OSError as error:
            problem = error.strerror or first_line(error)
        waited = time.monotonic() - started
        if waited >= timeout_seconds:
            raise PeerLostError(
                f"master {host}:{port} did not answer within {timeout_seconds:.0f} s ({problem}); "
                "check that node 0 runs and that its name resolves here, or give --master HOST:PORT"
            )
        if time.monotonic() >= next_word:
            log.info(
                "waiting for master %s:%d: %s (%.0f of %.0f s)", host, port, problem, waited, timeout_seconds
            )
            next_word += WAITING_WORD_SECONDS
        time.sleep(MASTER_RETRY_SECONDS)


def announce(placement: Placement, code: int) -> None:
    """Node 0 ends the job before it began: tell the nodes that come within half a minute."""
    if placement.node_rank != 0 or placement.nodes == 1:
        return
    with contextlib.suppress(PeerLostError, RuntimeError):
        store = host_store(placement)
        store.set(VERDICT_KEY, str(code))
        stay_until_all_left(store, placement.nodes, store.add(LEFT_KEY, 1), ANNOUNCE_SECONDS)


def stay_until_all_left(store: TCPStore, nodes: int, left: int, seconds: float = LEAVE_SECONDS) -> None:
    """Until so many nodes have left, but no longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while left < nodes and time.monotonic() < deadline:
        time.sleep(LEFT_POLL_SECONDS)
        left = store.add(LEFT_KEY, 0)
