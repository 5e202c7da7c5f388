"""The fixtures of the fault tests; what they give is in small_runs.py and otel_runs.py."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from otel_runs import Sent
from small_runs import Runs

from networks import Machine, machines
from tandem.report.otel import is_installed


@pytest.fixture
def runs(tmp_path: Path, processes: Any) -> Runs:
    return Runs(tmp_path, processes)


@pytest.fixture
def sent(runs: Runs, require: Any) -> Iterator[Sent]:
    require("otel", is_installed(), "the extra of this name")
    here = Sent(runs)
    yield here
    here.collector.close()


@pytest.fixture
def network(require: Callable[..., None]) -> Iterator[Sequence[Machine]]:
    """Three machines of their own."""
    for tool in ("ip", "unshare", "nsenter"):
        require(tool)
    require("root", os.geteuid() == 0, "network namespaces are made by root")
    yield from machines(3)
