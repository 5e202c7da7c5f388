"""Commands that were written for torchrun start unchanged with `tandem launch` in its place."""

import sys
from typing import Any

import pytest

from program_files import program_text

pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]

PROGRAM = program_text("torchrun_commands_program")
ALONE = [
    "--standalone --nproc-per-node 2 sums.py --lr 0.1",
    "--nproc_per_node=2 --nnodes=1 --node_rank=0 --master_addr=localhost --master_port=29513 "
    "sums.py --lr 0.1",
    "--nnodes=1 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 sums.py --lr 0.1",
    "--max-restarts 3 --nproc-per-node 2 --tee 3 --log-dir logs -m sums --lr 0.1",
    f"--nproc-per-node 2 --no-python {sys.executable} sums.py --lr 0.1",
]


def test_one_node(scripts: Any) -> None:
    (scripts.folder / "sums.py").write_text(PROGRAM)
    for number, words in enumerate(ALONE):
        code, said = scripts.run(scripts.tandem(*words.split(), run=f"run-{number}"))
        assert code == 0 and "rank 0 of 2 2 --lr 0.1" in said, said


@pytest.mark.parametrize(
    "where",
    [
        "--rdzv-backend c10d --rdzv-endpoint {host}:{port}",
        pytest.param("--master-addr {host} --master-port {port}", marks=pytest.mark.soak),
    ],
)
def test_two_nodes(scripts: Any, free_port: int, where: str) -> None:
    (scripts.folder / "sums.py").write_text(PROGRAM)
    meet = where.format(host="127.0.0.1", port=free_port).split()
    words = ("--nnodes", 2, "--nproc-per-node", 1, *meet)
    nodes = [scripts.start(scripts.tandem(*words, "--node-rank", rank, "sums.py")) for rank in range(2)]
    ends = [scripts.wait(node) for node in nodes]
    assert [code for code, _ in ends] == [0, 0], ends
    assert "rank 0 of 2 1" in ends[0][1]
