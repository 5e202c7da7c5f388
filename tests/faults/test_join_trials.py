"""Nodes in network namespaces test each other: the right ones stay out, each for its own fault.

Speeds and links are compared only in the trials with eight nodes, which need the machine for themselves.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trials.joining import NODES, REASONS, JoiningNodes, joining_nodes

pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture(params=[NODES])
def nodes(
    tmp_path: Path, require: Callable[..., None], request: pytest.FixtureRequest
) -> Iterator[JoiningNodes]:
    for tool in ("ip", "tc", "unshare", "nsenter"):
        require(tool)
    is_root = os.geteuid() == 0
    require("root", is_root, "network namespaces and CPU limits are made by root")
    require("CPU limits", os.access("/sys/fs/cgroup", os.W_OK) or Path("/sys/fs/cgroup/cpu").is_dir())
    with joining_nodes(tmp_path, request.param) as found:
        yield found


@pytest.mark.parametrize("nodes", [4], indirect=True)
def test_a_wrong_clock_and_a_volume_that_cannot_be_written_are_named(nodes: JoiningNodes) -> None:
    checked = nodes.check({"volume": 1, "clock": 3})
    named = checked.named()
    assert "run volume" in named[1] and "clock" in named[3], checked.verdict
    assert not {"run volume", "clock"} & {*named.get(0, []), *named.get(2, [])}, checked.verdict
    assert checked.codes[1] == checked.codes[3] == 1


@pytest.mark.soak
@pytest.mark.parametrize("bad", [(3, 6, 1, 4), (5, 2, 0, 7)])
def test_each_faulty_node_stays_out_with_its_reason(nodes: JoiningNodes, bad: tuple[int, ...]) -> None:
    faults = dict(zip(REASONS, bad, strict=True))
    checked = nodes.check(faults)
    assert checked.named() == {node: [REASONS[fault]] for fault, node in faults.items()}, checked.verdict
    # Without node 0, whose place no spare can take, the job cannot start.
    assert checked.codes == [int(node in bad or 0 in bad) for node in range(NODES)]


@pytest.mark.soak
def test_no_healthy_node_is_named(nodes: JoiningNodes) -> None:
    checked = nodes.check({})
    assert checked.named() == {} and not checked.verdict["unclear"], checked.verdict
    assert checked.codes == [0] * NODES
