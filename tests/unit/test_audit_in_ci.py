"""The audit in a user's test, and its GitHub Action, whose steps run as on a runner."""

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
from program_files import program_text
from tandem.verify.audit import EXACT, NOISE
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


@pytest.mark.slow
@pytest.mark.timeout(patient(120))
def test_a_test_asserts_that_a_program_resumes(program: Path) -> None:
    found = assert_resumes([sys.executable, "train.py", "plain", "1"], kills=1)
    assert found.verdict == EXACT and len(found.trials) == 1
    # Which of torch's states is lost is what the action names below; this program needs no import of torch.
    (program / "forgets.py").write_text(program_text("audit_forgets"))
    with pytest.raises(AssertionError) as caught:
        assert_resumes([sys.executable, "forgets.py"], kills=1)
    said = str(caught.value)
    assert "verdict: differs" in said and "`log.jsonl: loss` differs from step" in said


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


def python_that(runner: Runner, does: str) -> str:
    """Write a program to use as the input `python`, and return its path from the program's directory."""
    path = runner.folder / "env" / "python"
    path.parent.mkdir()
    path.write_text(f"#!/bin/bash\n{does}\n")
    path.chmod(0o755)
    return os.path.relpath(path, runner.program)


@pytest.mark.slow
@pytest.mark.timeout(patient(120))
def test_the_action_fails_for_a_bug_and_names_it(runner: Runner) -> None:
    code, said = runner.step(AUDIT, command="python train.py 'optimizer-lost' 1", kills="1")
    assert code == 1 and "trial 1 of 1" in said, said
    assert runner.read("outputs") == "verdict=differs\n"
    summary = runner.read("summary")
    assert summary.startswith("### Resume: differs\n\n    verify-resume: python train.py ")
    assert "\n    reason: optimizer state lost, in 1 of 1 killed runs\n" in summary


@pytest.mark.parametrize("verdict", [EXACT, NOISE])
def test_the_action_passes_when_tandem_does(runner: Runner, verdict: str) -> None:
    says = python_that(runner, f'printf "<%s>" "$@"; echo; echo "verdict: {verdict}; 3 of 3 killed runs"')
    command = "python train.py \\\n  --name 'two words' \"$(touch ran)\" \\\n  *\n"
    code, said = runner.step(AUDIT, command=command, python=says)
    assert code == 0 and runner.read("outputs") == f"verdict={verdict}\n"
    assert said.partition("<-->")[2].startswith("<python><train.py><--name><two words><$(touch ran)><*>\n")
    assert runner.read("summary").startswith(f"### Resume: {verdict}\n")
    assert not (runner.program / "ran").exists()


@pytest.mark.parametrize(
    "given, said",
    [
        ({"command": "python train.py 'plain"}, "no closing quotation"),
        ({"command": "python train.py", "nproc": "2"}, "--launcher"),
        ({"command": "python train.py", "kills": "many"}, "--kills"),
        ({"command": "no-such-command"}, "no-such-command"),
        ({"command": ""}, "command not found"),
    ],
)
def test_mistakes_are_one_line(runner: Runner, given: dict[str, str], said: str) -> None:
    code, text = runner.step(AUDIT, **given)
    assert code == 2 and said in text and len(text.splitlines()) == 1, text
    assert runner.read("outputs") in ("", "verdict=\n")


def test_the_action_installs_its_release_beside_the_torch_of_the_program(runner: Runner) -> None:
    pip = 'if [ "$3" = list ]; then printf "numpy==2.0\ntorch==2.9.1+cpu\n"; else printf "%s\n" "$@"; fi'
    code, said = runner.step(INSTALL, python=python_that(runner, pip))
    *words, source = said.splitlines()
    assert code == 0 and words[:3] == ["-m", "pip", "install"]
    assert Path(words[words.index("--constraint") + 1]).read_text() == "torch==2.9.1+cpu\n"
    assert Path(source).resolve() == ROOT and (ROOT / "pyproject.toml").exists()


@pytest.mark.parametrize("pip", ["echo numpy==2.0", "exit 1"], ids=["no torch", "no pip"])
def test_no_torch_is_downloaded_for_a_program_that_has_none(runner: Runner, pip: str) -> None:
    code, said = runner.step(INSTALL, python=python_that(runner, pip))
    assert code == 2 and "no pip or no torch" in said and len(said.splitlines()) == 1


def test_what_is_given_is_no_code() -> None:
    """`${{ inputs... }}` in a shell's text would be run; in `env:` it is text."""
    assert all("${{" not in step["run"] and step["shell"] == "bash" for step in STEPS)
    # Relative paths mean the same in both steps.
    assert STEPS[INSTALL]["working-directory"] == STEPS[AUDIT]["working-directory"]
    used = {text for step in STEPS for text in step["env"].values()} | {STEPS[AUDIT]["working-directory"]}
    assert used == {f"${{{{ inputs.{name} }}}}" for name in ACTION["inputs"]}
