"""Programs that know nothing of tandem, under `tandem launch` and under torchrun."""

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patience import patient

LIMIT_SECONDS = 280.0  # three or four imports of torch at worst, on a machine that does other things


class Scripts:
    """Commands in one folder; what they leave there is looked at by the tests."""

    def __init__(self, folder: Path, processes: Any) -> None:
        self.folder, self.processes, self.python = folder, processes, sys.executable
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        self.environment = {name: value for name, value in kept.items() if name != "OMP_NUM_THREADS"}

    def tandem(self, *words: object, run: str = "run") -> list[str]:
        """`tandem launch` with an own metrics page and no waiting for its readers."""
        ours = ["--metrics", "0", "--metrics-linger", "0", "--run-dir", run]
        return [self.python, "-m", "tandem", "launch", *ours, *map(str, words)]

    def by_torchrun(self, *words: object) -> tuple[int, str]:
        """Exit code and output. Again where a rank was aborted at its end, as gloo's threads do it to some
        interpreters; under tandem launch ranks leave before that."""
        command = [self.python, "-m", "torch.distributed.run", "--standalone", *map(str, words)]
        for _ in range(3):
            code, said = self.run(command)
            if code == 0 or "(SIGABRT)" not in said:
                break
        return code, said

    def run(self, command: list[str], **options: Any) -> tuple[int, str]:
        return self.processes.run(command, LIMIT_SECONDS, cwd=self.folder, env=self.environment, **options)

    def start(self, command: list[str]) -> Any:
        return self.processes.start(command, cwd=self.folder, env=self.environment)

    def wait(self, process: Any) -> tuple[int, str]:
        return self.processes.wait(process, LIMIT_SECONDS)

    def log(self, rank: int, run: str = "run") -> str:
        path = self.folder / run / "log" / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""

    def lives(self, rank: int, run: str = "run") -> list[int]:
        """The process numbers that a rank has had, in order: the programs print one at their first line."""
        line = rf"^first line .* pid (\d+) rank {rank}$"
        return [int(pid) for pid in re.findall(line, self.log(rank, run), re.M)]

    def until(self, true: Callable[[], object], process: Any, seconds: float = 200.0) -> Any:
        """Wait until `true()`, as long as `process` runs."""
        deadline = time.monotonic() + patient(seconds)
        while not (found := true()):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "too long"
            time.sleep(0.05)
        return found


@pytest.fixture
def scripts(tmp_path: Path, processes: Any) -> Scripts:
    return Scripts(tmp_path, processes)


@pytest.fixture(scope="module")
def module_scripts(tmp_path_factory: pytest.TempPathFactory, module_processes: Any) -> Scripts:
    return Scripts(tmp_path_factory.mktemp("scripts"), module_processes)
