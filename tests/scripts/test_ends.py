"""How a script ends: what is its own, what reaches its log, and what is said of it."""

import json
import os
import signal
from typing import Any

import pytest

from program_files import program_text

pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]

BEGIN = """
import os, sys, time, warnings, datetime, torch.distributed as dist
dist.init_process_group("gloo")
"""
STORE = """
if os.environ["RANK"] == "1":
    dist.TCPStore("127.0.0.1", 1, 1, False, timeout=datetime.timedelta(seconds=1))
dist.barrier()
"""
NO_TEXT = program_text("ends_no_text")
AWAITED = """
print("no newline", end="")
warnings.warn("beware")
while not os.path.exists("seen"): time.sleep(0.05)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0": os.kill(os.getpid(), 9)
sys.exit(-1)
"""


def launched(scripts: Any, body: str, *flags: object) -> tuple[int, str]:
    (scripts.folder / "script.py").write_text(BEGIN + body)
    return scripts.run(scripts.tandem("--nproc", 2, *flags, "script.py"))


def test_an_error_of_a_store_of_its_own_ends_the_job_with_its_cause(scripts: Any) -> None:
    code, said = launched(scripts, STORE)
    assert code == 1 and "generation 2" not in said, said
    assert "DistNetworkError" in said and "(127.0.0.1, 1)" in said, said


def test_an_error_without_a_text_is_shown_as_python_shows_it(scripts: Any) -> None:
    code, said = launched(scripts, NO_TEXT)
    assert code == 1 and "Refused: <exception str() failed>" in said, said
    assert "TypeError" not in said and "tandem/" not in scripts.log(1), said


def test_unbuffered_prints_come_at_once_and_an_exit_of_minus_one_is_final(scripts: Any) -> None:
    """A killed rank is started again before that, and nothing of what it had printed is lost."""
    (scripts.folder / "script.py").write_text(BEGIN + AWAITED)
    scripts.environment["PYTHONUNBUFFERED"] = "1"
    output = scripts.folder / "output"
    with output.open("wb") as file:
        process = scripts.processes.start(
            scripts.tandem("--nproc", 1, "script.py"), cwd=scripts.folder, env=scripts.environment,
            stdout=file, stderr=file,
        )  # fmt: skip
        scripts.until(lambda: b"no newline" in output.read_bytes(), process)
        scripts.until(lambda: "UserWarning: beware" in scripts.log(0), process)
        (scripts.folder / "seen").touch()
        process.wait(280)
    said = output.read_text()
    assert process.returncode == 255, said
    assert scripts.log(0).count("no newline") == 2 and "generation 2" in said and "generation 3" not in said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_wrapper_that_passes_on_the_signal_of_its_child_is_started_again(scripts: Any, number: int) -> None:
    script = f'if [ "$TORCHELASTIC_RESTART_COUNT" = 0 ]; then sh -c "kill -{number} \\$\\$"; exit $?; fi'
    (scripts.folder / "wrapper.sh").write_text(f"#!/bin/sh\n{script}\n")
    os.chmod(scripts.folder / "wrapper.sh", 0o700)
    code, said = scripts.run(scripts.tandem("--nproc", 1, "--", "./wrapper.sh"))
    assert code == 0 and f"({signal.Signals(number).name})" in said and "generation 2" in said, said
    assert "code 0; restarts: 1; run directory: run" in said.splitlines()[-1], said


@pytest.mark.parametrize("quiet", [[], ["-q"]])
def test_a_script_has_one_closing_line_on_the_terminal_alone(scripts: Any, quiet: list[str]) -> None:
    code, said = scripts.run(scripts.tandem("--nodes", 2, *quiet, "--", "echo", "its output"))
    assert code == 0, said
    lines = [line for line in said.splitlines() if line.startswith("echo ended with code 0; restarts: 0;")]
    assert len(lines) == (0 if quiet else 1) and said.count("run directory") == len(lines), said
    logs = (scripts.folder / "run/log").glob("*.log")
    assert not any("run directory" in log.read_text() for log in logs)


def test_a_wrapper_with_a_code_of_no_signal_ends_the_job(scripts: Any) -> None:
    code, said = scripts.run(scripts.tandem("--nodes", 2, "--", "sh", "-c", "exit 241"))
    assert code == 241 and "generation 2" not in said, said


def test_a_flag_of_tandem_after_the_script_has_a_hint(scripts: Any) -> None:
    (scripts.folder / "usage.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    code, said = scripts.run(scripts.tandem("--nproc", 1, "usage.py", "--nodes", 2))
    assert code == 2 and "unrecognized arguments: --nodes 2" in said, said
    assert said.splitlines()[-1].endswith(": tandem launch --nodes 2 usage.py"), said


def test_the_last_steps_are_known(scripts: Any) -> None:
    """Heartbeats come four times a second, and the script ends at once after its last step."""
    (scripts.folder / "script.py").write_text(program_text("status_ends_loop"))
    code, said = scripts.run(scripts.tandem("--nproc", 2, "script.py", "script", ".", 57))
    assert code == 0, said
    summary = json.loads((scripts.folder / "run" / "summary.json").read_text())
    assert summary["global_step"] == int((scripts.folder / "step").read_text()) == 57
