"""What libraries below torch read from the environment: set for ranks, unless somebody has."""

import os

import pytest

from tandem.distributed.group import _bind
from tandem.launch.torch_variables import set_for_ranks

NCCL2 = "TORCH_DIST_USE_NCCL2"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": "/usr/bin"})


@pytest.mark.parametrize("has_own_store", [False, True])
def test_the_older_nccl_is_used_unless_somebody_has_chosen(has_own_store: bool, bare: None) -> None:
    set_for_ranks(False, has_own_store)
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert os.environ[NCCL2] == "0" and "NCCL_SOCKET_IFNAME" not in os.environ
    os.environ[NCCL2] = "1"
    set_for_ranks(False, has_own_store)
    assert os.environ[NCCL2] == "1"


@pytest.mark.parametrize("devices", [1, 2])
def test_a_rank_without_an_agent_uses_it_too(devices: int, bare: None, gpu: object) -> None:
    import torch

    gpus = [torch.device("cuda", index) for index in range(devices)]
    assert _bind(torch.device("cpu"), []) == {"backend": "gloo"} and NCCL2 not in os.environ
    assert _bind(gpus[0], gpus)["backend"] == "nccl" and os.environ[NCCL2] == "0"
