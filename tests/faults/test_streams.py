"""Iterable data: a run that is killed, stopped and started again ends with the bits of the calm one."""

import os
import signal

import pytest
from small_runs import Runs, rank_processes

from program_files import program_text

pytestmark = pytest.mark.timeout(300)

SLOW = 0.02  # seconds per step, so that a fault hits the middle

# A stream with a buffer that it shuffles in: where it stands is more than a number. `plain`: it cannot say.
TASK = program_text("streams_task")


@pytest.mark.parametrize("plain", ["false", pytest.param("true", marks=pytest.mark.soak)])
def test_killed_and_stopped_in_a_stream_is_continued_with_equal_bits(runs: Runs, plain: str) -> None:
    (runs.folder / "small.py").write_text(TASK)
    flags = ("--nproc", 2, "--task.plain", plain, "--steps", 120, "--checkpoint-every", 20)
    calm = runs.finish("launch", "calm", *flags)  # 54 steps an epoch: it ends in the third
    process = runs.start("launch", "hard", *flags, delay=SLOW)
    runs.wait_for_step("hard", 20)
    os.kill(rank_processes(process.pid)["tandem-rank-1"], signal.SIGKILL)  # goes on from the snapshot
    runs.wait_for_step("hard", 60)
    process.terminate()  # goes on from the checkpoint
    code, output = runs.processes.wait(process)
    assert code == 143, output
    stopped = runs.summary("hard")
    assert stopped["restarts"] == 1 and stopped["global_step"] < 120
    hard = runs.finish("launch", "hard", *flags, delay=SLOW)
    assert hard["resumed_from_step"] == stopped["global_step"]
    assert hard["weights_sha256"] == calm["weights_sha256"]
