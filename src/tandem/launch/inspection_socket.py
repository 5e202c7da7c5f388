"""Connect `tandem stacks` and similar commands to node 0's agent by a Unix socket for the run's user only.

The agent writes the socket's path to the run's log directory. A request and its answer are one line of JSON
each. The client needs no torch.
"""

import json
import logging
import os
import select
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem import layout
from tandem.bounded_reader import content, parsed
from tandem.errors import ConfigError, TandemError
from tandem.paths import identity, is_elsewhere
from tandem.run.directory import RunDir
from tandem.telemetry.journal import write_json_atomic
from tandem.timeouts import REQUEST_SECONDS

if TYPE_CHECKING:
    from tandem.launch.inspection import Inspector
    from tandem.launch.node_context import NodeContext

log = logging.getLogger("tandem.inspection")

MOST_BYTES = 64 * 1024
"""The longest line of a request."""
HINT = "run this on node 0: kubectl exec POD -- ..., srun --overlap --jobid JOB ..."


class InspectionSocket:
    """Serves requests from a thread in a `with` block. If the socket cannot be opened, nothing is served."""

    def __init__(self, node: "NodeContext", inspector: "Inspector") -> None:
        self._inspector = inspector
        self._path = node.view.socket_path.with_name("inspect.sock")
        self._folder = node.run.folder
        self._note = node.run.logs / layout.INSPECTION
        self._listener: socket.socket | None = None

    def __enter__(self) -> "InspectionSocket":
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(self._path))
            self._path.chmod(0o600)
            listener.listen(8)
            self._listener = listener
            threading.Thread(target=self._accept, name="tandem-inspection", daemon=True).start()
            self._note.parent.mkdir(parents=True, exist_ok=True)
            note = {
                "host": socket.gethostname(),
                "process": os.getpid(),
                "socket": str(self._path),
                "folder": identity(self._folder),
            }
            write_json_atomic(self._note, note)
        except OSError as error:  # training does not depend on it
            log.debug("`tandem stacks` will not work: %s", error)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._note.unlink(missing_ok=True)
        if self._listener is not None:
            with suppress(OSError):  # wakes the thread
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            with suppress(OSError):
                self._path.unlink()

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="tandem-inspection", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(REQUEST_SECONDS)
            result: Mapping[str, Any]
            try:
                words = json.loads(_line(connection))
                action, options = str(words["action"]), dict(words["options"])
                result = self._inspector.ask(action, options, lambda: _is_gone(connection))
            except TandemError as error:
                result = {"error": str(error), "exit_code": error.exit_code}
            except Exception as error:  # no request may end the agent
                result = {"error": f"the request failed: {type(error).__name__}: {error}", "exit_code": 1}
            connection.sendall(json.dumps(result).encode() + b"\n")


def _line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < MOST_BYTES:
        more = connection.recv(4096)
        if not more:
            break
        line += more
    return line


def _is_gone(connection: socket.socket) -> bool:
    """Return True if the client has closed its end: Ctrl-C was pressed."""
    try:
        # recv alone would wait for the socket's timeout, even with MSG_DONTWAIT.
        return bool(select.select([connection], [], [], 0)[0]) and not connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def ask(run: RunDir, action: str, options: Mapping[str, float]) -> dict[str, Any]:
    """Send a request to node 0's agent of a run, and wait for the answer.

    Raises ConfigError if the run cannot be reached from here or refuses, and TandemError for other failures.
    """
    connection = _connected(run)
    with connection:
        try:
            connection.sendall(json.dumps({"action": action, "options": dict(options)}).encode() + b"\n")
            with connection.makefile("rb") as answers:
                answer = json.loads(answers.readline() or b"null")
        except (OSError, ValueError) as error:
            raise TandemError(f"{run.folder}: the run ended before it answered") from error
    if not isinstance(answer, dict):
        raise TandemError(f"{run.folder}: the run ended before it answered")
    if "error" in answer:
        kind = ConfigError if answer.get("exit_code") == ConfigError.exit_code else TandemError
        raise kind(f"{run.folder}: {answer['error']}")
    return answer


def _connected(run: RunDir) -> socket.socket:
    if not run.folder.is_dir():
        raise ConfigError(f"{run.folder} is not a directory; give the run directory")
    note: Any = None
    with suppress(OSError, ValueError):
        note = parsed(content(run.folder, f"{layout.LOG}/{layout.INSPECTION}"))
    if not isinstance(note, dict):
        why = "has ended" if run.summary() else "is not running here"
        raise ConfigError(f"{run.folder} {why}; give the directory of a run that trains under tandem launch")
    if note.get("host") == socket.gethostname() and is_elsewhere(note.get("folder"), run.folder):
        # The socket is that of the run from which this directory was copied.
        raise ConfigError(f"{run.folder} is a copy of a run; give the directory of the run itself")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(note.get("socket")))
    except OSError as error:
        connection.close()
        raise ConfigError(f"{run.folder}: {_why_not(note, error)}") from error
    return connection


def _why_not(note: Mapping[str, Any], error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "the run belongs to another user"
    host = str(note.get("host"))
    if host != socket.gethostname():
        return f"node 0 is on {host}; {HINT}"
    if Path(f"/proc/{note.get('process')}").exists():
        return f"node 0 runs in another container or namespace of this machine; {HINT}"
    return "the run is not running any more (its agent was killed)"
