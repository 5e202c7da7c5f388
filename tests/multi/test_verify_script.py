"""`tandem verify-resume --script`: passes a sound loop of one's own, and says what is wrong with another."""

from pathlib import Path
from typing import Any

import pytest
from own_loops import SMALL, Scripts

pytestmark = [pytest.mark.multi, pytest.mark.timeout(250)]

SLOW = SMALL.replace("import os", "import time, os").replace("seen += 1", "time.sleep(0.01); seen += 1")
OWN_GENERATOR = SLOW.replace("first_life", "own = torch.Generator().manual_seed(3)\nfirst_life", 1).replace(
    "model(inputs)", "model(inputs + 0.1 * torch.randn(inputs.shape, generator=own))"
)


@pytest.fixture
def scripts(tmp_path: Path, processes: Any) -> Scripts:
    return Scripts(tmp_path, processes)


@pytest.mark.soak
def test_a_sound_script_passes(scripts: Scripts) -> None:
    scripts.write("small.py", SLOW)
    code, output = scripts.verify("small.py", "--trials", 2)
    lines = output.splitlines()
    assert code == 0, output
    assert lines[0] == "verify-resume: small.py, 40 steps on 2 ranks, 2 trials"
    assert [line.split(":")[0] for line in lines[2:4]] == ["trial 1 of 2", "trial 2 of 2"]
    assert lines[-1] == "verdict: exact; 2 of 2 killed runs are bit-identical to the uninterrupted run"


def test_what_a_script_does_not_keep_is_found(scripts: Scripts) -> None:
    scripts.write("small.py", OWN_GENERATOR)
    code, output = scripts.verify("small.py", "--trials", 1)
    assert code == 1, output
    verdict, reason = output.splitlines()[-2:]
    assert verdict == "verdict: not exact; 1 of 1 killed run differs"
    assert reason.startswith("reason: uninterrupted runs agree.")
    assert "neither passed to run.keep" in reason
    assert "`loss` differs at step" in output and "weights differ at the end, first" in output


@pytest.mark.soak
def test_a_run_that_ends_itself_is_compared_where_it_ended(scripts: Scripts) -> None:
    scripts.write("small.py", SLOW.replace("    loss =", "    run.step < 24 or run.stop()\n    loss ="))
    code, output = scripts.verify("small.py", "--trials", 1)
    assert code == 0, output
    assert output.startswith("verify-resume: small.py, 25 steps on 2 ranks, 1 trial\n")


@pytest.mark.parametrize(
    "script, code, said",
    [
        ("print('no loop')", 2, "plain.py succeeded, but without a step in a loop over run.batches"),
        pytest.param(
            SMALL.replace("model(inputs)", "model(undefined)"),
            1,
            "NameError: name 'undefined' is not defined",
            marks=pytest.mark.soak,
        ),
    ],
    ids=["no loop", "a bug"],
)
def test_a_script_that_cannot_be_proven_is_one_line_with_its_code(
    scripts: Scripts, script: str, code: int, said: str
) -> None:
    scripts.write("plain.py", script)
    ended, output = scripts.verify("plain.py")
    assert (ended, len(output.splitlines())) == (code, 1), output
    assert output.startswith(f"tandem: {said}")
