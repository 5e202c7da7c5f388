"""`make compose-up` and the verbs around it, on a real engine with real containers."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from clusters import IMAGE, ROOT, TestedCluster, docker

from patience import patient
from program_files import program_text

pytestmark = pytest.mark.timeout(600)

# A node in `mode` ends at its 20th step as told; every other one waits for it in the all-reduce.
TASK = program_text("cluster_task")


# So that what a test does to a run comes before its end; `at_full_pace` lets the rest go.
SLOWLY = "--task.pause 0.5 --log-every 5 --checkpoint-every 30 --eval-every 1000"


@pytest.fixture
def task(tmp_path: Path) -> str:
    tmp_path.chmod(0o755)
    (tmp_path / "small.py").write_text(TASK)
    return f"{tmp_path}/small.py:Small"


def at_full_pace(task: str) -> None:
    """From here on the task does not pause."""
    Path(task.partition(":")[0]).with_name("quick").touch()


@pytest.mark.core
def test_two_nodes_train_the_digits_and_show_metrics(cluster: TestedCluster) -> None:
    process = cluster.start("--nodes", "2", "--epochs", "2")
    seen: set[int] = set()

    def rising() -> bool:
        seen.add(cluster.step())
        return len(seen - {0}) >= 2

    cluster.until(rising, process, "rising step on the metrics page")
    code, output = cluster.processes.wait(process, 150)
    assert code == 0, output
    assert f"metrics      http://localhost:{cluster.port}/metrics" in output
    assert "node-1" in output and "node-2" in output and "finished at step 500" in output
    engine = cluster.engine()
    summary = engine.summary()
    assert summary is not None and summary["platform"] == "compose" and summary["nodes"] == 2
    assert float(summary["eval"]["accuracy"]) >= 0.98  # type: ignore[index]
    assert "ended with 0 (node 0 0, node 1 0): finished at step 500; accuracy 0.9" in output
    mount = ("--rm", "-v", f"{cluster.project}_checkpoints:/checkpoints", "--read-only", "--cap-drop", "ALL")
    verified = docker("run", *mount, IMAGE, "checkpoints", "verify", "/checkpoints/digits")
    assert verified.count("verified") == 2 and "DAMAGED" not in verified


@pytest.mark.soak
def test_four_nodes(cluster: TestedCluster, task: str) -> None:
    code, output = cluster.up("--nodes", "4", "--task", task, "--epochs", "2")
    assert code == 0, output
    summary = cluster.engine("Small").summary()
    assert summary is not None and summary["world_size"] == 4
    first = [line for line in output.splitlines() if "rank 0 of" in line]
    assert first and all(line.startswith("node-1") for line in first)


def test_a_replica_that_fails_with_7_makes_7(cluster: TestedCluster, task: str) -> None:
    code, output = cluster.up("--nodes", "2", "--task", task, "--args", "--task.rank 1 --task.code 7")
    assert code == 7, output
    assert "ended with 7 (" in output


@pytest.mark.soak
def test_a_wrong_setting_stays_down_with_2(cluster: TestedCluster, task: str) -> None:
    code, output = cluster.up("--nodes", "2", "--task", task, "--args", "--lr fast")
    assert code == 2 and "--lr: invalid value 'fast'" in output
    once_per_node = "each node says it once, however often Docker starts it"
    assert output.count("--lr: invalid value 'fast'") == 2, once_per_node
    assert {node.exit_code for node in cluster.engine().nodes()} == {2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a script; the containers' user may read it."""
    tmp_path.chmod(0o755)
    return tmp_path


def test_a_plain_ddp_script_goes_on_from_its_own_file_after_a_node_is_killed(
    cluster: TestedCluster, folder: Path
) -> None:
    shutil.copy(ROOT / "tests/scripts/programs/ddp_tutorial.py", folder / "train.py")
    script = ("--nodes", "2", "--script", str(folder / "train.py"), "--script-args=--epochs 30 --pause 0.1")
    process = cluster.start(*script)
    cluster.until(lambda: cluster.step() > 25, process, "step of its third epoch")
    engine = cluster.engine("train")
    engine.helper("sh", "-c", f"kill -9 {engine.node(1).pid}", options=["--pid=host"])
    code, output = cluster.processes.wait(process, 250)
    assert code == 0, output
    assert "ended with 0 (node 0 0, node 1 0): finished at step " in output
    assert f"its files: make compose-get RUN=train PROJECT={cluster.project}" in output
    log = engine.read("/checkpoints/train/log/rank-0.log") or ""
    assert "resuming from epoch" in log and log.count("final loss") == 1
    assert engine.node(1).starts == 2


@pytest.mark.soak
def test_a_loop_of_its_own_stops_with_a_checkpoint_and_goes_on(cluster: TestedCluster, folder: Path) -> None:
    text, steps = (ROOT / "examples/gan.py").read_text(), "    optimizer_g.step()"
    slowly = "    time.sleep(0.5 if run.step < 40 else 0)\n"  # so that the stop comes before the end
    (folder / "gan.py").write_text("import time\n" + text.replace(steps, slowly + steps))
    script = ("--nodes", "2", "--script", str(folder / "gan.py"), "--args", "--steps 150 --log-every 5")
    process = cluster.start(*script)
    cluster.until(lambda: cluster.step() > 0, process, "first step")
    os.kill(process.pid, signal.SIGINT)
    code, output = cluster.processes.wait(process, 100)
    assert code == 143, output
    stopped = cluster.engine("gan").summary()
    assert stopped is not None and stopped["last_checkpoint_step"] == stopped["global_step"]
    code, output = cluster.up(*script)
    summary = cluster.engine("gan").summary()
    assert code == 0 and "finished at step 150" in output, output
    assert summary is not None and summary["resumed_from_step"] == stopped["global_step"]
    assert (summary["platform"], summary["nodes"], summary["world_size"]) == ("compose", 2, 2)


@pytest.mark.soak
def test_a_scripts_own_code_is_the_clusters(cluster: TestedCluster, folder: Path) -> None:
    (folder / "fails.py").write_text("import os\nraise SystemExit(7 if os.environ['RANK'] == '1' else 0)\n")
    words = ("--script", str(folder / "fails.py"), "--args=--fresh-interpreter")
    code, output = cluster.up("--nodes", "2", *words)
    assert code == 7 and "ended with 7 (" in output, output


def test_an_interrupt_saves_and_the_next_up_goes_on(cluster: TestedCluster, task: str) -> None:
    flags = ("--nodes", "2", "--task", task, "--epochs", "40", "--args", SLOWLY)
    process = cluster.start(*flags)
    cluster.until(lambda: cluster.step() > 0, process, "first step")
    os.kill(process.pid, signal.SIGINT)
    code, output = cluster.processes.wait(process, 100)
    assert code == 143, output
    assert "ended with 143 (node 0 143, node 1 143): stopped at step" in output
    stopped = cluster.engine("Small").summary()
    assert stopped is not None and stopped["last_checkpoint_step"] == stopped["global_step"]
    at_full_pace(task)
    code, output = cluster.up(*flags)
    summary = cluster.engine("Small").summary()
    assert code == 0 and summary is not None, output
    assert summary["resumed_from_step"] == stopped["global_step"]


def test_scale_goes_on_with_another_number_of_nodes(cluster: TestedCluster, task: str) -> None:
    flags = ("--nodes", "1", "--task", task, "--epochs", "40", "--args", SLOWLY)
    process = cluster.start(*flags)
    cluster.until(lambda: cluster.step() > 0, process, "first step")
    code, output = cluster.call("scale", "--nodes", "2")
    assert code == 0 and "1 nodes stopped, 2 started" in output, output
    at_full_pace(task)
    assert "there is no node 3 in" in cluster.call("shell", "--node", "3")[1]
    assert cluster.processes.wait(process, 60)[0] == 143, "who followed the first cluster hears of its stop"
    code, output = cluster.call("logs")
    summary = cluster.engine("Small").summary()
    assert code == 0 and "finished at step 400" in output, output
    assert summary is not None and summary["world_size"] == 2 and int(str(summary["resumed_from_step"])) > 0


def test_fewer_nodes_than_before_are_the_first_ones(cluster: TestedCluster, task: str) -> None:
    """Compose keeps any of the old containers, and node 0 may be missing then."""
    for nodes in ("3", "1"):
        code, output = cluster.up("--nodes", nodes, "--task", task, "--epochs", "1", "--run", f"of-{nodes}")
        assert code == 0, output
    assert [node.index for node in cluster.engine().nodes()] == [0]


def test_down_leaves_nothing_but_the_volumes_and_a_run_comes_out_of_them(
    cluster: TestedCluster, task: str, tmp_path: Path
) -> None:
    code, output = cluster.up("--nodes", "2", "--task", task, "--epochs", "1")
    assert code == 0, output
    assert cluster.call("ps")[1].count("exited with 0") == 2
    code, output = cluster.call("down")
    left = cluster.left()
    assert code == 0 and not left["containers"] and not left["networks"]
    assert sorted(left["volumes"]) == [
        f"{cluster.project}_{name}" for name in ("checkpoints", "data", "notes")
    ]
    assert f"VOLUMES=1 removes {cluster.project}_checkpoints" in output
    code, output = cluster.call("get", "--run", "Small", "--to", str(tmp_path / "out"), "--image", IMAGE)
    said = f"run Small of {cluster.project}_checkpoints is in {tmp_path}/out: "
    assert code == 0 and output.startswith(said)
    assert json.loads((tmp_path / "out/summary.json").read_text())["state"] == "finished"
    assert list((tmp_path / "out/checkpoints").glob("step-*/state.pt")) and (tmp_path / "out/log").is_dir()
    code, output = cluster.call("get", "--run", "other", "--image", IMAGE)
    assert code == 2 and f"is not in {cluster.project}_checkpoints; there are: Small; type: make " in output
    assert cluster.call("down", "--volumes", "1")[0] == 0
    assert not cluster.left()["volumes"]


@pytest.mark.soak
def test_a_rate_holds_every_node_also_after_a_restart(cluster: TestedCluster, task: str) -> None:
    flags = ("--nodes", "2", "--task", task, "--epochs", "60", "--args", SLOWLY)
    process = cluster.start(*flags, "--rate", "100mbit")
    cluster.until(lambda: cluster.step() > 0, process, "first step")
    engine = cluster.engine()

    def limits() -> list[str]:
        nodes = [f"container:{node.identity}" for node in engine.nodes()]
        return [engine.helper("tc", "qdisc", "show", options=["--network", name]) for name in nodes]

    assert all("tbf" in each and "rate 100Mbit" in each for each in limits())
    engine.helper("sh", "-c", f"kill -9 {engine.node(1).pid}", options=["--pid=host"])
    cluster.until(lambda: engine.node(1).starts == 2, process, "restart of node 1")
    cluster.until(lambda: "rate 100Mbit" in limits()[1], process, "limit on the restarted node")
    small = cluster.engine("Small")
    cluster.until(lambda: "resumed" in [e["kind"] for e in small.events()], process, "next world")
    process.terminate()
    assert cluster.processes.wait(process, 100)[0] == 143


@pytest.mark.parametrize(("flags", "line"), [
    (("--nodes", "0"), "NODES: invalid value '0'; expected an integer from 1 to 64: make compose-up NODES=2"),
    (("--nodes", "x"), "NODES: invalid value 'x'; expected an integer from 1 to 64: make compose-up NODES=2"),
    (("--nodes", "2", "--rate", "fast"), "RATE: invalid value 'fast'; expected a value such as RATE=100mbit"),
    (("--nodes", "2", "--loss", "1"), "LOSS: invalid value '1'; expected a value such as LOSS=1%"),
    (
        ("--nodes", "2", "--metrics-port", "0"),
        "METRICS_PORT: invalid value '0'; expected a port from 1 to 65535",
    ),
    (
        ("--task", "no.py:Task"),
        "TASK: invalid value 'no.py:Task'; file no.py does not exist; expected FILE.py:Class or digits",
    ),
    (("--script", "no.py"), "SCRIPT=no.py is not there; give the path of a Python script: SCRIPT=train.py"),
    (("--run", "../x"), "RUN: invalid value '../x'; expected letters, digits, dots and dashes"),
])  # fmt: skip
def test_what_cannot_be_is_one_line(cluster: TestedCluster, flags: tuple[str, ...], line: str) -> None:
    code, output = cluster.up(*flags)
    assert (code, output) == (2, f"tandem: {line}\n")
    assert not any(cluster.left().values())


def test_a_port_that_is_taken(cluster: TestedCluster) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", cluster.port))
        taken.listen()
        code, output = cluster.up("--nodes", "1")
    assert code == 2 and output == (
        f"tandem: port {cluster.port} of this host is taken (Address already in use); choose another: "
        f"make compose-up METRICS_PORT={cluster.port + 1}\n"
    )


@pytest.mark.soak
def test_a_volume_of_another_user(cluster: TestedCluster) -> None:
    volume = f"{cluster.project}_checkpoints"
    mine = ("--label", f"com.docker.compose.project={cluster.project}", "--label")
    docker("volume", "create", *mine, "com.docker.compose.volume=checkpoints", volume)
    foreign = "touch /v/file && chown -R 0:0 /v"  # an empty volume would take the image's owner when mounted
    docker("run", "--rm", "-u", "0", "-v", f"{volume}:/v", "--entrypoint", "sh", IMAGE, "-c", foreign)
    code, output = cluster.up("--nodes", "1")
    assert code == 2 and output.count("\n") == 1
    assert f"tandem: volume {volume} belongs to user 0, and tandem is user 10001; hand it over" in output
    subprocess.run(output.partition("hand it over: ")[2].split(), check=True, timeout=patient(60))
    assert cluster.up("--nodes", "1", "--args", "--steps 5")[0] == 0


def test_a_disk_that_is_nearly_full(cluster: TestedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.cluster import preflight
    from tandem.cluster.engine import ClusterError

    monkeypatch.setattr(preflight, "RUN_NEEDS_BYTES", 10**18)
    with pytest.raises(ClusterError, match="GB are free for checkpoints, 1000000000 are needed; make room"):
        preflight.check_volumes(cluster.engine())
    with pytest.raises(ClusterError, match=r"only 1\.5 GB are free where the engine .* needs 20; make room"):
        preflight.check_room_for_a_build(1_500_000_000)


def test_netem_or_a_refusal(cluster: TestedCluster) -> None:
    from tandem.cluster.network import has_netem

    code, output = cluster.up("--nodes", "1", "--latency", "5ms", "--args", "--steps 5")
    if has_netem(cluster.engine()):
        assert code == 0 and "5ms latency" in output
    else:
        assert code == 2 and output.startswith("tandem: LATENCY=5ms needs the kernel's netem, which")


@pytest.mark.soak
def test_a_cluster_that_runs_is_not_started_twice(cluster: TestedCluster, task: str) -> None:
    flags = ("--nodes", "1", "--task", task, "--epochs", "40", "--args", SLOWLY)
    process = cluster.start(*flags)
    cluster.until(lambda: cluster.step() > 0, process, "first step")
    code, output = cluster.up(*flags)
    assert code == 2 and output.startswith(f"tandem: cluster {cluster.project} is running (1 nodes); stop it")
    code, output = cluster.call("down")
    assert code == 0, output
    _, ended, down = output.splitlines()
    assert ended.startswith("ended with 143 (node 0 143): stopped at step ")
    assert "checkpoint of step " in ended
    assert down.startswith(f"cluster {cluster.project} is down; volumes kept")
    code, output = cluster.processes.wait(process, 60)
    assert (code, output.splitlines()[-1]) == (143, ended), "who followed it hears the same"
    assert not cluster.left()["containers"]


def test_the_code_of_a_container_that_was_removed_a_moment_ago(cluster: TestedCluster) -> None:
    """It said 137 for whatever had ended in the same second."""
    from tandem.cluster.engine import code_of_removed

    for code in (7, 143, 0):
        identity = docker("create", "--entrypoint", "sh", IMAGE, "-c", f"exit {code}").strip()
        created = docker("inspect", "--format", "{{.Created}}", identity).strip()
        docker("start", "--attach", identity, check=False)
        docker("rm", identity)
        assert code_of_removed(identity, created) == code
    assert code_of_removed("0" * 64, created) is None


def make(*arguments: str, **environ: str) -> tuple[int, str]:
    command = ["make", "--no-print-directory", *arguments]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, timeout=patient(60)
    )
    return ended.returncode, ended.stderr


def test_an_engine_that_does_not_run(require: Callable[..., None]) -> None:
    require("docker")
    code, errors = make("compose-up", DOCKER_HOST="unix:///nowhere/docker.sock")
    assert code == 2  # make's own code for any failure; the program's is in the line after
    line = errors.splitlines()[0]
    for part in ("unix:///nowhere/docker.sock", "systemctl start docker", "make docker-host"):
        assert part in line


@pytest.mark.parametrize(("version", "said"), [("echo 2.6.1", "2.6.1"), ("exit 1", "missing")])
def test_compose_that_is_too_old(tmp_path: Path, version: str, said: str) -> None:
    fake = tmp_path / "docker"
    fake.write_text(f'#!/bin/sh\n[ "$1" = version ] && exit 0\n{version}\n')
    fake.chmod(0o755)
    code, errors = make("compose-up", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert code == 2 and errors.startswith(f"tandem: docker compose is {said}; 2.24 or newer is needed")


def test_no_docker_at_all(tmp_path: Path) -> None:
    for name in ("make", "bash", "sh", "sed"):
        found = subprocess.run(["bash", "-c", f"command -v {name}"], capture_output=True, text=True)
        (tmp_path / name).symlink_to(found.stdout.strip())
    _, errors = make("compose-up", f"PYTHON={sys.executable}", PATH=str(tmp_path))
    assert errors.startswith("tandem: docker is not installed; on Debian: sudo make docker-host\n")
