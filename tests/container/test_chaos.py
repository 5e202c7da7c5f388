"""Every fault of the table: its documented outcome, and the weights of an undisturbed run at the end."""

import subprocess
import uuid
from collections.abc import Iterator

import pytest
from clusters import IMAGE, ROOT

import chaos
from faults import FAULTS

pytestmark = [pytest.mark.timeout(600), pytest.mark.faults]


@pytest.fixture(scope="module")
def project() -> Iterator[str]:
    """One project for all rows, so that the digits are drawn once."""
    name = f"tandem-test-{uuid.uuid4().hex[:8]}"
    yield name
    chaos.own_cluster(name, IMAGE, "x").compose("down", "--volumes", "--remove-orphans")


@pytest.fixture(scope="module")
def calm(project: str) -> str:
    """The weights of an undisturbed run."""
    cluster = chaos.own_cluster(project, IMAGE, "calm")
    chaos.start(cluster)
    return chaos.finish(cluster)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_its_outcome_and_costs_no_bit(
    image: str, project: str, name: str, request: pytest.FixtureRequest
) -> None:
    expected = request.getfixturevalue("calm")  # only once it is known that there is an engine
    cluster = chaos.own_cluster(project, IMAGE, name)
    chaos.start(cluster)
    row = chaos.break_it(cluster, name, 2)
    assert str(row).startswith(f"{name}: ") and "\n" not in str(row)
    same_ranks = {"pause", "slow-node", "disk-full"}
    assert (not any(event["kind"] == "resumed" for event in cluster.events())) == (name in same_ranks)
    assert chaos.finish(cluster) == expected


@pytest.mark.parametrize(("words", "line"), [
    (["FAULT=melt"], "FAULT=melt is not known; valid are kill-rank, "),
    (["FAULT=kill-rank", "NODE=x"], "NODE=x is not a node; nodes count from 1: make compose-ps"),
    (["FAULT=kill-rank", "PROJECT=nobody"], "there is no cluster nobody here; start one: make compose-up"),
])  # fmt: skip
def test_what_cannot_be_broken(image: str, words: list[str], line: str) -> None:
    command = ["make", "--no-print-directory", "chaos", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and ended.stderr.startswith(f"tandem: {line}")
