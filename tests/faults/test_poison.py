"""Somebody on the network writes into the agents' store: no command of theirs runs, and the job goes on."""

import base64
import os
import pickle
import signal
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from small_runs import Runs, rank_processes
from torch.distributed import TCPStore  # type: ignore[attr-defined]

pytestmark = pytest.mark.timeout(900)
LIMIT = 250.0
POISONED = ("tandem/rendezvous", "torch.rendezvous.tandem")  # ours, and torch's own
JUNK = (b"{", b"\xff\0", b"[" * 10_000, b'{"number": 1}')


class Planted:
    """A pickle that makes a file where it is read."""

    def __init__(self, file: Path) -> None:
        self._command = f"touch {file}"

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


def attack(port: int, file: Path, seconds_between: float, over: threading.Event) -> None:
    """Pickles as the rendezvous state, and junk as heartbeats, alarms and metrics, until it is `over`."""
    bits, store, turn = pickle.dumps(Planted(file)), None, 0
    while not over.wait(seconds_between):
        turn += 1
        with suppress(Exception):
            store = store or TCPStore(
                "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False
            )
            for key in POISONED:
                store.set(key, base64.b64encode(bits) if turn % 2 else bits)
            for key in store.list_keys():
                if any(part in key for part in ("/pulse/", "/alarm", "metrics/")):
                    store.set(key, JUNK[turn % len(JUNK)])
            continue
        store = None


def test_pickles_and_junk_in_the_store_run_nothing_and_change_nothing(runs: Runs, free_port: int) -> None:
    undisturbed = runs.undisturbed("--steps", 200)
    file, over = runs.folder / "was-here", threading.Event()
    own = ("--nodes", 2, "--master", f"127.0.0.1:{free_port}", "--steps", 200, "--checkpoint-every", 20)
    nodes = [runs.start("launch", "poisoned", *own, "--node-rank", index, delay=0.02) for index in range(2)]
    enemy = threading.Thread(target=attack, args=(free_port, file, 0.3, over), daemon=True)
    enemy.start()
    try:
        runs.wait_for_step("poisoned", 40)
        (pid,) = rank_processes(nodes[1].pid).values()
        os.kill(pid, signal.SIGKILL)  # the nodes meet once more
        ended = [runs.processes.wait(node, LIMIT) for node in nodes]
    finally:
        over.set()
        enemy.join()
    assert not file.exists(), "a command of somebody else's ran"
    assert [code for code, _ in ended] == [0, 0], ended
    assert "invalid rendezvous state" in ended[0][1] + ended[1][1]
    assert "Traceback" not in ended[0][1] + ended[1][1]
    summary = runs.summary("poisoned")
    assert summary["global_step"] == 200 and summary["weights_sha256"] == undisturbed
    assert summary["restarts"] == 1, "the one that was killed"
