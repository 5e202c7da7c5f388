"""`make compose-get`: a run out of the volume, with an engine that is a folder."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from patience import patient
from tandem.cluster import command_line

ROOT = Path(__file__).parents[2]
DOCKER = """#!{python}
import os, sys
words = sys.argv[1:]
if words[:2] in (["volume", "inspect"], ["image", "inspect"]):
    print(words[-1] if words[-1] in ("own_checkpoints", "tandem:cuda") else "")
elif words[0] == "compose":
    print("2.30.0")
elif words[0] == "run":
    assert "own_checkpoints:/checkpoints:ro,nocopy" in words and words[words.index("--pull") + 1] == "never"
    _, shell, c, script, *rest = words[words.index("--"):]
    os.execvp(shell, [shell, c, script.replace("/checkpoints", {volume!r}), *rest])
"""
Get = Callable[..., tuple[int, str, str]]


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is in the volume: one run. The current folder is `here`."""
    checkpoint = tmp_path / "volume/digits/checkpoints/step-000000340"
    checkpoint.mkdir(parents=True)
    (tmp_path / "volume/digits").chmod(0o700)
    (checkpoint / "state.pt").write_bytes(b"x" * 200_000)
    (tmp_path / "volume/digits/summary.json").write_text("{}")
    (tmp_path / "volume/digits/newest").symlink_to("/checkpoints/digits/checkpoints")
    (tmp_path / "volume/a file").touch()
    (tmp_path / "bin").mkdir()
    docker = DOCKER.format(python=sys.executable, volume=str(tmp_path / "volume"))
    (tmp_path / "bin/docker").write_text(docker)
    (tmp_path / "bin/docker").chmod(0o755)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path / "volume"


@pytest.fixture
def get(volume: Path, capsys: pytest.CaptureFixture[str]) -> Get:
    """Code, output and errors of `make compose-get` with these options."""

    def call(*words: str, project: str = "own") -> tuple[int, str, str]:
        code = command_line.main(["get", "--project", project, *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_a_run_comes_out_whole_with_its_modes_and_one_line(get: Get) -> None:
    line = "run digits of own_checkpoints is in {}: 2 files, 0.2 MB\n"
    assert get("--run=digits") == (0, line.format("runs/digits"), "")
    brought = Path("runs/digits")
    assert (brought / "checkpoints/step-000000340/state.pt").stat().st_size == 200_000
    assert brought.stat().st_mode & 0o777 == 0o700 and brought.stat().st_uid == os.getuid()
    assert (brought / "newest").is_symlink()
    assert get("--run=digits", "--to=with us/a $(x) 'b'") == (0, line.format("with us/a $(x) 'b'"), "")
    assert [path.name for path in Path("runs").iterdir()] == ["digits"], "nothing half is left beside it"


@pytest.mark.parametrize(("words", "line"), [
    (["--run=mnist"],
     "RUN=mnist is not in own_checkpoints; there are: digits; type: make compose-get RUN=digits PROJECT=own"),
    ([], "RUN is missing; there are: digits; type: make compose-get RUN=digits PROJECT=own"),
    (["--run=.."], "RUN: invalid value '..'; expected letters, digits, dots and dashes"),
    (["--run=digits", "--to=there"],
     "there already exists; choose a new directory: "
     "make compose-get RUN=digits TO=runs/digits-copy PROJECT=own"),
    (["--run=digits", "--to=there/file/x"],
     "cannot write there/file/x: File exists; name another: "
     "make compose-get RUN=digits TO=FOLDER PROJECT=own"),
    (["--run=digits", "--image=no:such"],
     "there is no image no:such here, and one of tandem reads the volume; make it: make image, or name "
     "another: make compose-get IMAGE=NAME"),
])  # fmt: skip
def test_what_cannot_be_brought_is_one_line(get: Get, words: list[str], line: str) -> None:
    Path("there").mkdir()
    Path("there/file").touch()
    assert get(*words) == (2, "", f"tandem: {line}\n")
    assert [path.name for path in Path("there").iterdir()] == ["file"] and not Path("runs/mnist").exists()


def test_no_volume_and_no_run(get: Get, volume: Path) -> None:
    start = "start one: make compose-up NODES=2"
    line = f"there is no volume tandem_checkpoints here, so no run of tandem; {start}"
    assert get("--run=digits", project="tandem") == (2, "", f"tandem: {line}\n")
    (volume / "digits").rename(volume.parent / "away")
    line = f"RUN=digits is not in own_checkpoints; there is none; {start} PROJECT=own"
    assert get("--run=digits") == (2, "", f"tandem: {line}\n")


def test_a_run_that_changes_while_it_is_read_is_brought_and_said(get: Get, tmp_path: Path) -> None:
    """tar ends with 1 then."""
    real = subprocess.run(["bash", "-c", "command -v tar"], capture_output=True, text=True).stdout.strip()
    line = f'{real} "$@"; code=$?; [ "$1" != -cf ] || exit 1; exit $code'
    (tmp_path / "bin/tar").write_text(f"#!/bin/sh\n{line}\n")
    (tmp_path / "bin/tar").chmod(0o755)
    said = "run digits of own_checkpoints is in runs/digits: 2 files, 0.2 MB; it changed meanwhile, "
    assert get("--run=digits") == (0, said + "so get it again when it has ended\n", "")


def test_what_make_hands_on() -> None:
    words = ["RUN=runs/digits", "TO=a 'b' c", "PROJECT=own", 'PYTHON=printf "%s\\n"']
    command = ["make", "--no-print-directory", "compose-get", *words]
    said = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=patient(30), check=True
    ).stdout
    found = command_line.parsed(said.split("\n")[2:-1])
    assert (found.action, found.project, found.run, found.to) == ("get", "own", "digits", "a 'b' c")
