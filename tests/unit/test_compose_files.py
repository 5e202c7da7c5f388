"""What image and cluster are described by, without an engine: locks, variables, commands, help."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "docker")]

from cpu_lock import cpu_lock  # noqa: E402

from patience import patient  # noqa: E402
from tandem.cluster import actions, command_line, engine, faults, preflight  # noqa: E402
from tandem.cluster import actions as cluster  # noqa: E402
from tandem.cluster.network import LinkShape  # noqa: E402

# The cluster decides these itself: places, ports, folders, and the grace period that Compose has to exceed.
DECIDED = {
    **{"TANDEM_COMPOSE_PROJECT": "tandem", "TANDEM_COMPOSE_NODES": "2", "TANDEM_STATE_DIR": "/run/tandem"},
    **{"TANDEM_DATA_DIR": "/data", "TANDEM_RUN_DIR": "/checkpoints/digits"},
    "TANDEM_METRICS": "0.0.0.0:19469",
}
NOT_HANDED_ON = "NODES NODE_RANK MASTER METRICS SHUTDOWN_TIMEOUT".split()


@pytest.fixture
def given_to_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, require: Callable[..., None]
) -> Callable[..., dict[str, str]]:
    """The TANDEM_ variables and others of a node by Compose's own account, for a text of .env and a shell."""
    require("docker")
    compose = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    require("docker", compose.returncode == 0, "no compose plugin; type: sudo make docker-host")
    for name in [name for name in os.environ if name.startswith("TANDEM_")]:
        monkeypatch.delenv(name)
    (tmp_path / "compose").mkdir()
    shutil.copy(ROOT / "compose" / "compose.yaml", tmp_path / "compose")
    monkeypatch.setattr(engine, "ROOT", tmp_path)
    monkeypatch.setattr(engine, "HERE", tmp_path / "compose")

    def given(dotenv: str, shell: dict[str, str], **options: str) -> dict[str, str]:
        (tmp_path / ".env").write_text(dotenv)
        for name, value in shell.items():
            monkeypatch.setenv(name, value)
        words = ["up", "--nodes", "2", *(f"--{name}={value}" for name, value in options.items())]
        variables = cluster.variables_of(command_line.parsed(words), 2, 19469)
        said = json.loads(engine.Cluster("tandem", variables).compose("config", "--format", "json"))
        found = said["services"]["node"]["environment"]
        return {name: value.replace("$$", "$") for name, value in found.items() if value}

    return given


def test_what_somebody_gave_reaches_the_containers_and_nothing_else(given_to_a_node: Any) -> None:
    dotenv = "TANDEM_EPOCHS=3\nTANDEM_LR=0.5\nPASSWORD=x\nexport TANDEM_THREADS = '4'\n#TANDEM_SEED=1\n"
    shell = {"TANDEM_LR": "0.1", "TANDEM_TASK__NAME": 'it\'s $HOME "x"', "OTHER": "x"}
    shell |= {f"TANDEM_{name}": "7" for name in NOT_HANDED_ON} | {"TANDEM_RUN_DIR": "runs/here"}
    assert given_to_a_node(dotenv, shell) == {
        **DECIDED,
        "TANDEM_EPOCHS": "3",
        "TANDEM_LR": "0.1",
        "TANDEM_TASK": "digits",
        "TANDEM_TASK__NAME": 'it\'s $HOME "x"',
        "TANDEM_THREADS": "4",
    }
    assert "stop_grace_period: 40s" in (ROOT / "compose" / "compose.yaml").read_text(encoding="utf-8")


def test_the_command_for_gpus_merges_with_the_included_files(require: Callable[..., None]) -> None:
    """compose.yaml includes its services; a second -f adds devices to one of them."""
    require("docker")
    compose = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    require("docker", compose.returncode == 0, "no compose plugin; type: sudo make docker-host")
    command = "GPUS=1 docker compose -f compose.yaml -f compose/gpu.yaml up"
    for file in ("compose.yaml", "docs/cluster-on-a-laptop.md"):
        assert command in (ROOT / file).read_text(encoding="utf-8"), file
    asked = ["bash", "-c", command.removesuffix("up") + "config --format json"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    assert set(services) == {"node", "job", "metrics"}
    (device,) = services["node"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert services["node"]["environment"]["TANDEM_COMPOSE_GPUS"] == "1"


def test_the_task_of_dotenv_is_trained_unless_another_is_asked_for(given_to_a_node: Any) -> None:
    asked = given_to_a_node("TANDEM_TASK='mnist'\n", {}, epochs="2")
    assert (asked["TANDEM_TASK"], asked["TANDEM_EPOCHS"]) == ("mnist", "2")
    assert asked["TANDEM_RUN_DIR"] == "/checkpoints/mnist"
    assert given_to_a_node("TANDEM_TASK=mnist\n", {}, task="digits")["TANDEM_TASK"] == "digits"


def test_the_job_secret_is_a_file_and_in_no_variable_or_label(
    given_to_a_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = "of the shell, of this job"
    monkeypatch.setattr(actions, "ROOT", tmp_path)
    given = given_to_a_node("TANDEM_JOB_SECRET=of the file .env alone\n", {"TANDEM_JOB_SECRET": word})
    assert "TANDEM_JOB_SECRET" not in given and "TANDEM_JOB_SECRET_FILE" not in given, "none was made"
    own = {**variables(), "SECRET_FILE": str(actions.make_secret("own", dict(os.environ)))}
    said = engine.Cluster("own", own).compose("config", "--format", "json")
    node = json.loads(said)["services"]["node"]
    assert node["environment"]["TANDEM_JOB_SECRET_FILE"] == "/run/secrets/job"
    assert node["secrets"] == [{"source": "job", "target": node["secrets"][0].get("target", "job")}]
    assert word not in said and ".env alone" not in said
    path = actions.secret_path("own")
    assert path.read_text() == word
    assert path.stat().st_mode & 0o777 == 0o444 and path.parent.stat().st_mode & 0o777 == 0o700
    before = actions.make_secret("own", {}).read_text()
    assert len(before) == 64 and actions.make_secret("own", {}).read_text() != before
    actions.remove_secret("own")
    assert not path.exists()


@pytest.mark.parametrize(("cpus", "gpus", "nodes", "threads"), [
    ("", "", 2, "4"), ("", "", 16, "1"), ("", "2", 2, "2"), ("", "all", 2, "4"),
    ("1", "", 2, "auto"), ("4", "", 2, "auto"), ("0.5", "2", 2, "auto"),  # the rank reads its quota
    ("8", "", 2, "4"), ("0", "", 2, "4"),  # four cores for each, whatever a node may take of eight
])  # fmt: skip
def test_threads_of_a_rank_are_a_share_of_the_host_or_its_nodes_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpus: str, gpus: str, nodes: int, threads: str
) -> None:
    monkeypatch.setattr(engine, "ROOT", tmp_path)
    monkeypatch.setattr(cluster.os, "cpu_count", lambda: 8)
    monkeypatch.delenv("TANDEM_THREADS", raising=False)
    for by_dotenv in (False, True):
        monkeypatch.setenv("CPUS", "" if by_dotenv else cpus)
        (tmp_path / ".env").write_text(f"CPUS={cpus}\n" if by_dotenv else "")
        options = command_line.parsed(["up", "--gpus", gpus])
        assert cluster.variables_of(options, nodes, 19469)["TANDEM_THREADS"] == threads
    monkeypatch.setenv("TANDEM_THREADS", "3")
    assert cluster.variables_of(options, nodes, 19469)["TANDEM_THREADS"] == "3"


def test_cpus_that_are_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_THREADS", raising=False)
    monkeypatch.setenv("CPUS", "two")
    with pytest.raises(engine.ClusterError, match="^CPUS: invalid value 'two'; .*make compose-up CPUS=2$"):
        variables()


def test_scale_counts_threads_anew_and_keeps_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.os, "cpu_count", lambda: 8)
    for name in ("TANDEM_THREADS", "CPUS", "MEMORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHM_SIZE", "2gb")
    started: list[engine.Cluster] = []
    for where, name in ((cluster.ClusterJob, "stop"), (cluster, "remove_metrics"), (cluster, "keep_shape")):
        monkeypatch.setattr(where, name, lambda *_: None)
    monkeypatch.setattr(cluster, "start", started.append)
    monkeypatch.setattr(cluster, "make_secret", lambda *_: Path("/secret"))
    monkeypatch.setattr(engine.Cluster, "nodes", lambda self: [])

    def scaled(nodes: str) -> dict[str, str]:
        there = engine.Cluster("own", cluster.variables_of(command_line.parsed(["up"]), 1, 19469))
        monkeypatch.setattr(engine.Cluster, "found", lambda project: there)
        cluster.scale(command_line.parsed(["scale", "--nodes", nodes]))
        return dict(started[-1].variables)

    found = scaled("4")
    assert (found["TANDEM_THREADS"], found["NODES"], found["SHM_SIZE"]) == ("2", "4", "2gb")
    monkeypatch.setenv("CPUS", "1")
    assert scaled("4")["TANDEM_THREADS"] == "auto"
    monkeypatch.setenv("TANDEM_THREADS", "3")
    assert scaled("4")["TANDEM_THREADS"] == "3"


def test_spares_are_replicas_beyond_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.os, "cpu_count", lambda: 8)
    for name in ("TANDEM_THREADS", "CPUS"):
        monkeypatch.delenv(name, raising=False)
    found = cluster.variables_of(command_line.parsed(["up", "--spares", "1"]), 2, 19469)
    assert (found["NODES"], found["TANDEM_SPARES"]) == ("3", "1")
    assert found["TANDEM_THREADS"] == "4", "a spare needs no cores"


@pytest.mark.parametrize("name", ["TOKEN", "API_KEY", "DB_PASSWORD", "CLIENT_SECRET"])
def test_what_is_called_a_secret_is_in_no_label(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"TANDEM_TASK__{name}", "correct-horse")
    monkeypatch.setenv("TANDEM_TASK__WIDTH", "64")
    label = engine.Cluster("own", variables()).environment()["VARIABLES"]
    assert json.loads(label)["TANDEM_TASK__WIDTH"] == "64" and "correct-horse" not in label


def test_what_is_called_a_secret_reaches_the_nodes(given_to_a_node: Any) -> None:
    given = {"TANDEM_TASK__TOKEN": "correct-horse"}
    assert given_to_a_node("", given).items() >= given.items()


def variables(*words: str) -> dict[str, str]:
    """What compose.yaml reads for `cluster.py up` with these options."""
    options = command_line.parsed(["up", *words])
    return cluster.variables_of(options, 2, 19469)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script in a folder that the containers' user may read."""
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    (tmp_path / "train it.py").write_text("print(1)\n")
    return "train it.py"


def test_a_script_is_mounted_with_its_folder_and_works_in_the_runs(script: str, tmp_path: Path) -> None:
    words = ["--script", script, "--script-args=--name 'a b' x", "--args=--fresh-interpreter"]
    found = variables(*words)
    assert found["COMMAND"] == "launch --fresh-interpreter '/script/train it.py' --name 'a b' x"
    assert (found["TASKS"], found["TASKS_AT"]) == (str(tmp_path.resolve()), "/script")
    assert (found["RUN"], found["WORKING_DIR"]) == ("train-it", "/checkpoints/train-it")
    assert "TANDEM_TASK" not in found
    assert variables(*words, "--run", "mine")["WORKING_DIR"] == "/checkpoints/mine"


def test_a_scripts_folder_is_private(script: str, tmp_path: Path) -> None:
    """It is made before the run begins, as the folder that its containers start in."""
    found, mode = variables("--script", script), 0o700
    volume = tmp_path / "checkpoints"
    volume.mkdir()
    look = preflight.LOOK_AT_VOLUMES.replace('"/checkpoints"', repr(str(volume))).replace('"/data"', "'/tmp'")
    folder = volume / Path(found["WORKING_DIR"]).name
    for _ in range(2):
        command = [sys.executable, "-", str(folder)]
        subprocess.run(command, input=look, text=True, check=True, capture_output=True, timeout=patient(60))
        assert folder.stat().st_mode & 0o7777 == mode
        folder.chmod(mode := 0o711)  # what is there is left as it is


def test_a_node_of_a_script(given_to_a_node: Any, script: str) -> None:
    given = given_to_a_node("TANDEM_TASK=mnist\nTANDEM_LR=0.5\n", {}, script=script)
    assert given["TANDEM_RUN_DIR"] == "/checkpoints/train-it" and given["TANDEM_LR"] == "0.5"


@pytest.mark.parametrize(("words", "line"), [
    (["--script", "no.py"], "SCRIPT=no.py is not there; give the path of a Python script: SCRIPT=train.py"),
    (["--script", "."], "SCRIPT=. is a directory; give the path of a Python script: SCRIPT=train.py"),
    (["--script", "broken.py"], "SCRIPT: broken.py, line 1 is not Python: invalid syntax"),
    (["--script", "own.py"], "SCRIPT=own.py: user 10001 of the containers may not read {here}/own.py; "
                             "allow it: chmod o+r {here}/own.py"),
    (["--script", "closed/x.py"], "SCRIPT=closed/x.py: user 10001 of the containers may not read "
                                  "{here}/closed; allow it: chmod o+rx {here}/closed"),
    (["--script", "train it.py", "--task", "mnist"],
     "SCRIPT=train it.py and TASK=mnist: choose one: a script has no task"),
    (["--script-args=--lr 1"],
     "SCRIPT_ARGS are a script's, and there is none; give SCRIPT=train.py, or ARGS"),
    (["--script", "train it.py", "--script-args=a 'b"], "SCRIPT_ARGS=a 'b: no closing quotation; words are "
                                                        "split as a shell does"),
    (["--args=a 'b"], "ARGS=a 'b: no closing quotation; words are split as a shell does"),
])  # fmt: skip
def test_a_script_that_cannot_be_is_one_line(script: str, words: list[str], line: str) -> None:
    here = Path.cwd()
    (here / "broken.py").write_text("if\n")
    (here / "own.py").write_text("x = 1\n")
    (here / "own.py").chmod(0o600)
    (here / "closed").mkdir(mode=0o700)
    (here / "closed/x.py").write_text("x = 1\n")
    with pytest.raises(engine.ClusterError) as error:
        variables(*words)
    assert str(error.value) == line.format(here=here)


@pytest.mark.parametrize(("words", "options"), [
    (["SCRIPT=a.py", "SCRIPT_ARGS=--name 'a b'"],
     {"script": "a.py", "script_args": "--name 'a b'", "task": ""}),
    (["TASK=mnist", "ARGS=--compile"], {"script": "", "task": "mnist", "args": "--compile"}),
    ([], {"script": "", "task": "", "args": ""}),  # TANDEM_TASK of .env counts
])  # fmt: skip
def test_what_make_hands_on(words: list[str], options: dict[str, str]) -> None:
    """`echo` in the place of Python prints the words that the shell has made of the line."""
    command = ["make", "--no-print-directory", "compose-up", 'PYTHON=printf "%s\\n"', *words]
    said = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=patient(30), check=True
    ).stdout
    found = vars(command_line.parsed(said.split("\n")[2:-1]))
    assert {name: found[name] for name in options} == options


def test_the_cpu_lock_is_the_other_without_cuda() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    cpu = (ROOT / "requirements-cpu.lock").read_text(encoding="utf-8")
    assert cpu == cpu_lock(lock)
    names = [line.partition("==")[0] for line in cpu.splitlines() if line[:1].isalpha()]
    assert {"numpy", "pillow", "prometheus-client", "pydantic", "sympy"} <= set(names)
    assert not [name for name in names if name.startswith(("torch", "nvidia", "cuda", "triton"))]
    assert all("--hash=sha256:" in entry for entry in cpu.split("\n\n"))


@pytest.mark.parametrize(("shape", "commands"), [
    (LinkShape("100mbit"),
     ["qdisc replace dev eth0 root handle 1: tbf rate 100mbit burst 256kb latency 400ms"]),
    (LinkShape("", "20ms", "1%"), ["qdisc replace dev eth0 root handle 1: netem delay 20ms loss 1%"]),
    (LinkShape("1gbit", "5ms"), [
        "qdisc replace dev eth0 root handle 1: netem delay 5ms",
        "qdisc replace dev eth0 parent 1: handle 2: tbf rate 1gbit burst 256kb latency 400ms",
    ]),
])  # fmt: skip
def test_what_tc_is_told(shape: LinkShape, commands: list[str]) -> None:
    shape.check()
    assert shape.commands() == commands


@pytest.mark.parametrize(("shape", "line"), [
    (LinkShape("100"), "RATE: invalid value '100'; expected a value such as RATE=100mbit"),
    (LinkShape("", "20"), "LATENCY: invalid value '20'; expected a value such as LATENCY=20ms"),
    (LinkShape("", "", "1;ls"), "LOSS: invalid value '1;ls'; expected a value such as LOSS=1%"),
])  # fmt: skip
def test_what_tc_would_not_take(shape: LinkShape, line: str) -> None:
    with pytest.raises(engine.ClusterError) as error:
        shape.check()
    assert str(error.value) == line


def test_the_forwarder_hands_on_and_survives_a_target_that_is_gone(free_port: int, processes: Any) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x" * 300_000)

        def log_message(self, *_: object) -> None:
            """Silent."""

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    target = f"127.0.0.1:{server.server_port}"
    process = processes.start([sys.executable, str(ROOT / "compose" / "forward.py"), str(free_port), target])

    def get() -> int:
        with urlopen(f"http://127.0.0.1:{free_port}/", timeout=2) as answer:
            return len(answer.read())

    def answers(wanted: bool) -> bool:
        for _ in range(100):
            try:
                if (get() == 300_000) is wanted:
                    return True
            except OSError:
                if not wanted:
                    return True
            threading.Event().wait(0.1)
        return False

    assert answers(True)
    server.shutdown()
    server.server_close()
    assert answers(False)
    assert process.poll() is None
    process.terminate()
    assert processes.wait(process, 10)[0] == 0


def test_make_gives_tandem_no_variable_that_it_does_not_know() -> None:
    """A TANDEM_ variable that make exports for itself would be a typo to the program that it starts."""
    shown = ["make", "--no-print-directory", "--eval", "shown: ; @env", "shown"]
    ended = subprocess.run(shown, cwd=ROOT, capture_output=True, text=True, timeout=patient(30))
    assert ended.returncode == 0, ended.stderr
    names = {line.partition("=")[0] for line in ended.stdout.splitlines() if line.startswith("TANDEM_")}
    assert names <= set(os.environ)


def test_help_lists_every_target_that_has_a_text() -> None:
    said = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patient(30),
    ).stdout
    targets = "setup image image-size sbom docker-host compose-up compose-scale compose-get chaos"
    for target in targets.split():
        assert f"  make {target} " in said


def test_a_build_of_torch_that_there_is_not() -> None:
    ended = subprocess.run(
        ["make", "--no-print-directory", "image", "TORCH=tpu"],
        cwd=ROOT, capture_output=True, text=True, timeout=patient(30),
    )  # fmt: skip
    assert ended.returncode == 2 and ended.stderr.startswith("make: TORCH: invalid value 'tpu'; ")


def test_only_root_prepares_a_host() -> None:
    command = [sys.executable, str(ROOT / "docker" / "host.py")]
    if os.geteuid() == 0:
        command = ["setpriv", "--reuid", "10001", "--clear-groups", "python3", "-"]
    ended = subprocess.run(
        command, input=(ROOT / "docker" / "host.py").read_text(), capture_output=True, text=True,
        timeout=patient(30), cwd="/", env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    line = "tandem: preparing this machine needs root; type: sudo make docker-host\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", line)


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "all of them"])
def test_gpus_of_a_node_are_a_number_or_all(text: str) -> None:
    preflight.check_gpus("")
    preflight.check_gpus("all")
    preflight.check_gpus("2")
    with pytest.raises(engine.ClusterError, match=f"^GPUS: invalid value '{text}'"):
        preflight.check_gpus(text)


@pytest.mark.parametrize(
    ("refusal", "tries"), [("OCI runtime pause failed: unable to freeze", 3), ("No such container", 1)]
)
def test_a_freeze_that_a_busy_host_refuses_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str, tries: int
) -> None:
    program = tmp_path / "docker"
    tried = tmp_path / "tries"
    text = f'echo >>{tried}; [ "$(wc -l <{tried})" = 3 ] || {{ echo "{refusal}" >&2; exit 1; }}'
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(faults.time, "sleep", lambda seconds: None)
    if tries == 3:
        faults.freeze("node")
    else:
        with pytest.raises(engine.ClusterError, match=refusal):
            faults.freeze("node")
    assert len(tried.read_text()) == tries


class Told(engine.Cluster):
    """A cluster whose events the test says; `inside` answers what the program would have printed."""

    told: list[dict[str, object]] = []

    def events(self) -> list[dict[str, object]]:
        return self.told

    def inside(self, node: engine.Node, program: str, *arguments: str, check: bool = True) -> str:
        assert (node.index, arguments) == (1, (str(int(signal.SIGSTOP)),))
        return "rank-3\n"


def test_chaos_reads_events_on_when_their_file_is_put_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    files: dict[str, list[dict[str, object]]] = {"events.jsonl": [{"kind": "world", "number": 1}]}

    def read(self: engine.Cluster, path: str) -> str | None:
        lines = files.get(Path(path).name)
        return None if lines is None else "".join(f"{json.dumps(each)}\n" for each in lines)

    monkeypatch.setattr(engine.Cluster, "read", read)
    there = engine.Cluster("n", {"RUN": "train"})
    before = there.events()[-1]
    node = engine.Node(1, "n-node-2", "id", "running", 0, 1, 1, "", "")
    context = faults.FaultContext(there, node, 40, before, 1)
    assert context.continued()
    files["events.jsonl"].append({"kind": "world", "number": 2})
    files["events.jsonl.1"], files["events.jsonl"] = files["events.jsonl"], [{"kind": "counted"}]
    files["events.jsonl"].append({"kind": "resumed", "step": 41})
    assert context.since("world") == [{"kind": "world", "number": 2}] and context.resumed() == 41
    files["events.jsonl.1"], files["events.jsonl"] = files["events.jsonl"], [{"kind": "counted"}]
    assert context.resumed() == 41, "what the context knows is gone: all that is left is newer"


def test_a_rank_that_hangs_has_to_be_named_before_the_next_generation_counts() -> None:
    there = Told("n", {})
    there.told = [{"kind": "hang", "rank": 0, "node": 0, "seconds": 9.0}]
    context = faults.FaultContext(
        there, engine.Node(1, "n-node-2", "id", "running", 0, 1, 1, "", ""), 40, there.told[0], 1
    )
    fault = faults.FAULTS["hang"]
    assert fault.inject(context) == "stopped rank-3 on node 1 in its tracks" and fault.needs_new_generation
    assert fault.check(context) is None, "a hang before the fault is none of it"
    resumed = {"kind": "resumed", "step": 41}
    there.told.append(resumed)
    assert fault.check(context) is None, "no rank was reported"
    there.told.insert(1, {"kind": "hang", "rank": 3, "node": 1, "seconds": 10.24})
    assert fault.check(context) == "it was reported after 10.2 s, the next generation resumed from step 41"
    there.told[1] = {"kind": "hang", "rank": 2, "node": 0, "seconds": 10.24}
    with pytest.raises(engine.ClusterError, match="rank 2 on node 0 was reported, but rank 3 on node 1 was"):
        fault.check(context)
