"""Eight nodes in network namespaces test each other: the right ones stay out, each for its own fault."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trials.joining import NODES, REASONS, JoiningNodes, joining_nodes

pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture
def nodes(tmp_path: Path, require: Callable[..., None]) -> Iterator[JoiningNodes]:
    for tool in ("ip", "tc", "unshare", "nsenter"):
        require(tool)
    is_root = os.geteuid() == 0
    require("root", is_root, "network namespaces and CPU limits are made by root")
    require("CPU limits", os.access("/sys/fs/cgroup", os.W_OK) or Path("/sys/fs/cgroup/cpu").is_dir())
    with joining_nodes(tmp_path) as found:
        yield found


@pytest.mark.parametrize("bad", [(3, 6, 1, 4), (5, 2, 0, 7)])
def test_each_faulty_node_stays_out_with_its_reason(nodes: JoiningNodes, bad: tuple[int, ...]) -> None:
    faults = dict(zip(REASONS, bad, strict=True))
    checked = nodes.check(faults)
    assert checked.named() == {node: [REASONS[fault]] for fault, node in faults.items()}, checked.verdict
    # Without node 0, whose place no spare can take, the job cannot start.
    assert checked.codes == [int(node in bad or 0 in bad) for node in range(NODES)]


def test_no_healthy_node_is_named(nodes: JoiningNodes) -> None:
    checked = nodes.check({})
    assert checked.named() == {} and not checked.verdict["unclear"], checked.verdict
    assert checked.codes == [0] * NODES
