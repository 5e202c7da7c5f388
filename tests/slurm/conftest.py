"""One Slurm for all tests of a module, of two nodes, or of as many as its NODES."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from slurm_jobs import LIMIT_SECONDS, Slurm

from two_nodes import Cluster, available


@pytest.fixture(scope="module")
def slurm(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    require: Callable[..., None],
    module_processes: Any,
) -> Iterator[Slurm]:
    here, why = available()
    require("slurm", here, why)
    folder = tmp_path_factory.mktemp("slurm")
    with Cluster(folder / "cluster", getattr(request.module, "NODES", 2)) as cluster:
        (folder / "shared").mkdir()
        yield Slurm(cluster, folder / "shared", module_processes)


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm) -> dict[str, Any]:
    """The same run by `tandem launch --nodes 2`, without Slurm."""
    command = [sys.executable, "-m", "tandem", "launch", "--nodes", "2", *slurm.task("undisturbed")]
    code, output = slurm.processes.run(command, LIMIT_SECONDS, cwd=slurm.folder, env=slurm.environment)
    assert code == 0, output
    return slurm.summary("undisturbed")
