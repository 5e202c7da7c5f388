"""The tutorials' own programs (examples/tutorials), each through the door that README there gives it."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from program_files import program_text

pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]
TUTORIALS = Path(__file__).parents[2] / "examples" / "tutorials"
LIMIT_SECONDS = 280.0
FOREIGN = re.compile(r"TANDEM_|PET_|SLURM_|OMPI_|OMP_|TORCHELASTIC_|RANK$|LOCAL_|WORLD_SIZE|MASTER_|NNODES")


class Tutorials:
    """Their programs in one folder, where the data lie as well."""

    def __init__(self, folder: Path, processes: Any) -> None:
        self.folder, self.processes = folder, processes
        clean = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
        ours = {"TANDEM_METRICS": "0", "TANDEM_METRICS_LINGER": "0", "TANDEM_THREADS": "1"}
        self.environment = clean | ours

    def start(self, *words: object, **variables: object) -> Any:
        """`python words`, begun."""
        # tandem sets the threads of its ranks, and with OMP_NUM_THREADS it would import torch again.
        own = {} if words[0] == "-m" else {"OMP_NUM_THREADS": "1"}
        environment = self.environment | own | {name: str(value) for name, value in variables.items()}
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


@pytest.mark.soak
def test_buffers_are_each_ranks_own_without_ddps_broadcast_and_alone_count_the_same(
    tutorials: Tutorials,
) -> None:
    plain, ours = TUTORIALS / "counting_buffer_plain.py", TUTORIALS / "counting_buffer.py"
    for seen, _, buffer, _ in counted(tutorials.launch("kept", plain, "--keep-buffers")):
        assert buffer == seen
    ((alone, *_),) = counted(tutorials.run(ours))
    assert {everywhere for *_, everywhere in counted(tutorials.launch("everywhere", ours))} == {alone}


def test_mnist_by_hand_set_variables_is_mnist_under_tandem_launch(
    tutorials: Tutorials, free_port: int
) -> None:
    script = TUTORIALS / "mnist_ddp.py"
    said = tutorials.by_hand(free_port, script)
    shown = re.findall(r"^(?:epoch|accuracy|weights) .*$", said, re.M)
    assert len(shown) == 7, said  # rank 0's alone: two epochs of two losses and a test, the weights
    assert re.findall(r"^(?:epoch|accuracy|weights) .*$", tutorials.launch("script", script), re.M) == shown
    assert (tutorials.folder / "mnist_cnn.pt").exists()


@pytest.mark.soak
def test_mnist_as_a_task_by_hand_set_variables(tutorials: Tutorials, free_port: int) -> None:
    settings = ["--task", f"{TUTORIALS / 'mnist_task.py'}:Mnist", "--batch-size", 120, "--lr", 0.02]
    settings += ["--epochs", 2, "--log-every", 5]
    said = tutorials.by_hand(free_port, "-m", "tandem", "train", "--run-dir", "task", *settings)
    assert f"rank 0 | waiting for the other 1 of 2 ranks at 127.0.0.1:{free_port}" in said
    summary = tutorials.summary("task")
    assert (summary["platform"], summary["world_size"], summary["global_step"]) == ("by-hand", 2, 20)
    assert [line["step"] for line in tutorials.lines("task")].count(20) >= 1


PRETRAINED = program_text("tutorials_pretrained")


def resnet34(*words: object) -> list[object]:
    """Settings: pretrained weights with another head, SyncBatchNorm, a scaled rate and a warm-up."""
    settings: list[object] = ["--task", f"{TUTORIALS / 'resnet34_task.py'}:Resnet34", "--task.image-size", 32]
    settings += ["--batch-size", 20, "--sync-batchnorm", "--init-from", "r34.pth"]
    settings += ["--lr", 0.01, "--lr-scaling", "linear:10", "--warmup", "1epoch"]
    return [*settings, "--schedule", "constant", "--log-every", 1, "--snapshot-every", "never", *words]


def test_resnet34_begins_with_all_weights_but_the_head(tutorials: Tutorials) -> None:
    tutorials.run("-c", PRETRAINED)
    said = tutorials.launch("begun", *resnet34("--steps", 1, "--eval-every", "never"))
    assert re.search(r"r34.pth: [\d.]+% of the model's parameters \(21,284,672 of 21,287,237\)", said), said
    assert re.search(r"loaded +216 .*missing +0.*unexpected +0.*wrong shape +2  fc.weight is", said, re.S)
    lines = tutorials.lines("begun")
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.01])  # of 0.02
    assert tutorials.summary("begun")["world_size"] == 2


def test_resnet34_goes_on_with_a_bar_and_tensorboard(tutorials: Tutorials) -> None:
    tutorials.run("-c", PRETRAINED)
    shown = ["--tracker", "tensorboard", "--progress", "on"]
    tutorials.launch("resnet34", *resnet34("--epochs", 1, *shown))
    said = tutorials.launch("resnet34", *resnet34("--epochs", 2, *shown))
    assert "resumed from step 2" in said and "evaluation after step 4" in said
    lines = [line for line in tutorials.lines("resnet34") if "learning_rate" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.01, 0.02, 0.02, 0.02])
    assert list((tutorials.folder / "resnet34" / "tensorboard").glob("events*"))


def test_data_parallel_in_one_process_and_the_same_as_a_task(tutorials: Tutorials) -> None:
    assert "outside: 20 rows" in tutorials.run(TUTORIALS / "data_parallel_plain.py")
    settings = ["--task", f"{TUTORIALS / 'data_parallel_task.py'}:Rows", "--batch-size", 20, "--epochs", 1]
    settings += ["--strategy", "dp:0.5", "--run-dir", "dp"]
    said = tutorials.run("-m", "tandem", "train", *settings)
    assert said.count("inside: ") >= 5
    assert tutorials.summary("dp")["global_step"] == 5


def test_a_model_on_two_devices_under_ddp(tutorials: Tutorials, free_port: int) -> None:
    said = tutorials.by_hand(free_port, TUTORIALS / "two_devices_plain.py")
    assert len(re.findall(r"^loss [\d.]+$", said, re.M)) == 1, said
    task = ["--task", f"{TUTORIALS / 'two_devices_task.py'}:Rows", "--devices-per-rank", 2]
    tutorials.launch("two-devices", *task, "--batch-size", 40, "--epochs", 2, "--log-every", 5)
    losses = [line["loss"] for line in tutorials.lines("two-devices") if "loss" in line]
    assert losses[-1] < losses[0]
