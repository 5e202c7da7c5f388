"""What a test needs of the machine: skipped where it is missing, with a line, unless it is asked for."""

import os
import shutil

import pytest


def require(name: str, available: bool | None = None, why: str = "") -> None:
    """Skip where `name` (say docker) is missing; fail instead when TANDEM_REQUIRE (a,b,c) names it.

    `available` None means: is there a program of that name?
    """
    if shutil.which(name) is not None if available is None else available:
        return
    message = f"{name} is not available here{': ' + why if why else ''}"
    if name in os.environ.get("TANDEM_REQUIRE", "").replace(",", " ").split():
        pytest.fail(f"{message}, but TANDEM_REQUIRE asks for it", pytrace=False)
    pytest.skip(message)


def require_strategy(name: str) -> None:
    """Skip where this torch has the strategy of that name on GPUs alone, as `tandem` says there."""
    import torch

    has_it = name != "fsdp" or hasattr(torch.cpu.Stream, "record_event")
    require(f"--strategy {name} on CPUs", has_it, "torch 2.11 brought it")
