"""One replica of a Compose service: which one it is, and that it stays down when a retry cannot help.

Compose gives all replicas the same environment. Docker's resolver knows better: the name that belongs to a
container's own address is <project>-node-<index>. Docker's restart policy in turn knows only zero and not
zero; an end that no retry can mend is therefore written down, and the container that is started again
within `STAY_DOWN_SECONDS` leaves at once with the same code.
"""

import contextlib
import json
import re
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from tandem.errors import ConfigError
from tandem.timeouts import RESOLVER_SECONDS, STAY_DOWN_SECONDS

RESOLVER = ("127.0.0.11", 53)
ATTEMPTS = 5
_PTR, _INTERNET, _POINTER = 12, 1, 0xC0


def with_index(environ: Mapping[str, str], resolver: tuple[str, int] = RESOLVER) -> Mapping[str, str]:
    """The environment with TANDEM_COMPOSE_INDEX where Compose started this container, else as it is.

    Raises ConfigError when the resolver does not know this container as a replica of the project.
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
        f"this container ({address}, names: {', '.join(names) or 'none'}) is no replica of service node in "
        f"TANDEM_COMPOSE_PROJECT={project}; start it with make compose-up, or set TANDEM_COMPOSE_INDEX"
    )


def names_of(address: str, resolver: tuple[str, int] = RESOLVER) -> list[str]:
    """The names that a resolver has for an IPv4 address (RFC 1035, query type PTR); [] when it is silent."""
    question = _encode(".".join(reversed(address.split("."))) + ".in-addr.arpa")
    question += struct.pack(">HH", _PTR, _INTERNET)
    for _ in range(ATTEMPTS):
        number = secrets.randbelow(2**16)
        query = struct.pack(">6H", number, 0x0100, 1, 0, 0, 0) + question
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
            channel.settimeout(RESOLVER_SECONDS)
            try:
                channel.connect(resolver)  # and nobody else is heard
                channel.send(query)
                answer = channel.recv(4096)
            except OSError:
                continue
        if answer[:2] == query[:2]:
            with contextlib.suppress(ValueError, IndexError, struct.error):  # no answer of a resolver's
                return _pointers(answer, len(query))
    return []


def _encode(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"


def _pointers(answer: bytes, at: int) -> list[str]:
    """The names in the answer section, which starts at `at`."""
    names = []
    for _ in range(struct.unpack_from(">H", answer, 6)[0]):
        _, at = _decode(answer, at)
        kind, _, _, length = struct.unpack_from(">HHIH", answer, at)
        at += 10
        if kind == _PTR:
            names.append(_decode(answer, at)[0])
        at += length
    return names


def _decode(message: bytes, at: int) -> tuple[str, int]:
    """(name at `at`, where the next field begins); a name may end in a pointer to an earlier one.

    Raises ValueError for a pointer that leads nowhere earlier, which could go round for ever.
    """
    labels: list[str] = []
    after, began = None, at
    while length := message[at]:
        if length & _POINTER:
            after = after or at + 2
            at = struct.unpack_from(">H", message, at)[0] & 0x3FFF
            if at >= began:
                raise ValueError(f"a name at {began} goes on at {at}")
            began = at
            continue
        labels.append(message[at + 1 : at + 1 + length].decode())
        at += 1 + length
    return ".".join(labels), after or at + 1


def stay_down_code(run_dir: Path, container: str, now: float | None = None) -> int | None:
    """The code to leave with at once, when this container has just ended for good; None to go ahead."""
    try:
        record = json.loads(_note(run_dir, container).read_text(encoding="utf-8"))
        age = (time.time() if now is None else now) - float(record["time"])
        return int(record["exit_code"]) if 0 <= age < STAY_DOWN_SECONDS else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def note_end(run_dir: Path, container: str, code: int) -> None:
    """Remember an end that no retry can mend (1 to 127); any other end is forgotten."""
    note = _note(run_dir, container)
    with contextlib.suppress(OSError):  # without a volume to write to, Docker's five retries are the limit
        if 1 <= code <= 127:
            run_dir.parent.mkdir(parents=True, exist_ok=True)
            for folder in (run_dir, note.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            note.write_text(json.dumps({"exit_code": code, "time": time.time()}), encoding="utf-8")
        else:
            note.unlink(missing_ok=True)


def _note(run_dir: Path, container: str) -> Path:
    return run_dir / "log" / f"ended-{container}.json"
