"""The audit in a test of one's own, and its GitHub Action: the steps run as a runner runs them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from patience import patient
from tandem.verify.audit import EXACT
from tandem.verify.pytest import assert_resumes

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "actions" / "verify-resume"
ACTION = yaml.safe_load((FOLDER / "action.yml").read_text())
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
INSTALL, AUDIT = range(2)
INPUT = re.compile(r"\$\{\{ inputs\.([\w-]+) \}\}")
BIN = Path(sys.executable).parent
TRAINER = ROOT / "tests" / "programs" / "trainer.py"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "program"
    folder.mkdir()
    shutil.copy(TRAINER, folder / "train.py")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.timeout(patient(120))
def test_a_test_asserts_that_a_program_resumes(program: Path) -> None:
    found = assert_resumes([sys.executable, "train.py", "plain", "1"], kills=1)
    assert found.verdict == EXACT and len(found.trials) == 1
    with pytest.raises(AssertionError) as caught:
        assert_resumes([sys.executable, "train.py", "optimizer-lost", "1"], kills=1)
    assert "verdict: differs" in str(caught.value) and "reason: optimizer state lost" in str(caught.value)


class Runner:
    """Runs the steps of the action as GitHub's runner does, with its files in a folder."""

    def __init__(self, folder: Path, program: Path) -> None:
        self.folder = folder
        self.program = program

    def step(self, number: int, **given: str) -> tuple[int, str]:
        """Run a step, and return its exit code and what it prints."""
        inputs = {name: each.get("default", "") for name, each in ACTION["inputs"].items()} | given
        files = {"GITHUB_OUTPUT": "outputs", "GITHUB_STEP_SUMMARY": "summary", "RUNNER_TEMP": "."}
        own = {name: str(self.folder / file) for name, file in files.items()}
        own |= {"GITHUB_ACTION_PATH": str(FOLDER), "PATH": f"{BIN}:{os.environ['PATH']}"}
        for name, text in STEPS[number]["env"].items():
            own[name] = inputs[INPUT.findall(text)[0]]
        # `shell: bash` of a composite action.
        words = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", STEPS[number]["run"]]
        done = subprocess.run(
            words, cwd=self.program, env={**os.environ, **own}, capture_output=True, text=True,
            timeout=patient(110),
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""


@pytest.fixture
def runner(tmp_path: Path, program: Path) -> Runner:
    return Runner(tmp_path, program)


@pytest.mark.timeout(patient(120))
def test_the_action_fails_for_a_bug_and_names_it(runner: Runner) -> None:
    code, said = runner.step(AUDIT, command="python train.py 'optimizer-lost' 1", trials="1")
    assert code == 1 and "trial 1 of 1" in said, said
    assert runner.read("outputs") == "verdict=differs\n"
    summary = runner.read("summary")
    assert summary.startswith("### Resume: differs\n\n    verify-resume: python train.py ")
    assert "\n    reason: optimizer state lost, in 1 of 1 killed runs\n" in summary


@pytest.mark.timeout(patient(120))
def test_the_action_passes_for_an_exact_program(runner: Runner) -> None:
    code, said = runner.step(AUDIT, command="python train.py plain 1", trials="1")
    assert code == 0 and runner.read("outputs") == "verdict=exact\n", said
    assert "### Resume: exact\n" in runner.read("summary")


def test_a_verdict_that_is_not_exact_fails(runner: Runner) -> None:
    """Exit code 0 of tandem includes noise of the program's own."""
    noisy = runner.folder / "noisy"
    noisy.write_text("#!/bin/sh\necho \"verdict: equal within the program's own noise; 3 of 3 are close\"\n")
    noisy.chmod(0o755)
    code, said = runner.step(AUDIT, command="python train.py", python=str(noisy))
    assert code == 1 and "::error::the resume is not exact: equal within" in said, said
    assert runner.read("outputs") == "verdict=equal within the program's own noise\n"


@pytest.mark.parametrize(
    "given, said",
    [
        ({"command": "python train.py 'plain"}, "no closing quotation"),
        ({"command": "python train.py", "nproc": "2"}, "--launcher"),
        ({"command": "python train.py", "trials": "many"}, "--kills"),
        ({"command": "no-such-command $(touch ran)"}, "no-such-command"),
    ],
)
def test_mistakes_are_one_line(runner: Runner, given: dict[str, str], said: str) -> None:
    code, text = runner.step(AUDIT, **given)
    assert code == 2 and said in text and "verdict=e" not in runner.read("outputs"), text
    assert not (runner.program / "ran").exists()


def test_the_action_installs_the_release_that_it_is_part_of(runner: Runner) -> None:
    pip = runner.folder / "pip"
    pip.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    pip.chmod(0o755)
    code, said = runner.step(INSTALL, python=str(pip))
    *words, source = said.splitlines()
    assert code == 0 and words[:3] == ["-m", "pip", "install"]
    assert Path(source).resolve() == ROOT and (ROOT / "pyproject.toml").exists()


def test_what_is_given_is_no_code() -> None:
    """`${{ inputs... }}` in a shell's text would be run; in `env:` it is text."""
    assert all("${{" not in step["run"] and step["shell"] == "bash" for step in STEPS)
    used = {text for step in STEPS for text in step["env"].values()} | {STEPS[AUDIT]["working-directory"]}
    assert used == {f"${{{{ inputs.{name} }}}}" for name in ACTION["inputs"]}
