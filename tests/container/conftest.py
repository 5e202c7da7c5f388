"""A real engine, the image that `make image` built, and clusters that are removed with all they left."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import IMAGE, TestedCluster, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.container)


@pytest.fixture(scope="session")
def image(require: Callable[..., None]) -> str:
    """The image under test; skipped (or failed, by TANDEM_REQUIRE=docker) where there is none."""
    require("docker", not missing(), missing())
    return IMAGE


@pytest.fixture
def cluster(image: str, free_port: int, processes: Any) -> Iterator[TestedCluster]:
    """A project name and a port of the test's own."""
    own = TestedCluster(f"tandem-test-{uuid.uuid4().hex[:8]}", free_port, processes)
    yield own
    own.remove()
