"""How a script is stopped, and what a run leaves behind: exit codes, the summary, the temporary folder."""

import json
import os
import re
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from unchanged import PROGRAMS

from program_files import program_text
from tree import of_launch

pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]

TUTORIAL = str(PROGRAMS / "ddp_tutorial.py")
ENDLESS = program_text("stops_endless")


def summary(scripts: Any) -> dict[str, Any]:
    return dict(json.loads((scripts.folder / "run" / "summary.json").read_text()))


def fork_servers(launch: int) -> list[int]:
    """Those of a launch, from their first moment on."""
    return [pid for pid, name in of_launch(launch).items() if name == "tandem-forks"]


def entries(folder: str | Path) -> list[str]:
    """torch makes an empty folder of its own when it is imported."""
    return [each.name for each in Path(folder).iterdir() if not each.name.startswith("torchinductor")]


@pytest.mark.parametrize(
    "ranks",
    [["--nproc", 1], pytest.param(["--nodes", 2], marks=pytest.mark.soak)],
    ids=["one-node", "nodes"],
)
def test_a_stop_at_the_very_start_is_137_and_one_line(scripts: Any, ranks: list[Any]) -> None:
    (scripts.folder / "endless.py").write_text(ENDLESS)
    process = scripts.start(scripts.tandem(*ranks, "endless.py"))
    scripts.until(lambda: fork_servers(process.pid), process)
    for pid in of_launch(process.pid):  # as a scheduler does: the whole tree hears it
        os.kill(pid, signal.SIGTERM)
    code, said = scripts.wait(process)
    node_1 = scripts.folder / "run" / "log" / "node-1.log"
    said += node_1.read_text() if node_1.exists() else ""
    assert code == 137, said
    assert "Traceback" not in said and "EOFError" not in said, said
    assert not scripts.lives(0)


def test_a_stopped_script_is_143_and_one_that_does_not_listen_is_killed(scripts: Any) -> None:
    (scripts.folder / "endless.py").write_text(ENDLESS)
    endings = (([], 143, "stopped"), (["polite"], 143, "stopped"), (["deaf"], 137, "failed"))
    for words, expected, state in endings:
        process = scripts.start(scripts.tandem("--shutdown-timeout", 2, "endless.py", *words))
        lives = len(scripts.lives(0))
        scripts.until(lambda lives=lives: len(scripts.lives(0)) > lives, process)
        process.send_signal(signal.SIGTERM)
        code, said = scripts.wait(process)
        assert code == expected, said
        assert (summary(scripts)["state"], summary(scripts)["exit_code"]) == (state, expected)
        assert ("ranks did not stop within 2 s: killing them" in said) == (expected == 137), said
        assert "Traceback" not in said, said


@pytest.mark.soak
def test_nothing_is_left_in_a_temporary_folder_however_long_its_name(scripts: Any) -> None:
    """multiprocessing's socket lies there, and a name of 108 bytes and more cannot be one's."""
    (scripts.folder / "endless.py").write_text(ENDLESS)
    (scripts.folder / "short.py").write_text("import multiprocessing\nmultiprocessing.Manager().list()\n")
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as short:
        scripts.environment["TMPDIR"] = short
        process = scripts.start(scripts.tandem("endless.py"))
        scripts.until(lambda: scripts.lives(0), process)
        os.killpg(process.pid, signal.SIGKILL)
        scripts.wait(process)
        (left,) = entries(short)
        assert re.match(r"tandem-\d+-\d+-", left)
        code, said = scripts.run(scripts.tandem("short.py"))
        assert code == 0, said
        assert entries(short) == []
    assert (summary(scripts)["state"], summary(scripts)["restarts"]) == ("finished", 1)
    long = scripts.folder / ("d" * 120)
    long.mkdir()
    scripts.environment["TMPDIR"] = str(long)
    code, said = scripts.run(scripts.tandem("short.py"))
    assert code == 0, said
    assert entries(long) == []


def test_a_script_that_is_not_there_is_one_line(scripts: Any) -> None:
    code, said = scripts.run(scripts.tandem("--nodes", 2, "gone.py"))
    assert code == 2 and len(said.splitlines()) == 1, said
    assert "gone.py" in said, said
