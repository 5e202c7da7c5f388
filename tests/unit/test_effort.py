"""Whether a training thread works: by its stack, its CPU time and that of processes below it."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from tandem import running_clock
from tandem.telemetry.thread_activity import ThreadActivity, in_collective
from tandem.timeouts import BEAT_SECONDS


def seen_while(work: Callable[[], object]) -> float:
    """For how long no work was seen at the end of `work`, which this thread, the main one, does."""
    effort, done = ThreadActivity(), threading.Event()

    def look() -> None:
        while not done.wait(BEAT_SECONDS):
            effort.look()

    looking = threading.Thread(target=look)
    looking.start()
    work()
    idle = running_clock.now() - effort.worked_at
    done.set()
    looking.join()
    return idle


def computed() -> None:
    until = time.monotonic() + 4
    while time.monotonic() < until:
        sum(range(1000))


def below() -> None:
    code = "import time\nend = time.monotonic() + 4\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", code], check=True)


def polled() -> None:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("work", [computed, below])
def test_work_is_seen(work: Callable[[], None]) -> None:
    assert seen_while(work) < 3.0


@pytest.mark.slow
@pytest.mark.parametrize("wait", [lambda: time.sleep(5), lambda: threading.Event().wait(5), polled])
def test_a_thread_that_waits_shows_none(wait: Callable[[], object]) -> None:
    assert seen_while(wait) > 2.5


def test_only_what_torch_itself_has_called_is_in_a_collective() -> None:
    """A model's own code below a wrapper of torch.distributed waits for nobody."""
    found = []

    def run_in(files: list[str], innermost: Callable[[], None]) -> None:
        call = innermost
        for file in reversed(files):
            scope = {"call": call}
            exec(compile("def outer():\n    call()", file, "exec"), scope)
            call = scope["outer"]
        call()

    def note() -> None:
        found.append(in_collective(sys._getframe(1)))

    distributed, user = "/lib/torch/distributed/distributed_c10d.py", "/home/me/train.py"
    run_in([user, distributed], note)
    run_in([user, distributed, "/lib/torch/_ops.py"], note)
    run_in([user, "/lib/torch/distributed/fsdp/wrapped.py", "/lib/torch/nn/modules/module.py", user], note)
    run_in([user, "/lib/torch/nn/parallel/distributed.py"], note)
    run_in([user, "/lib/torch/nn/parallel/distributed.py", "/lib/torch/nn/modules/linear.py"], note)
    assert found == [True, True, False, True, False]
