"""The node check between threads of one process, and the parts that measure.

Threads of one interpreter slow each other down, so the nodes here report a fixed speed and a fixed link.
tests/faults/test_join_trials.py has nodes that measure.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from patience import patient
from tandem.config import Settings
from tandem.distributed.devices import product_problem
from tandem.distributed.group_store import connect_store
from tandem.errors import ConfigError
from tandem.launch import join_check, join_measure
from tandem.launch.connectivity import ConnectivityProblem
from tandem.launch.join_check import (
    CheckAnswer,
    CheckCoordinator,
    CheckOrder,
    NodeUnderTest,
    as_text,
    check_nodes,
)
from tandem.launch.join_measure import LinkListener, OwnTime, measure_link
from tandem.launch.rendezvous import serve
from tandem.platforms.environment import Placement

HERE = "127.0.0.1"
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": HERE, "MASTER_PORT": "29500"}


class SteadyNode(NodeUnderTest):
    def obey(self, order: CheckOrder) -> CheckAnswer:
        steady = {"speed": {"cpu": 1000.0}, "link": {"rate": 1e8, "latency": 0.001}}
        return CheckAnswer(steady[order.kind]) if order.kind in steady else super().obey(order)


def checked(nodes: int, tmp_path: Path, kinds: dict[int, type[NodeUnderTest]]) -> dict[str, Any]:
    """The verdict of a check in which each node is a thread."""
    settings = Settings.from_dict({"run_dir": str(tmp_path)})
    placements = [Placement("none", nodes, each, 1, HERE, 0, nodes_share_host=True) for each in range(nodes)]
    store = serve(placements[0], 0)

    def node(number: int) -> NodeUnderTest:
        return kinds.get(number, SteadyNode)(placements[number], settings, {}, lambda folder: ())

    def take_part(number: int) -> dict[str, Any]:
        return node(number).take_part(connect_store(HERE, store.port, store.timeout, patient(20)))

    with ThreadPoolExecutor(nodes) as pool:
        others = [pool.submit(take_part, each) for each in range(1, nodes)]
        verdict = CheckCoordinator(store, node(0), nodes, patient(20)).run()
        assert all(each.result(patient(60)) == verdict for each in others)
    return verdict


class WithoutVolume(SteadyNode):
    def hello(self) -> CheckAnswer:
        found = super().hello()
        failed = ConnectivityProblem("run volume", "fail", "/run is read-only", "mount it for writing")
        return CheckAnswer(found.values, found.names, [join_check._as_json(failed)])


@pytest.mark.parametrize("bad", [0, 2])
def test_the_node_with_a_fault_of_its_own_stays_out(tmp_path: Path, bad: int) -> None:
    verdict = checked(3, tmp_path, {bad: WithoutVolume})
    assert [each["node"] for each in verdict["nodes"] if each["state"] == "fail"] == [bad]
    (check,) = verdict["nodes"][bad]["checks"]
    assert (check["name"], check["said"]) == ("run volume", "/run is read-only")
    text = as_text(verdict)
    assert "run volume" in text and "mount it for writing" in text and f"stays out: node {bad}" in text


def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    settings = Settings.from_dict({"run_dir": str(tmp_path)})
    placement = Placement("none", 2, 0, 1, HERE, 0, nodes_share_host=True)
    node = NodeUnderTest(placement, settings, {}, lambda folder: ())
    verdict = CheckCoordinator(serve(placement, 0), node, 2, 0.1).run()
    assert [each["state"] for each in verdict["nodes"]] == ["pass", "fail"]
    assert verdict["nodes"][1]["checks"][0]["name"] == "start"


@pytest.mark.parametrize(
    ("launch", "environ", "what"),
    [
        ({}, {}, "only one node"),
        ({"nodes": 2}, {}, "simulated nodes"),
        ({}, BY_HAND, "one process per rank"),
    ],
)
def test_what_is_no_job_of_several_nodes_is_refused(
    tmp_path: Path, launch: dict[str, int], environ: dict[str, str], what: str
) -> None:
    settings = Settings.from_dict({"run_dir": str(tmp_path), **launch})
    with pytest.raises(ConfigError, match=f"{what}.*--master HOST:PORT"):
        check_nodes(settings, environ, lambda folder: ())


def test_a_master_whose_name_does_not_resolve_is_named(tmp_path: Path) -> None:
    settings = Settings.from_dict({"run_dir": str(tmp_path)})
    placement = Placement("none", 2, 0, 1, "no-such-host.invalid", 29500)
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid does not resolve.*--master"):
        NodeUnderTest(placement, settings, {}, lambda folder: ())


def test_a_device_that_multiplies_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert product_problem(torch.device("cpu")) == ""
    right = torch.matmul

    def wrong(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        product = right(one, other)
        product[17, 200] += 1
        return product

    monkeypatch.setattr(torch, "matmul", wrong)
    assert product_problem(torch.device("cpu")) == (
        "cpu multiplies wrongly: 2 of 512 sums of an exact product differ"
    )


@pytest.fixture
def listener() -> Iterator[LinkListener]:
    found = LinkListener(HERE)
    yield found
    found._listener.close()


def test_both_ends_measure_a_link(listener: LinkListener) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(listener.measure)
        found = measure_link(HERE, listener.port, listener.token)
        assert other.result(patient(20)).rate > 0
    assert found.rate > 0 and found.latency > 0


def test_a_stranger_is_turned_away_and_the_other_node_still_measures(listener: LinkListener) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(listener.measure)
        with pytest.raises(OSError):
            measure_link(HERE, listener.port, "0" * join_measure.TOKEN_BYTES)
        assert measure_link(HERE, listener.port, listener.token).rate > 0
        assert other.result(patient(20)).rate > 0


@pytest.mark.parametrize(("group", "stat", "text", "seconds"), [
    ("0::/pod/main\n", "pod/main/cpu.stat", "usage_usec 5\nthrottled_usec 2500000\n", 2.5),
    ("0::/pod/main\n", "pod/cpu.stat", "throttled_usec 2500000\n", 2.5),
    ("0::/a/path/of/the/host\n", "cpu.stat", "throttled_usec 2500000\n", 2.5),
    ("3:cpu,cpuacct:/pod\n0::/\n", "cpu/pod/cpu.stat", "nr_throttled 7\nthrottled_time 1500000000\n", 1.5),
    ("3:memory:/pod\n", "cpu/pod/cpu.stat", "throttled_time 1500000000\n", 0.0),
    ("0::/pod\n", "pod/cpu.stat", "usage_usec 5\n", 0.0),
])  # fmt: skip
def test_the_time_stopped_by_a_limit(
    tmp_path: Path, group: str, stat: str, text: str, seconds: float
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(group)
    file = tmp_path / "sys/fs/cgroup" / stat
    file.parent.mkdir(parents=True)
    file.write_text(text)
    found = list(join_measure.cpu_stat_files(tmp_path))
    assert join_measure.throttled_seconds(found) == pytest.approx(seconds)


def test_time_on_a_core_counts_and_sleep_too() -> None:
    own = OwnTime([])
    threading.Event().wait(0.05)
    torch.ones(256, 256) @ torch.ones(256, 256)
    cpu = own.cpu
    spent = own.without_others()
    # The time is read in this order, and only grows.
    assert own.wall >= spent >= cpu > 0 == own.throttled
