"""A rank that multiplies wrongly is found before its first step."""

from pathlib import Path

import pytest
from small_runs import Runs

from program_files import program_text

pytestmark = pytest.mark.timeout(300)

FLAGS = ("--steps", 20, "--checkpoint-every", 5)
WRONG = ("--task", "wrong_products.py:WrongProducts")
NAMED = "rank 1 on node 1: cpu multiplies wrongly: 2 of 512 sums of an exact product differ"


@pytest.fixture
def broken(runs: Runs) -> Path:
    (runs.folder / "wrong_products.py").write_text(program_text("wrong_products_task"))
    (runs.folder / "broken").touch()
    return runs.folder / "broken"


def test_the_job_ends_before_its_first_step_with_the_name_of_the_node(runs: Runs, broken: Path) -> None:
    code, output = runs.processes.wait(runs.start("launch", "run", "--nodes", 2, *WRONG, *FLAGS))
    assert code == 1 and NAMED in output, output
    assert not (runs.folder / "run" / "metrics.jsonl").exists()


def test_a_spare_takes_the_place_of_its_node(runs: Runs, broken: Path) -> None:
    undisturbed = runs.undisturbed(*FLAGS, ranks=3)
    flags = ("--nodes", 3, "--spares", 1, *WRONG, *FLAGS)
    code, output = runs.processes.wait(runs.start("launch", "run", *flags), limit=180)
    assert code == 0 and NAMED in output, output
    (left_out,) = runs.events("run", "node_left_out")
    assert (left_out["node"], left_out["by"], left_out["reason"]) == (1, 3, "computes wrongly")
    assert runs.summary("run")["weights_sha256"] == undisturbed


def test_an_elastic_job_continues_without_its_node(runs: Runs, broken: Path) -> None:
    flags = (*FLAGS, "--threads", 1)
    undisturbed = runs.undisturbed(*flags, ranks=2)
    elastic = ("--nodes", 3, "--elastic", "2:3", *WRONG, *flags)
    code, output = runs.processes.wait(runs.start("launch", "run", *elastic), limit=180)
    assert code == 0 and NAMED in output, output
    (left_out,) = runs.events("run", "node_left_out")
    assert (left_out["node"], left_out["reason"]) == (1, "computes wrongly")
    assert [event["nodes"] for event in runs.events("run", "world")] == [3, 2]
    assert runs.summary("run")["weights_sha256"] == undisturbed
