"""tandem on a real Slurm of two nodes: slurm/two_nodes.py brings it up, slurm/train.sbatch runs on it."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from patience import patient
from two_nodes import HEAD, Cluster, available

pytestmark = [pytest.mark.slurm, pytest.mark.multi]

TRAIN = Path(__file__).parents[2] / "slurm" / "train.sbatch"
STEPS = 240
LIMIT_SECONDS = 280.0  # several imports of torch at once, on a machine that does other things
# Dropout, batch norm and momentum make a resume hard; steps take long while the file `hold` is there.
TASK = """
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tandem.data.datasets import Datasets, TensorRows


@dataclass
class Held:
    def build_model(self):
        return nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3)
        )

    def build_datasets(self):
        x = torch.randn(2400, 8, generator=torch.Generator().manual_seed(7))
        rows = TensorRows(x, x[:, :3].argmax(1))
        return Datasets(rows, rows)

    def loss(self, model, batch):
        x, y = batch
        time.sleep(0.3 if model.training and Path("hold").exists() else 0)
        return nn.functional.cross_entropy(model(x), y)
"""
OWN_LOOP = """
import torch
import tandem

run = tandem.start()
torch.manual_seed(1)
model = run.wrap(torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.keep(model=model, optimizer=optimizer)
x = torch.randn(240, 8)
dataset = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
for inputs, labels in run.batches(dataset, batch_size=24, epochs=3):
    run.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
    optimizer.step()
    optimizer.zero_grad()
"""
STAND_IN = """
import signal
import sys
import time

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as tandem's agent ends, after a checkpoint
print("started", flush=True)
time.sleep(300 if sys.argv[1] == "wait" else 0)
sys.exit(int(sys.argv[1]))
"""
PLAIN = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: sum {total.item():.0f}", flush=True)
dist.destroy_process_group()
"""


class Slurm:
    """The cluster with a folder that its nodes share, and what tests do there."""

    def __init__(self, cluster: Cluster, folder: Path, processes: Any) -> None:
        self.cluster, self.folder, self.processes = cluster, folder, processes
        self.environment = {
            **{name: value for name, value in cluster.environment.items() if not name.startswith("TANDEM_")},
            "PATH": f"{Path(sys.executable).parent}:{cluster.environment['PATH']}",
            "TANDEM_METRICS_PORT": "0",
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


@pytest.fixture(scope="module")
def slurm(
    tmp_path_factory: pytest.TempPathFactory, require: Callable[..., None], module_processes: Any
) -> Iterator[Slurm]:
    here, why = available()
    require("slurm", here, why)
    folder = tmp_path_factory.mktemp("slurm")
    with Cluster(folder / "cluster") as cluster:
        (folder / "shared").mkdir()
        yield Slurm(cluster, folder / "shared", module_processes)


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm) -> dict[str, Any]:
    """The same run by `tandem launch --nodes 2`, without Slurm."""
    command = [sys.executable, "-m", "tandem", "launch", "--nodes", "2", *slurm.task("undisturbed")]
    code, output = slurm.processes.run(command, LIMIT_SECONDS, cwd=slurm.folder, env=slurm.environment)
    assert code == 0, output
    return slurm.summary("undisturbed")


@pytest.mark.timeout(600)
def test_both_srun_forms_are_a_run_of_two(slurm: Slurm) -> None:
    """As `tandem launch --nodes 2`; what cannot be is one line and 2, as in a heterogeneous job."""
    srun = ("srun", "--nodes=2", "--ntasks-per-node=1")
    by_hand = [sys.executable, "-m", "tandem", "launch", "--nodes", "2", *slurm.task("by-hand", 20)]
    started = [
        slurm.processes.start(by_hand, cwd=slurm.folder, env=slurm.environment),
        slurm.start(*srun, "tandem", "launch", *slurm.task("launch", 20)),
        slurm.start(*srun, "tandem", "train", *slurm.task("train", 20)),
    ]
    refused = slurm.start("srun", "--nodes=1", ":", "--nodes=1", "tandem", "train", "--run-dir", "het")
    for process in started:
        code, output = slurm.wait(process)
        assert code == 0, output
    code, output = slurm.wait(refused)
    assert code == 2 and "SLURM_HET_SIZE=2: this job is heterogeneous" in output, output
    summaries = [slurm.summary(run) for run in ("by-hand", "launch", "train")]
    assert [each["world_size"] for each in summaries] == [2, 2, 2]
    assert [each["platform"] for each in summaries] == ["by-hand", "slurm", "slurm"]
    assert len({each["weights_sha256"] for each in summaries}) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_scripts_by_srun(slurm: Slurm) -> None:
    """A plain script needs the agent; one that calls tandem.start() is a rank under srun as well."""
    srun = ("srun", "--nodes=2", "--ntasks-per-node=1")
    plain = slurm.start(*srun, "tandem", "launch", "--run-dir", "plain", "plain.py")
    launched = slurm.start(*srun, "tandem", "launch", "--run-dir", "own-launch", "own.py")
    by_itself = slurm.start(*srun, "python", "own.py", TANDEM_RUN_DIR="own-srun")
    code, output = slurm.wait(plain)
    assert code == 0 and "rank 0 of 2: sum 3" in output, output
    for process in (launched, by_itself):
        code, output = slurm.wait(process)
        assert code == 0, output
    runs = [slurm.summary(run) for run in ("own-launch", "own-srun")]
    assert [each["world_size"] for each in runs] == [2, 2] and runs[0]["global_step"] == 30
    assert runs[0]["weights_sha256"] == runs[1]["weights_sha256"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_task_of_an_array_is_a_run_of_its_own(slurm: Slurm, undisturbed: dict[str, Any]) -> None:
    sbatch = ("sbatch", "--wait", "--array=1-2", "--output=array-%a.out", str(TRAIN))
    code, output = slurm.run(*sbatch, *slurm.task(), TANDEM_RUN_DIR="array")
    assert code == 0, output + slurm.said()
    runs = [slurm.summary(f"array/{task}") for task in (1, 2)]
    assert {each["weights_sha256"] for each in runs} == {undisturbed["weights_sha256"]}
    # Told to share one, the second is refused, and does not come back.
    # Its other node waits for the refused one's, so the wait is a short one here.
    code, output = slurm.run(*sbatch, *slurm.task("one-for-all", 20), "--master-timeout", "100")
    assert code != 0
    outputs = [(slurm.folder / f"array-{task}.out").read_text() for task in (1, 2)]
    assert sum("is the run of task" in each and "requeuing" not in each for each in outputs) == 1, outputs


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_does_not_come_back(slurm: Slurm) -> None:
    """A cancelled job, the script's own error, and a failure too many; what srun starts only ends so."""
    jobs = {}
    for name, word in {"cancelled": "wait", "own-error": "2", "failing": "200"}.items():
        options = ("--parsable", f"--job-name={name}", "--cpus-per-task=1", f"--output={name}.out")
        variables = {"LAUNCHER": "python stand_in.py", "MAX_RESTARTS": "1"}
        code, jobs[name] = slurm.run("sbatch", *options, str(TRAIN), word, **variables)
        assert code == 0, jobs[name]
    jobs = {name: number.strip() for name, number in jobs.items()}
    cancelled = slurm.folder / "cancelled.out"
    slurm.until(lambda: cancelled.exists() and cancelled.read_text().count("started") == 2, "it runs")
    slurm.cluster.run("scancel", jobs["cancelled"])
    ends = {"cancelled": ("CANCELLED", "0"), "own-error": ("FAILED", "0"), "failing": ("FAILED", "1")}
    for name, (state, restarts) in ends.items():
        slurm.until(lambda job=jobs[name], state=state: slurm.cluster.job(job)["JobState"] == state, name)
        assert slurm.cluster.job(jobs[name])["Restarts"] == restarts
    assert slurm.cluster.job(jobs["own-error"])["ExitCode"] == "2:0"
    assert slurm.cluster.job(jobs["failing"])["ExitCode"] == "200:0"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_job_goes_on_after_whatever_stops_it(slurm: Slurm, undisturbed: dict[str, Any]) -> None:
    """scancel --signal, requeue, a lost node, preemption, in turn: the weights are the same at the end."""
    (slurm.folder / "hold").touch()
    sbatch = ("sbatch", "--parsable", "--partition=low", "--output=disturbed.out", str(TRAIN))
    code, job = slurm.run(*sbatch, *slurm.task(), TANDEM_RUN_DIR="disturbed")
    assert code == 0, job
    job, preempting = job.strip(), ("sbatch", "--partition=main", "--nodes=2", "--exclusive")
    disturb: dict[str, Callable[[], object]] = {
        "scancel --signal": lambda: slurm.cluster.run("scancel", "--signal=TERM", job),
        "scontrol requeue": lambda: slurm.cluster.run("scontrol", "requeue", job),
        "node down": lambda: slurm.cluster.lose("node2"),
        "preemption": lambda: slurm.cluster.run(*preempting, "--output=/dev/null", "--wrap=true"),
    }
    for number, (what, act) in enumerate(disturb.items(), start=1):
        before = slurm.step("disturbed")
        slurm.until(lambda before=before: slurm.step("disturbed") >= before + 5, f"it trains before {what}")
        act()
        restarts = str(number)
        slurm.until(
            lambda restarts=restarts: slurm.cluster.job(job)["Restarts"] == restarts,
            f"it stopped after {what}",
        )
        if what == "node down":
            slurm.cluster.bring_back("node2")
        slurm.until(lambda: slurm.cluster.job(job)["JobState"] == "RUNNING", f"it came back after {what}")
        assert slurm.cluster.job(job)["Restarts"] == restarts, what
    (slurm.folder / "hold").unlink()
    slurm.until(lambda: slurm.cluster.job(job)["JobState"] not in ("RUNNING", "COMPLETING"), "it ended")
    assert slurm.cluster.job(job)["JobState"] == "COMPLETED", slurm.said()
    assert slurm.summary("disturbed")["weights_sha256"] == undisturbed["weights_sha256"]
    resumed = [line for line in slurm.said().splitlines() if "an epoch; resumed from step" in line]
    assert len(resumed) == 4, resumed
