"""The command in the head of compose.yaml, typed in a fresh clone: it trains, it is bounded, it returns."""

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from clusters import ROOT, TestedCluster, docker

from patience import patient

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


def test_the_command_in_the_head_of_the_file(cluster: TestedCluster, tmp_path: Path, processes: Any) -> None:
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, tmp_path / "clone"], check=True)
    text = (ROOT / "compose" / "compose.yaml").read_text()
    typed = next(line for line in re.findall(r"^#   (docker compose .*)$", text, re.MULTILINE))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    own = {"COMPOSE_PROJECT_NAME": cluster.project, "METRICS_PORT": str(cluster.port), "NODES": "2"}
    own |= {"MEMORY": "1536mb", "TMP_SIZE": "32m", "COMMAND": "launch --steps 200 --metrics-linger 0"}
    began = time.monotonic()
    process = processes.start(["bash", "-c", typed], cwd=tmp_path / "clone", env={**clean, **own})
    node = f"{cluster.project}-node-1"
    deadline = time.monotonic() + patient(120)
    while docker("inspect", node, "--format", "{{.State.Running}}", check=False).strip() != "true":
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    fill = "head -c 64M /dev/zero >/tmp/fill; df -k /tmp | tail -n 1; rm /tmp/fill"
    filled = docker("exec", node, "sh", "-c", fill)
    assert int(filled.split()[1]) == 32 * 1024, filled
    assert docker("inspect", node, "--format", "{{.State.Running}}").strip() == "true"
    logging = json.loads(docker("inspect", node, "--format", "{{json .HostConfig.LogConfig}}"))
    assert logging["Config"]["max-size"]
    code, output = processes.wait(process, 300)
    assert code == 0 and "finished at step 200" in output, output
    states = docker("ps", "-a", "--filter", f"name={cluster.project}-", "--format", "{{.Names}} {{.State}}")
    assert states.count("exited") == 3 and "metrics-1 exited" in states, f"{states}{time.monotonic() - began}"
