"""A loop of one's own under `tandem launch`: the agent's page, its memory and its signals; started again."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from own_loops import SMALL, Scripts

from patience import patient
from tandem.log import pluralize

pytestmark = pytest.mark.multi
LIMIT_SECONDS = 100.0


@pytest.fixture
def scripts(tmp_path: Path, processes: Any) -> Scripts:
    scripts = Scripts(tmp_path, processes)
    scripts.write("small.py", SMALL)
    return scripts


def logs(scripts: Scripts, run: str) -> str:
    return "".join(path.read_text() for path in sorted((scripts.folder / run / "log").glob("*.log")))


@pytest.mark.core
@pytest.mark.timeout(250)
def test_a_killed_rank_goes_on_from_memory_to_the_same_bits_and_lines(scripts: Scripts) -> None:
    nodes = ["--nodes", "2", "--checkpoint-every", "never"]
    code, output = scripts.processes.wait(scripts.launch(nodes, "small.py", "calm"), LIMIT_SECONDS)
    assert code == 0, output
    killed = scripts.launch(nodes, "small.py", "killed", SIGNAL=9, SIGNAL_AT=23, TO_RANK=1)
    code, output = scripts.processes.wait(killed, LIMIT_SECONDS)
    assert code == 0, output
    said = logs(scripts, "killed")
    assert "rank 1 on node 1 (127.0.0.102) was killed (SIGKILL)" in said
    assert re.search(r"resuming from step 2[23] \(in-memory snapshot\)", said), said
    assert scripts.summary("killed")["restarts"] == 1
    assert scripts.summary("killed")["weights_sha256"] == scripts.summary("calm")["weights_sha256"]
    assert scripts.lines("killed") == scripts.lines("calm")


def test_one_page_a_share_of_the_cores_and_143_with_a_checkpoint(scripts: Scripts) -> None:
    process = scripts.launch(["--nodes", "2", "--log-every", "5"], "small.py", "run", TANDEM_STEPS=100_000)
    deadline, lines = time.monotonic() + patient(LIMIT_SECONDS), scripts.folder / "run/metrics.jsonl"
    while not lines.exists() or not lines.read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, output = scripts.processes.wait(process, LIMIT_SECONDS)
    assert code == 143, output
    summary = scripts.summary("run")
    assert (summary["state"], summary["last_checkpoint_step"]) == ("stopped", summary["global_step"])
    assert logs(scripts, "run").count("live page at") == 1, output
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"fp32, {pluralize(share, 'thread')}" in output


FAILING = """
import os, tandem, torch

def train():
    run = tandem.start()
    model = run.wrap(torch.nn.Linear(3, 2))
    model(torch.ones(1, 4))

if __name__ == "__main__":
    tandem.launch(train, nodes=1, run_dir="run") if os.environ["HOW"] == "function" else train()
"""


@pytest.mark.parametrize("how", ["alone", "launched", "function"])
def test_of_an_error_the_terminal_shows_the_scripts_own_lines(scripts: Scripts, how: str) -> None:
    """torch's frames are in the log alone, however the loop was started."""
    scripts.write("failing.py", FAILING)
    if how == "launched":
        process = scripts.launch(["--nproc", "1"], "failing.py", "run", HOW=how)
    else:
        process = scripts.start("failing.py", "run", HOW=how)
    code, output = scripts.processes.wait(process, LIMIT_SECONDS)
    assert code == 1, output
    output = output.replace("[rank0]: ", "")  # torch's, where no agent runs the script
    trace = output.partition("Traceback (most recent call last, in the script's code):\n")[2]
    begins, _, _ = trace.partition("RuntimeError: ")
    frames = [line for line in begins.splitlines() if line.startswith("  File ")]
    assert frames and all(str(scripts.folder / "failing.py") in line for line in frames), output
    assert frames[-1].endswith(", in train") and "    model(torch.ones(1, 4))\n" in begins, output
    full = (scripts.folder / "run/log/rank-0.log").read_text()
    assert "/torch/nn/modules/linear.py" in full and "/torch/nn/modules/linear.py" not in output, full


KILLED_AT_THE_END = """
import logging
from pathlib import Path

checkpoints = Path("run/checkpoints")


class Killing(logging.Handler):
    def emit(self, record):
        if first_life and "save at step 48 failed" in record.getMessage():
            checkpoints.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


logging.getLogger("tandem.checkpoint").addHandler(Killing())
"""


def test_a_rank_killed_in_the_last_save_saves_after_the_restart(scripts: Scripts) -> None:
    """Only memory has the last step: the run is not complete without a checkpoint of it."""
    begins, loop = "for inputs, labels in", "    seen += 1\n"
    assert begins in SMALL and loop in SMALL
    script = SMALL.replace(begins, KILLED_AT_THE_END + begins)
    obstacle = "        checkpoints.touch()\n"
    scripts.write("end.py", script.replace(loop, f"{loop}    if first_life and run.step == 46:\n{obstacle}"))
    launch = scripts.launch(["--nproc", "1", "--checkpoint-every", "100"], "end.py", "run")
    code, output = scripts.processes.wait(launch, LIMIT_SECONDS)
    assert code == 0, output
    assert "resuming from step 48 (in-memory snapshot)" in output, output
    assert scripts.summary("run")["last_checkpoint_step"] == 48
    assert (scripts.folder / "run/checkpoints/step-000000048/manifest.json").exists()


def test_a_finished_run_with_a_damaged_last_checkpoint_trains_again(scripts: Scripts) -> None:
    """Neither its ranks nor its agent call it finished: the agent would keep the old summary."""
    scripts.write("small.py", "import os\nprint('summary', os.path.exists('run/summary.json'))\n" + SMALL)
    code, output = scripts.processes.wait(scripts.launch(["--nproc", "1"], "small.py", "run"), LIMIT_SECONDS)
    assert code == 0, output
    (state,) = (scripts.folder / "run/checkpoints/step-000000048").glob("state*.pt")
    whole = bytearray(state.read_bytes())
    whole[len(whole) // 2] ^= 0xFF
    state.write_bytes(whole)
    code, output = scripts.processes.wait(scripts.launch(["--nproc", "1"], "small.py", "run"), LIMIT_SECONDS)
    assert code == 0, output
    assert "step 48 is damaged" in output and "already finished" not in output, output
    assert "summary False" in output and "after the loop 48" in output, output
    assert scripts.summary("run")["resumed_from_step"] == 45


@pytest.mark.parametrize("stops", [False, True], ids=["failing", "stopped"])
def test_why_saves_fail_is_in_the_last_line(scripts: Scripts, stops: bool) -> None:
    """A rank that could not save before it stopped was said to have been killed by SIGKILL."""
    slow = "    import time; time.sleep(0.05)\n"
    obstacle = f"{slow}    if run.step == 3:\n        open('run/checkpoints', 'w').close()\n"
    scripts.write("full.py", SMALL.replace("    seen += 1\n", obstacle))
    flags = ["--nproc", "1", "--checkpoint-every", "1000" if stops else "5"]
    process = scripts.launch(flags, "full.py", "run")
    deadline, lines = time.monotonic() + patient(LIMIT_SECONDS), scripts.folder / "run/metrics.jsonl"
    while stops and '"step": 8' not in (lines.read_text() if lines.exists() else ""):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    if stops:
        process.send_signal(signal.SIGTERM)
    code, output = scripts.processes.wait(process, LIMIT_SECONDS)
    assert code == (137 if stops else 1), output
    last = output.splitlines()[-1]
    assert f"ended with {code}: " in last and "run/checkpoints: Not a directory" in last, output
    assert "SIGKILL" not in last and "restarting all ranks" not in output, output


@pytest.mark.soak
def test_a_script_that_leaves_its_loop_by_sys_exit_has_not_ended_well(scripts: Scripts) -> None:
    scripts.write("left.py", SMALL.replace("    seen += 1\n", "    raise SystemExit(0)\n"))
    code, output = scripts.processes.wait(scripts.launch([], "left.py", "run"), LIMIT_SECONDS)
    assert code == 1, output
    assert "the script left its loop after step" in output
    assert "Traceback" not in output
