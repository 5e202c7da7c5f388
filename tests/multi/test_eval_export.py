"""What a run leaves: its scores again, by any number of ranks, and its weights without tandem."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from program_files import program_text
from tandem import cli
from tandem.checkpoint.state import weights_sha256
from tandem.checkpoint.store import CheckpointStore
from tandem.errors import ConfigError
from tandem.launch.eval_command import format_scores

pytestmark = pytest.mark.multi

TASK = program_text("eval_export_task")
PLAIN = program_text("eval_export_plain")
PRETRAINED = program_text("eval_export_pretrained")
LOADED = program_text("eval_export_loaded")
NO_CALL = "loss never calls the model itself; call model(...)"
ROOT = Path(__file__).parents[2]
FRAMEWORKS = ROOT / "build" / "frameworks" / "bin" / "python"
Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def tandem(module_processes: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`tandem WORDS` in a folder with a finished run: exit code and output."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "small.py").write_text(TASK)
    environment = {name: text for name, text in os.environ.items() if not name.startswith("TANDEM_")}

    def run(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "tandem", *words]
        code, output = module_processes.run(command, cwd=folder, env=environment)
        return int(code), str(output)

    run.folder = folder  # type: ignore[attr-defined]
    words = ["--task", "small.py:Small", "--task.width", "16", "--batch-size", "24", "--epochs", "2"]
    code, output = run("train", *words, "--run-dir", "run", "--metrics", "0", "--threads", "1")
    assert code == 0, output
    return run


def folder_of(tandem: Run) -> Path:
    folder: Path = tandem.folder  # type: ignore[attr-defined]
    return folder


def files(run: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in sorted(run.rglob("*")) if path.is_file()}


@pytest.mark.core
@pytest.mark.parametrize(("ranks", "place"), [(1, "run@20"), pytest.param(3, "run", marks=pytest.mark.soak)])
def test_the_score_is_that_of_the_run_with_any_number_of_ranks(tandem: Run, ranks: int, place: str) -> None:
    run = folder_of(tandem) / "run"
    before = files(run)
    code, output = tandem("eval", place, "--json", *(["--nproc", str(ranks)] if ranks > 1 else []))
    assert code == 0, output
    found = json.loads(output.splitlines()[-1])
    expected = json.loads((run / "summary.json").read_text())["eval"]
    assert found["step"] == 20 and found["ranks"] == ranks
    assert found["eval"]["accuracy"] == expected["accuracy"]
    assert found["eval"]["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert files(run) == before


@pytest.mark.soak
def test_an_error_of_any_rank_is_shown(tandem: Run) -> None:
    broken = ["--task", "small.py:Broken", "--task.width", "16"]
    code, output = tandem("eval", "run", "--nproc", "2", *broken)
    assert code == 1 and "this evaluation is broken" in output, output


def test_weights_of_another_model_are_one_line(tandem: Run) -> None:
    code, output = tandem("eval", "run", "--task.width", "4")
    assert code == 2 and len(output.splitlines()) == 2, output  # whose task is imported, and what is wrong
    assert str(folder_of(tandem) / "small.py") in output.splitlines()[0]
    assert "use the task and fields it was trained with" in output


def test_an_evaluation_computes_with_the_settings_of_its_checkpoint(tandem: Run) -> None:
    unpooled = ["--task", "small.py:Unpooled", "--task.width", "16"]
    assert tandem("eval", "run", *unpooled)[0] == 0
    code, output = tandem("eval", "run", *unpooled, "--deterministic")
    assert code == 2 and "has no deterministic kernel" in output, output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval", "nowhere"], "nowhere is not a directory"),
        (["eval", "run@11"], "has no checkpoint of step 11; available steps: 20, 10"),
        (["export", "run", "--output", "small.py"], "small.py already exists"),
        (["export", "run@3"], "no checkpoint of step 3"),
        (["export", "run", "--format", "pickle"], "invalid choice: 'pickle'"),
        (["export", "run", "--task", "a.py"], "--task has no effect with --format safetensors"),
        (["export", "run", "--format", "hf"], "build_model returns the model Sequential, which has no save"),
        (["export", "run", "--format", "onnx", "--task.width", "4"], "use the task and fields it was"),
        (["export", "run", "--format", "onnx", "--task", "small.py:Apart", "--task.width", "16"], NO_CALL),
    ],
)
def test_what_cannot_be_is_said(
    tandem: Run, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder_of(tandem))
    with pytest.raises(ConfigError, match=re.escape(said)):
        cli.run(words[0], words[1:], {})


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_the_weights_are_those_of_the_run_without_tandem(
    tandem: Run, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "safetensors":
        pytest.importorskip("safetensors")
    file, answer = tmp_path / f"weights.{'pt' if kind == 'torch' else kind}", tmp_path / "answer.pt"
    place = str(folder_of(tandem) / "run")
    assert cli.run("export", [place, "--format", kind, "--output", str(file)], {}) == 0
    output = capsys.readouterr().out
    summary = json.loads((folder_of(tandem) / "run" / "summary.json").read_text())
    assert f"weights {summary['weights_sha256'][:12]}" in output
    subprocess.run([sys.executable, "-c", PLAIN, str(file), str(answer)], check=True, cwd=tmp_path)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    raw, _ = CheckpointStore(folder_of(tandem) / "run" / "checkpoints").read(20)
    (tmp_path / "state.pt").write_bytes(raw)
    model.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True)["model"])
    expected: Tensor = model.eval()(torch.linspace(-1, 1, 80).reshape(10, 8))
    assert torch.equal(torch.load(answer), expected)


def test_dcp_reads_what_it_is_given(tandem: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torch.distributed import checkpoint

    folder = tmp_path / "weights.dcp"
    command = [str(folder_of(tandem) / "run"), "--format", "dcp", "--output", str(folder)]
    assert cli.run("export", command, {}) == 0
    written = sum(path.stat().st_size for path in folder.iterdir())
    assert f"{written:,} bytes" in capsys.readouterr().out
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    summary = json.loads((folder_of(tandem) / "run" / "summary.json").read_text())
    assert weights_sha256(state) == summary["weights_sha256"]
    with pytest.raises(ConfigError, match="already exists"):
        cli.run("export", command, {})


def test_onnx_computes_what_pytorch_does_for_any_batch(
    tandem: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    monkeypatch.chdir(folder_of(tandem))
    file, weights = tmp_path / "model.onnx", tmp_path / "weights.pt"
    assert cli.run("export", ["run", "--format", "onnx", "--output", str(file)], {}) == 0
    said = capsys.readouterr().out
    assert "input [batch, 8] -> " in said and "of PyTorch's" in said, said
    cli.run("export", ["run", "--format", "torch", "--output", str(weights)], {})
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    model.load_state_dict(torch.load(weights, weights_only=True))
    given = torch.linspace(-1, 1, 80).reshape(10, 8)
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: given.numpy()})
    assert (torch.from_numpy(found) - model.eval()(given)).abs().max() <= 1e-5
    digest = json.loads((folder_of(tandem) / "run" / "summary.json").read_text())["weights_sha256"]
    assert session.get_modelmeta().custom_metadata_map["weights_sha256"] == digest


@pytest.mark.timeout(300)
def test_a_model_of_transformers_is_loaded_as_any_other_of_theirs(
    tandem: Run, module_processes: Any, tmp_path: Path
) -> None:
    python = os.environ.get("FRAMEWORKS_PYTHON") or str(FRAMEWORKS)
    if not Path(python).exists():
        pytest.skip("make frameworks has transformers, and has not been run")
    folder = folder_of(tandem)
    (folder / "pretrained.py").write_text(PRETRAINED)
    environment = {name: text for name, text in os.environ.items() if not name.startswith("TANDEM_")}
    environment["PYTHONPATH"] = str(ROOT / "src")

    def run(*words: str) -> None:
        code, output = module_processes.run([python, *words], limit=200, cwd=folder, env=environment)
        assert code == 0, output

    words = ["--task", "pretrained.py:Tiny", "--batch-size", "24", "--steps", "4", "--metrics", "0"]
    run("-m", "tandem", "train", *words, "--run-dir", "tiny", "--threads", "1")
    run("-m", "tandem", "export", "tiny", "--format", "hf", "--output", str(tmp_path / "tiny"))
    run("-m", "tandem", "export", "tiny", "--format", "torch", "--output", str(tmp_path / "tiny.pt"))
    run("-c", LOADED, str(tmp_path / "tiny"), str(tmp_path / "tiny.pt"))


def test_a_file_has_a_name_of_its_own_by_default(
    tandem: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cli.run("export", [f"{folder_of(tandem) / 'run'}@10", "--format", "torch"], {})
    assert capsys.readouterr().out.startswith("run-step-10.pt: step 10, ")
    assert [path.name for path in tmp_path.iterdir()] == ["run-step-10.pt"]


def test_a_line_for_people() -> None:
    store = CheckpointStore(Path("runs/digits/checkpoints"))
    said = format_scores(store, 500, {"loss": 0.02718, "accuracy": 0.994}, 2, as_json=False)
    assert said == "step 500 in runs/digits/checkpoints: accuracy 0.9940, loss 0.0272"
