"""`make compose-up MONITORING=1`: alerts of the real rules fire in a cluster that is broken, and resolve.

The rules have seconds in place of minutes (monitoring/shorten.py). Prometheus is Debian's, put into an image
of the test's own; Grafana's place is taken by a program that serves the files that are mounted for it.
"""

import json
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import IMAGE, ROOT, TestedCluster, docker

from patience import patient
from program_files import program_text
from tandem.cluster.faults import freeze

pytestmark = pytest.mark.timeout(900)
LIMIT = 120.0
ENDLESS = (
    "--steps 1000000 --batch-size 24 --log-every 10 --eval-every never --checkpoint-every 200 "
    "--hang-timeout 100 --metrics-linger 60"
)
PROMETHEUS = f"""
FROM {IMAGE}
USER 0
COPY prometheus /usr/bin/prometheus
RUN install -d -o nobody -g nogroup /prometheus
USER nobody
ENTRYPOINT ["/usr/bin/prometheus"]
"""
GRAFANA = f"""
FROM {IMAGE}
ENTRYPOINT ["python3", "-m", "http.server", "3000", "--directory", "/"]
"""
TASK = program_text("watched_cluster_task")


@pytest.fixture(scope="module")
def stand_ins(
    tmp_path_factory: pytest.TempPathFactory, require: Callable[..., None]
) -> Iterator[dict[str, str]]:
    """The two images under names of this test's own, as the variables that name them."""
    require("prometheus")
    folder = tmp_path_factory.mktemp("images")
    shutil.copy(str(shutil.which("prometheus")), folder / "prometheus")
    names = {}
    for variable, text in (("PROMETHEUS_IMAGE", PROMETHEUS), ("GRAFANA_IMAGE", GRAFANA)):
        names[variable] = f"tandem-test-{variable.partition('_')[0].lower()}"
        (folder / "Dockerfile").write_text(text)
        docker("build", "--quiet", "--tag", names[variable], str(folder))
    yield names
    docker("rmi", "--force", *names.values(), check=False)


@pytest.fixture
def rules(tmp_path: Path) -> str:
    path = tmp_path / "rules.yaml"
    path.write_bytes(subprocess.check_output([sys.executable, ROOT / "monitoring" / "shorten.py"]))
    return str(path)


class Watched:
    """What Prometheus beside the cluster says."""

    def __init__(self, port: str) -> None:
        self.url = f"http://127.0.0.1:{port}/api/v1"

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/{path}", timeout=patient(10)) as answer:
            return json.load(answer)["data"]

    def firing(self, name: str) -> bool:
        alerts = self.ask("alerts")["alerts"]
        return any(each["labels"]["alertname"] == name and each["state"] == "firing" for each in alerts)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + patient(LIMIT)
        while True:
            try:
                if condition():
                    return
            except OSError:
                pass
            assert time.monotonic() < deadline, f"no {what} within {LIMIT:g} s"
            time.sleep(0.3)

    def fires(self, name: str, *containers: str) -> None:
        """Also one that fired between two looks, because a run that ends is scraped only once more."""
        fired = f'count_over_time(ALERTS{{alertname="{name}",alertstate="firing"}}[10m])'
        query = f"query?{urllib.parse.urlencode({'query': fired})}"
        try:
            self.until(lambda: bool(self.ask(query)["result"]), f"{name} firing")
        except AssertionError as error:
            for container in containers:
                command = ["docker", "logs", "--tail", "40", container]
                error.add_note(
                    subprocess.run(
                        command,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                        timeout=patient(60),
                    ).stdout
                )
            raise

    def resolves(self, name: str) -> None:
        self.until(lambda: not self.firing(name), f"{name} resolved")


def test_alerts_fire_in_the_cluster_and_resolve(
    cluster: TestedCluster,
    tmp_path: Path,
    stand_ins: dict[str, str],
    rules: str,
    module_ports: list[int],
) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "knobs.py").write_text(TASK)
    prometheus, grafana = map(str, module_ports[:2])
    variables = {**stand_ins, "RULES": rules, "PROMETHEUS_PORT": prometheus, "GRAFANA_PORT": grafana}
    flags = ("--nodes", "2", "--task", f"{tmp_path}/knobs.py:Knobs", "--run", "watched")
    process = cluster.start(*flags, "--monitoring", "1", "--args", ENDLESS, **variables)
    cluster.until(lambda: cluster.step() > 20, process, "steps")
    watched, nodes = Watched(prometheus), [f"{cluster.project}-node-{index}" for index in (1, 2)]
    with urllib.request.urlopen(
        f"http://127.0.0.1:{grafana}/var/lib/dashboards/tandem.json", timeout=patient(10)
    ) as file:
        assert json.load(file)["uid"] == "tandem"

    (tmp_path / "slow").touch()
    watched.fires("TandemStraggler")

    def is_named() -> bool:  # once it has been slow for some intervals
        query = urllib.parse.urlencode({"query": "tandem_straggler_excess_seconds"})
        named = watched.ask(f"query?{query}")["result"]
        return [(each["metric"]["rank"], each["metric"]["node"]) for each in named] == [("1", "1")]

    watched.until(is_named, "name of the straggler")
    (tmp_path / "slow").unlink()
    watched.resolves("TandemStraggler")

    freeze(nodes[1])
    watched.fires("TandemTrainingStalled")
    docker("unpause", nodes[1])
    watched.resolves("TandemTrainingStalled")

    def inside(script: str) -> None:
        docker("exec", "-w", "/checkpoints/watched", nodes[0], "sh", "-c", script)

    inside("mv checkpoints aside && touch checkpoints")
    watched.fires("TandemCheckpointStale")
    inside("rm checkpoints && mv aside checkpoints")
    watched.resolves("TandemCheckpointStale")

    docker("kill", nodes[0])  # Docker leaves alone what was killed through it
    watched.fires("TandemTargetDown")
    docker("start", nodes[0])
    watched.resolves("TandemTargetDown")

    cluster.until(lambda: cluster.step() > 0, process, "training again")
    # A run that Prometheus has never scraped does not wait for it at the end.
    query, again = "query?query=tandem_global_step", cluster.step()
    watched.until(
        lambda: any(float(each["value"][1]) > again for each in watched.ask(query)["result"]), "scrape of it"
    )
    (tmp_path / "nan").touch()
    watched.fires("TandemLossNotFinite", *nodes)
    code, output = cluster.processes.wait(process, LIMIT)
    assert code == 1, output
    assert f"prometheus   http://localhost:{prometheus}/alerts" in output
    watched.resolves("TandemLossNotFinite")

    (tmp_path / "nan").unlink()
    code, output = cluster.up(*flags[:-1], "after", "--args", "--steps 5")
    assert code == 0, output
    assert watched.ask("query?query=up") is not None, "the next job lets Prometheus run"
    code, _ = cluster.call("down")
    assert code == 0 and not cluster.left()["containers"]


def test_rules_that_are_not_there(cluster: TestedCluster, tmp_path: Path) -> None:
    missing = str(tmp_path / "no.yaml")
    code, output = cluster.up("--nodes", "1", "--monitoring", "1", RULES=missing)
    assert (code, output) == (
        2,
        f"tandem: RULES={missing}: there is no such file; monitoring/rules.yaml is the default\n",
    )


def test_an_image_of_grafana_that_cannot_be_had(cluster: TestedCluster) -> None:
    image = "localhost:1/nobody/grafana:1"
    code, output = cluster.up(
        "--nodes", "1", "--monitoring", "1", GRAFANA_IMAGE=image, PROMETHEUS_IMAGE=image
    )
    said = output.splitlines()[-1]
    assert code == 2 and said.startswith("tandem: ")
    assert [word for word in ("PROMETHEUS_IMAGE=", "GRAFANA_IMAGE=") if word not in said] == [], said
    assert not subprocess.run(
        ["docker", "ps", "-q", "-f", f"name={cluster.project}-node"], capture_output=True
    ).stdout
