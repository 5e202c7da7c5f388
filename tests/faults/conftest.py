"""The fixtures of the fault tests; what they give is in small_runs.py and otel_runs.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from otel_runs import Sent
from small_runs import Runs

from tandem.report.otel_variables import is_installed


@pytest.fixture
def runs(tmp_path: Path, processes: Any) -> Runs:
    return Runs(tmp_path, processes)


@pytest.fixture
def sent(runs: Runs, require: Any) -> Iterator[Sent]:
    require("otel", is_installed(), "the extra of this name")
    here = Sent(runs)
    yield here
    here.collector.close()
