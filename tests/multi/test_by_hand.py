"""Ranks that a person starts: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as tutorials teach."""

import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from program_files import program_text
from tandem.config import Settings
from tandem.config.slices import LaunchConfig
from tandem.distributed.group import ProcessGroup
from tandem.distributed.group_store import check_fresh
from tandem.distributed.position import Connection, Position
from tandem.errors import ConfigError
from tandem.platforms.detection import detect

TASK = program_text("by_hand_task")
FOREIGN = re.compile(r"TANDEM_|PET_|SLURM_|OMPI_|TORCHELASTIC_|RANK$|LOCAL_|WORLD_SIZE|MASTER_|NNODES")
SETTINGS = "--task line.py:Line --batch-size 24 --steps 8 --threads 1 --metrics-linger 0".split()
SETTINGS += ["--metrics", "0"]


@pytest.mark.timeout(180)
def test_two_ranks_by_hand_train_as_two_of_the_launcher(
    processes: Any, tmp_path: Path, free_port: int
) -> None:
    (tmp_path / "line.py").write_text(TASK)
    clean = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    clean["PYTHONPATH"] = str(Path(tandem.__file__).parents[1])

    def start(verb: str, run: str, *more: str, **variables: str) -> Any:
        command = [sys.executable, "-m", "tandem", verb, *SETTINGS, "--run-dir", run, *more]
        return processes.start(command, cwd=tmp_path, env={**clean, **variables})

    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port)}
    ranks = [start("train", "by-hand", **group, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]
    for process in ranks:
        code, output = processes.wait(process)
        assert code == 0, output
    summary = json.loads((tmp_path / "by-hand" / "summary.json").read_text())
    assert (summary["platform"], summary["world_size"], summary["nodes"]) == ("by-hand", 2, 1)
    for method in (f"tcp://127.0.0.1:{free_port}", f"file://{tmp_path}/meet"):
        group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        more = ("--master", method)
        runs = [start("train", method[:3], *more, **group, RANK=r, LOCAL_RANK=r) for r in ("0", "1")]
        for process in runs:
            code, output = processes.wait(process)
            assert code == 0, output
        met = json.loads((tmp_path / method[:3] / "summary.json").read_text())
        assert met["weights_sha256"] == summary["weights_sha256"]
    code, output = processes.wait(start("launch", "launched", "--nproc", "2"))
    assert code == 0, output
    launched = json.loads((tmp_path / "launched" / "summary.json").read_text())
    assert summary["weights_sha256"] == launched["weights_sha256"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_a_rank_that_waits_for_the_others_can_be_stopped(
    processes: Any, tmp_path: Path, free_port: int, number: int
) -> None:
    """torch waits in C, where no handler of Python's comes through; there is nothing yet to be saved."""
    (tmp_path / "line.py").write_text(TASK)
    clean = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    clean.update(PYTHONPATH=str(Path(tandem.__file__).parents[1]), WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
    clean.update(MASTER_ADDR="localhost", MASTER_PORT=str(free_port))
    command = [sys.executable, "-m", "tandem", "train", *SETTINGS, "--run-dir", "alone"]
    process = processes.start(command, cwd=tmp_path, env=clean)
    for line in process.stdout:
        if "waiting for the other 1 of 2 ranks" in line:
            break
    time.sleep(1)  # into the wait
    process.send_signal(number)
    code, output = processes.wait(process, 30)
    assert code == 137 and "Traceback" not in output, output
    assert f"{signal.Signals(number).name} came before the first step; nothing to save" in output


def test_a_rank_that_never_comes_is_named_and_not_waited_for_for_ever(
    processes: Any, tmp_path: Path, free_port: int
) -> None:
    """It was waited for without a word, for as long as a first step may take."""
    (tmp_path / "line.py").write_text(TASK)
    clean = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    clean.update(PYTHONPATH=str(Path(tandem.__file__).parents[1]), WORLD_SIZE="3")
    clean.update(MASTER_ADDR="localhost", MASTER_PORT=str(free_port))
    words = [sys.executable, "-m", "tandem", "train", *SETTINGS, "--run-dir", "alone", "--master-timeout", 20]
    first, third = (
        processes.start([*map(str, words)], cwd=tmp_path, env={**clean, "RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "2")
    )
    code, output = processes.wait(first, 120)
    assert code == 200 and "waiting: 2 of 3 ranks have joined, missing rank 1 (" in output, output
    assert "not all of the 3 ranks joined within 20 s, missing rank 1" in output, output
    assert processes.wait(third, 90)[0] == 200


def test_a_taken_port_and_a_used_file_are_said_in_one_line(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port))
        other.listen()
        connection = Connection(init="master", master=("127.0.0.1", free_port))
        with pytest.raises(ConfigError, match=f"port {free_port}, .* in use .* another MASTER_PORT"):
            ProcessGroup.open(Position(world_size=2), connection, torch.device("cpu"), 5)
    used = tmp_path / "used"
    used.write_text("addresses")
    right = time.time
    with monkeypatch.context() as patched:
        # The clock of the volume, which dates the file, is behind this machine's.
        patched.setattr(time, "time", lambda: right() + 9999)
        check_fresh(used)
    os.utime(used, (right() - 9999, right() - 9999))
    with pytest.raises(ConfigError, match=r"from an earlier run, (9999|1\d{4}) s old; remove it"):
        check_fresh(used)
    check_fresh(tmp_path / "new")
    assert os.listdir(tmp_path) == ["used"]


@pytest.mark.parametrize(
    ("method", "environ", "said"),
    [
        ("file:///meet", {}, "started by hand: set RANK, WORLD_SIZE"),
        ("file:///meet", {"MASTER_ADDR": "n1"}, "and MASTER_ADDR both"),
    ],
)
def test_init_methods_that_cannot_be(method: str, environ: dict[str, str], said: str) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **environ} if environ else {}
    with pytest.raises(ConfigError, match=said):
        detect(ranks, "n0", LaunchConfig(master=method))


def test_a_tcp_address_is_the_masters() -> None:
    ranks = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    placement = detect(ranks, "n0", Settings.from_dict({"master": "tcp://n0:2345"}).launch)
    assert (placement.master_host, placement.master_port, placement.nodes) == ("n0", 2345, 2)
