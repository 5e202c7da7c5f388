"""Simulated nodes: `tandem launch --nodes N` on a laptop starts N processes that are told they are nodes.

Each is placed by hand at a loopback address of its own, as a cluster would place it.
"""

import contextlib
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.checkpoint.storage.copies import local_folder
from tandem.config import Settings
from tandem.errors import INTERRUPTED_TWICE, KILLED
from tandem.launch.gpus import gpus_of, shared_out
from tandem.launch.restarts import job_code
from tandem.launch.run_dir import open_run_folder
from tandem.platforms.placement import Placement
from tandem.process import end_with_parent, safe_path
from tandem.script.job import Program
from tandem.signals import StopFlag, handed_on
from tandem.timeouts import SUPERVISE_SECONDS

log = logging.getLogger("tandem.launch")


def simulate(
    settings: Settings,
    placement: Placement,
    argv: Sequence[str],
    environ: Mapping[str, str],
    stop: StopFlag,
    program: Program | None = None,
) -> int:
    """Run `placement.nodes` nodes on this machine; the job's exit code.

    Node 0 keeps the terminal, the others write to RUN_DIR/log/node-N.log. A node killed by a signal is
    started again, as a cluster's platform would, up to --max-restarts times.
    """
    run_dir = local_folder(settings.run.place)
    open_run_folder(settings)
    shares = shared_out(gpus_of(environ), placement.nodes, placement.nproc, settings.compute)
    nodes = [
        SimulatedNode(
            [*argv, "--nodes", str(placement.nodes), "--node-rank", str(index)]
            + ["--master", f"{placement.master_host}:{placement.master_port}"]
            + ["--run-dir", str(settings.run.place)],
            None if index == 0 else run_dir / "log" / f"node-{index}.log",
            {**environ, **shares[index]},
            program.words() if program is not None else (),
        )
        for index in range(placement.nodes)
    ]
    for node in nodes:
        node.start()
    _supervise(nodes, settings.launch.max_restarts, stop)
    if stop.interrupts > 1:
        return INTERRUPTED_TWICE
    return job_code([code for node in nodes if (code := node.code()) is not None])


def _supervise(nodes: Sequence["SimulatedNode"], restarts_left: int, stop: StopFlag) -> None:
    """Until all have ended: hand a stop signal on, start again what was killed.

    A second Ctrl-C kills the nodes, which may hear nothing; what they have started ends with them.
    """
    forwarded = False
    while any(node.code() is None for node in nodes):
        time.sleep(SUPERVISE_SECONDS)
        if stop and not forwarded:
            forwarded = True
            for node in nodes:
                node.signal(handed_on(stop.signal_number or signal.SIGTERM))
        if stop.interrupts > 1:
            log.warning("second Ctrl-C: ending all nodes at once")
            for node in nodes:
                node.signal(signal.SIGKILL)
            return
        for index, node in enumerate(nodes):
            if node.was_killed() and not stop and restarts_left > 0 and _others_run(nodes, index):
                restarts_left -= 1
                log.warning("node %d was killed (%s): starting it again", index, node.code())
                node.start("--resume", "auto")  # whatever this launch began with, it goes on now


def _others_run(nodes: Sequence["SimulatedNode"], index: int) -> bool:
    others = [node for position, node in enumerate(nodes) if position != index]
    return not others or any(node.code() is None or node.was_killed() for node in others)


class SimulatedNode:
    """One `tandem launch` process that stands for a node."""

    def __init__(
        self,
        arguments: Sequence[str],
        output: Path | None,
        environment: Mapping[str, str],
        program: Sequence[str] = (),
    ) -> None:
        self._command = [sys.executable, "-m", "tandem", "launch", *arguments]
        self._program = program
        self._output, self._environment = output, environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        with contextlib.ExitStack() as stack:
            target = None
            if self._output is not None:
                self._output.parent.mkdir(parents=True, exist_ok=True)
                target = stack.enter_context(self._output.open("ab"))
            self._process = subprocess.Popen(
                [*self._command, *more, *self._program],
                stdin=subprocess.DEVNULL,
                stdout=target,
                stderr=target,
                env=safe_path(self._environment),
                preexec_fn=stop_with_parent,
            )

    def code(self) -> int | None:
        if self._process is None or self._process.poll() is None:
            return None
        code = self._process.returncode
        if code == -signal.SIGTERM:  # before it could hear of it; 143 is a stop with all that belongs to it
            return KILLED
        return 128 - code if code < 0 else code

    def was_killed(self) -> bool:
        return self._process is not None and (self._process.poll() or 0) < 0

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def stop_with_parent() -> None:
    """In the child: get SIGTERM when the launcher dies."""
    end_with_parent(signal.SIGTERM)
