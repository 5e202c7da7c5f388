"""A run under steady fire ends with the weights of an undisturbed one."""

from pathlib import Path

import pytest

from chaos_trials import under_fire


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_twenty_mixed_faults_leave_no_trace(tmp_path: Path) -> None:
    row = under_fire(faults=20, every=1.0, folder=tmp_path)
    assert row.trials >= 15, row
    assert "weights equal" in row.outcome, row
