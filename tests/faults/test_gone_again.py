"""A node that comes to the rendezvous and is gone before it has said which ranks it has.

The others' agents wait for its word in torch's store, in C, where no signal is heard. A handler of the
engine's in the test is that node: it comes, and says nothing more.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from small_runs import Runs
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from patience import patient
from tandem.config.slices import LaunchConfig
from tandem.launch.rendezvous_state import handler_of
from tandem.platforms.detection import Placement
from tandem.torch_private import stop_keep_alive

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

HOST = "127.0.0.101"


class Silent:
    """Node 1 of two, in the rendezvous of a node 0 that is started by hand."""

    def __init__(self, runs: Runs, port: int) -> None:
        self.flags = ("--nodes", 2, "--master", f"{HOST}:{port}", "--steps", 40)
        self.node_0 = runs.start("launch", "run", "--node-rank", 0, *self.flags)
        placement = Placement("by-hand", 2, 1, None, HOST, port, local_name="127.0.0.102")
        runs.until(lambda: self._joined(port), "store on node 0")
        self.handler = handler_of(placement, self.store, LaunchConfig(), lambda: None)
        self.handler.next_rendezvous()

    def _joined(self, port: int) -> bool:
        try:
            self.store = TCPStore(HOST, port, is_master=False)
        except RuntimeError:
            return False
        return True


@pytest.fixture
def silent(runs: Runs, free_port: int) -> Iterator[Silent]:
    node = Silent(runs, free_port)
    yield node
    stop_keep_alive(node.handler)


def ended(runs: Runs, process: Any, seconds: float) -> tuple[int, str]:
    return runs.processes.wait(process, patient(seconds))


def test_the_others_hear_a_stop_at_once(runs: Runs, silent: Silent) -> None:
    silent.node_0.terminate()
    code, output = ended(runs, silent.node_0, 30)  # torch would wait for 60 s
    assert code == 137, output
    assert "SIGTERM came before training started; nothing to save" in output


def test_the_others_go_round_again_and_train_with_the_node_that_comes_in_its_place(
    runs: Runs, silent: Silent
) -> None:
    stop_keep_alive(silent.handler)
    node_1 = runs.start("launch", "run", "--node-rank", 1, *silent.flags)
    code, output = ended(runs, silent.node_0, 50)
    assert code == 0, output
    assert "a node joined and left again: 1 of 2 remain" in output
    assert ended(runs, node_1, 30)[0] == 0
