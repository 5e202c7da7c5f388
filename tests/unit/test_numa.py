"""A rank on the CPUs beside its GPU, by the kernel's own files, laid out here."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.distributed import devices
from tandem.distributed.devices import bind_to_node, cpus_of

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
ADDRESSES = {0: "0000:1b:00.0", 1: "0001:dc:01.0"}


@pytest.fixture
def cpus() -> Iterator[list[int]]:
    """Those of this process, given back afterwards."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("this process may use one CPU alone")
    yield sorted(before)
    os.sched_setaffinity(0, before)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def properties(device: torch.device) -> Any:
        domain, bus, rest = ADDRESSES[device.index].split(":")
        device_id = rest.partition(".")[0]
        return SimpleNamespace(
            pci_domain_id=int(domain, 16), pci_bus_id=int(bus, 16), pci_device_id=int(device_id, 16)
        )

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return tmp_path


def beside(root: Path, device: torch.device, text: str) -> None:
    folder = root / "sys/bus/pci/devices" / ADDRESSES[device.index]
    folder.mkdir(parents=True)
    (folder / "local_cpulist").write_text(text)


def test_the_kernels_lists() -> None:
    assert cpus_of("0-3,8\n") == {0, 1, 2, 3, 8} and cpus_of("5") == {5} and cpus_of("\n") == set()
    with pytest.raises(ValueError):
        cpus_of("all")


def test_all_threads_run_beside_the_gpu_and_later_ones_too(root: Path, cpus: list[int]) -> None:
    beside(root, FIRST, f"{cpus[-1]},4096-4099\n")
    end, seen = threading.Event(), list[set[int]]()
    early = threading.Thread(target=end.wait)
    early.start()
    try:
        bind_to_node([FIRST], root)
        late = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        late.start()
        late.join()
        assert early.native_id is not None
        assert os.sched_getaffinity(early.native_id) == os.sched_getaffinity(0) == {cpus[-1]} == seen[0]
    finally:
        end.set()
        early.join()


def test_of_two_gpus_the_cpus_beside_either(root: Path, cpus: list[int]) -> None:
    beside(root, FIRST, str(cpus[0]))
    beside(root, SECOND, str(cpus[1]))
    bind_to_node([FIRST, SECOND], root)
    assert os.sched_getaffinity(0) == {cpus[0], cpus[1]}


@pytest.mark.parametrize("text", [None, "4096-4099", "nothing"])
def test_where_it_cannot_be_a_line_says_so(
    text: str | None, root: Path, cpus: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    if text is not None:
        beside(root, FIRST, text)
    bind_to_node([FIRST], root)
    assert caplog.messages == [
        "--numa-binding node has no effect: the kernel does not report which CPUs are close to the GPU"
    ]
    assert os.sched_getaffinity(0) == set(cpus)


def test_without_a_gpu_and_with_a_torch_that_does_not_tell(
    cpus: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bind_to_node([CPU])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="a GPU"))
    bind_to_node([FIRST])
    assert [text.rpartition(": ")[2].split()[0] for text in caplog.messages] == ["there", "the"]
    assert os.sched_getaffinity(0) == set(cpus) and devices.log.name == "tandem.run"
