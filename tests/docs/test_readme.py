"""README's commands, word for word, in its order, in a clone, on a machine that has little besides Python.

Each runs, says in one line what this machine lacks, or is on the list of those that only another test can
run. A command that README gets is on none, and fails until it is.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from patience import patient
from program_files import program_text

ROOT = Path(__file__).parents[2]
PROGRAM = r"(?:sudo )?(?:make|tandem|torchrun|srun|sbatch|kubectl|pip) \S.*"
ACTIVATE = ". .venv/bin/activate"

SETUP = "make setup"
AS_IT_IS = [
    SETUP,
    "make train NODES=2",
    "tandem verify-resume --nproc 2 --task examples/my_task.py:MyTask",
    "tandem check examples/my_task.py",
    "pip install .",
    "pip install '.[export]'",
]
"""These run with no setting but README's."""

SHORT = {
    "TANDEM_STEPS": "12",
    "TANDEM_METRICS": "0",
    "TANDEM_PROGRESS": "off",
    "TANDEM_METRICS_LINGER": "0",
}
SHORTENED = [
    "torchrun --nproc-per-node 2 -m tandem train --run-dir runs/digits",
    "tandem eval RUN",
    "tandem export RUN",
    "tandem runs",
    "tandem report runs/digits",
    "tandem launch --nodes 2 examples/my_task.py:MyTask --task.width 64",
    "tandem launch --nodes 2 train.py",
    "tandem launch --nodes 2 train.py --lr 0.1",
    "tandem init DIR",
]
"""These with SHORT; there is a train.py, RUN is runs/digits, DIR a new folder."""

BREAK, PAGE = "make train NODES=2 EPOCHS=50 RUN=runs/broken", "tandem page runs"
KILL, STOP = "tandem kill runs/broken --rank 1", "tandem kill runs/broken --rank 1 --signal STOP"
PLAYED = [BREAK, KILL, STOP, PAGE]
"""These go on until a person ends them, or are typed meanwhile."""

NO_ENGINE = "docker is not installed; on Debian: sudo make docker-host"
NO_KUBECTL = "kubectl is not installed; on Debian: sudo apt-get install kubernetes-client"
REFUSED = {
    "make compose-up NODES=2": NO_ENGINE,
    "tandem cluster up --nodes 2": NO_ENGINE,
    "tandem cluster up --nodes 2 --monitoring": NO_ENGINE,
    "tandem cluster chaos kill-node --node 1": NO_ENGINE,
    "tandem cluster get --run digits --to runs/copy": NO_ENGINE,
    "tandem cluster down": NO_ENGINE,
    "tandem k8s apply --kind trainjob --with gpu,kueue": NO_KUBECTL,
    "tandem k8s apply --kind job": NO_KUBECTL,
}
"""{what needs an engine or a cluster: what it says without}; tests of container/ and k8s/ run it with one."""

ELSEWHERE = {
    "tandem demo": "tests/multi/test_demo.py",  # and without torchvision in tests/docs/test_package.py
    "tandem launch": "tests/faults/test_hangup.py",
    "tandem launch --nodes 2 --node-rank 0 --master node1:29500 --run-dir runs/digits": (
        "tests/faults/test_nodes.py"
    ),
    "pip install tandem-train": "tests/docs/test_package.py",
    "pip install 'tandem-train[vision]'": "tests/docs/test_package.py",
    "make bench": "tests/benchmarks/test_tables.py",
    "make test": ".ci/run",
    "sudo make docker-host": "tests/unit/test_compose_files.py",
    "srun --ntasks-per-node=1 tandem launch --run-dir runs/digits": "tests/slurm/test_two_nodes.py",
    "sbatch slurm/train.sbatch --task digits": "tests/slurm/test_two_nodes.py",
    "kubectl apply -f k8s/pytorchjob.yaml": "tests/k8s/test_manifests.py",
}  # fmt: skip
"""{what needs other programs, several machines or minutes: the test that covers it}."""

SCRIPT = program_text("readme_script")


def commands() -> list[str]:
    """Every command of README, once, in its order: lines of code blocks, and code spans that are one."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^```[a-z]*\n(.*?)^```|`([^`\n]+)`", text, re.M | re.S)
    lines = [re.sub(r"\s+#.*", "", line).strip() for pair in found for line in "".join(pair).splitlines()]
    matches = [re.fullmatch(rf"(?:\$ )?({PROGRAM})", line) for line in lines]
    return list(dict.fromkeys(match[1] for match in matches if match))


def test_every_command_runs_here_or_in_a_test_that_is_named() -> None:
    assert sorted(commands()) == sorted([*AS_IT_IS, *SHORTENED, *PLAYED, *REFUSED, *ELSEWHERE])
    assert [path for path in ELSEWHERE.values() if not (ROOT / path).is_file()] == []


def test_each_measured_figure_is_in_the_section_that_its_row_links_to() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("\n## Measured\n")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    assert table[0].startswith("| measured |") and len(table) >= 8, table
    for row in table[2:]:
        match = re.match(r"\| \[.+\]\((docs/(?:reliability|benchmarks|compared)\.md)#([\w-]+)\) \|", row)
        assert match, f"no link to how this was taken: {row}"
        sections = (ROOT / match[1]).read_text(encoding="utf-8").split("\n## ")
        taken = [each for each in sections if anchor(each.partition("\n")[0]) == match[2]]
        assert len(taken) == 1, row
        figures = re.findall(r"\d+\.\d+", row.replace("(" + match[1], ""))
        assert figures or "100 bit-identical" in row, row
        assert [each for each in figures if each not in taken[0]] == [], row


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_package_is_told_by_its_name_and_with_all_its_extras() -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("Extras: ")]
    extras, _, rest = line.partition(". The package on PyPI is ")
    assert set(re.findall(r"`(\w+)`", extras)) == set(about["optional-dependencies"]) - {"dev"}
    assert rest.startswith(f"`{about['name']}`")


@pytest.mark.slow
def test_a_script_is_ported_in_ten_lines(processes: Any, free_port: int, tmp_path: Path) -> None:
    """Both sides of the diff run: one as torchrun starts it, one under tandem launch."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (diff,) = re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S)
    lines = [(line[:1] or " ", line[1:]) for line in diff.splitlines()]
    assert sum(sign == "+" for sign, _ in lines) == 10
    for name, other in (("before", "+"), ("after", "-")):
        script = "\n".join(line for sign, line in lines if sign != other)
        (tmp_path / f"{name}.py").write_text(script + "\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    before = processes.start([sys.executable, "before.py"], cwd=tmp_path, env=kept | place)
    words = ["--nproc", "2", "--metrics", "0", "--metrics-linger", "0", "--run-dir", "run", "after.py"]
    after = processes.start([sys.executable, "-m", "tandem", "launch", *words], cwd=tmp_path, env=kept)
    for process in (before, after):
        code, said = processes.wait(process)
        assert code == 0, said
    assert (tmp_path / "weights.pt").is_file()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["state"], summary["global_step"], summary["world_size"]) == ("finished", 200, 2)
    assert summary["last_checkpoint_step"] == 200 and summary["loss"] < 0.05


class Terminal:
    """A command that was typed, and what it has said so far."""

    def __init__(self, process: subprocess.Popen[str], output: Path) -> None:
        self.process, self._output = process, output

    @property
    def said(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def until(self, pattern: str, behind: int = 0) -> re.Match[str]:
        """Wait for a line, `behind` that many characters."""
        deadline = time.monotonic() + patient(400)
        while True:
            has_ended = self.process.poll() is not None
            if match := re.compile(pattern).search(self.said, behind):
                return match
            assert not has_ended and time.monotonic() < deadline, f"no {pattern!r} in\n{self.said}"
            time.sleep(0.2)

    def ctrl_c(self) -> int:
        """As a terminal does it: to all of the process group. The exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(timeout=patient(200))


class Machine:
    """A clone of this repository in `folder`, and a PATH of what every Debian has, git, make and python3."""

    def __init__(self, folder: Path, processes: Any) -> None:
        self._processes, self._outputs = processes, folder / "said"
        self.clone, programs = folder / "clone", folder / "bin"
        programs.mkdir()
        self._outputs.mkdir()
        for name, program in _programs().items():
            (programs / name).symlink_to(program)
        kept = r"(?i)HOME|LANG|(PIP|UV|SSL)_\w+|REQUESTS_CA_BUNDLE|\w+_PROXY"  # what leads to packages
        self._environment = {name: value for name, value in os.environ.items() if re.fullmatch(kept, name)}
        self._environment["PATH"] = str(programs)
        said = self.type(f"git clone --quiet {shlex.quote(str(ROOT))} clone", within=folder)
        assert said == (0, ""), said

    def start(self, command: str, within: Path | None = None, **settings: str) -> Terminal:
        """Type it into a new terminal, in which tandem is on the PATH as soon as there is a .venv."""
        folder = within or self.clone
        activate = f"{ACTIVATE}; " if (folder / ".venv").exists() else ""
        output = self._outputs / f"{len(list(self._outputs.iterdir()))}.txt"
        with output.open("w") as file:
            words = ["bash", "-c", f"{activate}exec {command}"]
            environment = {**self._environment, **settings}
            process = self._processes.start(words, cwd=folder, env=environment, stdout=file)
        return Terminal(process, output)

    def type(self, command: str, within: Path | None = None, **settings: str) -> tuple[int, str]:
        """Exit code and output of a command that ends."""
        terminal = self.start(command, within, **settings)
        try:
            return terminal.process.wait(timeout=patient(900)), terminal.said
        except subprocess.TimeoutExpired:
            pytest.fail(f"{command} did not end; its output:\n{terminal.said}", pytrace=False)


def _programs() -> dict[str, Path]:
    """{name: file} of Debian's packages of priority `required`, of git, make and this Python."""

    def query(*words: str) -> list[str]:
        return subprocess.check_output(words, text=True, timeout=patient(60)).splitlines()

    listed = [line.split() for line in query("dpkg-query", "-Wf", "${Priority} ${binary:Package}\n")]
    packages = [line[1] for line in listed if line[:1] == ["required"]]
    files = {Path(line) for line in query("dpkg-query", "-L", *packages)}
    found = {path.name: path for path in files if path.parent.name in ("bin", "sbin") and path.is_file()}
    real = {path.resolve() for path in found.values()}
    links = {path.name: path for path in Path("/etc/alternatives").iterdir() if path.resolve() in real}  # awk
    own = {name: Path(shutil.which(name) or name) for name in ("git", "make")}
    return {**links, **found, **own, "python3": Path(sys.base_prefix) / "bin" / "python3"}


@pytest.fixture
def machine(tmp_path: Path, processes: Any, require: Callable[..., None]) -> Iterator[Machine]:
    for program in ("dpkg-query", "git", "make"):
        require(program)
    require("checkout", (ROOT / ".git").exists(), "there is nothing to clone")
    made = Machine(tmp_path, processes)
    yield made
    processes.end()
    shutil.rmtree(made.clone)  # it has gigabytes


def inject_fault(machine: Machine) -> None:
    """A rank is killed, and one is stopped; Ctrl-C saves, and the same command goes on from there."""
    training = machine.start(BREAK)
    page = training.until(r"live page at (http://\S+)/,")[1]
    training.until(r"step \d+ of 12,500")
    with urllib.request.urlopen(f"{page}/", timeout=patient(30)) as answer:
        assert answer.status == 200 and b"<html" in answer.read()
    code, said = machine.type(KILL)
    assert code == 0 and "SIGKILL" in said, said
    line = r"rank 1 on node 1 was killed \(SIGKILL\); training again after [\d.]+ \w+, \d+ steps? lost"
    behind = training.until(line).end()
    behind = training.until(r"step [\d,]+ of 12,500", behind).end()
    assert machine.type(STOP)[0] == 0
    line = r"hang: rank 1 on node 1 \(.+\) .+ for [\d.]+ s \(phase .+, step \d+\)"
    behind = training.until(line, behind).end()
    training.until(r"step [\d,]+ of 12,500", behind)
    assert training.ctrl_c() != 0
    line = r"^  checkpoint +step ([\d,]+) in runs/broken/checkpoints; to resume: "
    (saved,) = re.findall(line, training.said, re.M)
    again = machine.start(BREAK)
    again.until(f"steps {saved} to 12,500, 250 per epoch; resumed from step {saved}")
    again.until(r"step [\d,]+ of 12,500 ")
    assert again.ctrl_c() != 0


def look_at_the_page(machine: Machine) -> None:
    serving = machine.start(PAGE)
    url = serving.until(r"(http://\S+) \(Ctrl-C ends it\)")[1]
    with urllib.request.urlopen(url, timeout=patient(60)) as answer:
        assert answer.status == 200 and b'"name": "digits"' in answer.read()
    assert serving.ctrl_c() == 0, serving.said


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_commands_run_word_for_word(machine: Machine) -> None:
    """SHORT makes most runs short; what they leave behind is what README says."""
    (machine.clone / "train.py").write_text(SCRIPT)
    said = {}
    for command in sorted(commands(), key=lambda each: each != SETUP):  # README: until tandem is on PyPI
        if command in (BREAK, PAGE):
            {BREAK: inject_fault, PAGE: look_at_the_page}[command](machine)
        elif command in REFUSED:
            code, output = machine.type(command)
            lines = [line for line in output.splitlines() if not line.startswith("make: ***")]
            assert code != 0 and len(lines) == 1 and REFUSED[command] in lines[0], f"{command}\n{output}"
        elif command in (*AS_IT_IS, *SHORTENED):
            words = command.replace(" RUN", " runs/digits").replace(" DIR", " project")
            code, said[command] = machine.type(words, **(SHORT if command in SHORTENED else {}))
            assert code == 0, f"{command}\n{said[command]}"
    assert ACTIVATE in (machine.clone / "README.md").read_text(encoding="utf-8")
    assert "finished at step 1,000" in said["make train NODES=2"]
    assert "already finished at step 1,000" in said[SHORTENED[0]], "torchrun, on the same run"
    assert "accuracy" in said["tandem eval RUN"]
    assert re.search(r"^digits +finished +1,000 ", said["tandem runs"], re.M), said["tandem runs"]
    assert "the sum is 0.2" in said["tandem launch --nodes 2 train.py --lr 0.1"]
    assert said["tandem check examples/my_task.py"].endswith("verdict: sound\n")
    assert "verdict: exact" in said[AS_IT_IS[2]]
    assert (machine.clone / "runs" / "digits" / "report.html").is_file()
    assert list(machine.clone.glob("*.safetensors")) and (machine.clone / "project" / "task.py").is_file()
