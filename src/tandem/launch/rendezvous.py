"""Host the store on node 0, exchange the job result in it, and wait for the master; tell why it is silent.

Every wait here checks signals and whether another node has ended the job.
"""

import contextlib
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tandem import __version__, running_clock
from tandem.distributed.group_store import connect_store, listen
from tandem.errors import FAILED, FINISHED, MISCONFIGURED, ConfigError, PeerLostError
from tandem.log import printable
from tandem.platforms.detection import Placement
from tandem.platforms.environment import LOOPBACK
from tandem.signals import StopFlag
from tandem.text import first_line
from tandem.timeouts import (
    LEAVE_SECONDS,
    LEFT_POLL_SECONDS,
    MASTER_ANSWER_SECONDS,
    MASTER_RETRY_SECONDS,
    OTHERS_SECONDS,
    STORE_READ_SECONDS,
    STORE_RETRY_SECONDS,
    WAITING_WORD_SECONDS,
)
from tandem.torch_private import listening_at

log = logging.getLogger("tandem.agent")

REASON_CHARACTERS = 400
RUN_ID = "tandem"
JOB_RESULT_KEY = "tandem/verdict"
LEFT_KEY = "tandem/left"
NO_RESULT = "none"
END_KEY = "tandem/end"
"""Node 0 sets it when its result is final; spares believe a success only then."""
JOB_KEY = "tandem/job"
VERSION_KEY = "tandem/version"
NODES_KEY = "tandem/nodes"


class StopRequestedError(Exception):
    """A stop signal arrived while the agent waited for other nodes."""


class JobEndedError(Exception):
    """Another node ended the job with this code."""

    def __init__(self, code: int, why: str | None = None) -> None:
        super().__init__(why or f"another node ended the job with code {code}")
        self.code = code


class StoreLostError(Exception):
    """The store on node 0 does not answer, or its content is invalid."""

    def __init__(self, why: str = "the store on node 0 is gone") -> None:
        super().__init__(why)


def raise_if_job_ended(store: TCPStore) -> None:
    """Raise JobEndedError if another node has ended the job. Raises StoreLostError."""
    result = job_end_in(store)
    if result is not None:
        raise result


def job_end_in(store: TCPStore) -> JobEndedError | None:
    """Return the job result, or None if there is none yet. Raises StoreLostError.

    Any client of the store can write there, so anything but an exit code counts as a permanent failure.
    """
    try:
        # One request: node 0 may delete the key between a check and a get, which would wait for it. If the
        # key is absent, the store answers with the expected value; the key never has that value.
        text = store.compare_set(JOB_RESULT_KEY, NO_RESULT, NO_RESULT).decode(errors="replace")
    except RuntimeError as error:
        raise StoreLostError from error
    return None if text == NO_RESULT else _job_end(text)


def _job_end(text: str) -> JobEndedError:
    code, _, why = text.partition(" ")
    # POSIX exit codes have 8 bits. The length is checked first, because int() raises ValueError for
    # thousands of digits.
    if code.isdecimal() and len(code) <= 3 and int(code) <= 255:
        message = f"another node ended the job with code {int(code)}: {printable_line(why)}" if why else None
        return JobEndedError(int(code), message)
    return JobEndedError(
        FAILED, f"the job's verdict in the store is {text[:40]!r}, which is not an exit code"
    )


def publish_job_result(store: TCPStore, code: int, reason: str) -> None:
    """Publish the job result with its reason. The first one counts, but a failure replaces a success."""
    value = f"{code} {printable_line(reason)}".strip()
    # For torch's store, an expected value of "" means that the key must not exist yet. See
    # docs/architecture.md#who-decides-restarts for which result counts.
    before = store.compare_set(JOB_RESULT_KEY, "", value)
    # A node whose ranks succeeded may have published that before another node failed.
    if code != FINISHED and before.partition(b" ")[0] == str(FINISHED).encode():
        # Do not use set(): a third node's failure may have replaced the success meanwhile, and the first
        # counts.
        store.compare_set(JOB_RESULT_KEY, before.decode(errors="replace"), value)


def printable_line(reason: str) -> str:
    """Return a long or untrusted reason as one printable line: its first line, with the last one."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or [""]
    text = lines[0] if len(lines) == 1 else f"{lines[0].removesuffix(':')}: {lines[-1]}"
    return printable(text)[:REASON_CHARACTERS]


def wait_for_end_of_node_0(placement: Placement, seconds: float, should_stop: Callable[[], bool]) -> None:
    """Wait until node 0's port is closed, but at most `seconds`.

    A platform cleans up when the first container exits, and node 0 has the only log that explains the end.
    This uses separate connections, because torch's store prints a stack trace when a read ends this way.
    """
    deadline = running_clock.now() + seconds
    with contextlib.suppress(OSError):
        while running_clock.now() < deadline and not should_stop():
            # A timeout means a busy host; a node that has ended refuses, or its name is gone.
            with contextlib.suppress(TimeoutError):
                socket.create_connection(placement.master, timeout=MASTER_ANSWER_SECONDS).close()
            time.sleep(MASTER_RETRY_SECONDS)


def read_all(store: TCPStore, keys: Sequence[str], known: set[str]) -> dict[str, bytes]:
    """Return the values of `keys`, in one round trip for the keys in `known`; add new ones to `known`."""
    new = [key for key in keys if key not in known]
    if new:
        # check() only reports whether all keys exist, so it is repeated for each key if some are missing.
        known.update(new if store.check(new) else [key for key in new if store.check([key])])
    found = [key for key in keys if key in known]
    return dict(zip(found, store.multi_get(found), strict=True)) if found else {}


def check_job_result(store: TCPStore, is_done: Callable[[], bool]) -> None:
    """Do the same as `raise_if_job_ended`, but delete a result of 0 unless the job `is_done`.

    Another client of the store, or an earlier launch, may have written it.
    """
    try:
        raise_if_job_ended(store)
    except JobEndedError as result:
        # A result of 0 ends this node for good, so it has to be true. A failure is believed.
        if result.code != FINISHED or is_done():
            raise
        log.warning("the store says that the job has finished, but it has not; continuing")
        # The next poll reports a store that is gone.
        with contextlib.suppress(RuntimeError):
            store.delete_key(JOB_RESULT_KEY)


def is_confirmed(store: TCPStore) -> bool:
    """Return whether a result of 0 is still there after node 0 had time to check the checkpoints."""
    # Node 0 deletes a result of 0 that is not true (`check_job_result`).
    time.sleep(OTHERS_SECONDS)
    with contextlib.suppress(RuntimeError):
        return bool(store.check([JOB_RESULT_KEY]))
    return False


def serve(placement: Placement, port: int) -> TCPStore:
    """Start a store on node 0; for a job on one host, it listens only on that host's address.

    Node 0 connects by loopback, because its name may be published later. Raises RuntimeError, OSError.
    """
    host = LOOPBACK
    here = None
    if placement.is_one_host:
        # torch's store binds to all interfaces, unless it gets a descriptor that already listens on one.
        here, port = listen(placement.master_host, port)
        host = placement.master_host
    return TCPStore(
        host,
        port,
        is_master=True,
        multi_tenant=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_READ_SECONDS),
        **listening_at(here),
    )


def host_store(placement: Placement) -> TCPStore:
    """Start the store that all agents and ranks use. Raises PeerLostError if its port is taken."""
    try:
        store = serve(placement, placement.master_port)
        # Set the job's name last: other nodes wait for it, and then only check that the rest exists.
        store.set(VERSION_KEY, __version__)
        store.set(NODES_KEY, str(placement.nodes))
        store.set(JOB_KEY, placement.job)
        return store
    except (RuntimeError, ValueError, OSError) as error:
        raise PeerLostError(
            f"cannot listen on {placement.master_host}:{placement.master_port}: {first_line(error)}"
            "; another job may be using this port; choose another with --master HOST:PORT"
        ) from error


def join_store(
    placement: Placement, reached_at: tuple[str, int], patience: float, should_stop: Callable[[], bool]
) -> TCPStore:
    """Connect to node 0's store at `reached_at`, and check that it belongs to this job and version.

    Raises StoreLostError, TandemError.
    """
    host = placement.master_host
    port = placement.master_port
    try:
        timeout = timedelta(seconds=STORE_READ_SECONDS)
        store = connect_store(*reached_at, timeout, patience, should_stop)
        job = store.get(JOB_KEY).decode()
        version = store.get(VERSION_KEY).decode() if store.check([VERSION_KEY]) else "an older version"
    except (RuntimeError, ValueError) as error:
        raise StoreLostError from error
    # Two jobs whose ports collide would otherwise share a store.
    if job != placement.job:
        raise PeerLostError(
            f"{host}:{port} belongs to {job or 'another job'}, not to {placement.job or 'this one'}; "
            "choose another port with --master HOST:PORT"
        )
    if version != __version__:
        why = f"node {placement.node_rank} has tandem {__version__}, but node 0 has {version[:40]}"
        # Without a result, the other nodes would wait for this one, which can never join.
        with contextlib.suppress(RuntimeError):
            publish_job_result(store, MISCONFIGURED, why)
        raise ConfigError(f"{why}; install the same version, or use one image, on all nodes of a job")
    return store


def is_admitted(
    store: TCPStore, placement: Placement, seconds: float, stop: StopFlag, was_in: bool = False
) -> bool:
    """Return whether node 0 was started for the same number of nodes; if not, the job is being resized.

    A rendezvous with one node more or less would stop all nodes from training. A node that `was_in` the job
    therefore exits, so that its platform restarts it with the current number. A new node waits until node 0
    exits, while the others continue to train: False means that the caller must check again. Raises
    PeerLostError, StopRequestedError, JobEndedError.
    """
    if placement.elastic is not None or not store.check([NODES_KEY]):
        return True
    asked = printable_line(store.get(NODES_KEY).decode(errors="replace"))[:10]
    if asked == str(placement.nodes):
        return True
    differ = f"node 0 was started for {asked} nodes, but node {placement.node_rank} for {placement.nodes}"
    if was_in:
        raise PeerLostError(f"{differ}; restart it with the same number")
    log.warning("%s; waiting while the others train; to resize the job, restart all of its nodes", differ)
    deadline = running_clock.now() + seconds
    while running_clock.now() < deadline:
        if stop:
            raise StopRequestedError
        try:
            raise_if_job_ended(store)
        # Node 0 has exited, so the caller connects to its successor.
        except StoreLostError:
            return False
        time.sleep(MASTER_RETRY_SECONDS)
    raise PeerLostError(f"{differ}, for {seconds:.0f} s; start all nodes with the same number")


def wait_for_master(host: str, port: int, timeout_seconds: float, should_stop: Callable[[], bool]) -> None:
    """Wait until the master's name resolves and its port answers; every few seconds, log what is missing.

    The name is resolved at every attempt, because a recreated pod has a new address. Returns early if
    `should_stop()` is true. Raises PeerLostError after `timeout_seconds`.
    """
    started = running_clock.now()
    next_word = started + 1.0
    while not should_stop():
        try:
            # A plain connection: a store's client would wait in C, where no signal is handled.
            socket.create_connection((host, port), timeout=MASTER_ANSWER_SECONDS).close()
            return
        except OSError as error:
            problem = error.strerror or first_line(error)
        waited = running_clock.now() - started
        if waited >= timeout_seconds:
            raise PeerLostError(
                f"master {host}:{port} did not answer within {timeout_seconds:.0f} s ({problem}); "
                "check that node 0 runs and that its name resolves here, or give --master HOST:PORT"
            )
        if running_clock.now() >= next_word:
            log.info(
                "waiting for master %s:%d: %s (%.0f of %.0f s)", host, port, problem, waited, timeout_seconds
            )
            next_word += WAITING_WORD_SECONDS
        time.sleep(MASTER_RETRY_SECONDS)


def stay_until_all_left(
    store: TCPStore,
    nodes: int,
    left: int,
    seconds: float = LEAVE_SECONDS,
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Wait until `nodes` nodes have left, but at most `seconds`; return how many have."""
    deadline = running_clock.now() + seconds
    while left < nodes and running_clock.now() < deadline and not should_stop():
        time.sleep(LEFT_POLL_SECONDS)
        left = store.add(LEFT_KEY, 0)
    return left


class MasterProbe:
    """Distinguish a frozen agent of node 0 from a lost one, in the background.

    The kernel of a frozen process accepts connections, but the process does not answer. If the store answers
    on a new connection, only the old ones are dead. `connect` opens a connection to the store at `host`:
    `port`. Silence after an accepted connection counts after `patience` seconds.
    """

    def __init__(
        self, host: str, port: int, connect: Callable[[], TCPStore], patience: float = MASTER_ANSWER_SECONDS
    ) -> None:
        self._address = host, port
        self._connect = connect
        self._patience = patience
        self._thread: threading.Thread | None = None
        self._accepted_at: float | None = None

    def is_frozen(self) -> bool:
        """Return whether node 0 accepted a connection and has not answered on it. Never waits.

        Starts a probe, whose result later calls return, unless one is running.
        """
        since = self._accepted_at
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._probe, name="tandem-master-probe", daemon=True)
            self._thread.start()
        return since is not None and time.monotonic() - since > self._patience

    def _probe(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            socket.create_connection(self._address, timeout=MASTER_ANSWER_SECONDS).close()
            self._accepted_at = time.monotonic()
            self._connect()  # returns only if the store answers
        self._accepted_at = None
        time.sleep(STORE_RETRY_SECONDS)


def cut_connections(port: int) -> None:
    """Shut down this process's connections to `port`, so that threads that read from them get an error.

    shutdown() wakes a blocked read; close() would not.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            descriptor = int(name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            # Use a copy: `with` closes its socket, but torch's client owns the original.
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getpeername()[1] == port:
                    copy.shutdown(socket.SHUT_RDWR)
