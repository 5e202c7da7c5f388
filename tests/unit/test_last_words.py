"""Why a job failed, on its way from the rank that knows to the last line of every node."""

import os
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tandem.errors import FAILED
from tandem.launch import announce_error
from tandem.launch.rendezvous import (
    JOB_RESULT_KEY,
    JobEndedError,
    printable_line,
    publish_job_result,
    raise_if_job_ended,
    wait_for_end_of_node_0,
)
from tandem.platforms.detection import Placement


@pytest.mark.parametrize(
    "said, line",
    [
        ("", ""),
        ("one line", "one line"),
        ("rank 1 ended with 1:\n  File x\n  ValueError: no", "rank 1 ended with 1: ValueError: no"),
        ("\n\n a \n\n", "a"),
        ("a\x1b[31mb\x00c", "a [31mb c"),
        ("x" * 5000, "x" * 400),
    ],
)
def test_a_reason_is_a_line(said: str, line: str) -> None:
    assert printable_line(said) == line


def test_a_verdict_carries_its_reason_and_the_first_one_counts() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    publish_job_result(store, 1, "rank 3 on node 1: ValueError: no such file")
    publish_job_result(store, 2, "another")
    with pytest.raises(JobEndedError) as caught:
        raise_if_job_ended(store)
    assert caught.value.code == FAILED
    said = "another node ended the job with code 1: rank 3 on node 1: ValueError: no such file"
    assert str(caught.value) == said
    store.delete_key(JOB_RESULT_KEY)
    publish_job_result(store, 143, "")
    with pytest.raises(JobEndedError, match="^another node ended the job with code 143$"):
        raise_if_job_ended(store)


def test_a_failure_counts_more_than_a_good_end_that_came_first() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for code in (0, 3, 0, 4):
        publish_job_result(store, code, f"reason {code}")
    with pytest.raises(JobEndedError, match="^another node ended the job with code 3: reason 3$"):
        raise_if_job_ended(store)


@pytest.mark.timeout(60)
def test_other_nodes_outstay_the_first(free_port: int) -> None:
    server = TCPStore("127.0.0.1", free_port, is_master=True, wait_for_workers=False)
    here = Placement("by-hand", 2, 1, None, "127.0.0.1", free_port)
    wait_for_end_of_node_0(here, 0.1, lambda: False)
    wait_for_end_of_node_0(here, 300, lambda: True)
    looks = []

    def node_0_leaves() -> bool:
        nonlocal server
        looks.append(1)
        if len(looks) == 3:
            del server
        return False

    wait_for_end_of_node_0(here, 300, node_0_leaves)
    assert len(looks) >= 3


def test_kubernetes_is_told_where_it_asks_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "termination-log"
    monkeypatch.setattr(announce_error, "TERMINATION_LOG", path)
    announce_error.write_termination_message("nobody asks")
    assert not path.exists()
    path.write_text("an earlier end of this container, which was longer")
    announce_error.write_termination_message("ended with code 1: é" + "x" * 5000)
    assert path.read_text().startswith("ended with code 1: éxx") and path.stat().st_size == 4096
    path.unlink()
    os.mkfifo(path)
    announce_error.write_termination_message("a pipe is none of Kubernetes'")
