"""What `tandem init` makes, as an image: its two lines build, and the image trains its task."""

import uuid
from pathlib import Path

import pytest
from clusters import docker

from tandem.tasks.init import init

pytestmark = pytest.mark.timeout(600)

LOCKED_DOWN = ("--rm", "--read-only", "--cap-drop", "ALL", "--tmpfs", "/tmp", "-v", "/checkpoints")


def test_the_image_of_a_project_trains_its_task(image: str, tmp_path: Path) -> None:
    folder, name = tmp_path / "project", f"tandem-test-{uuid.uuid4().hex[:8]}"
    init(folder)
    written = (folder / "Dockerfile").read_text()
    (folder / "Dockerfile").write_text(written.replace("FROM tandem:cuda", f"FROM {image}"))
    docker("build", "--quiet", "--tag", name, str(folder))
    try:
        task = ("--task", "/app/task.py:MyTask", "--task.width", "8")
        docker("run", *LOCKED_DOWN, name, "launch", *task, "--steps", "5", "--metrics-linger", "0")
    finally:
        docker("rmi", name)
