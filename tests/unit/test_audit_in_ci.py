"""The audit in a test of one's own, and its GitHub Action: the steps run as a runner runs them."""

import json
import os
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
ACTION = yaml.safe_load((ROOT / ".github" / "actions" / "verify-resume" / "action.yml").read_text())
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
    """Runs steps of the action as GitHub's runner does, with its files in a folder."""

    def __init__(self, folder: Path, program: Path) -> None:
        self.folder = folder
        self.program = program

    def step(self, **given: str) -> tuple[int, str]:
        inputs = {name: each.get("default", "") for name, each in ACTION["inputs"].items()} | given
        (step,) = [each for each in ACTION["runs"]["steps"] if each.get("id") == "audit"]
        files = {"GITHUB_OUTPUT": "outputs", "GITHUB_STEP_SUMMARY": "summary", "RUNNER_TEMP": "."}
        own = {name: str(self.folder / file) for name, file in files.items()}
        asked = {
            name: inputs[text.removeprefix("${{ inputs.").removesuffix(" }}")]
            for name, text in step["env"].items()
        }
        # `shell: bash` of a composite action.
        words = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            words, cwd=self.program, env={**os.environ, **own, **asked, "PATH": path},
            capture_output=True, text=True, timeout=patient(110),
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
    command = "python train.py 'optimizer-lost' 1"
    code, said = runner.step(command=command, kills="1", outputs="model.pt\n*.jsonl")
    assert code == 1 and "trial 1 of 1" in said, said
    report = json.loads(runner.read("verify-resume.json"))
    assert [each["kind"] for each in report["kinds"]] == ["optimizer-lost"]
    assert "verdict=differs\n" in runner.read("outputs") and "report=" in runner.read("outputs")
    assert "- **optimizer state lost.** before step" in runner.read("summary")


@pytest.mark.timeout(patient(120))
def test_the_action_passes_for_an_exact_program(runner: Runner) -> None:
    code, said = runner.step(command="python train.py plain 1", kills="1")
    assert code == 0 and "verdict=exact\n" in runner.read("outputs"), said


@pytest.mark.parametrize(
    "given, said",
    [
        ({"command": "python train.py 'plain"}, "no closing quotation"),
        ({"command": "python train.py", "nproc": "2"}, "--launcher"),
        ({"command": "no-such-command $(touch ran)"}, "command not found"),
    ],
)
def test_mistakes_are_one_line(runner: Runner, given: dict[str, str], said: str) -> None:
    code, text = runner.step(**given)
    assert code == 2 and said in text and "verdict" not in runner.read("outputs"), text
    assert not (runner.program / "ran").exists()


def test_what_is_given_is_no_code() -> None:
    """`${{ inputs... }}` in a shell's text would be run; in `env:` it is text."""
    steps: list[dict[str, Any]] = ACTION["runs"]["steps"]
    assert all("${{" not in step["run"] and step["shell"] == "bash" for step in steps)
    used = {text for step in steps for text in step.get("env", {}).values()}
    asked = {f"${{{{ inputs.{name} }}}}" for name in ACTION["inputs"]} - {"${{ inputs.working-directory }}"}
    assert used == asked
