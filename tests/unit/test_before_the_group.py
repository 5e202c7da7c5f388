"""What is found out before ranks open their group: one kind of device, a GPU for each, a clean store."""

import ctypes
import logging
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from tandem.config import Settings
from tandem.distributed.group_store import (
    DUMP_SIGNAL,
    check_same_kind,
    connect_store,
    forget_dump_signal,
    open_store,
)
from tandem.distributed.position import Connection, Position
from tandem.errors import ConfigError, PeerLostError
from tandem.launch import this_machine

SECOND = timedelta(seconds=20)


def meet(kinds: list[str]) -> list[str]:
    """One rank for each kind, at one store: what each is told."""
    store, said = HashStore(), [""] * len(kinds)

    def rank(index: int) -> None:
        try:
            check_same_kind(store, Position(rank=index, node_rank=index, world_size=len(kinds)), kinds[index])
        except ConfigError as error:
            said[index] = str(error)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(len(kinds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return said


def test_a_rank_without_a_gpu_beside_one_that_has_one_is_named_on_all_ranks() -> None:
    said = meet(["cuda", "cpu"])
    assert said[0] == said[1]
    assert "rank 0 on node 0 (localhost) has a GPU and rank 1 on node 1 (localhost) has none" in said[0]
    assert "--device cpu" in said[0] and "\n" not in said[0]


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_alike_ranks_go_on(kind: str) -> None:
    assert meet([kind] * 3) == [""] * 3


def test_a_nccl_error_of_one_generation_is_no_signal_for_the_next() -> None:
    """What ProcessGroupNCCL::broadcastDumpSignal does lies below the prefix of a generation."""
    root = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SECOND)

    def of(generation: str) -> Any:
        connection = Connection(store=("127.0.0.1", root.port, generation))
        return open_store(Position(world_size=2), connection, SECOND)

    first = of("generation/0")
    first.underlying_store.set(DUMP_SIGNAL, b"\x01\0\0\0")
    second = of("generation/1")
    forget_dump_signal(second)
    assert not second.underlying_store.check([DUMP_SIGNAL])
    forget_dump_signal(PrefixStore("of one rank", HashStore()))  # has none


def shares(seen: list[str], nodes: int, nproc: int | None = None, **compute: Any) -> list[dict[str, str]]:
    return this_machine.gpus_per_node(seen, nodes, nproc, Settings().replace(**compute).compute)


def test_fewer_gpus_than_simulated_ranks_are_used_by_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert shares(["0"], 2) == [{"CUDA_VISIBLE_DEVICES": ""}] * 2
    (record,) = caplog.records
    assert record.message == (
        "2 simulated nodes need 2 GPUs, but only 1 visible; all ranks train on CPUs "
        "(use --nodes 1 to train on GPUs)"
    )
    with pytest.raises(ConfigError, match="--device cuda: 2 simulated nodes need 4 GPUs, but only 3 visible"):
        shares(["0", "1", "2"], 2, 2, device="cuda")
    assert shares(["0"], 1, devices_per_rank=2) == [{"CUDA_VISIBLE_DEVICES": ""}]


def test_enough_gpus_are_shared_out() -> None:
    four = shares(["4", "5", "6", "7"], 2, 2)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in four] == ["4,6", "5,7"]
    assert shares([], 2) == [{}, {}] == shares(["0"], 2, device="cpu")


def test_a_replica_takes_gpus_of_its_own() -> None:
    """Every node had all of the host's, and two ranks on one GPU."""
    four = [this_machine.share_of_replica(["0", "1", "2", "3"], "2", node, 2) for node in (0, 1)]
    assert four == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    for everything in ("all", None):
        assert this_machine.share_of_replica(["0"], everything, 1, 2) == {}
    with pytest.raises(ConfigError, match="GPUS=2 on 3 nodes needs 6 GPUs, .* has 4; set NODES=2, a"):
        this_machine.share_of_replica(["0", "1", "2", "3"], "2", 0, 3)
    with pytest.raises(ConfigError, match="TANDEM_COMPOSE_GPUS"):
        this_machine.share_of_replica(["0"], "0", 0, 1)


@pytest.mark.parametrize(
    ("visible", "seen"),
    [("", []), ("-1", []), ("1,0", ["1", "0"]), ("0,-1,2", ["0"]), ("GPU-89, MIG-1", ["GPU-89", "MIG-1"])],
)
def test_visible_gpus_are_read_as_cuda_reads_them(visible: str, seen: list[str]) -> None:
    assert this_machine.gpus_of({"CUDA_VISIBLE_DEVICES": visible}) == seen


class Nvml:
    """NVIDIA's library where there are two GPUs and no device file, as under WSL2."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))[0] = 2
        return 0

    def nvmlShutdown(self) -> int:
        return 0


def test_gpus_are_counted_where_they_have_no_device_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml())
    assert this_machine.gpus_of({}) == ["0", "1"]


def test_without_nvidias_library_device_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [Path("/dev/nvidia0")])
    assert this_machine.gpus_of({}) == ["0"]


def test_a_port_that_another_program_has_is_not_waited_for_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It accepts connections and says nothing: torch's own constructor would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as other, caplog.at_level(logging.INFO):
        port, began = other.getsockname()[1], time.monotonic()
        with pytest.raises(PeerLostError, match=f":{port} accepts connections.*--master"):
            connect_store("127.0.0.1", port, timedelta(seconds=1), 1.0, log_every=0.2)
        with pytest.raises(PeerLostError):
            connect_store("127.0.0.1", port, timedelta(seconds=1), 600.0, lambda: True)
        assert time.monotonic() - began < 60
    assert any(f":{port} accepts connections" in line for line in caplog.messages)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connect_store("127.0.0.1", store.port, SECOND, 20.0).set("key", "value")
    assert store.get("key") == b"value"
