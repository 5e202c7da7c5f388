"""The tutorials' own programs (examples/tutorials), each through the door that README there gives it."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.multi, pytest.mark.timeout(400)]
TUTORIALS = Path(__file__).parents[2] / "examples" / "tutorials"
LIMIT_SECONDS = 180.0
FOREIGN = re.compile(r"TANDEM_|PET_|SLURM_|OMPI_|OMP_|TORCHELASTIC_|RANK$|LOCAL_|WORLD_SIZE|MASTER_|NNODES")


class Tutorials:
    """Their programs in one folder, where the data lie as well."""

    def __init__(self, folder: Path, processes: Any) -> None:
        self.folder, self.processes = folder, processes
        clean = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
        ours = {"TANDEM_METRICS_PORT": "0", "TANDEM_METRICS_LINGER": "0", "TANDEM_THREADS": "1"}
        self.environment = clean | ours | {"OMP_NUM_THREADS": "1"}

    def start(self, *words: object, **variables: object) -> Any:
        """`python words`, begun."""
        environment = self.environment | {name: str(value) for name, value in variables.items()}
        command = [sys.executable, *map(str, words)]
        return self.processes.start(command, cwd=self.folder, env=environment)

    def ended(self, process: Any, code: int = 0) -> str:
        """What it has printed."""
        got, output = self.processes.wait(process, LIMIT_SECONDS)
        assert got == code, output
        return str(output)

    def run(self, *words: object, code: int = 0) -> str:
        return self.ended(self.start(*words), code)

    def launch(self, run: str, *words: object, code: int = 0) -> str:
        """What two ranks of `tandem launch` print together."""
        self.run("-m", "tandem", "launch", "--nproc", 2, "--run-dir", run, *words, code=code)
        return "".join(path.read_text() for path in sorted((self.folder / run / "log").glob("*.log")))

    def by_hand(self, port: int, *words: object) -> str:
        """What two ranks print that are started as tutorials do it."""
        place = {"WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        ranks = [self.start(*words, RANK=rank, LOCAL_RANK=rank, **place) for rank in (0, 1)]
        return "".join([self.ended(rank) for rank in ranks])

    def summary(self, run: str) -> dict[str, Any]:
        return dict(json.loads((self.folder / run / "summary.json").read_text()))

    def lines(self, run: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tutorials(tmp_path_factory: pytest.TempPathFactory, module_processes: Any, require: Any) -> Tutorials:
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:  # RuntimeError: of another build than torch
        require("torchvision", False, str(error))
    tutorials = Tutorials(tmp_path_factory.mktemp("tutorials"), module_processes)
    tutorials.run(TUTORIALS / "draw_data.py", "data", "--digits", 1200, "--pictures", 8)
    return tutorials


COUNTED = re.compile(
    r"^rank (\d): saw (\d+), (\d+) of them last; its buffer says (\d+)(?:, all ranks (\d+))?", re.M
)


def counted(text: str) -> list[tuple[int, ...]]:
    """(seen, of them last, buffer, everywhere or 0) of each rank."""
    found = sorted(tuple(int(number or 0) for number in line) for line in COUNTED.findall(text))
    assert [rank for rank, *_ in found] == [*range(len(found))]
    return [tuple(numbers) for _, *numbers in found]


def test_buffers_are_rank_0s_in_plain_ddp_and_in_a_loop_of_ones_own(tutorials: Tutorials) -> None:
    for run, script in (("plain", "counting_buffer_plain.py"), ("own-loop", "counting_buffer.py")):
        first, second = counted(tutorials.launch(run, TUTORIALS / script))
        assert first[0] != second[0]
        assert first[2] == first[0] and second[2] == first[0] - first[1] + second[1]
    assert {first[3], second[3]} == {first[0] + second[0]}


@pytest.mark.slow
def test_buffers_are_each_ranks_own_without_ddps_broadcast_and_alone_count_the_same(
    tutorials: Tutorials,
) -> None:
    plain, ours = TUTORIALS / "counting_buffer_plain.py", TUTORIALS / "counting_buffer.py"
    for seen, _, buffer, _ in counted(tutorials.launch("kept", plain, "--keep-buffers")):
        assert buffer == seen
    ((alone, *_),) = counted(tutorials.run(ours))
    assert {everywhere for *_, everywhere in counted(tutorials.launch("two", ours))} == {alone}


def test_mnist_by_hand_set_variables_is_mnist_under_tandem_launch(
    tutorials: Tutorials, free_port: int
) -> None:
    script = TUTORIALS / "mnist_ddp.py"
    said = tutorials.by_hand(free_port, script)
    shown = re.findall(r"^(?:epoch|accuracy|weights) .*$", said, re.M)
    assert len(shown) == 7, said  # rank 0's alone: two epochs of two losses and a test, the weights
    assert re.findall(r"^(?:epoch|accuracy|weights) .*$", tutorials.launch("script", script), re.M) == shown
    assert (tutorials.folder / "mnist_cnn.pt").exists()


def test_mnist_as_a_task_by_hand_set_variables(tutorials: Tutorials, free_port: int) -> None:
    settings = ["--task", f"{TUTORIALS / 'mnist_task.py'}:Mnist", "--batch-size", 120, "--lr", 0.02]
    settings += ["--epochs", 2, "--log-every", 5]
    tutorials.by_hand(free_port, "-m", "tandem", "train", "--run-dir", "task", *settings)
    summary = tutorials.summary("task")
    assert (summary["platform"], summary["world_size"], summary["global_step"]) == ("by-hand", 2, 20)
    assert [line["step"] for line in tutorials.lines("task")].count(20) >= 1
