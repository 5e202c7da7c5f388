"""What is given to make is text: neither make nor the shell runs a part of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patience import patient

ROOT = Path(__file__).parents[2]
TARGETS = {
    "train": "NODES TASK RUN EPOCHS ARGS",
    "compose-up": "PROJECT NODES SPARES TASK EPOCHS RUN SCRIPT SCRIPT_ARGS ARGS GPUS RATE LATENCY LOSS "
    "METRICS_PORT MONITORING IMAGE CPUS MEMORY SHM_SIZE TMP_SIZE",
    "compose-down": "VOLUMES",
    "compose-shell": "NODE",
    "compose-get": "PROJECT RUN TO IMAGE",
    "chaos": "FAULT",
    "image": "TORCH IMAGE BASE_IMAGE PIP_CONF CA_BUNDLE BUILD_ARGS CONTEXT",
    "image-size": "IMAGE",
    "k8s-apply": "OVERLAY NAMESPACE IMAGE",
    "k8s-delete": "PURGE",
    "monitoring-up": "RULES PROJECT PROMETHEUS_PORT GRAFANA_PORT METRICS_PORT",
    "slurm-try": "TASK EPOCHS ARGS",
    "help": "RUN",
}
CODE = ["$(shell touch {})", "$(touch {})", "';touch {};'", '";touch {};"', "x\ntouch {} #"]


@pytest.fixture
def stubs(tmp_path: Path) -> dict[str, str]:
    """An environment in which the programs that recipes start do nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("docker", "kubectl", "python", "tandem", "pip"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "BIN": str(folder)}


def make(target: str, stubs: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    done = ["--old-file=.venv/.installed", "--old-file=.venv/.tools"]
    settings = ["--silent", *done, f"BIN={stubs['BIN']}", "PYTHON=true"]
    return subprocess.run(
        ["make", *settings, target, *words],
        cwd=ROOT,
        env=stubs,
        capture_output=True,
        text=True,
        timeout=patient(30),
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_of_what_is_given_is_run(target: str, stubs: dict[str, str], tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for name in TARGETS[target].split():
        for code in CODE:
            value = code.format(trace)
            make(target, stubs, f"{name}={value}")
            make(target, {**stubs, name: value})
            assert not trace.exists(), f"make {target} {name}={value!r}"


def test_what_compose_reads_from_its_environment_is_there_when_it_was_given(stubs: dict[str, str]) -> None:
    names = ("CPUS", "MEMORY", "SHM_SIZE", "TMP_SIZE", "PROMETHEUS_PORT", "GRAFANA_PORT", "RULES")
    clean = {name: value for name, value in stubs.items() if name not in names}

    def seen(*words: str, **environ: str) -> dict[str, str]:
        done = make("compose-up", {**clean, **environ}, *words, "PYTHON=env; true")
        assert done.returncode == 0, done.stderr
        pairs = (line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
        return {name: value for name, value in pairs if name in names}

    assert seen() == {}, "an empty one would hide that of .env"
    given = {"CPUS": "2", "RULES": "a b.yaml", "MEMORY": "4gb"}
    assert seen("CPUS=2", "RULES=a b.yaml", MEMORY="4gb") == given
    assert seen("PROMETHEUS_PORT=9191", "CPUS=$$(x)") == {"PROMETHEUS_PORT": "9191", "CPUS": "$$(x)"}


def test_words_are_split_as_a_shell_reads_quotes_and_nothing_else(
    stubs: dict[str, str], tmp_path: Path
) -> None:
    (Path(stubs["BIN"]) / "tandem").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    said = make("train", stubs, "RUN=a run", "EPOCHS=2", "ARGS=--task.name 'two words' $$HOME *").stdout
    assert said == (
        "launch|--nodes|2|--task|digits|--run-dir|a run|--epochs|2|--task.name|two words|$$HOME|*|"
    )
    assert make("train", stubs).stdout == "launch|--nodes|2|--task|digits|--run-dir|runs/digits|"
    refused = make("train", stubs, "ARGS='open")
    assert (refused.returncode, refused.stdout) == (2, "")
    said = "make: ARGS='open: no closing quotation; words are split as a shell does\n"
    assert refused.stderr.startswith(said)


@pytest.mark.parametrize("target", [
    "image", "image-size", "sbom", "monitoring-up", "monitoring-down", "rules-check",
    "compose-up", "compose-down", "compose-ps", "compose-logs", "compose-shell", "compose-scale",
    "compose-get",
])  # fmt: skip
def test_a_program_that_is_missing_is_one_line(target: str, tmp_path: Path) -> None:
    """In a PATH with what recipes call everywhere, and neither `docker` nor `promtool`."""
    for name in ("bash", "sed", "git", "date", "awk", "cut", "grep", "xargs", "realpath"):
        found = shutil.which(name)
        assert found, name
        (tmp_path / name).symlink_to(found)
    programs = shutil.which("make") or "make", f"PYTHON={sys.executable}"
    done = subprocess.run(
        [programs[0], "--no-print-directory", target, programs[1]],
        cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=patient(60),
    )  # fmt: skip
    missing = "promtool" if target == "rules-check" else "docker"
    line, *makes_own = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert f"{missing} is not installed" in line and "sudo " in line
    assert [each[:8] for each in makes_own] == ["make: **"], done.stderr
