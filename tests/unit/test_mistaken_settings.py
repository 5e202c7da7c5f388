"""A mistake in one node's settings: its place is read in spite of it, so that the others hear why."""

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as engine

import tandem
from program_files import program_text
from tandem.errors import FINISHED
from tandem.launch.announce_error import placement_of
from tandem.launch.rendezvous_state import STATE_KEY, to_text
from tandem.launch.store_endpoint import StoreEndpoint, _is_missed, announce
from tandem.log import setup
from tandem.platforms.detection import Placement
from tandem.signals import StopFlag

AT = "--nodes 2 --node-rank 1 --master 10.0.0.1:29500"


@pytest.mark.parametrize(
    ("words", "variables", "dotenv", "toml"),
    [
        (f"{AT} --epoks 3", {}, "", ""),
        (f"--epochs x {AT}", {}, "", ""),
        (f"{AT.replace(' --master ', ' --master=')} --lr= script.py --nodes 7", {}, "", ""),
        (f"{AT} -m", {}, "", ""),
        (f"--nproc x {AT}", {"TANDEM_EPOKS": "3"}, "", ""),
        (AT, {}, "TANDEM_EPOCHS=x", ""),
        (AT, {}, "", "epochs = 'x'"),
        (f"{AT} --epoks 3", {}, "", "epochs = ["),
        ("--epoks 3", {}, "TANDEM_NODES=2\nTANDEM_NODE_RANK=1\nTANDEM_MASTER=10.0.0.1:29500", ""),
        ("--epoks 3 --node-rank 1", {}, "", "nodes = 2\nmaster = '10.0.0.1:29500'"),
        ("--epoks 3", {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}, "", ""),
        ("", {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "TANDEM_LR": "x"}, "", ""),
        ("--epoks 3", {"TANDEM_NODES": "2", "NODE_RANK": "1", "TANDEM_MASTER": "10.0.0.1:29500"}, "", ""),
    ],
)
def test_the_place_is_known_whatever_else_is_wrong(
    words: str, variables: dict[str, str], dotenv: str, toml: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if dotenv:
        Path(".env").write_text(dotenv)
    if toml:
        Path("run.toml").write_text(toml)
        words = f"--config run.toml {words}"
    place = placement_of(words.split(), variables)
    assert place is not None
    assert (place.nodes, place.node_rank, place.master_host, place.master_port) == (2, 1, "10.0.0.1", 29500)


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        ("--nodes 2 --epochs x", {}),  # simulated here, and no other has begun
        ("--epochs x", {"NNODES": "1", "NODE_RANK": "0"}),
        (AT.replace("2", "x", 1), {}),
        ("--nodes 2 --node-rank 1 --epochs x", {}),
        ("--epochs x", dict(zip(("RANK", "LOCAL_RANK", "WORLD_SIZE", "NNODES"), "1122", strict=True))),
    ],
)
def test_whose_place_is_not_known_tells_nobody(words: str, variables: dict[str, str]) -> None:
    assert placement_of(words.split(), variables) is None


def test_nodes_that_are_all_there_miss_nobody_until_one_is_lost() -> None:
    timeout = timedelta(seconds=10)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    soon = time.monotonic() + 30
    assert _is_missed(store, StopFlag(), soon)
    state, stop = engine._RendezvousState(), StopFlag()
    state.complete, stop.signal_number = True, 15
    store.set(STATE_KEY, to_text(state).decode())
    assert not _is_missed(store, stop, soon)
    state.complete = False
    can_be_read_again = to_text(state).decode()
    threading.Timer(0.3, store.set, (STATE_KEY, can_be_read_again)).start()
    assert _is_missed(store, StopFlag(), soon)


SLOW_TORCH = program_text("early_slow_torch")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_tells_the_others_says_so_and_the_first_signal_ends_it_at_once(
    number: int, processes: Any, tmp_path: Path
) -> None:
    """It was heard when torch had been imported, which takes seconds."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_TORCH)
    places = tmp_path, Path(tandem.__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, places))
    command = [sys.executable, "-m", "tandem", "launch", *AT.split(), "--epoks", "3"]
    process = processes.start(command, cwd=tmp_path, env=environment)
    assert process.stdout.readline().startswith("tandem: unknown flag --epoks")
    told = "tandem: telling the other nodes why this one exits, for up to 30 s; press Ctrl-C to exit now\n"
    assert process.stdout.readline() == told
    process.send_signal(number)
    code, said = processes.wait(process, 10)
    assert (code, said) == (2, "")


@pytest.mark.slow
def test_a_complete_run_says_that_it_waits_for_the_others_and_hears_a_signal(
    free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    setup(None, None, 0, to_terminal=True, json_lines=False)
    stop = StopFlag()
    threading.Timer(4, setattr, (stop, "signal_number", signal.SIGINT)).start()
    began = time.monotonic()
    announce(StoreEndpoint(Placement("by-hand", 2, 0, 1, "127.0.0.1", free_port), None), FINISHED, stop=stop)
    assert time.monotonic() - began < 20
    setup(None, None, 0, to_terminal=False, json_lines=False)
    assert "still telling the other nodes, for up to 30 s" in capsys.readouterr().err
