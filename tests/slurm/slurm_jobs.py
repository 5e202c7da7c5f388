"""A real Slurm of two nodes with a folder that they share, and the programs that tests run on it."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patience import patient
from program_files import program_text
from two_nodes import HEAD, Cluster

SBATCH_FILES = Path(__file__).parents[2] / "slurm"
TRAIN = SBATCH_FILES / "train.sbatch"
STEPS = 240
LIMIT_SECONDS = 280.0  # several imports of torch at once, on a machine that does other things
# Dropout, batch norm and momentum make a resume hard; steps take long while the file `hold` is there.
TASK = program_text("slurm_jobs_task")
OWN_LOOP = program_text("slurm_jobs_own_loop")
STAND_IN = program_text("slurm_jobs_stand_in")
PLAIN = program_text("slurm_jobs_plain")


class Slurm:
    """The cluster with a folder that its nodes share, and what tests do there."""

    def __init__(self, cluster: Cluster, folder: Path, processes: Any) -> None:
        self.cluster, self.folder, self.processes = cluster, folder, processes
        self.environment = {
            **{name: value for name, value in cluster.environment.items() if not name.startswith("TANDEM_")},
            "PATH": f"{Path(sys.executable).parent}:{cluster.environment['PATH']}",
            "TANDEM_METRICS": "0",
            "TANDEM_METRICS_LINGER": "0",
            "TANDEM_THREADS": "1",
        }
        (folder / "held.py").write_text(TASK)
        (folder / "own.py").write_text(OWN_LOOP)
        (folder / "plain.py").write_text(PLAIN)
        (folder / "stand_in.py").write_text(STAND_IN)

    def task(self, run: str | None = None, steps: int = STEPS) -> list[str]:
        flags = ["--task", "held.py:Held", "--batch-size", "24", "--steps", str(steps)]
        return [*flags, "--checkpoint-every", "5", *(["--run-dir", run] if run else [])]

    def start(self, *command: str, **variables: str) -> Any:
        """A command on the head, in the folder."""
        there = self.cluster.on(HEAD, "env", f"--chdir={self.folder}", *command)
        return self.processes.start(there, env={**self.environment, **variables})

    def run(self, *command: str, **variables: str) -> tuple[int, str]:
        return self.wait(self.start(*command, **variables))

    def wait(self, process: Any) -> tuple[int, str]:
        code, output = self.processes.wait(process, LIMIT_SECONDS)
        return code, output if code == 0 else output + self.cluster.logs()

    def summary(self, run: str) -> dict[str, Any]:
        path = self.folder / run / "summary.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def step(self, run: str) -> int:
        """The newest checkpoint's."""
        manifests = (self.folder / run / "checkpoints").glob("step-*/manifest.json")
        names = [path.parent.name for path in manifests]
        return max((int(name.rpartition("-")[2]) for name in names), default=0)

    def until(self, true: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + patient(LIMIT_SECONDS)
        while not true():
            assert time.monotonic() < deadline, f"waited too long until {what}\n{self.queue()}\n{self.said()}"
            time.sleep(0.1)

    def queue(self) -> str:
        """The jobs with what each waits for, and the nodes."""
        return "\n".join(self.cluster.run(*command, "--long") for command in (["squeue"], ["sinfo"]))

    def said(self) -> str:
        outputs = [path.read_text() for path in self.folder.glob("*.out")]
        return "\n".join([*outputs, self.cluster.logs()])
