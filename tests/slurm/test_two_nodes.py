"""tandem on a real Slurm of two nodes: slurm/two_nodes.py brings it up, slurm/train.sbatch runs on it."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from slurm_jobs import TRAIN, Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.multi]


@pytest.mark.core
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


@pytest.mark.timeout(600)
def test_an_allocation_without_srun(slurm: Slurm) -> None:
    """salloc, and a job that is submitted from a step of another one, whose variables it inherits."""
    launch = ("tandem", "launch", "--nodes", "2")
    plain = slurm.start("salloc", "-N1", "-n1", *launch, *slurm.task("salloc", 20))
    inherits = ("sbatch", "--wait", "-N1", "-n1", "--output=inherits.out", "inherits.sh")
    script = " ".join(["#!/bin/sh\nexec", *launch, *slurm.task("inherits", 20)])
    (slurm.folder / "inherits.sh").write_text(script + "\n")
    within = slurm.start("srun", "-N1", "-n1", *inherits)
    for process in (plain, within):
        code, output = slurm.wait(process)
        assert code == 0, output + slurm.said()
    summaries = [slurm.summary(run) for run in ("salloc", "inherits")]
    assert [(each["world_size"], each["global_step"]) for each in summaries] == [(2, 20)] * 2
    assert len({each["weights_sha256"] for each in summaries}) == 1


@pytest.mark.soak
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
    assert sum("belongs to task" in each and "requeuing" not in each for each in outputs) == 1, outputs


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
    for what, act in disturb.items():
        before = slurm.step("disturbed")
        slurm.until(lambda before=before: slurm.step("disturbed") >= before + 5, f"it trains before {what}")
        # A node that has just come back may refuse a start or two, and the job is requeued once more.
        restarts = int(slurm.cluster.job(job)["Restarts"])
        act()
        slurm.until(
            lambda restarts=restarts: int(slurm.cluster.job(job)["Restarts"]) > restarts,
            f"it stopped after {what}",
        )
        if what == "node down":
            slurm.cluster.bring_back("node2")
        slurm.until(lambda: slurm.cluster.job(job)["JobState"] == "RUNNING", f"it came back after {what}")
    (slurm.folder / "hold").unlink()
    slurm.until(lambda: slurm.cluster.job(job)["JobState"] not in ("RUNNING", "COMPLETING"), "it ended")
    assert slurm.cluster.job(job)["JobState"] == "COMPLETED", slurm.said()
    assert slurm.summary("disturbed")["weights_sha256"] == undisturbed["weights_sha256"]
    resumed = [line for line in slurm.said().splitlines() if "per epoch; resumed from step" in line]
    assert len(resumed) == 4, resumed
