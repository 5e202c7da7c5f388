"""Code that is edited while a run lasts, or that differs between nodes."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from small_runs import Runs, rank_processes

from program_files import program_text

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
CHANGED = "version.py has changed since the ranks last started"
EDITED = ("--task", "edited.py:Edited")


def write(folder: Path, version: int) -> None:
    """Write the task, the script and the module that both import; the module with another size."""
    (folder / "edited.py").write_text(program_text("changed_code_task"))
    (folder / "script.py").write_text(program_text("changed_code_script"))
    (folder / "version.py").write_text(f"VERSION = {version}\n" + "\n" * version)


def versions(folder: Path) -> list[str]:
    """Return what each start of a rank has imported, in order."""
    path = folder / "versions.txt"
    return path.read_text().split() if path.exists() else []


def standby_processes(launch: int) -> int:
    from tree import of_launch

    return list(of_launch(launch).values()).count("tandem-standby")


def lose_a_rank(launch: Any) -> None:
    os.kill(rank_processes(launch.pid)["tandem-rank-1"], signal.SIGKILL)


@pytest.mark.core
def test_restarted_ranks_all_run_the_edited_code(runs: Runs) -> None:
    """Processes that waited for a restart had imported the task before the edit."""
    write(runs.folder, 1)
    launch = runs.start("launch", "run", "--nproc", 2, "--steps", 2000, *EDITED, delay=0.02)
    runs.until(lambda: standby_processes(launch.pid) == 2, "standby processes")
    write(runs.folder, 2)
    lose_a_rank(launch)
    runs.until(lambda: len(versions(runs.folder)) == 4, "restart")
    lose_a_rank(launch)
    runs.until(lambda: len(versions(runs.folder)) == 6, "second restart")
    launch.send_signal(signal.SIGTERM)
    code, output = runs.processes.wait(launch)
    assert code == 143, output
    assert versions(runs.folder) == ["1", "1", "2", "2", "2", "2"], output
    assert output.count(CHANGED) == 1, output


def test_a_script_s_restart_with_edited_code_is_told(runs: Runs) -> None:
    write(runs.folder, 1)
    command = [sys.executable, "-m", "tandem", "launch", "--nproc", "2", "--metrics", "0", "script.py"]
    launch = runs.processes.start(command, cwd=runs.folder, env=runs.environment)
    runs.until(lambda: standby_processes(launch.pid) > 0, "standby process")
    write(runs.folder, 2)
    lose_a_rank(launch)
    runs.until(lambda: len(versions(runs.folder)) == 4, "restart")
    runs.hurry()
    code, output = runs.processes.wait(launch)
    assert code == 0, output
    assert versions(runs.folder) == ["1", "1", "2", "2"], output
    assert output.count(CHANGED) == 1, output


@pytest.mark.parametrize("differs", [True, False])
def test_nodes_with_different_files_are_told(runs: Runs, free_port: int, differs: bool) -> None:
    """Both nodes have a folder of their own; only a difference in content counts."""
    nodes = []
    for node in range(2):
        folder = runs.folder / f"node-{node}"
        folder.mkdir()
        (folder / "small.py").write_text((runs.folder / "small.py").read_text())
        write(folder, 1 + node * differs)
        flags = ("--nodes", 2, "--node-rank", node, "--master", f"127.0.0.1:{free_port}", "--steps", 5)
        command = runs.command("launch", str(runs.folder / "run"), *flags, *EDITED)
        nodes.append(runs.processes.start(command, cwd=folder, env=runs.environment))
    ended = [runs.processes.wait(each) for each in nodes]
    assert [code for code, _ in ended] == [0, 0], ended
    told = [output.count("version.py differs from the first node's copy") for _, output in ended]
    assert told == [0, int(differs)], ended


def test_ranks_without_an_agent_compare_their_code(runs: Runs, free_port: int) -> None:
    ranks = []
    for rank in range(2):
        folder = runs.folder / f"rank-{rank}"
        folder.mkdir()
        (folder / "small.py").write_text((runs.folder / "small.py").read_text())
        write(folder, 1 + rank)
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port)}
        command = runs.command("train", str(runs.folder / "run"), "--steps", 5, *EDITED)
        place = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        given = {**runs.environment, **group, **place}
        ranks.append(runs.processes.start(command, cwd=folder, env=given))
    ended = [runs.processes.wait(each) for each in ranks]
    assert [code for code, _ in ended] == [0, 0], ended
    log = (runs.folder / "run/log/rank-1.log").read_text()
    assert "version.py differs from the first node's copy" in log, log
