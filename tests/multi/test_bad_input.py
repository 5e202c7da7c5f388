"""What a user can get wrong: the real program, its exit code, and one line that says what to do."""

import json
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tandem.data.datasets import NAMES, write_idx

LIMIT_SECONDS = 60.0
ERROR_LINE = re.compile(r"(\btandem: |\berror: )")

# Whatever would tell the program that it runs on a platform, or change what it trains.
FOREIGN = re.compile(
    r"TANDEM_|PET_|SLURM_|OMPI_|TORCHELASTIC_|JOB_COMPLETION_INDEX|JOBSET|KUBERNETES_|GROUP_RANK|PYTHONPATH"
    r"|RANK$|LOCAL_|WORLD_SIZE|MASTER_|NNODES|NODE_RANK|CUDA_VISIBLE_DEVICES$"
)

Tandem = Callable[..., tuple[int, str]]

WIDE_TASK = """
import torch
from torch import nn
from tandem.data.datasets import Datasets, TensorRows

WIDTH = {width}

class Wide:
    def build_model(self):
        return nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def build_datasets(self):
        rows = TensorRows(torch.ones(40, 4), torch.ones(40, 1))
        return Datasets(rows, rows)

    def loss(self, model, batch):
        rows, targets = batch
        return nn.functional.mse_loss(model(rows), targets)
"""


@pytest.fixture
def run_tandem(processes: Any, tmp_path: Path) -> Tandem:
    """Runs `tandem ARGUMENTS` in `tmp_path`: exit code, and stdout with stderr."""

    def run(*arguments: str, limit: float = LIMIT_SECONDS, **variables: str) -> tuple[int, str]:
        kept = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
        own = {"PYTHONPATH": str(Path(tandem.__file__).parents[1])}
        command = [sys.executable, "-m", "tandem", *arguments]
        code, output = processes.run(command, limit, cwd=tmp_path, env={**kept, **own, **variables})
        assert "Traceback" not in output, output
        return int(code), str(output)

    return run


def the_error(output: str) -> str:
    """The one line that says what is wrong."""
    lines = [line for line in output.splitlines() if ERROR_LINE.search(line)]
    assert len(lines) == 1, f"{len(lines)} error lines in:\n{output}"
    return lines[0]


def contents(directory: Path) -> Mapping[str, tuple[bytes, int]]:
    """Every file below `directory` with its bytes and the time of its last change."""
    return {
        str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def write_mnist(folder: Path, train: int = 64, evaluation: int = 32) -> None:
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for names, count in ((NAMES[:2], train), (NAMES[2:], evaluation)):
        pictures = torch.randint(0, 256, (count, 28, 28), dtype=torch.uint8, generator=generator)
        write_idx(folder / names[0], pictures)
        write_idx(folder / names[1], torch.arange(count).remainder(10).to(torch.uint8))


TASK = str(Path(__file__).parents[1] / "fixtures" / "binary.py")
BINARY = ("--task", TASK, "--batch-size", "20", "--device", "cpu", "--metrics", "0")

FLAG_CASES = {
    "unknown-task": (["--task", "digit"], ["'digit'", "did you mean digits?"]),
    "task-file-syntax": (["--task", "broken.py:Mine"], ["broken.py", "SyntaxError", "line 1"]),
    "task-class-missing-on-two-nodes": (["--nodes", "2", "--task", "wide.py:Wyde"], ["'Wyde'", "Wide"]),
    "unknown-flag": (["--epoch", "3"], ["--epoch;", "did you mean --epochs?"]),
    "batch-larger-than-the-set": (["--task", TASK, "--batch-size", "101"], ["101", "--batch-size 100"]),
    "run-dir-below-a-file": ([*BINARY, "--run-dir", "file/run"], ["file/run", "--run-dir"]),
    "run-dir-that-is-a-file": ([*BINARY, "--run-dir", "file", "--nodes", "2"], ["file: Not a dir"]),
}


# Each is the whole program; unit/test_tasks.py has more, of the parser alone.
LONG = {"task-file-syntax", "task-class-missing-on-two-nodes"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.soak if case in LONG else ()) for case in FLAG_CASES]
)
def test_wrong_flags_exit_2_with_one_line(case: str, run_tandem: Tandem, tmp_path: Path) -> None:
    arguments, expected = FLAG_CASES[case]
    (tmp_path / "broken.py").write_text("class Mine(:\n")
    (tmp_path / "wide.py").write_text(WIDE_TASK.format(width=3))
    (tmp_path / "file").write_text("not a directory")
    code, output = run_tandem("launch", "--metrics", "0", *arguments)
    line = the_error(output)
    assert code == 2, output
    assert [part for part in expected if part not in line] == [], line
    if "task" in case:
        assert not (tmp_path / "runs").exists(), "a run that is none"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_task_file_without_read_permission_exits_2(run_tandem: Tandem, tmp_path: Path) -> None:
    (tmp_path / "secret.py").write_text(WIDE_TASK.format(width=3))
    (tmp_path / "secret.py").chmod(0)
    code, output = run_tandem("launch", "--task", "secret.py:Wide", "--metrics", "0")
    assert code == 2, output
    assert "secret.py" in the_error(output)


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_mistake_in_the_task_comes_without_the_header_of_a_run(
    nodes: str, run_tandem: Tandem, tmp_path: Path
) -> None:
    (tmp_path / "lacks.py").write_text("class Lacks:\n    def build_model(self): ...\n")
    flags = ["--nodes", nodes, "--task", "lacks.py:Lacks", "--metrics", "0", "--run-dir", "run"]
    code, output = run_tandem("launch", *flags)
    assert code == 2 and "build_datasets" in the_error(output), output
    assert not re.search("^(run|checkpoints|logs) ", output, re.M) and not (tmp_path / "run").exists(), output


def test_an_unknown_variable_names_the_nearest(run_tandem: Tandem) -> None:
    code, output = run_tandem("launch", TANDEM_EPOCH="3")
    assert code == 2, output
    assert "TANDEM_EPOCHS" in the_error(output)


@pytest.mark.multi
def test_a_batch_that_does_not_divide_names_two_that_do(run_tandem: Tandem, tmp_path: Path) -> None:
    code, output = run_tandem(
        "launch", "--nodes", "2", "--task", TASK, "--task.samples", "300", "--batch-size", "241",
        "--steps", "2", "--device", "cpu", "--metrics", "0", "--run-dir", "run",
    )  # fmt: skip
    assert code == 2, output
    line = the_error(output)
    assert "240" in line and "242" in line, line
    assert not list(tmp_path.glob("run/checkpoints/step-*"))


@pytest.mark.soak
def test_a_busy_metrics_port_is_only_a_warning(run_tandem: Tandem, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        code, output = run_tandem("launch", *BINARY[:-1], port, "--steps", "5", "--run-dir", "run")
    assert code == 0, output
    warnings = [line for line in output.splitlines() if "warning" in line and port in line]
    assert len(warnings) == 1, output
    assert not ERROR_LINE.search(output), output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["global_step"] == 5


@pytest.mark.parametrize(
    ("verb", "variables"),
    [
        ("launch", {"RANK": "0"}),
        ("train", {"MASTER_ADDR": "127.0.0.1"}),
        ("launch", {"WORLD_SIZE": "2"}),
        ("train", {"RANK": "1", "WORLD_SIZE": "2"}),
    ],
)
def test_half_of_a_distributed_environment_exits_2(
    verb: str, variables: dict[str, str], run_tandem: Tandem
) -> None:
    code, output = run_tandem(verb, *BINARY, "--steps", "5", "--run-dir", "run", **variables)
    line = the_error(output)
    assert code == 2, output
    assert any(name in line for name in variables), line
    assert "by-hand" not in line and ("; set it or give --" in line or "type `unset " in line), line


def test_a_master_that_does_not_resolve_is_named_while_waiting_and_ends_200(run_tandem: Tandem) -> None:
    code, output = run_tandem(
        "launch", *BINARY, "--nodes", "2", "--node-rank", "1", "--master", "no-such-host.invalid:29500",
        "--master-timeout", "3", "--run-dir", "run",
    )  # fmt: skip
    assert code == 200, output
    waiting = [line for line in output.splitlines() if "waiting" in line]
    assert waiting and all("no-such-host.invalid:29500" in line for line in waiting), output
    assert "no-such-host.invalid:29500" in the_error(output)


def test_a_checkpoint_of_another_model_exits_2_and_is_left_alone(run_tandem: Tandem, tmp_path: Path) -> None:
    arguments = (
        "launch", "--task", "wide.py:Wide", "--batch-size", "20", "--device", "cpu", "--metrics", "0",
        "--run-dir", "run",
    )  # fmt: skip
    (tmp_path / "wide.py").write_text(WIDE_TASK.format(width=3))
    code, output = run_tandem(*arguments, "--steps", "2")
    assert code == 0, output
    saved = contents(tmp_path / "run" / "checkpoints")
    assert [name for name in saved if name.startswith("step-000000002/")], saved.keys()

    (tmp_path / "wide.py").write_text(WIDE_TASK.format(width=17))
    code, output = run_tandem(*arguments, "--steps", "4")
    line = the_error(output)
    assert code == 2, output
    assert "(3, 4)" in line or "(3,)" in line, line
    assert "17" in line and "--run-dir" in line, line
    assert contents(tmp_path / "run" / "checkpoints") == saved


def test_settings_that_a_resume_must_keep_exit_2_with_both_values(run_tandem: Tandem, tmp_path: Path) -> None:
    code, output = run_tandem("launch", *BINARY, "--steps", "2", "--run-dir", "run")
    assert code == 0, output
    saved = contents(tmp_path / "run" / "checkpoints")
    code, output = run_tandem("launch", *BINARY, "--steps", "4", "--run-dir", "run", "--seed", "77")
    line = the_error(output)
    assert code == 2, output
    assert "seed" in line and "77" in line and "0" in line, line
    assert contents(tmp_path / "run" / "checkpoints") == saved


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("verb", ["launch", "train"])
def test_cuda_that_is_not_there_exits_2(verb: str, run_tandem: Tandem) -> None:
    code, output = run_tandem(verb, "--task", TASK, "--batch-size", "20", "--steps", "5",
                              "--device", "cuda", "--metrics", "0", "--run-dir", "run")  # fmt: skip
    assert code == 2, output
    assert "--device cuda" in the_error(output)


MNIST = ("--task", "mnist", "--batch-size", "16", "--steps", "3", "--device", "cpu", "--metrics", "0")


@pytest.mark.soak
def test_mnist_files_that_are_there_train_without_network(run_tandem: Tandem, tmp_path: Path) -> None:
    write_mnist(tmp_path / "data" / "MNIST" / "raw")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    code, output = run_tandem("launch", *MNIST, "--run-dir", "run", **nowhere)
    assert code == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["global_step"] == 3 and summary["samples_seen"] == 48
    assert (summary["eval"]["accuracy"] * 32) % 1 == 0


def test_a_truncated_mnist_file_is_named(run_tandem: Tandem, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write_mnist(folder)
    broken = folder / NAMES.train_images
    broken.write_bytes(broken.read_bytes()[:-1000])
    code, output = run_tandem("launch", *MNIST, "--run-dir", "run")
    line = the_error(output)
    assert code == 2, output
    assert str(broken) in line and str(16 + 64 * 784) in line, line


@pytest.mark.soak
def test_mnist_files_that_are_missing_say_where_to_put_them(run_tandem: Tandem, tmp_path: Path) -> None:
    code, output = run_tandem("launch", *MNIST, "--run-dir", "run", "--data-dir", "nothing")
    line = the_error(output)
    assert code == 2, output
    assert str(tmp_path / "nothing") in line and "--download" in line, line


def test_a_launch_in_an_environment_where_warnings_are_errors(run_tandem: Tandem) -> None:
    quick = ("--steps", "4", "--eval-every", "never", "--metrics", "0", "--metrics-linger", "0")
    code, output = run_tandem("launch", "--nproc", "2", "--device", "cpu", *quick, PYTHONWARNINGS="error")
    assert code == 0 and "finished at step 4" in output, output
