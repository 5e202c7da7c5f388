"""torchrun's flags become tandem's."""

import os
import shlex
from pathlib import Path

import pytest

from tandem.errors import ConfigError
from tandem.launch.program_arguments import split
from tandem.launch.torchrun_flags import translated

SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_PROCID": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--standalone --nproc-per-node 4 train.py --lr 1", "--nodes 1 --nproc 4 train.py --lr 1"),
        ("--nproc_per_node=gpu train.py --nproc_per_node 9", "--nproc auto train.py --nproc_per_node 9"),
        (
            "--nnodes=2 --nproc-per-node=8 --node_rank=1 --master_addr=10.0.0.7 --master_port=1234 t.py",
            "--node-rank=1 --nodes 2 --master 10.0.0.7:1234 --nproc 8 t.py",
        ),
        ("--nnodes 1:4 --max_restarts 3 t.py", "--max-restarts 3 --nodes 4 --elastic 1:4 t.py"),
        ("--nnodes 1 --rdzv-endpoint localhost:0 --rdzv-backend c10d t.py", "--nodes 1 t.py"),
        (
            "--nnodes 2 --node-rank 0 --rdzv_endpoint head t.py",
            "--node-rank 0 --nodes 2 --master head:29400 t.py",
        ),
        (
            "--nnodes 2 --node-rank 0 --master-addr fd00::1 t.py",
            "--node-rank 0 --nodes 2 --master [fd00::1]:29500 t.py",
        ),
        ("--nproc-per-node 2 -m pkg.train --tee 3", "--nproc 2 -m pkg.train --tee 3"),
        ("--nproc-per-node 2 --module pkg.train", "--nproc 2 -m pkg.train"),
        ("--no-python --nproc-per-node 2 ./prog -x", "--nproc 2 -- ./prog -x"),
        ("--rdzv-id 5 --role trainer --nproc-per-node auto --epochs 3 t.py", "--epochs 3 --nproc auto t.py"),
        ("--compile --nproc-per-node 2 t.py", "--compile --nproc 2 t.py"),
        ("--nproc-per-node 2 --task digits", "--task digits --nproc 2"),
    ],
)  # fmt: skip
def test_flags_are_translated(theirs: str, ours: str) -> None:
    assert translated(shlex.split(theirs), {}) == shlex.split(ours)


def test_nproc_per_node_cpu_is_the_number_of_cpus() -> None:
    assert translated(["--nproc-per-node", "cpu", "t.py"], {}) == ["--nproc", str(os.cpu_count()), "t.py"]


def test_commands_without_torchrun_flags_are_unchanged() -> None:
    for words in (["--nodes", "2", "t.py", "--nnodes", "3"], ["-h"], [], ["--task.width", "3"]):
        assert translated(words, {}) == words
        assert split(translated(words, {})) == split(words)


def test_node_rank_follows_from_the_endpoint() -> None:
    """torchrun ranks nodes as they arrive; here, the host of the endpoint is node 0."""
    words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
    assert translated([*words, "127.0.0.1:29500", "t.py"], {})[-3:-1] == ["--node-rank", "0"]
    assert translated([*words, "192.0.2.7:29500", "t.py"], {})[-3:-1] == ["--node-rank", "1"]
    with pytest.raises(ConfigError) as caught:
        translated(["--nnodes", "3", "--rdzv-endpoint", "192.0.2.7:29500", "t.py"], {})
    assert "--node-rank" in str(caught.value) and "192.0.2.7" in str(caught.value)


@pytest.mark.parametrize("environ", [SLURM, {"NODE_RANK": "1"}])
def test_node_rank_of_the_platform_counts(environ: dict[str, str]) -> None:
    words = translated(["--nnodes", "2", "--rdzv-endpoint", "192.0.2.7:29500", "t.py"], environ)
    assert words == ["--nodes", "2", "--master", "192.0.2.7:29500", "t.py"]


def test_flags_without_effect_are_named_and_unsupported_values_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert translated(["--log-dir", "logs", "-t", "3", "t.py"], {}) == ["t.py"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "--log-dir" in said[0] and "--tee" in said[1]
    with pytest.raises(ConfigError) as caught:
        translated(["--rdzv-backend", "etcd-v2", "t.py"], {})
    assert "etcd-v2" in str(caught.value) and "c10d" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        translated(["--nnodes"], {})
    assert "--nnodes" in str(caught.value)
