"""Damaged files of the newest checkpoint: never used, always the one before instead."""

from pathlib import Path
from typing import Any

import pytest
from trial_rows import TRIALS, rows

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.mark.core
def test_damage_is_never_silent(processes: Any, tmp_path: Path) -> None:
    found = rows(processes, tmp_path, "rot", 20 * TRIALS)
    assert set(found) == {"flipped bits", "zeroed pages", "truncations"}
    for row in found.values():
        assert row["bad"] == 0 and f"0 silent, {row['trials']} fell back" in row["outcome"]
    assert found["flipped bits"]["control_bad"] > 0.8 * found["flipped bits"]["control_trials"]
