"""The fixture of the fault tests; what it gives is in small_runs.py."""

from pathlib import Path
from typing import Any

import pytest
from small_runs import Runs


@pytest.fixture
def runs(tmp_path: Path, processes: Any) -> Runs:
    return Runs(tmp_path, processes)
