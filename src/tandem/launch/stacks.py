"""Request stacks from the ranks of a node that hangs, and report which ranks have written them."""

import time
from collections.abc import Mapping
from pathlib import Path

from tandem.launch.sessions import has_handler
from tandem.launch.workers import Workers
from tandem.process import send, stat_of
from tandem.telemetry.stacks import LAST_RESORT, stacks_file
from tandem.timeouts import MONITOR_SECONDS, NO_ANSWER_SECONDS, STACKS_SECONDS


def gather_stacks(workers: Workers, ranks: Mapping[int, int], log_folder: Path) -> str:
    """Have the ranks {local rank: rank} write their stacks; return a sentence about the files."""
    pids = workers.pids()
    began = time.monotonic()
    asks_again = True
    files = {each: stacks_file(log_folder, ranks[each]) for each in pids}
    sizes = {each: _bytes(path) for each, path in files.items()}
    workers.ask_for_stacks()
    silent = sorted(pids)
    while (waited := time.monotonic() - began) < STACKS_SECONDS:
        silent = [each for each in silent if _bytes(files[each]) <= sizes[each]]
        if waited > NO_ANSWER_SECONDS and all(_is_stopped(pids[each]) for each in silent):
            break  # not earlier: ranks write torch's flight recorder on their own
        # Python's handler does not run while the main thread is blocked in C; the handler in C does.
        if waited > NO_ANSWER_SECONDS and asks_again:
            asks_again = False
            send(LAST_RESORT, [pids[each] for each in silent if has_handler(pids[each], LAST_RESORT)])
        time.sleep(MONITOR_SECONDS)
    written = [str(files[each]) for each in pids if each not in silent]
    without = [f"rank {ranks[each]}{' (stopped)' if _is_stopped(pids[each]) else ''}" for each in silent]
    words = [f"stacks are in {', '.join(written)}"] if written else []
    return "; ".join([*words, f"no stacks from {', '.join(without)}"] if without else words)


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _is_stopped(pid: int) -> bool:
    return stat_of(pid)[:1] in (["T"], ["t"])
