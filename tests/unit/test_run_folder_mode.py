"""Who may look into a run directory: its owner alone."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import patient
from tandem.config import resolve
from tandem.platforms.compose import note_end
from tandem.run.directory import RunDir


@pytest.fixture(params=[0o022, 0o077, 0])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def opened(folder: Path) -> Path:
    variables = {"TANDEM_RUN_DIR": str(folder)}
    RunDir.of(resolve({}, variables).settings).make_private()
    return folder


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_is_private_and_its_files_are_as_ever(tmp_path: Path, umask: int) -> None:
    folder = opened(tmp_path / "runs" / "a")
    assert mode_of(folder) == 0o700
    assert mode_of(folder.parent) == 0o777 & ~umask, "what is above the run is not its own"
    (folder / "config.json").write_text("{}")
    assert mode_of(folder / "config.json") == 0o666 & ~umask, "a task's own files are as ever"


def test_a_folder_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert mode_of(opened(tmp_path)) == 0o755


def test_the_group_that_a_volume_gives_its_folders_stays(tmp_path: Path) -> None:
    """As with Kubernetes' fsGroup: the set-group-ID bit of the folder above."""
    tmp_path.chmod(0o2775)
    assert mode_of(opened(tmp_path / "a")) == 0o2700


def test_a_container_that_ends_before_its_run_begins_leaves_no_open_folder(tmp_path: Path) -> None:
    note_end(tmp_path / "a", "4f3c", 2)
    assert mode_of(tmp_path / "a") == 0o700 and os.listdir(tmp_path / "a" / "log")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="becomes another user")
def test_another_user_of_the_machine_reads_nothing() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        flags = f"--run-dir {folder}/run --data-dir {folder}/data --steps 3 --metrics 0"
        command = [sys.executable, "-m", "tandem", "train", *flags.split(), "--device", "cpu"]
        subprocess.run(command, check=True, timeout=patient(110), capture_output=True)
        files = [each for each in (folder / "run").rglob("*") if each.is_file()]
        assert {"config.json", "summary.json", "state.pt"} <= {each.name for each in files}
        nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        for file in files:
            read = subprocess.run([*nobody, "cat", file], capture_output=True, timeout=patient(30))
            assert read.returncode != 0, file
