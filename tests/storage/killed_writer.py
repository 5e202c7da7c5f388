"""A writer that the proxy kills at its n-th HTTP request, n = 0, 1, ...; prints a JSON line for each.

python killed_writer.py ADDRESS CONTROL.json RULE
"""

import json
import os
import sys
from pathlib import Path

import s3fs  # noqa: F401  imported once, before the forks; connections are each child's own

from tandem.checkpoint.retention import Retention
from tandem.checkpoint.store import CheckpointStore
from tandem.config.address import address

STATE = bytes(range(256)) * 2048


def write(prefix: str, control: Path, rule: str, nth: int, told: int) -> None:
    """Two checkpoints and a prune; killed at the `nth` request after the first of them was acknowledged."""
    control.write_text("{}")
    store = CheckpointStore(address(f"{prefix}/{nth}/checkpoints"))
    store.save(1, b"1" + STATE, {})
    os.write(told, b"1")
    since = int(control.with_suffix(".count").read_text())
    control.write_text(json.dumps({"rule": rule, "at": [nth], "since": since, "victim": os.getpid()}))
    store.save(2, b"2" + STATE, {})
    os.write(told, b"2")
    store.prune(Retention(1))


def main() -> None:
    address, control, rule = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    nth, killed = 0, True
    while killed:
        theirs, ours = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                write(address, control, rule, nth, ours)
            finally:
                os._exit(0)
        os.close(ours)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        acknowledged = os.read(theirs, 9).decode()
        os.close(theirs)
        print(
            json.dumps({"nth": nth, "killed": killed, "acknowledged": int(acknowledged[-1:] or 0)}),
            flush=True,
        )
        nth += 1
    control.write_text("{}")


if __name__ == "__main__":
    main()
