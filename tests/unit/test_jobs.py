"""What keeps jobs of one scheduler apart: run directories of array tasks, restarts, and the store's owner."""

import errno
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from patience import patient
from tandem.checkpoint.storage import lease_records
from tandem.config import Settings
from tandem.distributed.devices import choose_devices
from tandem.errors import ConfigError, PeerLostError
from tandem.launch import rendezvous
from tandem.launch.rendezvous import host_store, join_store
from tandem.launch.run_dir import adjust_for_job
from tandem.launch.store_endpoint import StoreEndpoint
from tandem.platforms.detection import Placement
from tandem.run.directory import RunDir


def task_of_array(number: int, **more: Any) -> Placement:
    return Placement(
        "slurm", 2, 0, None, "node1", 20004, job=f"slurm-{number}.0", array=("3", str(number)), **more
    )


def settings_of(folder: Path, resume: str = "auto") -> Settings:
    return Settings().replace(run_dir=folder, resume=resume)


def taken(settings: Settings, placement: Placement) -> Settings:
    return adjust_for_job(RunDir.of(settings), settings, placement)


def joined(placement: Placement, port: int) -> TCPStore:
    return join_store(placement, ("127.0.0.1", port), 10, lambda: False)


def test_two_tasks_of_an_array_never_share_a_run_directory(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "run")
    assert taken(settings, task_of_array(1)) == settings
    taken(settings, task_of_array(1, restarts=1))  # it comes back
    with pytest.raises(ConfigError, match=r"task 1 of array 3, but this is task 2"):
        taken(settings, task_of_array(2))
    taken(settings_of(tmp_path / "other"), task_of_array(2))
    taken(settings, replace(task_of_array(1), array=("8", "2")))  # another array goes on with the run
    other = replace(task_of_array(1), node_rank=1)
    assert taken(settings, other) == settings
    with pytest.raises(ConfigError, match="belongs to task 1"):  # instead of waiting for a refused node 0
        taken(settings, replace(other, array=task_of_array(2).array))
    taken(settings_of(Path("/proc/nothing")), other)  # the volume need not be there
    with pytest.raises(ConfigError, match="cannot write to the run directory"):
        taken(settings_of(Path("/proc/nothing")), task_of_array(1))
    (tmp_path / "link").symlink_to("/nonexistent/folder")
    with pytest.raises(ConfigError, match=r"run directory .*/link: it is a link to nothing"):
        taken(settings_of(tmp_path / "link"), task_of_array(1))


def test_nodes_of_a_task_that_start_at_once_are_of_that_task(tmp_path: Path) -> None:
    """A file that is created and then written is empty for a moment: a node was refused by its own task."""
    together = Barrier(2, timeout=patient(20))

    def start(node: int) -> None:
        placement = replace(task_of_array(1), node_rank=node)
        for number in range(400):
            together.wait()
            taken(settings_of(tmp_path / str(number)), placement)

    with ThreadPoolExecutor(2) as nodes:
        list(nodes.map(start, range(2)))


def test_a_requeued_job_goes_on_though_it_began_with_never(tmp_path: Path) -> None:
    settings, job = settings_of(tmp_path, "never"), replace(task_of_array(1), array=None)
    assert taken(settings, job).checkpoint.resume == "never"
    assert taken(settings, replace(job, restarts=1)).checkpoint.resume == "auto"
    # One that was requeued before it ran for the first time has not begun yet.
    late = replace(job, job="slurm-9.0", restarts=1)
    assert taken(settings, late).checkpoint.resume == "never"
    assert taken(settings, replace(late, restarts=2)).checkpoint.resume == "auto"
    assert taken(settings_of(tmp_path), replace(job, restarts=1)) == settings_of(tmp_path)


def test_nodes_of_another_job_are_not_let_in(free_port: int) -> None:
    first = Placement("slurm", 2, 0, None, "127.0.0.1", free_port, job="slurm-4.0")
    store = host_store(first)
    assert joined(replace(first, node_rank=1), free_port).check(["tandem/job"])
    with pytest.raises(PeerLostError, match="belongs to slurm-4.0, not to slurm-135.0"):
        joined(replace(first, node_rank=1, job="slurm-135.0"), free_port)
    del store


def test_node_0_needs_no_name_to_reach_its_own_store(free_port: int) -> None:
    """A pod's name is published when it is seen to live; until then its own store was "taken"."""
    place = StoreEndpoint(Placement("by-hand", 2, 0, None, "not-published.invalid", free_port), None)
    store = place.host()
    assert place.address == ("127.0.0.1", free_port)
    assert place.connect().get(rendezvous.NODES_KEY) == b"2"
    del store


def test_the_gate_leads_to_the_agents_store_after_each_generation_of_a_script(free_port: int) -> None:
    """The first store of ranks took its place, and nobody who came later was let in."""
    node_0 = StoreEndpoint(Placement("by-hand", 2, 0, None, "127.0.0.1", free_port), b"key")
    stores = [node_0.host()]
    node_1 = StoreEndpoint(replace(node_0.asked, node_rank=1), b"key")
    for generation in range(2):
        ranks, address = node_0.host_for_ranks()
        stores.append(ranks)
        ranks.set("generation", str(generation))
        assert node_1.connect().get(rendezvous.NODES_KEY) == b"2"
        host, _, port = address.rpartition(":")
        through = TCPStore(*node_1.of_ranks(host, int(port)), is_master=False)
        assert through.get("generation") == str(generation).encode()


def test_a_port_that_is_taken_is_said(free_port: int) -> None:
    with socket.create_server(("", free_port)):
        place = StoreEndpoint(Placement("by-hand", 2, 0, None, "localhost", free_port), None)
        said = f"cannot listen on localhost:{free_port}: .*--master HOST:PORT"
        with pytest.raises(PeerLostError, match=said):
            place.host()


@pytest.mark.parametrize("theirs", ["9.9.9", None])
def test_two_versions_in_one_job_are_refused_in_one_line(free_port: int, theirs: str | None) -> None:
    first = Placement("by-hand", 2, 0, None, "127.0.0.1", free_port)
    store = host_store(first)
    if theirs is None:
        store.delete_key(rendezvous.VERSION_KEY)
    else:
        store.set(rendezvous.VERSION_KEY, theirs)
    with pytest.raises(
        ConfigError, match=f"node 1 has tandem .* node 0 has {theirs or 'an older'}"
    ) as caught:
        joined(replace(first, node_rank=1), free_port)
    assert "\n" not in str(caught.value) and "same version" in str(caught.value)
    with pytest.raises(rendezvous.JobEndedError, match="code 2: node 1 has tandem"):
        rendezvous.raise_if_job_ended(store)


@pytest.mark.parametrize(("local_rank", "device"), [(0, None), (1, None), (1, 0)])
def test_a_rank_takes_the_gpu_that_is_its_own(
    local_rank: int, device: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under --gpus-per-task each sees one GPU; elsewhere all, and the local rank counts."""
    from tandem.distributed.position import Position

    monkeypatch.setattr("torch.cuda.device_count", lambda: 1 if device == 0 else 2)
    position = Position(local_rank=local_rank, device=device)
    assert choose_devices("auto", position.gpu)[0].index == (local_rank if device is None else 0)


def test_a_task_that_comes_back_to_a_full_volume_reads_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken(settings_of(tmp_path), task_of_array(1))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lease_records, "_write_new", full)
    assert taken(settings_of(tmp_path), task_of_array(1, restarts=1)) == settings_of(tmp_path)
    with pytest.raises(ConfigError, match="belongs to task 1"):
        taken(settings_of(tmp_path), task_of_array(2))
