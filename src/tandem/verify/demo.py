"""`tandem demo`: two simulated nodes train, one rank is killed, and five lines describe the result."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from tandem import layout
from tandem.errors import FINISHED, ConfigError
from tandem.run.directory import RunDir
from tandem.signals import StopFlag
from tandem.text import format_duration, relative_path
from tandem.verify.watched_run import Kill, NothingResumedError, WatchedRun

STEPS = 600
KILLED_AT = 200
FLAGS = {
    "--nodes": 2,
    "--nproc": 1,
    "--task": "digits",
    "--device": "cpu",
    "--steps": STEPS,
    "--eval-every": 200,
    "--log-every": 10,
}


def demo(run_dir: Path, environ: Mapping[str, str], stop: StopFlag, say: Callable[[str], None]) -> int:
    """Train, kill rank 1, and `say` five lines.

    Raises ConfigError if `run_dir` exists or cannot be made, StoppedError after a signal, and
    RunFailedError if training fails.
    """
    if run_dir.exists():
        raise ConfigError(f"{run_dir} already exists; choose a new directory with --run-dir")
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        # Report a read-only location here, not by a launch that cannot open its log.
        run_dir.with_suffix(".log").touch()
    except OSError as error:
        raise ConfigError(
            f"cannot write to {run_dir.parent}: {error.strerror}; choose a writable directory with --run-dir"
        ) from None
    say(f"training {FLAGS['--task']} on two simulated nodes of this machine, one rank each (about 30 s)")
    with WatchedRun(environ, run_dir, FLAGS) as run:
        with suppress(NothingResumedError):  # it finished before the kill, as the last lines show
            step = run.kill(Kill(KILLED_AT, 1), stop)
            say(f"step {step}: killed rank 1 on node 1 with SIGKILL; live page: {_page(run_dir)}")
        run.finish(stop)
    files = RunDir(run_dir).files()
    killed = [each for each in files.events() if each.get("kind") == "rank_killed"]
    # No event exists if the run finished before the kill.
    for each in killed[:1]:
        after = format_duration(each["seconds"])
        say(f"{after} later both ranks trained again; steps lost: {each['steps_lost']}")
    summary = files.read(layout.SUMMARY)
    scores = ", ".join(f"{name} {value:.4g}" for name, value in summary["eval"].items())
    say(f"finished at step {summary['global_step']}: {scores}; restarts: {summary['restarts']}")
    say(f"report: tandem report {relative_path(run_dir)}; your own script: tandem launch --nodes 2 train.py")
    return FINISHED


def _page(run_dir: Path) -> str:
    """The address of the live page, from the output of the launch."""
    found = re.search(r"live page at (\S+),", run_dir.with_suffix(".log").read_text(errors="replace"))
    return found[1] if found else "none"
