"""--compile: under ddp a graph for each bucket, so that gradients travel early; under fsdp by blocks."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from needs import require_strategy
from program_files import program_text

pytestmark = [
    pytest.mark.multi,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("cc") is None, reason="torch.compile needs a C compiler"),
]

TASK = program_text("compile_task")
FLAGS = (
    "launch --nproc 2 --task deep.py:Deep --batch-size 24 --steps 12 --lr 0.01 --device cpu --log-every 4 "
    "--metrics 0 --metrics-linger 0"
).split()


def trained(processes: Any, folder: Path, name: str, *flags: str) -> tuple[int, dict[str, Any]]:
    """How many graphs were compiled, and the summary."""
    (folder / "deep.py").write_text(TASK)
    command = [sys.executable, "-m", "tandem", *FLAGS, "--run-dir", name, *flags]
    code, said = processes.run(command, cwd=folder, limit=300, env={**os.environ, "NAME": name})
    assert code == 0, said
    graphs = json.loads((folder / f"graphs-{name}.json").read_text())
    return graphs.get("ok", 0), json.loads((folder / name / "summary.json").read_text())


@pytest.mark.parametrize(
    ("strategy", "graphs"),
    [
        (("ddp", "--bucket-mb", "1"), 3),  # a layer in each bucket
        pytest.param(("fsdp",), 1, marks=pytest.mark.soak),
    ],
    ids=("ddp", "fsdp"),
)
def test_a_compiled_model_is_cut_where_its_gradients_are_exchanged(
    strategy: tuple[str, ...], graphs: int, processes: Any, tmp_path: Path
) -> None:
    """In one graph all gradients come at its end, and ddp's exchange would begin when backward is over. What
    is around the forward pass of fsdp made torch give up every graph, without a word."""
    require_strategy(strategy[0])
    plain, as_it_is = trained(processes, tmp_path, "plain", "--strategy", *strategy)
    cut, compiled = trained(processes, tmp_path, "compiled", "--strategy", *strategy, "--compile")
    assert plain == 0 and cut >= graphs
    assert compiled["loss"] == pytest.approx(as_it_is["loss"], rel=1e-4)
    assert compiled["eval"]["loss"] == pytest.approx(as_it_is["eval"]["loss"], rel=1e-4)
    _, again = trained(processes, tmp_path, "again", "--strategy", *strategy, "--compile")
    assert again["weights_sha256"] == compiled["weights_sha256"]


def test_graphs_of_cuda_are_not_for_shares(processes: Any, tmp_path: Path) -> None:
    require_strategy("fsdp")
    (tmp_path / "deep.py").write_text(TASK)
    flags = ("--strategy", "fsdp", "--compile", "reduce-overhead", "--run-dir", "none")
    command = [sys.executable, "-m", "tandem", *FLAGS, *flags]
    code, said = processes.run(command, cwd=tmp_path, env={**os.environ, "NAME": "none"})
    assert code == 2 and "--compile reduce-overhead does not work with --strategy fsdp" in said, said
