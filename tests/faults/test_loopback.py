"""A launch in a network namespace whose loopback interface is down ends at once, and says what to type."""

import subprocess
from collections.abc import Callable

import pytest
from small_runs import Runs

from patience import patient

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("ranks", ["--nproc", "--nodes"])
def test_a_launch_without_loopback_names_the_interface(
    runs: Runs, require: Callable[..., None], ranks: str
) -> None:
    """It tried for a minute, with stack traces, and then blamed another job for using the port."""
    tried = subprocess.run(["unshare", "--net", "--", "true"], capture_output=True, timeout=patient(20))
    require("namespaces", tried.returncode == 0)
    command = ["unshare", "--net", "--", *runs.command("launch", "alone", ranks, 2)]
    done = subprocess.run(
        command, cwd=runs.folder, env=runs.environment, capture_output=True, text=True, timeout=patient(50)
    )
    assert done.returncode == 2, done
    (line,) = done.stderr.splitlines()
    assert "ip link set lo up" in line and "127.0.0.1" in line
    assert not (runs.folder / "alone").exists()
