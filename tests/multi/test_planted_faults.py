"""Ten faults of an environment, planted for real: `tandem doctor` names each, and nothing else.

What needs a file system of its own is mounted in a namespace of its own, where this user may make one.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from patience import patient

ROOT = Path(__file__).parents[2]
DOCTOR = [sys.executable, "-m", "tandem", "doctor", "--json"]
HOST_IS_SMALL = {"shm"} if shutil.disk_usage("/dev/shm").free < 2**28 else set[str]()
QUIET = {"GLOO_SOCKET_IFNAME": "lo", "TANDEM_METRICS_LINGER": "0"}  # whatever this host's own name is


def environment(**more: str) -> dict[str, str]:
    ours = ("TANDEM_", "PET_", "MASTER_", "WORLD_SIZE", "RANK", "LOCAL_", "GLOO_", "NCCL_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**clean, **QUIET, **more}


def diagnosis(command: list[str], **variables: str) -> tuple[int, dict[str, Any]]:
    ended = subprocess.run(
        command, capture_output=True, text=True, env=environment(**variables), timeout=patient(100)
    )
    assert ended.stdout, ended.stderr
    found = json.loads(ended.stdout)
    assert all(each["remedy"] for each in found["checks"] if each["state"] != "pass")
    return ended.returncode, found


def wrong_in(found: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, what is said) of all that is not well, but for what is so on this host anyway."""
    checks = [each for each in found["checks"] if each["state"] != "pass"]
    return [(each["name"], each["said"]) for each in checks if each["name"] not in HOST_IS_SMALL]


def named(command: list[str], **variables: str) -> tuple[int, dict[str, str]]:
    """(exit code, what is wrong)."""
    code, found = diagnosis(command, **variables)
    return code, dict(wrong_in(found))


def by_hand(rank: int, port: int, host: str = "127.0.0.1") -> list[str]:
    return ["--nodes", "2", "--node-rank", str(rank), "--master", f"{host}:{port}"]


@pytest.fixture
def mounted(require: Any) -> Any:
    """A command that runs in a mount namespace, after other commands."""
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True) if os.geteuid() == 0 else None
    require("mount namespaces", tried is not None and tried.returncode == 0, "they need root")

    def command(before: str, *words: object) -> list[str]:
        return ["unshare", "--mount", "sh", "-ec", f'{before}; exec "$@"', "-", *DOCTOR, *map(str, words)]

    return command


def test_nothing_is_named_where_nothing_is_wrong(tmp_path: Path, free_port: int) -> None:
    code, found = diagnosis([*DOCTOR, *by_hand(0, free_port), "--run-dir", str(tmp_path / "run")])
    assert (code, wrong_in(found)) == (0, []) and not list(tmp_path.iterdir())
    names = {"placement", "MASTER_ADDR", "MASTER_PORT", "interface", "WORLD_SIZE", "shm", "run volume"}
    assert names | {"owner", "space", "clock", "grace", "GPU"} == {each["name"] for each in found["checks"]}


def test_a_name_that_does_not_resolve(tmp_path: Path, free_port: int) -> None:
    code, wrong = named([*DOCTOR, *by_hand(1, free_port, "node0.invalid"), "--run-dir", str(tmp_path)])
    assert (code, wrong) == (1, {"MASTER_ADDR": "node0.invalid does not resolve here"})


def test_a_port_that_is_taken(tmp_path: Path, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        code, wrong = named([*DOCTOR, *by_hand(0, free_port), "--run-dir", str(tmp_path)])
    assert code == 1 and wrong.keys() == {"MASTER_PORT"}
    assert f"port {free_port}: Address already in use" in wrong["MASTER_PORT"]


def test_an_interface_that_is_not_there(tmp_path: Path) -> None:
    code, wrong = named([*DOCTOR, "--run-dir", str(tmp_path)], GLOO_SOCKET_IFNAME="ib7")
    assert code == 1 and wrong.keys() == {"interface"}
    assert wrong["interface"].startswith("GLOO_SOCKET_IFNAME=ib7: ib7 does not exist; up here: ")


def test_a_small_shared_memory(tmp_path: Path, mounted: Any) -> None:
    small = "mount -t tmpfs -o size=8m none /dev/shm"
    code, found = diagnosis(mounted(small, "--run-dir", tmp_path, "--workers", 2))
    wrong = [(each["name"], each["said"]) for each in found["checks"] if each["state"] != "pass"]
    assert (code, wrong) == (0, [("shm", "/dev/shm has 8 MiB free; 2 loader processes")])


def test_a_read_only_folder(tmp_path: Path, mounted: Any) -> None:
    code, wrong = named(mounted(f"mount -t tmpfs -o ro none '{tmp_path}'", "--run-dir", tmp_path / "run"))
    assert (code, wrong) == (1, {"run volume": f"{tmp_path} is read-only"})


def test_a_full_volume(tmp_path: Path, mounted: Any) -> None:
    fill = f"mount -t tmpfs -o size=1m none '{tmp_path}'; head -c 1048576 /dev/zero >'{tmp_path}/x'"
    code, wrong = named(mounted(fill, "--run-dir", tmp_path / "run"))
    assert (code, wrong) == (1, {"space": f"{tmp_path}: 0 of 1 MiB are free"})


def test_a_foreign_owner(tmp_path: Path, require: Any) -> None:
    require("another user's folder", os.geteuid() == 0, "it needs root")
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    os.chown(run, 4242, 4242)
    code, wrong = named([*DOCTOR, "--run-dir", str(run)])
    assert code == 0 and wrong.keys() == {"owner"} and "belongs to user 4242, mode 700" in wrong["owner"]


@contextmanager
def waiting_node_0(processes: Any, port: int, run_dir: Path) -> Iterator[None]:
    """An agent that waits for node 1, and has said so."""
    words = [*by_hand(0, port), "--run-dir", str(run_dir)]
    node = processes.start([sys.executable, "-m", "tandem", "launch", *words], env=environment())
    assert node.stdout is not None
    for line in node.stdout:
        if "waiting: 1 of 2 nodes" in line:
            break
    yield
    processes.kill(node)


def test_a_clock_that_is_ahead(tmp_path: Path, free_port: int, processes: Any) -> None:
    shifted = [sys.executable, "-m", "shifted_clock", "doctor", "--json", *by_hand(1, free_port)]
    variables = {"CLOCK_SECONDS": "30", "PYTHONPATH": str(ROOT / "benchmarks")}
    with waiting_node_0(processes, free_port, tmp_path / "run"):
        _, right = named([*DOCTOR, *by_hand(1, free_port), "--run-dir", str(tmp_path)])
        code, found = diagnosis([*shifted, "--run-dir", str(tmp_path)], **variables)
    assert not right, "and the others agree"
    wrong = wrong_in(found)
    assert code == 0 and {name for name, _ in wrong} == {"clock"}
    assert " s ahead of node 0's" in wrong[0][1] and " s before this clock" in wrong[1][1]


@pytest.mark.parametrize(("each", "flags", "code"), [("4", [], 1), ("auto", ["--nproc", "4"], 0)])
def test_a_world_size_that_counts_pods(
    tmp_path: Path, free_port: int, each: str, flags: list[str], code: int
) -> None:
    pod = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": each, "WORLD_SIZE": "2", "RANK": "0"}
    pod |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    found = named([*DOCTOR, *flags, "--run-dir", str(tmp_path)], **pod)
    assert found == (code, {"WORLD_SIZE": "WORLD_SIZE=2 counts pods: 2 pods of 4 ranks are 8 ranks"})


def test_a_grace_period_that_is_shorter_than_a_save(tmp_path: Path, processes: Any) -> None:
    run = str(tmp_path / "run")
    launch = [sys.executable, "-m", "tandem", "launch", "--steps", "5", "--run-dir", run]
    assert processes.run(launch, env=environment())[0] == 0
    code, wrong = named([*DOCTOR, "--run-dir", run, "--shutdown-timeout", "0.0001"])
    assert code == 1 and wrong.keys() == {"grace"} and "the longest of 1 save took " in wrong["grace"]


def test_an_agent_that_waits_in_vain_says_what_is_wrong(
    tmp_path: Path, free_port: int, processes: Any
) -> None:
    words = ["launch", *by_hand(1, free_port, "node0.invalid"), "--master-timeout", "1"]
    code, said = processes.run(
        [sys.executable, "-m", "tandem", *words, "--run-dir", str(tmp_path)], env=environment()
    )
    assert code == 200 and ":\n  MASTER_ADDR  node0" in said


def test_node_0_names_who_did_not_come(tmp_path: Path, free_port: int, processes: Any) -> None:
    words = ["launch", *by_hand(0, free_port), "--master-timeout", "2", "--run-dir", str(tmp_path / "run")]
    code, said = processes.run([sys.executable, "-m", "tandem", *words], env=environment())
    assert code == 200 and ":\n  nodes  node 1 did not join" in said


def test_a_mistake_on_another_node_ends_node_0_at_once(
    tmp_path: Path, free_port: int, processes: Any
) -> None:
    with waiting_node_0(processes, free_port, tmp_path / "run"):
        node_0 = processes.started[-1]
        words = [*by_hand(1, free_port), "--task", "nowhere.py:Task", "--run-dir", str(tmp_path / "run")]
        code, said = processes.run(
            [sys.executable, "-m", "tandem", "launch", *words], env=environment(), cwd=tmp_path
        )
        assert code == 2 and "nowhere.py" in said
        code, said = processes.wait(node_0)
    assert code == 2 and "another node ended the job with code 2: node 1: " in said and "nowhere.py" in said
