"""FLOPs against counts by hand; the GPU table."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from needs import require
from patience import patient
from program_files import program_text
from tandem.config.slices import ComputeConfig, ExchangeConfig
from tandem.distributed.group import ProcessGroup
from tandem.distributed.position import Position
from tandem.distributed.strategy.single import SingleStrategy as Single
from tandem.training import flops
from tandem.training.buffers import buffers_kept
from tandem.training.flops import flops_of, peak_flops

gradients = Single(ProcessGroup(Position(), torch.device("cpu")), ExchangeConfig(), ComputeConfig()).gradients


def test_flops_of_a_linear_layer() -> None:
    model, x = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(10, 8)
    forward = 2 * 10 * (8 * 32 + 32 * 4)
    # Backward: both weights' gradients, and that of the inner activation (the input needs none).
    backward = 2 * 10 * (8 * 32 + 32 * 4 + 32 * 4)
    assert flops_of(lambda: gradients(model(x).sum(), [*model.parameters()])) == forward + backward
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_cannot_be_counted_is_zero_and_no_error() -> None:
    def broken() -> None:
        raise RuntimeError("not under a counter")

    assert flops_of(broken) == 0


def test_buffers_are_put_back() -> None:
    model = nn.BatchNorm1d(3)
    with buffers_kept(model):
        model(torch.randn(5, 3) + 4)
        assert model.running_mean is not None and model.running_mean.abs().sum() > 0
    assert model.running_mean.abs().sum() == 0 and model.num_batches_tracked == 0


def test_the_peak_of_a_cpu_is_measured() -> None:
    assert peak_flops(torch.device("cpu"), "fp32") > 1e8


@pytest.mark.parametrize(("name", "precision", "peak"), [
    ("NVIDIA H100 80GB HBM3", "bf16", 989e12), ("NVIDIA H100 PCIe", "bf16", 756e12),
    ("NVIDIA H200 NVL", "bf16", 835e12), ("NVIDIA H20", "bf16", 148e12), ("NVIDIA L40", "bf16", 181e12),
    ("NVIDIA A10G", "fp16", 70e12), ("NVIDIA A10", "fp32", 31.2e12), ("Tesla T4", "fp32", 8.1e12),
    ("NVIDIA GeForce RTX 5090", "bf16", 209.5e12), ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", 0.0),
    ("NVIDIA H100 of a form to come", "bf16", 0.0), ("Something new", "fp32", 0.0),
])  # fmt: skip
def test_the_peak_of_a_gpu_is_the_data_sheets(
    name: str, precision: str, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flops.torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0), precision) == peak


def test_tf32_is_counted_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(flops.torch.cuda, "get_device_name", lambda device: "NVIDIA A40")
    assert (peak_flops(gpu, "fp32"), peak_flops(gpu, "fp32", convolves=True)) == (37.4e12, 74.8e12)
    monkeypatch.setattr(flops.torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_flops(gpu, "fp32") == 74.8e12
    monkeypatch.setattr(flops.torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-32GB")
    assert peak_flops(gpu, "fp32") == 15.7e12  # has none
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1))
    assert flops.convolves(model) and not flops.convolves(torch.nn.Linear(1, 1))


TF32 = program_text("costs_tf32")
PEAKS = {
    'torch.backends.fp32_precision = "tf32"': (74.8e12, 74.8e12),
    'torch.backends.cuda.matmul.fp32_precision = "tf32"': (74.8e12, 74.8e12),
    'torch.backends.cudnn.conv.fp32_precision = "ieee"': (37.4e12, 37.4e12),
    'torch.backends.cuda.matmul.fp32_precision = "ieee"': (37.4e12, 74.8e12),
}


@pytest.mark.slow
def test_tf32_is_found_by_its_names_of_torch_2_9() -> None:
    """The older names cannot be read after that: the run ended with 1, on GPUs alone."""
    require("torch.backends.fp32_precision", hasattr(torch.backends, "fp32_precision"), "torch 2.9 has it")
    command = [sys.executable, "-c", TF32, *PEAKS]
    found = subprocess.run(command, capture_output=True, text=True, timeout=patient(60))
    assert [tuple(map(float, line.split())) for line in found.stdout.splitlines()] == [*PEAKS.values()], found
