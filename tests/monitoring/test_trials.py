"""The straggler trials of benchmarks/monitoring.py, a few of them; TANDEM_TRIALS=200 is the whole proof."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from prometheus import ROOT

TRIALS = int(os.environ.get("TANDEM_TRIALS", "6"))
pytestmark = [pytest.mark.soak, pytest.mark.monitoring, pytest.mark.multi]
pytestmark += [pytest.mark.timeout(120 + 20 * TRIALS)]


def test_the_slowed_rank_is_named(tmp_path: Path, processes: Any) -> None:
    output = tmp_path / "trials.json"
    script = ROOT / "benchmarks" / "monitoring.py"
    command = [sys.executable, str(script), "--trials", str(TRIALS), "--blocks", "0", "--json", str(output)]
    code, said = processes.run(command, limit=100 + 20 * TRIALS)
    assert code == 0, said
    told = json.loads(output.read_text())
    # A loaded host slows ranks by itself, so a few trials are no proof: they show that it works.
    assert told["straggler_named"] > 0.5
    assert told["straggler_named"] > 2 * told["straggler_named_wrongly"]
