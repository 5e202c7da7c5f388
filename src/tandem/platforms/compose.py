"""Read the position of a replica of the Docker Compose service `node`, and prevent useless retries.

Compose gives all replicas the same environment, but Docker's resolver knows the name of a container's own
address: <project>-node-<index>. Docker's restart policy distinguishes only zero and nonzero. An end that no
retry can fix is therefore recorded, and a container that is restarted within `STAY_DOWN_SECONDS` exits at
once with the same code. See docs/architecture.md#containers.
"""

import contextlib
import json
import re
import secrets
import socket
import struct
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tandem import layout
from tandem.bounded_reader import content, count, moment, parsed
from tandem.errors import ConfigError, is_own
from tandem.platforms.environment import DEFAULT_PORT, Placement, PlatformEnv, VariableNames, any_set
from tandem.timeouts import RESOLVER_SECONDS, STAY_DOWN_SECONDS

ORDER = 80  # its variables are tandem's own, so it only needs to precede by-hand
MARKS = ("TANDEM_COMPOSE_NODES", "TANDEM_COMPOSE_INDEX", "TANDEM_COMPOSE_PROJECT")
VARIABLE_NAMES = VariableNames(("TANDEM_COMPOSE_NODES",), host=(), port=())
# Docker's own resolver has this address in every container of a user-defined network.
RESOLVER = ("127.0.0.11", 53)
ATTEMPTS = 5
NOTES = Path("/var/lib/tandem")
_PTR = 12
_INTERNET = 1
_POINTER = 0xC0


def detect(environ: Mapping[str, str]) -> bool:
    return any_set(environ, MARKS)


def read(env: PlatformEnv) -> Placement:
    """Read the position; replicas are named <project>-node-<index>, counted from 1."""
    env = env.for_platform("compose", MARKS, VARIABLE_NAMES)
    project = env.environ.get("TANDEM_COMPOSE_PROJECT")
    index = env.variable("TANDEM_COMPOSE_INDEX")
    if not project:
        raise ConfigError(
            "TANDEM_COMPOSE_INDEX is set but TANDEM_COMPOSE_PROJECT is not; start with docker compose up"
        )
    nodes = env.number("nodes")
    if not 1 <= index <= nodes:
        raise ConfigError(
            f"TANDEM_COMPOSE_INDEX={index} is not 1 to TANDEM_COMPOSE_NODES={nodes}; "
            "set NODES instead of --scale; if the indices have a gap: docker compose down, then up again"
        )
    return Placement(
        "compose",
        nodes,
        env.number("node_rank", index - 1),
        env.nproc(),
        env.text("host") or f"{project}-node-1",
        env.number("port", DEFAULT_PORT),
        local_name=f"{project}-node-{index}",
    )


def with_index(environ: Mapping[str, str], resolver: tuple[str, int] = RESOLVER) -> Mapping[str, str]:
    """Return the environment with TANDEM_COMPOSE_INDEX if Compose started this container, else unchanged.

    Raises ConfigError if the resolver does not know this container as a replica of the project.
    """
    project = environ.get("TANDEM_COMPOSE_PROJECT")
    if not project or environ.get("TANDEM_COMPOSE_INDEX"):
        return environ
    address = socket.gethostbyname(socket.gethostname())
    names = names_of(address, resolver)
    for name in names:
        if match := re.match(rf"{re.escape(project)}-node-([0-9]+)(\.|$)", name):
            return {**environ, "TANDEM_COMPOSE_INDEX": match[1]}
    raise ConfigError(
        f"this container ({address}, names: {', '.join(names) or 'none'}) is not a replica of service node "
        f"in TANDEM_COMPOSE_PROJECT={project}; start it with make compose-up, or set TANDEM_COMPOSE_INDEX"
    )


def names_of(
    address: str, resolver: tuple[str, int] = RESOLVER, seconds: float = RESOLVER_SECONDS
) -> list[str]:
    """Return the names that a resolver has for an IPv4 address (RFC 1035, type PTR).

    Returns [] if none of ATTEMPTS questions is answered within `seconds`.
    """
    question = _encode(".".join(reversed(address.split("."))) + ".in-addr.arpa")
    question += struct.pack(">HH", _PTR, _INTERNET)
    for _ in range(ATTEMPTS):
        # The query ID is random, so that a stray packet is not taken for the answer.
        number = secrets.randbelow(2**16)
        # 0x0100 asks for recursion; one question follows (RFC 1035, section 4.1.1).
        query = struct.pack(">6H", number, 0x0100, 1, 0, 0, 0) + question
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
            channel.settimeout(seconds)
            try:
                channel.connect(resolver)  # a connected socket accepts no other host's answer
                channel.send(query)
                answer = channel.recv(4096)
            except OSError:
                continue
        if answer[:2] == query[:2]:
            with contextlib.suppress(ValueError, IndexError, struct.error):  # not an answer of a resolver
                return _pointers(answer, len(query))
    return []


def _encode(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"


def _pointers(answer: bytes, at: int) -> list[str]:
    """Return the names in the answer section, which starts at `at`."""
    names = []
    for _ in range(struct.unpack_from(">H", answer, 6)[0]):
        _, at = _decode(answer, at)
        kind, _, _, length = struct.unpack_from(">HHIH", answer, at)
        # The fixed fields that `kind` and `length` are from: type, class, TTL and length.
        at += 10
        if kind == _PTR:
            names.append(_decode(answer, at)[0])
        at += length
    return names


def _decode(message: bytes, at: int) -> tuple[str, int]:
    """Return (the name at `at`, the position of the next field).

    A name may end in a pointer to an earlier one. Raises ValueError for a pointer that does not lead back,
    which could loop forever.
    """
    labels: list[str] = []
    after = None
    began = at
    while length := message[at]:
        if length & _POINTER:
            # The name continues elsewhere, but the next field follows the pointer.
            after = after or at + 2
            at = struct.unpack_from(">H", message, at)[0] & 0x3FFF
            if at >= began:
                raise ValueError(f"a name at {began} continues at {at}")
            began = at
            continue
        labels.append(message[at + 1 : at + 1 + length].decode())
        at += 1 + length
    return ".".join(labels), after or at + 1


def permanent_exit_code(run_dir: Path, container: str, now: float | None = None) -> int | None:
    """Return the code to exit with at once if this container has just ended for good; None to continue."""
    for folder, name in _notes(run_dir, container):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            record = parsed(content(folder, name))
            age = (time.time() if now is None else now) - moment(record["time"])
            # A time in the future means that the clock was set back; it does not tell when the run ended.
            if 0 <= age < STAY_DOWN_SECONDS:
                return count(record["exit_code"])
    return None


def note_start(container: str) -> None:
    """Remove the exit code of this container's last run: a killed one leaves none."""
    with contextlib.suppress(OSError):
        _code_of(container).unlink(missing_ok=True)


def _code_of(container: str) -> Path:
    return NOTES / f"code-{container}.json"


def note_end(run_dir: Path, container: str, code: int) -> None:
    """Record an end that no retry can fix (1 to 127, 255); remove the record for any other end.

    The first writable place is used. Without one, Docker's limit of five retries applies. The exit code is
    also written where the service `job` reads it (compose/follow_job.py).
    """
    with contextlib.suppress(OSError):
        _code_of(container).write_text(json.dumps({"exit_code": code}), encoding="utf-8")
    record = json.dumps({"exit_code": code, "time": time.time()})
    with contextlib.suppress(OSError):
        if is_own(code):
            run_dir.parent.mkdir(parents=True, exist_ok=True)
            for folder in (run_dir, run_dir / layout.LOG):
                folder.mkdir(mode=0o700, exist_ok=True)
    for folder, name in _notes(run_dir, container):
        with contextlib.suppress(OSError):
            if is_own(code):
                (folder / name).write_text(record, encoding="utf-8")
                return
            (folder / name).unlink(missing_ok=True)


def _notes(run_dir: Path, container: str) -> list[tuple[Path, str]]:
    """Return the places for a record: the run's volume, a separate one (compose.yaml), the container."""
    name = layout.ended(container)
    return [(run_dir, f"{layout.LOG}/{name}"), (NOTES, name), (Path(tempfile.gettempdir()), name)]
