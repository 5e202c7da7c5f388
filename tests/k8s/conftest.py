"""What the Kubernetes tests share."""

import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from simulated_cluster import REPOSITORY, Cluster, available

from needs import require as require_now
from tandem.kubernetes.render import UsageError

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))  # small_runs: the task that all of them train


@pytest.fixture
def cluster(tmp_path: Path, require: Callable[..., None]) -> Iterator[Callable[[], Cluster]]:
    """Makes clusters whose volumes are below `tmp_path`."""
    from small_runs import TASK

    here, why = available()
    require("namespaces", here, why)
    own: list[Cluster] = []

    def make() -> Cluster:
        folder = tmp_path / f"cluster-{len(own)}"
        volumes = {folder / "checkpoints": "/checkpoints", folder / "task": "/task"}
        for path in volumes:
            path.mkdir(parents=True)
            path.chmod(0o777)
        (folder / "task/small.py").write_text(TASK)
        image = {
            "PATH": f"{REPOSITORY}/.venv/bin:/usr/bin:/bin",
            "PYTHONPATH": str(REPOSITORY / "src"),
            "LANG": "C.UTF-8",
        }
        own.append(Cluster(folder, image, {str(path): target for path, target in volumes.items()}))
        return own[-1]

    yield make
    for each in own:
        each.close()


def _unless_kubectl_is_missing() -> Generator[None, object, object]:
    try:
        return (yield)
    except UsageError:
        if shutil.which("kubectl") is None:
            require_now("kubectl")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """What renders an overlay needs kubectl, also in a fixture; what reads a manifest as it is does not."""
    return (yield from _unless_kubectl_is_missing())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """The same in a test."""
    return (yield from _unless_kubectl_is_missing())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.kubernetes)
