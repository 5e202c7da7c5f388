"""Look inside the ranks of a running job: send a request to all of them, and collect the answers on node 0.

Node 0's agent gets a request (`inspection_socket.py`, or the page), publishes it in the agents' store, and
asks its own ranks. On each other node, the watchdog's exchange reads the request there. A node asks its ranks
through their pipes and answers through the store, because other nodes may not see the run directory. See
docs/architecture.md#looking-inside-a-run.
"""

import json
import logging
import math
import threading
import time
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tandem.errors import ConfigError
from tandem.launch.node_context import NodeContext
from tandem.launch.recordings import (
    NativeStacks,
    Offset,
    answer_clock,
    keep_snapshots,
    measure_clock,
    trace_parts,
    write_merged,
)
from tandem.launch.watchdog import size_of
from tandem.launch.workers import has_handler
from tandem.process import send, stat_of
from tandem.telemetry.hangs import Beat
from tandem.telemetry.inspection import ACTIONS, CANCEL, Answer, Request, answer_path, to_rank
from tandem.telemetry.messages import checked
from tandem.telemetry.stacks import LAST_RESORT, parse_dump, stacks_file
from tandem.timeouts import (
    ANSWER_SECONDS,
    LOCAL_ANSWER_SECONDS,
    MEMORY_SECONDS,
    MONITOR_SECONDS,
    NATIVE_SECONDS,
    NO_ANSWER_SECONDS,
    PROFILE_SECONDS,
)

log = logging.getLogger("tandem.inspection")

KEY = "inspection"
"""The store's key for the open requests, a JSON list. It exists only while requests are open."""
CHUNK_BYTES = 1024 * 1024
"""An answer is sent in values of this size: torch's store rejects values above 8 MiB."""
MOST_STEPS = 1000
MOST_SECONDS = 600
LEAD_SECONDS = 1.0
"""Pause between a request and the first step of a profile: all ranks have the request within a second."""
KEPT_BEATS = 25
"""The heartbeats of the last five seconds, which show how fast the steps are."""
STATES = {"T": "it is stopped", "t": "a debugger holds it", "D": "it waits in the kernel"}


class LocalRanks:
    """The answers of one node's ranks to one request. `pids`: {rank: process}; `tell` writes to its pipe."""

    def __init__(
        self,
        request: Request,
        pids: Mapping[int, int],
        tell: Callable[[int, bytes], bool],
        folder: Path,
        logs: Path,
    ) -> None:
        self.request = request
        self._pids = dict(pids)
        self._tell = tell
        self._folder = folder
        self._files = {rank: stacks_file(logs, rank) for rank in pids}
        self._sizes = {rank: size_of(path) for rank, path in self._files.items()}
        self._began = time.monotonic()
        self._seen: dict[int, int] = {}  # sizes at the last poll
        self._is_signaled = False
        self.answers: dict[int, Answer] = {}
        folder.mkdir(exist_ok=True)
        self._native = NativeStacks(self._pids, folder) if request.options.get("native") else None
        self._heard = {rank: tell(pid, to_rank(request, rank, folder)) for rank, pid in pids.items()}

    @property
    def missing(self) -> list[int]:
        return sorted(self._pids.keys() - self.answers.keys())

    @property
    def is_done(self) -> bool:
        return not self.missing and (self._native is None or self._native.is_done())

    def poll(self) -> None:
        """Collect the answers that have arrived; never waits."""
        for rank in self.missing:
            path = answer_path(self._folder, self.request.id, rank)
            with suppress(FileNotFoundError, ValueError, TypeError):
                self.answers[rank] = Answer(**json.loads(path.read_text()))
                path.unlink()
        for rank in self.missing:
            if stat_of(self._pids[rank])[:1] in ([], ["Z"], ["X"]):
                self.answers[rank] = Answer(rank, error="the rank has ended")
        waited = time.monotonic() - self._began
        if self.request.action == "stacks" and waited > NO_ANSWER_SECONDS:
            self._read_dumps()
        if self.request.action == "stacks" and waited > LOCAL_ANSWER_SECONDS:
            self._give_up()

    def _read_dumps(self) -> None:
        """Signal the ranks that did not answer, once, and read the stacks that their C handlers dumped."""
        if not self._is_signaled:
            self._is_signaled = True
            pids = [self._pids[rank] for rank in self.missing]
            send(LAST_RESORT, [pid for pid in pids if has_handler(pid, LAST_RESORT)])
        for rank in self.missing:
            size = size_of(self._files[rank])
            # Wait until the file no longer grows: the handler writes the main thread last.
            if size == self._seen.get(rank) and size > self._sizes[rank]:
                with suppress(OSError), self._files[rank].open(errors="replace") as file:
                    file.seek(max(0, self._sizes[rank]))
                    self.answers[rank] = Answer(rank, {"threads": parse_dump(file.read()), "in_c": True})
            self._seen[rank] = size

    def finish(self) -> None:
        """Record why the silent ranks did not answer, and add the stacks that py-spy has read."""
        if self.missing and self.request.action == "profile":
            end = to_rank(replace(self.request, action=CANCEL), 0, self._folder)
            for rank in self.missing:
                self._tell(self._pids[rank], end)
        self._give_up()
        if self._native is not None:
            for rank, answer in self.answers.items():
                answer.facts.update(self._native.of_rank(rank))
                # py-spy also reads ranks that cannot answer.
                answer.error = None if answer.facts.get("threads") else answer.error

    def _give_up(self) -> None:
        for rank in self.missing:
            if self.request.action != "stacks":
                self.answers[rank] = Answer(rank, error="no answer in time")
                continue
            state = STATES.get("".join(stat_of(self._pids[rank])[:1]))
            if state is None and not self._heard[rank]:
                state = "it does not read the requests of its agent"
            self.answers[rank] = Answer(rank, error=f"no answer: {state or 'it runs no Python'}")


class RemoteNodes:
    """The other nodes' answers to one request, which arrive in the store in chunks."""

    def __init__(self, store: TCPStore, request: Request, nodes: Sequence[int], folder: Path) -> None:
        self._store = store
        self._id = request.id
        self._folder = folder
        self._parts: dict[int, list[bytes]] = {node: [] for node in nodes}
        self.missing = set(nodes)
        self.answers: dict[int, list[Answer]] = {}

    def poll(self) -> None:
        """Take the chunks that have arrived. Raises RuntimeError if the store is lost."""
        for node in sorted(self.missing):
            key = _chunk_key(self._id, node, len(self._parts[node]))
            if not self._store.check([key]):
                continue
            value = bytes(self._store.get(key))
            # The node sends the next chunk once this one is gone, so the store has at most one per node.
            self._store.delete_key(key)
            self._parts[node].append(value[1:])
            if value[:1] != MORE:
                self.missing.discard(node)
                self.answers[node] = _unpacked(b"".join(self._parts.pop(node)), self._folder, self._id)


MORE = b"+"
LAST = b"."


def _chunk_key(request: str, node: int, number: int) -> str:
    return f"{KEY}/{request}/{node}/{number}"


def _packed(answers: Mapping[int, Answer], folder: Path) -> bytes:
    """Return the answers and their files in `folder`, which are removed: a line of JSON, then the files."""
    files = []
    for answer in answers.values():
        path = folder / Path(answer.file or "").name
        files.append(path.read_bytes() if answer.file else b"")
        if answer.file:
            path.unlink()
    head = [[asdict(each), len(file)] for each, file in zip(answers.values(), files, strict=True)]
    return zlib.compress(b"".join([json.dumps(head).encode(), b"\n", *files]), 1)


def _unpacked(data: bytes, folder: Path, request: str) -> list[Answer]:
    """Inverse of `_packed`; empty for anything else, which any client of the store may have written."""
    try:
        head, _, rest = zlib.decompress(data).partition(b"\n")
        answers = []
        for words, size in json.loads(head):
            answer = checked(Answer, words)
            if answer.file:
                # The name is chosen here: another node must not decide where this one writes.
                answer.file = f"{request}-{answer.rank}.file"
                (folder / answer.file).write_bytes(rest[:size])
            rest = rest[size:]
            answers.append(answer)
        return answers
    except (ValueError, TypeError, OSError, zlib.error, RecursionError):
        return []


def send_chunks(
    store: Any, request: Request, node: int, data: bytes, is_over: Callable[[], bool] = lambda: False
) -> None:
    """Send a node's answers to node 0, each chunk once the previous one was read. Raises RuntimeError."""
    chunks = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    for number, chunk in enumerate(chunks):
        key = _chunk_key(request.id, node, number)
        store.set(key, (LAST if number == len(chunks) - 1 else MORE) + chunk)
        while number < len(chunks) - 1 and store.check([key]) and not is_over():
            time.sleep(MONITOR_SECONDS)


class Inspector:
    """One node's part in looking inside the ranks. `ask` is for node 0, `look` for the others."""

    def __init__(self, node: NodeContext) -> None:
        self._node = node
        self._number = node.placement.node_rank
        self._folder = node.view.socket_path.parent / "inspection"
        self._lock = threading.Lock()
        self._open: dict[str, Request] = {}
        self._beats: dict[int, Beat] = {}
        self._progress = deque[tuple[float, int]](maxlen=KEPT_BEATS)
        self._serving: dict[str, threading.Event] = {}  # requests of node 0, with the events that end them

    def note(self, beats: Sequence[Beat]) -> None:
        """Store the heartbeats of all ranks, as node 0 has them."""
        self._beats = {beat.rank: beat for beat in beats}
        self._progress.append((time.monotonic(), max((beat.step for beat in beats), default=0)))

    def ask(
        self, action: str, options: Mapping[str, float], is_cancelled: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Ask all ranks of the run, on node 0, and return the answers as JSON values.

        Raises ConfigError if the request is refused: no rank is running, or the same is already running.
        """
        local = self._local_pids()
        if not local:
            raise ConfigError("the run has no ranks at the moment: it is starting, restarting or ending")
        request = self._request(action, options)
        offsets: dict[int, Offset | None] = {}
        with self._published(request) as store:
            ranks = LocalRanks(request, local, self._node.workers.tell, self._folder, self._node.run.logs)
            if action == "profile" and store is not None:
                offsets = {node: measure_clock(store, _clock(request, node)) for node in self._other_nodes()}
            answers, silent = self._gathered(request, ranks, store, is_cancelled)
        if action == "memory":
            keep_snapshots([answer for _, answer in answers], self._folder, self._node.run.folder)
        rows = [self._row(answer, node) for node, answer in answers]
        result: dict[str, Any] = {"run": str(self._node.run.folder), "action": action, "answers": rows}
        if action == "profile":
            names = {beat.rank: beat.node_name for beat in self._beats.values()}
            parts = trace_parts(answers, names, offsets, self._folder)
            result |= write_merged(self._node.run.folder, parts, self._folder / f"{request.id}.job")
        rows += [{"node": node, "error": "the node did not answer"} for node in silent]
        return result

    def _request(self, action: str, options: Mapping[str, float]) -> Request:
        """Return the request with the facts that only node 0 has. Raises ConfigError if it makes no sense."""
        if action not in ACTIONS:
            raise ConfigError(f"unknown request {action!r}; expected one of {', '.join(ACTIONS)}")
        asked = {str(name): float(value) for name, value in options.items()}
        limit = ANSWER_SECONDS + (NATIVE_SECONDS if asked.get("native") else 0)
        if action == "profile":
            limit = PROFILE_SECONDS
            if not 1 <= asked.get("steps", 0) <= MOST_STEPS:
                raise ConfigError(f"--steps: expected a number from 1 to {MOST_STEPS}")
            asked["first"] = self._next_step()
        elif action == "memory":
            if not 0 < asked.get("seconds", 0) <= MOST_SECONDS:
                raise ConfigError(f"--seconds: expected a number from 1 to {MOST_SECONDS}")
            limit = asked["seconds"] + MEMORY_SECONDS
        return Request(uuid.uuid4().hex[:12], action, limit, asked)

    def _next_step(self) -> int:
        """Return a step that no rank reaches before the request does, so that all record the same steps.

        Raises ConfigError if no steps are known.
        """
        if not any(beat.trained for beat in self._beats.values()):
            why = "no step is finished yet; in a script, the calls of optimizer.step() are the steps"
            raise ConfigError(f"where a step begins is not known: {why}")
        first_at, first = self._progress[0]
        last_at, last = self._progress[-1]
        pace = (last - first) / (last_at - first_at) if last_at > first_at else 0.0
        # Heartbeats and the request take time, too.
        return last + 1 + math.ceil(pace * (time.monotonic() - last_at + LEAD_SECONDS))

    def _local_pids(self) -> dict[int, int]:
        running = set(self._node.workers.pids().values())
        return {rank: pid for rank, pid in self._node.view.pids.items() if pid in running}

    @contextmanager
    def _published(self, request: Request) -> Iterator[TCPStore | None]:
        """Open a request for the other nodes in this block; yield a connection to the store.

        Raises ConfigError if a request of this kind is open.
        """
        with self._lock:
            if any(each.action == request.action for each in self._open.values()):
                raise ConfigError(f"another {request.action} request is running; try again when it is done")
            self._open[request.id] = request
        store = None
        try:
            if self._node.placement.nodes > 1:
                store = self._node.endpoint.connect()
                self._publish(store)
            yield store
        finally:
            with self._lock:
                self._open.pop(request.id)
            if store is not None:
                with suppress(RuntimeError):
                    self._publish(store)

    def _publish(self, store: TCPStore) -> None:
        with self._lock:
            rows = [asdict(each) for each in self._open.values()]
            if rows:
                store.set(KEY, json.dumps(rows))
            else:
                store.delete_key(KEY)

    def _gathered(
        self, request: Request, local: LocalRanks, store: TCPStore | None, is_cancelled: Callable[[], bool]
    ) -> tuple[list[tuple[int, Answer]], list[int]]:
        """Return (node, answer) of the ranks in their order, and the nodes that did not answer in time."""
        others = RemoteNodes(store, request, self._other_nodes(), self._folder) if store is not None else None
        deadline = time.monotonic() + request.limit
        # One check per node and poll, so more nodes mean longer pauses.
        pause = max(MONITOR_SECONDS, self._node.placement.nodes / 1000)
        while time.monotonic() < deadline and not is_cancelled():
            local.poll()
            if others is not None:
                others.poll()
            if local.is_done and not (others and others.missing):
                break
            time.sleep(pause)
        local.finish()
        found = [(self._number, answer) for answer in local.answers.values()]
        for node, answers in others.answers.items() if others else ():
            found += [(node, answer) for answer in answers]
        return sorted(found, key=lambda each: each[1].rank), sorted(others.missing if others else ())

    def _other_nodes(self) -> list[int]:
        placement = self._node.placement
        # In an elastic job, only nodes that send heartbeats are certainly present.
        known = {beat.node for beat in self._beats.values()} if placement.elastic else range(placement.nodes)
        return sorted(set(known) - {self._number})

    def _row(self, answer: Answer, node: int) -> dict[str, Any]:
        beat = self._beats.get(answer.rank)
        row = {"rank": answer.rank, "node": node, "error": answer.error, **answer.facts}
        if beat is not None:
            row["node_name"] = beat.node_name
            row["step"] = beat.step
            row["phase"] = beat.phase or beat.activity
            row["seconds"] = round(beat.quiet, 1)
            row["waiting"] = beat.waiting
        return row

    # The other nodes' part.

    def take_place(self, node_rank: int) -> None:
        """Answer as node `node_rank` from now on: this spare has taken the place of a lost node."""
        self._number = node_rank

    def look(self, store: TCPStore) -> None:
        """Start the request that node 0 published, or end one that it withdrew. Raises RuntimeError."""
        requests = _requests(bytes(store.get(KEY))) if store.check([KEY]) else []
        for request in requests:
            if request.id not in self._serving:
                ends = self._serving[request.id] = threading.Event()
                threading.Thread(
                    target=self._serve, args=(request, ends), name="tandem-inspection", daemon=True
                ).start()
        for gone in self._serving.keys() - {request.id for request in requests}:
            self._serving.pop(gone).set()

    def _serve(self, request: Request, is_over: threading.Event) -> None:
        try:
            pids = self._local_pids()
            local = LocalRanks(request, pids, self._node.workers.tell, self._folder, self._node.run.logs)
            store = self._node.endpoint.connect()
            if request.action == "profile":
                answer_clock(store, _clock(request, self._number))
            deadline = time.monotonic() + request.limit
            while not local.is_done and time.monotonic() < deadline and not is_over.is_set():
                local.poll()
                time.sleep(MONITOR_SECONDS)
            local.finish()
            send_chunks(store, request, self._number, _packed(local.answers, self._folder), is_over.is_set)
        except Exception as error:  # node 0 reports that this node did not answer
            log.debug("cannot answer a request of node 0: %s", error)


def _clock(request: Request, node: int) -> str:
    return f"{KEY}/{request.id}/{node}/clock"


def _requests(text: bytes) -> list[Request]:
    """Return the open requests; none for anything else, which any client of the store may have written."""
    try:
        return [checked(Request, each) for each in json.loads(text)]
    except (ValueError, TypeError, RecursionError):
        return []
