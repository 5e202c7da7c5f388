"""The time while a process ran: what it counts when the process is stopped, and after a fork."""

import os
import signal
import subprocess
import sys
import time

from patience import patient
from program_files import program_text
from tandem import running_clock

SAYS_BOTH = program_text("running_says_both")


def test_a_pause_is_not_counted_whoever_asks_first() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SAYS_BOTH], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        before = float(process.stdout.readline())
        time.sleep(1.0)
        os.kill(process.pid, signal.SIGSTOP)
        process.stdin.write("\n")  # asked at once when it wakes up, before any tick
        process.stdin.flush()
        time.sleep(4.0)
        os.kill(process.pid, signal.SIGCONT)
        asleep = float(process.stdout.readline()) - before
    finally:
        process.kill()
        process.wait()
    assert 2.5 < asleep < patient(30)


def test_it_never_goes_back_and_goes_on_in_a_forked_child() -> None:
    before = running_clock.now()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            first = running_clock.now()
            time.sleep(1.5)  # longer than a gap that counts: a thread of the child's own has to look
            os.write(theirs, f"{first} {running_clock.now()}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    first, later = map(float, os.read(ours, 100).split())
    assert before <= first and later - first > 1.2
    moments = [running_clock.now() for _ in range(1000)]
    assert moments == sorted(moments) and moments[0] >= before
