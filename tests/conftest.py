"""What all tests share: workers, honest skips, free ports, and processes that never outlive their test."""

import gc
import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import settings

import tree
from forked import Forked, may_be_forked
from needs import require
from patience import PATIENCE, patient

settings.register_profile("tandem", deadline=None)  # a busy machine is no fault of the code under test
settings.load_profile("tandem")

# `make test` hands the first on, and a make that a test starts would take itself for a part of that run. The
# last is set in no person's shell, and hides what happens to output that is still held back.
for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHONUNBUFFERED"):
    os.environ.pop(name, None)

# A shell starts what is to run in the background deaf to Ctrl-C, and nohup deaf to a hangup; so would be all
# that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A process that a test forks has none of this one's threads. If it collected what an earlier test has left, a
# destructor could wait for one of them forever, or abort: that of torch's store does.
os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)

DEFAULT_LIMIT_SECONDS = 100.0  # below pytest-timeout's 120, so that the process is named, not the test
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS_EACH = 1000
REASON_CHARACTERS = 2000
COMPLETE = ("unit", "docs")
"""Directories of which `make test` runs all tests; of the others, it runs what is marked `core`."""
# Suites that wait for clusters, alerts and lost nodes start first; those that compute fill the rest.
WAITING_FIRST = ("container", "slurm", "monitoring", "k8s", "faults", "scripts", "multi", "storage")
ORDER = {name: place for place, name in enumerate((*WAITING_FIRST, "docs/test_readme.py"))}


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a module on one worker, so that its fixtures start once, and all of container/ too: there is one
    engine. Modules start in the order of ORDER.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "engine" if nodeid.startswith("tests/container/") else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return ByModule(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start with the tests that mostly wait, and mark as slow what `make test` leaves out.

    Also applies TEST_PATIENCE to the limits of pytest-timeout.
    """
    items.sort(key=place_of)
    for item in items:
        if item.nodeid.split("/")[1] not in COMPLETE and not item.get_closest_marker("core"):
            item.add_marker(pytest.mark.slow)
    for item in items if PATIENCE != 1 else ():
        marker = item.get_closest_marker("timeout")
        seconds = float(marker.args[0] if marker else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(patient(seconds)), append=False)


def place_of(item: pytest.Item) -> int:
    module = item.nodeid.partition("::")[0].removeprefix("tests/")
    return ORDER.get(module, ORDER.get(module.split("/")[0], len(ORDER)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """From TRIALS_UNTIL on (seconds since 1970), skip what `make test` leaves out, and say so."""
    if item.get_closest_marker("slow") and time.time() > float(os.environ.get("TRIALS_UNTIL", "inf")):
        pytest.skip("no time is left for this test on so slow a machine; make test-all runs it")


class Reasons:
    """Says why a test failed as soon as it has: a suite that a limit ends may not get to its summary."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self.reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = (crash.message if crash else report.longreprtext)[-REASON_CHARACTERS:]
            self.reporter.write_line(f"\n{report.nodeid}, {report.when}: {reason}", red=True)


@pytest.hookimpl(trylast=True)  # after the terminal's own
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Reasons(reporter))


_candidates = itertools.count(os.getpid() % PORTS_EACH)


def a_free_port() -> int:
    """A TCP port that was free a moment ago on every local address.

    Below the ephemeral ones, so that no connection takes it before its test does, and no other worker's.
    """
    for number in itertools.islice(_candidates, PORTS_EACH):
        with socket.socket() as probe:
            try:
                probe.bind(("", port := 10_000 + WORKER * PORTS_EACH + number % PORTS_EACH))
            except OSError:
                continue
            return port
    pytest.fail("no port is free")


@pytest.fixture
def free_port() -> int:
    return a_free_port()


class Processes:
    """Starts programs, each leader of a session of its own, and ends all that comes of them, nothing else."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """`subprocess.Popen` with text pipes; stderr goes into stdout unless told otherwise."""
        defaults: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        environ = tree.marked(options.pop("env", None) or os.environ)
        options = {"start_new_session": True, "env": environ, **defaults, **options}
        kind = Forked if may_be_forked(command, options) else subprocess.Popen
        process = kind(command, **options)
        tree.remember(process.pid, environ)
        self.started.append(process)
        return process

    def run(
        self, command: Sequence[str], limit: float = DEFAULT_LIMIT_SECONDS, **options: Any
    ) -> tuple[int, str]:
        """Exit code and output; fails the test with the output so far when `limit` seconds pass."""
        return self.wait(self.start(command, **options), limit)

    def wait(self, process: subprocess.Popen[str], limit: float = DEFAULT_LIMIT_SECONDS) -> tuple[int, str]:
        try:
            output, _ = process.communicate(timeout=patient(limit))
        except subprocess.TimeoutExpired:
            self.kill(process)
            output, _ = process.communicate(timeout=patient(10))
            too_long = f"{process.args!r} ran longer than {patient(limit):g} s"
            pytest.fail(f"{too_long}; its output:\n{output}", pytrace=False)
        return process.returncode, output or ""

    def kill(self, process: subprocess.Popen[str]) -> None:
        """SIGKILL to all that it has started; they outlive it, so whether it has finished does not matter."""
        for pid in (-process.pid, *tree.of_launch(process.pid)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def end(self) -> None:
        """Kill what still runs, and close the pipes."""
        for process in self.started:
            self.kill(process)
            process.wait(timeout=patient(10))
            for stream in (process.stdout, process.stderr, process.stdin):
                if stream is not None:
                    stream.close()


@pytest.fixture
def processes() -> Iterator[Processes]:
    own = Processes()
    yield own
    own.end()


@pytest.fixture(scope="module")
def module_processes() -> Iterator[Processes]:
    """`processes` for all tests of a module."""
    own = Processes()
    yield own
    own.end()


@pytest.fixture(scope="module")
def module_ports() -> list[int]:
    """Four different ports, free as `free_port` is."""
    return [a_free_port() for _ in range(4)]


@pytest.fixture(name="require", scope="session")
def require_fixture() -> Callable[..., None]:
    return require
