"""What a rank computes on: kernels that repeat themselves, and threads that fit its cores."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.config import Settings
from tandem.distributed.devices import compute_deterministically
from tandem.signals import StopFlag
from tandem.verify import resume


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_deterministic_kernels_are_asked_for_before_cublas_starts(restored: None) -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    compute_deterministically()
    assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.utils.deterministic.fill_uninitialized_memory


class Stopped(Exception):
    """The runs themselves are not the matter here."""


@pytest.mark.parametrize(
    ("seen", "device", "expected"), [(["0"], "auto", True), (["0"], "cpu", False), ([], "auto", False)]
)
def test_a_proof_on_gpus_is_one_of_deterministic_kernels(
    seen: list[str], device: str, expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def runner(arguments: Any, *_: Any) -> Any:
        asked.append(list(arguments))
        raise Stopped

    monkeypatch.setattr(resume, "gpus_of", lambda environ: seen)
    monkeypatch.setattr(resume, "Runner", runner)
    with pytest.raises(Stopped):
        resume.verify(Settings().replace(device=device), ["--lr=1"], {}, 1, StopFlag(), print)
    assert asked == [["--lr=1", *(["--deterministic=true"] if expected else [])]]
