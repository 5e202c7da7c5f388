"""A loop of one's own where something else starts each rank: torchrun, srun, mpirun, `-- command`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from own_loops import SMALL, Scripts

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]
LIMIT_SECONDS = 140.0
ENVIRONMENTS = Path(__file__).parents[1] / "fixtures" / "environments"


@pytest.fixture
def scripts(tmp_path: Path, processes: Any) -> Scripts:
    scripts = Scripts(tmp_path, processes)
    scripts.write("small.py", SMALL)
    return scripts


def test_torchrun_starts_it_with_all_but_warm_restarts(scripts: Scripts) -> None:
    variables = scripts.environment | {"TANDEM_RUN_DIR": "run", "SIGNAL": "15", "TO_RANK": "1"}
    variables["SIGNAL_AT"] = "31"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", "2", "small.py"]
    code, output = scripts.processes.run(command, LIMIT_SECONDS, cwd=scripts.folder, env=variables)
    assert code == 1, output  # torchrun's own for whatever its ranks end with
    assert "exitcode  : 143" in output and "live page at" in output
    stopped = scripts.summary("run")
    assert (stopped["state"], stopped["platform"]) == ("stopped", "torchrun")
    assert stopped["last_checkpoint_step"] == stopped["global_step"] >= 32
    code, output = scripts.processes.run(
        command, LIMIT_SECONDS, cwd=scripts.folder, env=variables | {"SIGNAL_AT": "-1"}
    )
    assert code == 0, output
    summary = scripts.summary("run")
    assert (summary["state"], summary["global_step"], summary["world_size"]) == ("finished", 48, 2)
    assert summary["resumed_from_step"] == stopped["global_step"]


def captured(name: str) -> dict[str, str]:
    lines = (ENVIRONMENTS / f"{name}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def of_slurm(rank: int) -> Mapping[str, str]:
    """Those of the captured step of four tasks that are on one node, as a step of that node alone."""
    one = {name: "1" for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES")}
    two = {name: "2" for name in ("SLURM_NPROCS", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")}
    lists = {name: "node1" for name in ("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST")}
    tasks = {name: "2" for name in ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE")}
    return captured(f"slurm-two-per-node-{rank}") | one | two | lists | tasks


def of_open_mpi(rank: int) -> Mapping[str, str]:
    names = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}


@pytest.mark.parametrize(
    "platform, of",
    [("slurm", of_slurm), pytest.param("openmpi", of_open_mpi, marks=pytest.mark.soak)],
)
def test_ranks_of_srun_and_mpirun_find_each_other(
    platform: str, of: Any, scripts: Scripts, module_ports: list[int]
) -> None:
    port, by_hand = module_ports[:2]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [scripts.start("small.py", platform, **{**of(rank), **place}) for rank in range(2)]
    ended = [scripts.processes.wait(each, LIMIT_SECONDS) for each in started]
    assert [code for code, _ in ended] == [0, 0], ended
    summary = scripts.summary(platform)
    assert (summary["platform"], summary["world_size"], summary["nodes"]) == (platform, 2, 1)
    assert [code for code, _ in scripts.ranks("small.py", "by-hand", by_hand)] == [0, 0]
    assert summary["weights_sha256"] == scripts.summary("by-hand")["weights_sha256"]


@pytest.mark.soak
def test_behind_a_command_a_killed_rank_goes_on_from_the_newest_checkpoint(scripts: Scripts) -> None:
    words = ["--nproc", "2", "--", sys.executable]
    killed = scripts.launch(words, "small.py", "run", SIGNAL=9, SIGNAL_AT=23, TO_RANK=1)
    code, output = scripts.processes.wait(killed, LIMIT_SECONDS)
    assert code == 0, output
    summary = scripts.summary("run")
    assert (summary["state"], summary["global_step"]) == ("finished", 48)
    assert summary["resumed_from_step"] in (15, 20)  # by the save that was on its way


NEEDS_THE_GIL = """
import sys, threading
exec(open("small.py").read())
store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
def look():
    while True:
        store.check(["key"])
threading.Thread(target=look, daemon=True).start()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_thread_in_torch_that_needs_the_gil_at_the_end_does_not_abort_the_rank(
    scripts: Scripts, code: int
) -> None:
    scripts.write("needs_the_gil.py", NEEDS_THE_GIL)
    ended = scripts.processes.wait(scripts.start("needs_the_gil.py", "run", code), LIMIT_SECONDS)
    assert ended[0] == code, ended
    assert scripts.summary("run")["state"] == "finished"


def test_ranks_without_a_run_directory_are_refused_in_one_line(scripts: Scripts, free_port: int) -> None:
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}
    # An empty TANDEM_RUN_DIR counts as unset.
    ranks = [scripts.start("small.py", "", RANK=rank, LOCAL_RANK=rank, **place) for rank in range(2)]
    codes, outputs = zip(*[scripts.processes.wait(each) for each in ranks], strict=True)
    assert codes == (2, 2), outputs
    assert outputs[0].count("\n") == 1 and "TANDEM_RUN_DIR=" in outputs[0] and not outputs[1], outputs
