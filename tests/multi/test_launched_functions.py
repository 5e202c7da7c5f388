"""`tandem.launch(function)`: results, failures, Ctrl-C and the notebook, in Python processes of their own."""

import json
import os
import signal
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from patience import patient
from program_files import program_text

pytestmark = pytest.mark.multi
ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")},
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    "TANDEM_METRICS": "0",
    "TANDEM_METRICS_LINGER": "0",
}

RESULTS = program_text("launched_functions_results")

INTERRUPTED = program_text("launched_functions_interrupted")

EXECUTE = program_text("launched_functions_execute")


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(textwrap.dedent(text))
    return str(folder / name)


@pytest.mark.timeout(300)
def test_results_come_back_and_failures_are_one_line(processes: Any, tmp_path: Path) -> None:
    """A closure, a lambda, a class of `__main__`, a module beside the script; from another directory."""
    write(tmp_path, "neighbour.py", "VALUE = 7")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    command = [sys.executable, write(tmp_path, "results.py", RESULTS)]
    code, output = processes.run(command, 280, cwd=elsewhere, env=ENVIRONMENT)
    assert code == 0, output
    assert "rank 0 ['of_all_ranks']" in output and "live page at" in output
    caught = [line for line in output.splitlines() if line.startswith("CAUGHT")]
    assert len(caught) == 2 and caught[0] == "CAUGHT 1 LookupError: no such thing", output
    assert caught[1].startswith("CAUGHT 2 lambda returned lock, which cannot be pickled"), output
    assert "NEWLINE" not in output
    assert "tandem/script/" not in output, "the traceback begins in the function"


@pytest.mark.timeout(200)
def test_ctrl_c_saves_and_stops(processes: Any, tmp_path: Path) -> None:
    command = [sys.executable, write(tmp_path, "interrupted.py", INTERRUPTED)]
    process = processes.start(command, cwd=tmp_path, env=ENVIRONMENT)
    deadline = time.monotonic() + patient(100)
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    code, output = processes.wait(process, 60)
    assert (code, output.splitlines()[-1]) == (0, "INTERRUPTED"), output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["state"], summary["exit_code"]) == ("stopped", 143)
    assert summary["last_checkpoint_step"] == summary["global_step"] > 0


@pytest.mark.timeout(300)
def test_a_rank_killed_in_the_notebook_changes_no_bit(processes: Any, tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    command = [sys.executable, "-c", EXECUTE, str(NOTEBOOK), str(patient(120))]
    code, output = processes.run(command, 280, cwd=tmp_path, env=ENVIRONMENT)
    assert code == 0, output
    assert "restarts: 1 - the same bits: True" in output, output
    ends = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("runs/train-*/summary.json"))]
    assert [end["restarts"] for end in ends] == [0, 1]
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"]
