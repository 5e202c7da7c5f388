"""A node says that it lives before it has torch: a platform may publish its name only then."""

from small_runs import Runs

from tandem.telemetry import health

HOLD = """
import os, sys, time


class Hold:
    def find_spec(self, name, path=None, target=None):
        while name == "torch" and not os.path.exists("go"):
            time.sleep(0.02)


sys.meta_path.insert(0, Hold())
"""
"""Every import of torch waits for a file."""


def test_a_node_is_healthy_while_it_imports_torch(runs: Runs) -> None:
    (runs.folder / "held").mkdir()
    (runs.folder / "held/sitecustomize.py").write_text(HOLD)
    state = runs.folder / "state"
    environment = {
        **runs.environment, "PYTHONPATH": str(runs.folder / "held"), "TANDEM_STATE_DIR": str(state)
    }  # fmt: skip
    command = runs.command("launch", "first", "--nproc", 1, "--steps", 3)
    process = runs.processes.start(command, cwd=runs.folder, env=environment)
    runs.until(lambda: health.check(state)[0], "first sign of life")
    assert health.check(state)[1].startswith("starting at step 0")
    (runs.folder / "go").touch()
    code, output = runs.processes.wait(process)
    assert code == 0, output
