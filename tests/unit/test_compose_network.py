"""A node's network under a fault: the user's RATE is there again afterwards, as the kernel says."""

import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from patience import patient
from tandem.cluster import chaos
from tandem.cluster.engine import Cluster, Node
from tandem.cluster.faults import Fault, FaultContext
from tandem.cluster.network import LinkShape, cut, repair, shape_node

NODE = Node(1, "n-node-1", "id", "running", 0, 1, 1, "first", "")


class Namespace(Cluster):
    """A cluster of one node, which is a network namespace of this machine instead of a container."""

    def helper(self, *arguments: str, options: Sequence[str] = (), check: bool = True) -> str:
        command = ["ip", "netns", "exec", self.project, *arguments]
        return subprocess.run(
            command, check=check, capture_output=True, text=True, timeout=patient(20)
        ).stdout

    def start(self) -> None:
        """The node starts, with a network that nobody has shaped."""
        subprocess.run(["ip", "netns", "add", self.project], check=True, timeout=patient(20))
        self.helper("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "other")
        self.helper("ip", "link", "set", "eth0", "up")

    def end(self) -> None:
        subprocess.run(["ip", "netns", "del", self.project], check=False, timeout=patient(20))

    def rate(self) -> str:
        """The rate that the kernel holds the node's sending side to; empty: none."""
        words = self.helper("tc", "qdisc", "show", "dev", "eth0").split()
        return words[words.index("rate") + 1] if "rate" in words else ""

    def nodes(self) -> list[Node]:
        return [replace(NODE, started_at=self.variables["STARTED"])]

    def events(self) -> list[dict[str, object]]:
        return [{"kind": "checkpoint", "step": step} for step in (1, 2)]


@pytest.fixture
def cluster(require: Callable[..., None]) -> Iterator[Namespace]:
    made = Namespace(f"tandem-{uuid.uuid4().hex[:8]}", {"RATE": "100mbit", "STARTED": "first"})
    try:
        made.start()
        works = subprocess.run(
            ["ip", "netns", "exec", made.project, "tc", "qdisc", "show"],
            capture_output=True,
            timeout=patient(20),
        ).returncode
        reason = "tc does not work here" if works else ""
    except (OSError, subprocess.CalledProcessError):
        reason = "no network namespaces here: that needs root, ip and tc"
    require("netns", not reason, reason)
    yield made
    made.end()


def slow_network(context: FaultContext) -> str:
    """A fault with a shape of its own, lifted as faults lift it."""
    shape_node(context.cluster, context.node, LinkShape("1mbit"))
    assert context.cluster.rate() == "1Mbit"  # type: ignore[attr-defined]
    shape_node(context.cluster, context.node, LinkShape())
    return "slow"


def partition(context: FaultContext) -> str:
    cut(context.cluster, context.node)
    repair(context.cluster, context.node)
    return "cut"


def restart(context: FaultContext) -> str:
    assert isinstance(context.cluster, Namespace) and isinstance(context.cluster.variables, dict)
    context.cluster.end()
    context.cluster.start()
    context.cluster.variables["STARTED"] = "again"
    return "started again"


@pytest.mark.parametrize("inject", [slow_network, partition, restart])
def test_the_users_rate_is_back_after_a_fault(
    cluster: Namespace, inject: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape_node(cluster, cluster.nodes()[0], LinkShape("100mbit"))
    steps = iter(range(10, 100))
    monkeypatch.setattr(chaos, "live_step", lambda cluster: next(steps))
    tried = Fault(inject, lambda context: "went on", needs_new_generation=False)
    monkeypatch.setitem(chaos.FAULTS, "tried", tried)
    chaos.inject_fault(cluster, "tried", 1)
    assert cluster.rate() == "100Mbit"
