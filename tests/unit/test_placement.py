"""Placement against the environments of real pods, steps and ranks, and everything that can be wrong.

Those of SageMaker and Azure ML are put together from their documentation, the others were captured.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tandem.platforms
from patience import patient
from program_files import program_text
from tandem.config.slices import LaunchConfig
from tandem.errors import ConfigError
from tandem.platforms.by_hand import unplaced
from tandem.platforms.detection import Placement, detect, on_this_host, platforms
from tandem.platforms.slurm import expand_nodelist, expand_tasks, without_inherited_step

ENVIRONMENTS = Path(__file__).parents[1] / "fixtures" / "environments"


def captured(name: str) -> tuple[dict[str, str], str]:
    """The variables of a captured environment, and its host name (first line, or HOSTNAME)."""
    lines = (ENVIRONMENTS / f"{name}.env").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines if "=" in line)
    return variables, lines[0] if "=" not in lines[0] else variables.get("HOSTNAME", "host")


def place(name: str, **changes: object) -> Placement:
    """`detect` on a captured environment; upper-case changes are variables (None removes), others flags."""
    variables, hostname = captured(name)
    variables.update(
        {key: str(value) for key, value in changes.items() if key.isupper() and value is not None}
    )
    for key in [key for key, value in changes.items() if key.isupper() and value is None]:
        variables.pop(key, None)
    hostname = str(changes.pop("hostname", hostname))
    asked = {key: value for key, value in changes.items() if not key.isupper()}
    return detect(variables, hostname, LaunchConfig(**asked))  # type: ignore[arg-type]


REAL = [
    # environment, platform, nodes, node rank, nproc, master, elastic, local name
    ("pytorchjob-plain-master-0", "kubeflow-v1", 3, 0, None, "plain-master-0:23456", None, "plain-master-0"),
    ("pytorchjob-plain-worker-0", "kubeflow-v1", 3, 1, None, "plain-master-0:23456", None, "plain-worker-0"),
    ("pytorchjob-plain-worker-1", "kubeflow-v1", 3, 2, None, "plain-master-0:23456", None, "plain-worker-1"),
    ("pytorchjob-nproc2-master-0", "kubeflow-v1", 2, 0, 2, "nproc2-master-0:23456", None, "nproc2-master-0"),
    ("pytorchjob-nproc2-worker-0", "kubeflow-v1", 2, 1, 2, "nproc2-master-0:23456", None, "nproc2-worker-0"),
    ("pytorchjob-nprocauto-worker-0", "kubeflow-v1", 2, 1, None, "nprocauto-master-0:23456", None, None),
    ("pytorchjob-nprocauto-master-0", "kubeflow-v1", 2, 0, None, "nprocauto-master-0:23456", None, None),
    ("pytorchjob-masteronly-master-0", "kubeflow-v1", 1, 0, None, "masteronly-master-0:23456", None, None),
    ("pytorchjob-elastic-worker-0", "kubeflow-v1", 2, 0, None, "elastic-worker-0:23456", (1, 2), None),
    ("pytorchjob-elastic-worker-1", "kubeflow-v1", 2, 1, None, "elastic-worker-0:23456", (1, 2), None),
    (
        "pytorchjob-elasticmaster-master-0",
        "kubeflow-v1",
        2,
        0,
        None,
        "elasticmaster-master-0:23456",
        (1, 2),
        None,
    ),
    (
        "pytorchjob-elasticmaster-worker-0",
        "kubeflow-v1",
        2,
        1,
        None,
        "elasticmaster-master-0:23456",
        (1, 2),
        None,
    ),
    ("slurm-step-0", "slurm", 2, 0, None, "node1:20004", None, "node1"),
    ("slurm-step-1", "slurm", 2, 1, None, "node1:20004", None, "node2"),
    ("slurm-two-per-node-0", "slurm", 2, 0, 2, "node1:20005", None, "node1"),
    ("slurm-two-per-node-3", "slurm", 2, 1, 2, "node1:20005", None, "node2"),
    ("slurm-array-1-node-1", "slurm", 2, 1, None, "node1:20004", None, "node2"),
    ("slurm-array-2-node-1", "slurm", 2, 1, None, "node1:20003", None, "node2"),
    ("slurm-shard-1", "slurm", 2, 1, None, "node1:20002", None, "node2"),
    ("slurm-gpu-per-task-3", "slurm", 2, 1, 2, "node1:20001", None, "node2"),
    ("torchrun-rank-1", "torchrun", 1, 0, 2, "127.0.0.1:29444", None, None),
    ("sagemaker-0", "sagemaker", 2, 0, 4, "algo-1:7777", None, "algo-1"),
    ("sagemaker-1", "sagemaker", 2, 1, 4, "algo-1:7777", None, "algo-2"),
    ("azureml-node-0", "azureml", 2, 0, None, "10.0.0.4:6105", None, "10.0.0.4"),
    ("azureml-node-1", "azureml", 2, 1, None, "10.0.0.4:6105", None, None),
    ("azureml-process-0", "azureml", 2, 0, 2, "10.0.0.4:6105", None, "10.0.0.4"),
    ("azureml-process-3", "azureml", 2, 1, 2, "10.0.0.4:6105", None, None),
]


@pytest.mark.parametrize("case", REAL, ids=lambda case: case[0])
def test_real_environments(case: tuple) -> None:  # type: ignore[type-arg]
    name, platform, nodes, node_rank, nproc, master, elastic, local_name = case
    found = place(name)
    assert (found.platform, found.nodes, found.node_rank, found.nproc) == (platform, nodes, node_rank, nproc)
    assert (f"{found.master_host}:{found.master_port}", found.elastic) == (master, elastic)
    assert found.local_name == (local_name or captured(name)[1] or "host")


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_slurm_with_several_tasks_per_node_makes_each_task_a_rank(index: int) -> None:
    found = place(f"slurm-two-per-node-{index}")
    assert (found.rank, found.local_rank, found.world_size) == (index, index % 2, 4)


@pytest.mark.parametrize(
    ("name", "node_rank"), [("pytorchjob-plain-worker-0", 1), ("pytorchjob-plain-worker-1", 2)]
)
def test_a_platform_counts_nodes_and_spares(name: str, node_rank: int) -> None:
    for asked in ({"spares": 1}, {"spares": 1, "nodes": 2}):
        found = place(name, **asked)
        assert (found.nodes, found.spares, found.node_rank) == (2, 1, node_rank)


def test_nodes_and_spares_on_this_host_and_by_hand() -> None:
    found = detect({}, "host", LaunchConfig(nodes=2, spares=2))
    assert (found.nodes, found.spares, found.starts_all, found.nodes_share_host) == (2, 2, True, True)
    node = LaunchConfig(nodes=2, spares=1, node_rank=2, master="127.0.0.101:29500")
    assert detect({}, "host", node).local_name == "127.0.0.103"


@pytest.mark.parametrize("index", [0, 1])
def test_slurm_with_one_task_per_node_makes_it_a_node_or_a_rank(index: int) -> None:
    found = place(f"slurm-step-{index}")
    assert (found.rank, found.world_size, found.one_process_per_node) == (None, None, True)
    rank = found.as_rank()
    assert (rank.rank, rank.local_rank, rank.world_size, rank.nproc) == (index, 0, 2, 1)
    assert rank.as_rank() is rank and place("slurm-two-per-node-3").as_rank().rank == 3
    for asked in ({"nproc": 2}, {"elastic": "1:2"}):
        with pytest.raises(
            ConfigError, match=r"one rank of 2, a task on each node; start with tandem launch"
        ):
            place(f"slurm-step-{index}", **asked).as_rank()
    assert place(f"slurm-step-{index}", nproc=1).as_rank() == rank
    one = place(
        "slurm-step-0", SLURM_STEP_NUM_NODES=1, SLURM_STEP_NODELIST="node1", SLURM_STEP_TASKS_PER_NODE=1
    )
    assert one.as_rank().rank is None and one.nodes == 1


def test_slurm_says_which_job_it_is() -> None:
    found = [place(f"slurm-array-{task}-node-1", SLURM_RESTART_COUNT=2) for task in (1, 2)]
    assert [each.array for each in found] == [("3", "1"), ("3", "2")]
    assert [each.job for each in found] == ["slurm-4.0", "slurm-3.0"] and found[0].restarts == 2
    assert (place("slurm-step-0").array, place("slurm-step-0").restarts) == (None, 0)
    alone = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "10"}
    assert (detect(alone, "n1").array, detect(alone, "n1").job) == (("6", "10"), "slurm-7.batch")


def test_slurm_gives_tasks_gpus_of_their_own_or_all_of_the_nodes() -> None:
    assert place("slurm-gpu-per-task-3").device == 0  # CUDA_VISIBLE_DEVICES=1, of two on the node
    all_seen = place("slurm-gpu-per-task-3", CUDA_VISIBLE_DEVICES="0,1")
    assert (all_seen.device, all_seen.local_rank) == (None, 1)
    shared = place(
        "slurm-two-per-node-3", SLURM_GPUS_ON_NODE=1, SLURM_SHARDS_ON_NODE=2, CUDA_VISIBLE_DEVICES=0
    )
    assert shared.device is None  # both tasks see one GPU: the second rank has none of its own


@pytest.mark.parametrize("index", [0, 1])
def test_torchrun_ranks(index: int) -> None:
    found = place(f"torchrun-rank-{index}")
    assert (found.rank, found.local_rank, found.world_size) == (index, index, 2)


@pytest.mark.parametrize("index", [0, 1])
def test_indexed_job_with_nodes_and_master(index: int) -> None:
    by_flags = place(f"indexedjob-{index}", nodes=2, master="indexed-0.indexed:29500")
    by_variables = place(f"indexedjob-{index}", NNODES="2", MASTER_ADDR="indexed-0.indexed")
    assert by_flags == by_variables
    assert (by_flags.platform, by_flags.node_rank, by_flags.nodes) == ("indexed-job", index, 2)
    assert by_flags.local_name == f"indexed-{index}.indexed"


TRAINJOB = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "1", "JOB_COMPLETION_INDEX": "1",
            "PET_MASTER_ADDR": "mnist-node-0-0.mnist", "PET_MASTER_PORT": "29500"}  # fmt: skip
JOBSET = {"JOBSET_NAME": "js", "REPLICATED_JOB_NAME": "node", "NODES": "3", "JOB_COMPLETION_INDEX": "2"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
           "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}  # fmt: skip
COMPOSE = {"TANDEM_COMPOSE_PROJECT": "demo", "TANDEM_COMPOSE_NODES": "2", "TANDEM_COMPOSE_INDEX": "2"}


def test_platforms_without_a_capture() -> None:
    trainjob = detect(TRAINJOB, "mnist-node-0-1")
    assert trainjob == Placement(
        "kubeflow-v2", 2, 1, None, "mnist-node-0-0.mnist", 29500, None, "mnist-node-0-1.mnist"
    )
    jobset = detect(JOBSET, "js-node-0-2")
    assert jobset == Placement("jobset", 3, 2, None, "js-node-0-0.js", 29500, None, "js-node-0-2.js")
    compose = detect(COMPOSE, "4f3c")
    assert compose == Placement("compose", 2, 1, None, "demo-node-1", 29500, None, "demo-node-2")
    openmpi = detect(OPENMPI, "n2")
    assert openmpi == Placement("openmpi", 2, 1, 2, "n1", 29500, None, "n2", 3, 1, 4)


def test_no_platform_and_by_hand() -> None:
    alone = Placement("none", 1, 0, None, "127.0.0.1", 0, None, "127.0.0.1", starts_all=True)
    assert detect({}, "laptop") == alone
    many = detect({}, "laptop", LaunchConfig(nodes=3, nproc=2))
    assert (many.nodes, many.nproc, many.nodes_share_host) == (3, 2, True)
    hand = detect({}, "b", LaunchConfig(nodes=2, node_rank=1, master="a:29500", nproc="auto"))
    assert hand == Placement("by-hand", 2, 1, None, "a", 29500, None, "b")
    assert detect({}, "b", LaunchConfig(nodes=2, node_rank=1, master="127.0.0.101:29500")).nodes_share_host
    assert detect({}, "laptop", LaunchConfig(elastic="1:3")).elastic == (1, 3)
    assert str(place("pytorchjob-nproc2-worker-0")) == (
        "node 1 of 2 (kubeflow-v1), 2 processes, master nproc2-master-0:23456"
    )


SALLOC = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "1"}
OTHER_STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "n7",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_NODEID": "0",
}


@pytest.mark.parametrize("more", [
    {}, {"SLURM_STEP_ID": "4294967290"}, {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}, OTHER_STEP,
], ids=["salloc", "interactive step", "master set by hand", "another job's step"])  # fmt: skip
def test_a_slurm_allocation_of_one_node_needs_no_srun(more: dict[str, str]) -> None:
    """One node, or as many simulated ones as on a laptop: this process starts them all."""
    here = {**SALLOC, **more}
    one, two = detect(here, "n1"), detect(here, "n1", LaunchConfig(nodes=2))
    assert (one.platform, one.nodes, one.master_port, one.starts_all) == ("slurm", 1, 0, True)
    assert (two.nodes, two.nodes_share_host, two.starts_all, two.job) == (2, True, True, "slurm-7.batch")
    master = f"{two.master_host}:20999"
    child = detect(unplaced(here), "n1", LaunchConfig(nodes=2, node_rank=1, master=master))
    assert (child.platform, child.starts_all) == ("by-hand", False)


def test_a_slurm_allocation_of_several_tasks_needs_srun_or_a_number_of_ranks() -> None:
    four = {**SALLOC, "SLURM_NTASKS": "4"}
    with pytest.raises(ConfigError, match="srun"):
        detect(four, "n1")
    assert detect(four, "n1", LaunchConfig(nproc=4)).nproc == 4
    with pytest.raises(ConfigError, match="SLURM_JOB_NUM_NODES=2"):
        detect({**four, "SLURM_JOB_NUM_NODES": "2"}, "n1", LaunchConfig(nproc=4))


def test_several_tasks_of_a_step_outside_the_job_are_a_contradiction() -> None:
    """They may be real: each alone would be a world of one."""
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST=n1.*SLURM_STEP_NODELIST=n7,n8"):
        many = {"SLURM_STEP_NODELIST": "n[7-8]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}
        detect({**SALLOC, **OTHER_STEP, **many}, "n1")


@pytest.mark.parametrize(("daemon", "is_kept"), [
    ("slurmstepd: [7.0]", True),
    ("slurmstepd: [7.batch]", False),
    ("slurmstepd: [3.0]", False),
    ("bash", True),
])  # fmt: skip
def test_step_variables_count_in_that_step_only(daemon: str, is_kept: bool) -> None:
    """On the same node only the name of the daemon above the process tells two jobs' steps apart."""
    command = ["bash", "-c", f"exec -a '{daemon}' bash -c 'sleep 60 & echo $!; wait'"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    task = int(process.stdout.readline())
    try:
        environ = {**SALLOC, **OTHER_STEP, "SLURM_STEP_NODELIST": "n1"}
        found = without_inherited_step(environ, task)
        assert ("SLURM_STEP_ID" in found) is is_kept and found["SLURM_JOB_ID"] == "7"
    finally:
        os.kill(task, signal.SIGKILL)
        process.wait(timeout=patient(30))
        process.stdout.close()


@pytest.mark.parametrize("name", ["slurm-step-0", "torchrun-rank-0"])
def test_verbs_with_ranks_of_their_own_run_where_one_process_was_started(name: str) -> None:
    alone = {**SALLOC, "MASTER_ADDR": "n1"}
    interactive = {**SALLOC, **OTHER_STEP, "SLURM_STEP_NODELIST": "n1"}
    for environ in (alone, {**alone, **OTHER_STEP}, interactive, {"HOME": "/"}, captured("slurm-batch")[0]):
        found = on_this_host("check", environ, "n1")
        assert detect(found, "n1").platform == "none"
    with pytest.raises(ConfigError, match="check starts its own ranks"):
        on_this_host("check", captured(name)[0], "n1")


@pytest.mark.parametrize(("environ", "asked"), [
    ({}, {"nodes": 2, "node_rank": 0, "master": "127.0.0.1:0"}),
    ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "0"}, {}),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}, {}),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, {"master": "localhost:0"}),
])  # fmt: skip
def test_port_zero_is_no_port_to_meet_at(environ: dict[str, str], asked: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="port 0"):
        detect(environ, "a", LaunchConfig(**asked))  # type: ignore[arg-type]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    assert detect(alone, "a").master_port == 0


def test_a_flag_fills_in_what_the_platform_leaves_to_auto() -> None:
    assert place("pytorchjob-plain-worker-0", nproc=2).nproc == 2


WRONG: list[tuple[str, dict[str, object], list[str]]] = [
    ("pytorchjob-workeronly-worker-0", {}, ["PET_NNODES=2", "MASTER_ADDR", "elasticPolicy"]),
    ("pytorchjob-workeronly-worker-1", {}, ["PET_NNODES=2", "PET_RDZV_ENDPOINT"]),
    ("pytorchjob-plain-worker-0", {"PET_NODE_RANK": 2}, ["RANK=1", "PET_NODE_RANK=2"]),
    ("pytorchjob-plain-worker-0", {"MASTER_ADDR": "x"}, ["MASTER_ADDR=x", "PET_MASTER_ADDR=plain-master-0"]),
    ("pytorchjob-plain-worker-0", {"MASTER_PORT": "tcp://10.0.0.1:80"}, ["MASTER_PORT", "PET_MASTER_PORT"]),
    ("pytorchjob-plain-worker-0", {"WORLD_SIZE": 4}, ["WORLD_SIZE=4", "PET_NNODES=3", "PET_NPROC_PER_NODE"]),
    ("pytorchjob-nproc2-worker-0", {"WORLD_SIZE": 2}, ["WORLD_SIZE=2", "PET_NPROC_PER_NODE=2"]),
    ("pytorchjob-nproc2-worker-0", {"nproc": 4}, ["--nproc=4", "PET_NPROC_PER_NODE=2"]),
    ("pytorchjob-plain-worker-0", {"nodes": 2}, ["--nodes=2", "PET_NNODES=3"]),
    ("pytorchjob-plain-worker-0", {"nodes": 3, "spares": 1}, ["--nodes plus --spares=4", "PET_NNODES=3"]),
    ("pytorchjob-plain-worker-0", {"nodes": 1, "spares": 1}, ["--nodes plus --spares=2", "PET_NNODES=3"]),
    ("pytorchjob-plain-worker-0", {"spares": 2}, ["--spares 2", "of 3 nodes, 1 would train"]),
    ("pytorchjob-plain-worker-0", {"spares": 5}, ["--spares 5", "of 3 nodes, 0 would train"]),
    ("pytorchjob-elastic-worker-1", {"spares": 1}, ["--spares", "--elastic"]),
    ("torchrun-rank-1", {"spares": 1}, ["--spares", "torchrun"]),
    ("pytorchjob-plain-worker-0", {"node_rank": 0}, ["--node-rank=0", "RANK=1"]),
    ("pytorchjob-plain-worker-0", {"master": "y:23456"}, ["--master=y", "MASTER_ADDR=plain-master-0"]),
    ("pytorchjob-plain-worker-0", {"RANK": 3, "PET_NODE_RANK": 3}, ["RANK=3", "PET_NNODES=3"]),
    ("pytorchjob-plain-worker-0", {"PET_NNODES": None}, ["RANK=1", "PET_NNODES"]),
    ("pytorchjob-plain-worker-0", {"PET_NNODES": "three"}, ["PET_NNODES", "three"]),
    (
        "pytorchjob-plain-worker-0",
        {"MASTER_PORT": None, "PET_MASTER_PORT": None},
        ["MASTER_PORT", "--master"],
    ),
    ("pytorchjob-elastic-worker-1", {"PET_RDZV_ENDPOINT": "nope"}, ["PET_RDZV_ENDPOINT", "HOST:PORT"]),
    ("pytorchjob-elastic-worker-1", {"hostname": "somewhere"}, ["PET_RDZV_ENDPOINT", "somewhere"]),
    ("pytorchjob-elastic-worker-1", {"hostname": "elastic-worker-2"}, ["PET_NNODES=1:2", "elastic-worker-2"]),
    ("pytorchjob-elastic-worker-1", {"elastic": "1:3"}, ["--elastic 1:3", "PET_NNODES"]),
    ("indexedjob-1", {}, ["JOB_COMPLETION_INDEX=1", "NNODES", "--nodes"]),
    ("indexedjob-1", {"nodes": 2}, ["JOB_COMPLETION_INDEX=1", "MASTER_ADDR", "--master"]),
    (
        "indexedjob-1",
        {"nodes": 2, "master": "a:1", "NODE_RANK": 0},
        ["NODE_RANK=0", "JOB_COMPLETION_INDEX=1"],
    ),
    ("slurm-batch", {}, ["SLURM_NTASKS=2", "SLURM_STEP_ID", "srun"]),
    ("slurm-batch", {"SLURM_STEP_ID": 4294967291}, ["srun"]),
    ("slurm-step-1", {"SLURMD_NODENAME": "node9"}, ["SLURMD_NODENAME=node9", "SLURM_NODEID=1"]),
    ("slurm-step-1", {"SLURM_STEP_NODELIST": "node[1-"}, ["node[1-"]),
    ("slurm-step-1", {"MASTER_ADDR": "node2"}, ["MASTER_ADDR=node2", "node1"]),
    ("slurm-step-1", {"nodes": 3}, ["--nodes=3", "SLURM_STEP_NUM_NODES=2"]),
    ("slurm-het-batch", {}, ["SLURM_HET_SIZE=2", "heterogeneous", "sbatch --nodes"]),
    ("slurm-het-step-1", {}, ["SLURM_HET_SIZE=2", "alike"]),
    ("slurm-array-1-node-1", {"SLURM_RESTART_COUNT": "often"}, ["SLURM_RESTART_COUNT", "'often'"]),
    ("slurm-two-per-node-1", {"nproc": 1}, ["SLURM_PROCID=1", "--nproc=1"]),
    ("slurm-two-per-node-1", {"elastic": "1:2"}, ["--elastic"]),
    ("torchrun-rank-1", {"RANK": None}, ["RANK", "LOCAL_RANK=1"]),
    ("torchrun-rank-1", {"RANK": 2}, ["RANK=2", "WORLD_SIZE=2"]),
    (
        "torchrun-rank-1",
        {"LOCAL_RANK": None, "TORCHELASTIC_RUN_ID": None},
        ["RANK=1", "LOCAL_RANK", "torchrun", "PET_NNODES", "unset RANK"],
    ),
    ("torchrun-rank-1", {"MASTER_ADDR": None}, ["MASTER_ADDR"]),
    ("torchrun-rank-1", {"nproc": 3}, ["--nproc=3", "LOCAL_WORLD_SIZE=2", "rank 1 of 2"]),
    ("sagemaker-1", {"SM_HOSTS": None, "SM_RESOURCE_CONFIG": None}, ["SM_CURRENT_HOST", "SM_HOSTS is not"]),
    ("sagemaker-1", {"SM_CURRENT_HOST": "algo-3"}, ["SM_CURRENT_HOST=algo-3", "SM_HOSTS=algo-1,algo-2"]),
    ("sagemaker-1", {"SM_HOSTS": "algo-1"}, ["SM_HOSTS='algo-1'", "JSON"]),
    ("sagemaker-1", {"SM_MASTER_ADDR": "algo-2"}, ["MASTER_ADDR=algo-1", "SM_MASTER_ADDR=algo-2"]),
    ("sagemaker-1", {"SM_MASTER_ADDR": "algo-2", "MASTER_ADDR": None}, ["SM_MASTER_ADDR=algo-2", "SM_HOSTS"]),
    ("sagemaker-1", {"nodes": 3}, ["--nodes=3", "SM_HOST_COUNT=2"]),
    ("azureml-node-1", {"NODE_RANK": None}, ["AZUREML_NODE_COUNT=2", "NODE_RANK"]),
    ("azureml-node-1", {"MASTER_ADDR": None}, ["AZUREML_NODE_COUNT=2", "MASTER_ADDR"]),
    ("azureml-node-1", {"AZUREML_NODE_COUNT": None}, ["AZUREML_RUN_ID", "AZUREML_NODE_COUNT"]),
    ("azureml-node-1", {"NODE_RANK": 2}, ["NODE_RANK=2", "AZUREML_NODE_COUNT=2"]),
    (
        "azureml-node-1",
        {"NODE_RANK": None, "RANK": None, "WORLD_SIZE": None, "MASTER_ADDR": None},
        ["AZUREML_NODE_COUNT=2", "NODE_RANK", "distribution"],
    ),
    ("azureml-process-3", {"RANK": 1}, ["RANK=1", "NODE_RANK=1", "WORLD_SIZE=4"]),
    ("azureml-process-3", {"nproc": 4}, ["WORLD_SIZE=4", "LOCAL_RANK=1"]),
]


@pytest.mark.parametrize(("name", "changes", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_contradictions_and_half_environments(
    name: str, changes: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        place(name, **changes)
    assert "\n" not in str(error.value)
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("more", [{}, {"LOCAL_RANK": "1"}, {"MASTER_ADDR": "127.0.0.1"}, {"NNODES": "1"}])
def test_ranks_by_hand_on_one_host_as_tutorials_set_them(more: dict[str, str]) -> None:
    found = detect({**BY_HAND, **more}, "laptop")
    assert (found.platform, found.nodes, found.node_rank, found.nproc) == ("by-hand", 1, 0, 2)
    assert (found.rank, found.local_rank, found.world_size, found.master_port) == (1, 1, 2, 29500)


@pytest.mark.parametrize("more", [{"NNODES": "2"}, {"NNODES": "2", "NODE_RANK": "1"}])
def test_ranks_by_hand_on_several_hosts(more: dict[str, str]) -> None:
    four = {**BY_HAND, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", **more}
    found = detect(four, "b")
    assert found == Placement("by-hand", 2, 1, 2, "a", 29500, None, "b", 3, 1, 4)
    assert detect({**BY_HAND, "MASTER_ADDR": "a", "WORLD_SIZE": "1", "RANK": "0"}, "a").world_size == 1


@pytest.mark.parametrize(("more", "words"), [
    ({"MASTER_ADDR": "a"}, ["RANK=1", "LOCAL_RANK", "PET_NNODES", "unset RANK"]),
    ({"MASTER_ADDR": "a", "LOCAL_RANK": "1"}, ["LOCAL_RANK=1", "LOCAL_WORLD_SIZE or NNODES"]),
    ({"RANK": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
    ({"LOCAL_RANK": "0"}, ["RANK=1", "LOCAL_RANK=0"]),
    ({"MASTER_PORT": ""}, ["RANK=1", "MASTER_PORT"]),
    ({"NNODES": "3", "LOCAL_RANK": "1"}, ["WORLD_SIZE=2", "3 nodes"]),
])  # fmt: skip
def test_ranks_by_hand_that_cannot_be(more: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        detect({**BY_HAND, **more}, "host")
    assert "\n" not in str(error.value)
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


def test_hosts_of_sagemaker_count_in_the_order_of_their_names() -> None:
    names = [f"algo-{index}" for index in (3, 1, 10, 2)]
    places = [detect({"SM_HOSTS": json.dumps(names), "SM_CURRENT_HOST": name}, name) for name in names]
    assert [place.node_rank for place in places] == [3, 0, 1, 2]
    assert {place.master_host for place in places} == {"algo-1"} and places[0].nproc is None
    only_file = {"SM_RESOURCE_CONFIG": json.dumps({"current_host": "algo-2", "hosts": names})}
    assert detect(only_file, "algo-2") == places[3]
    given = detect({"TRAINING_JOB_ARN": "arn"}, "b", LaunchConfig(nodes=2, node_rank=1, master="a:29500"))
    assert (given.platform, given.node_rank) == ("by-hand", 1)


def test_one_instance_of_azure_ml_needs_no_distribution() -> None:
    alone = detect({"AZUREML_RUN_ID": "run", "AZUREML_NODE_COUNT": "1"}, "a")
    assert (alone.platform, alone.nodes, alone.nproc, alone.rank) == ("azureml", 1, None, None)
    found = place("azureml-process-2")
    assert (found.rank, found.local_rank, found.world_size) == (2, 0, 4)


def test_torchrun_is_asked_first_and_the_orders_differ() -> None:
    orders = [platform.ORDER for platform in platforms()]
    assert orders == sorted(set(orders))
    for name in ("azureml-node-1", "sagemaker-1", "pytorchjob-plain-worker-0", "slurm-step-0"):
        inside, _ = captured(name)
        ranks, _ = captured("torchrun-rank-1")
        assert detect({**inside, **ranks}, "host").platform == "torchrun"


MOON = program_text("placement_moon")


def test_a_new_platform_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "moon.py").write_text(MOON)
    monkeypatch.setattr(tandem.platforms, "__path__", [*tandem.platforms.__path__, str(tmp_path)])
    platforms.cache_clear()
    try:
        found = detect({"CRATER": "1", "CRATERS": "2", "MASTER_ADDR": "a"}, "b")
        assert (found.platform, found.node_rank, found.nodes) == ("moon", 1, 2)
        with pytest.raises(ConfigError, match="--nodes=3, CRATERS=2 contradict each other"):
            detect({"CRATER": "1", "CRATERS": "2", "MASTER_ADDR": "a"}, "b", LaunchConfig(nodes=3))
    finally:
        platforms.cache_clear()
        sys.modules.pop("tandem.platforms.moon", None)


@pytest.mark.parametrize("variables", [
    {"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2"}, {"MASTER_ADDR": "a"}, {"MASTER_PORT": "1"},
    {"NNODES": "2"}, {"NODE_RANK": "1"}, {"LOCAL_RANK": "0"}, {"TORCHELASTIC_RUN_ID": "none"},
    {"PET_NPROC_PER_NODE": "auto"}, {"PET_MASTER_ADDR": "a"}, {"PET_NNODES": "2"}, {"PET_NODE_RANK": "1"},
    {"JOBSET_NAME": "js"}, {"JOB_COMPLETION_INDEX": "1"}, {"OMPI_COMM_WORLD_RANK": "0"},
    {"TANDEM_COMPOSE_NODES": "2"}, {"TANDEM_COMPOSE_INDEX": "1"}, {"NNODES": "2", "NODE_RANK": "1"},
    {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, {**OPENMPI, "MASTER_ADDR": ""}, {**COMPOSE, "TANDEM_COMPOSE_INDEX": "3"},
    {"TRAINING_JOB_ARN": "arn"}, {"SM_HOSTS": '["a","b"]'}, {"SM_CURRENT_HOST": "a"}, {"AZUREML_NODE_COUNT": "2"},
    {**JOBSET, "NODES": ""}, {**JOBSET, "REPLICATED_JOB_NAME": ""}, {**TRAINJOB, "PET_MASTER_ADDR": ""},
], ids=lambda variables: "+".join(variables)[:60])  # fmt: skip
def test_half_an_environment_is_never_a_world_of_one(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        detect(variables, "host")
    assert "\n" not in str(error.value)
    assert any(name in str(error.value) for name in variables)


@pytest.mark.parametrize(("text", "names"), [
    ("node1", ["node1"]), ("node[1-3,7],gpu-a[01-02]", ["node1", "node2", "node3", "node7", "gpu-a01", "gpu-a02"]),
    ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]), ("a[1]-ib,b", ["a1-ib", "b"]),
])  # fmt: skip
def test_nodelist(text: str, names: list[str]) -> None:
    assert expand_nodelist(text) == names


numbers = st.tuples(st.integers(0, 50), st.integers(0, 9), st.integers(1, 4))


@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z][a-z0-9-]{0,4}[a-z]", fullmatch=True), st.lists(numbers, max_size=3)),
        min_size=1,
    )
)
def test_nodelist_expands_what_was_folded(groups: list[tuple[str, list[tuple[int, int, int]]]]) -> None:
    folded, expected = [], []
    for stem, ranges in groups:
        entries = [f"{low:0{width}d}-{low + more:0{width}d}" for low, more, width in ranges]
        folded.append(f"{stem}[{','.join(entries)}]" if entries else stem)
        expected += [
            f"{stem}{n:0{width}d}" for low, more, width in ranges for n in range(low, low + more + 1)
        ] or [stem]
    assert expand_nodelist(",".join(folded)) == expected


@given(st.text(alphabet="ab01[]-,x ", max_size=12))
def test_nodelist_expands_or_says_why_not(text: str) -> None:
    try:
        assert all(name and not set(name) & set("[], ") for name in expand_nodelist(text))
    except ConfigError as error:
        assert "\n" not in str(error)


def test_tasks() -> None:
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ConfigError):
        expand_tasks("2(y3)")
