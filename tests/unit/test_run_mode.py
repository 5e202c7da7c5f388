"""Who may look into a run directory: its owner alone, unless --run-mode says otherwise."""

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
from tandem.errors import ConfigError
from tandem.launch.run_dir import open_run_folder
from tandem.platforms.replica import note_end


@pytest.fixture(params=[0o022, 0o077, 0])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def opened(folder: Path, mode: str | None) -> Path:
    variables = {"TANDEM_RUN_DIR": str(folder)} | ({} if mode is None else {"TANDEM_RUN_MODE": mode})
    open_run_folder(resolve({}, variables).settings)
    return folder


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("mode", "folder_has", "file_lets"),
    [(None, 0o700, 0), ("private", 0o700, 0), ("group", 0o750, 0o040), ("world", 0o755, 0o044),
     ("2770", 0o2770, 0o060)],
)  # fmt: skip
def test_a_new_folder_has_its_mode_and_what_is_in_it_lets_through_what_that_does(
    tmp_path: Path, umask: int, mode: str | None, folder_has: int, file_lets: int
) -> None:
    folder = opened(tmp_path / "runs" / "a", mode)
    assert mode_of(folder) == folder_has
    assert mode_of(folder.parent) == 0o777 & ~umask, "what is above the run is not its own"
    (folder / "config.json").write_text("{}")
    assert mode_of(folder / "config.json") & file_lets == file_lets
    if mode in (None, "private"):
        assert mode_of(folder / "config.json") == 0o666 & ~umask, "a task's own files are as ever"


def test_a_folder_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert mode_of(opened(tmp_path, "private")) == 0o755


def test_the_group_that_a_volume_gives_its_folders_stays(tmp_path: Path) -> None:
    """As with Kubernetes' fsGroup: the set-group-ID bit of the folder above."""
    tmp_path.chmod(0o2775)
    assert mode_of(opened(tmp_path / "a", "group")) == 0o2750


def test_a_container_that_ends_before_its_run_begins_leaves_no_open_folder(tmp_path: Path) -> None:
    note_end(tmp_path / "a", "4f3c", 2)
    assert mode_of(tmp_path / "a") == 0o700 and os.listdir(tmp_path / "a" / "log")


@pytest.mark.parametrize("mode", ["-", "rwx", "0", "077", "8777", "70", "all"])
def test_what_is_no_mode_is_one_line(mode: str) -> None:
    with pytest.raises(ConfigError, match="private, group, world"):
        resolve({}, {"TANDEM_RUN_MODE": mode})


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="becomes another user")
@pytest.mark.parametrize(
    ("mode", "may"), [("private", False), pytest.param("world", True, marks=pytest.mark.soak)]
)
def test_another_user_of_the_machine(mode: str, may: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        flags = (
            f"--run-dir {folder}/run --run-mode {mode} --data-dir {folder}/data --steps 3 --metrics-port 0"
        )
        command = [sys.executable, "-m", "tandem", "train", *flags.split(), "--device", "cpu"]
        subprocess.run(command, check=True, timeout=patient(110), capture_output=True)
        files = [each for each in (folder / "run").rglob("*") if each.is_file()]
        assert {"config.json", "summary.json", "state.pt"} <= {each.name for each in files}
        nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        for file in files:
            read = subprocess.run([*nobody, "cat", file], capture_output=True, timeout=patient(30))
            assert (read.returncode == 0) is may, file
