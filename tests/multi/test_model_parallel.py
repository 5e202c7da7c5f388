"""Models on several devices, or over several ranks: two stages under DDP, and a pipeline as a script."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from needs import require_strategy
from tandem.distributed import group as groups
from tandem.distributed import strategy as strategies
from tandem.distributed.devices import choose_devices
from tandem.distributed.group import ProcessGroup
from tandem.distributed.position import Position
from tandem.errors import ConfigError
from tandem.tasks.base import TaskWithDefaults
from tandem.tasks.build import model_of

pytestmark = pytest.mark.multi

EXAMPLES = Path(__file__).parents[2] / "examples"
QUIET = ("--metrics", "0", "--metrics-linger", "0", "--device", "cpu", "--threads", "1")


def launched(processes: Any, folder: Path, *words: object) -> tuple[int, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    command = [sys.executable, "-m", "tandem", "launch", *map(str, words)]
    code, output = processes.run(command, cwd=folder, env=environment)
    return code, str(output)


def test_two_stages_on_two_devices_of_each_of_two_ranks(processes: Any, tmp_path: Path) -> None:
    task = ("--task", f"{EXAMPLES / 'two_stages.py'}:TwoStages", "--steps", 60, "--nproc", 2, *QUIET)
    code, output = launched(processes, tmp_path, *task, "--run-dir", "two", "--devices-per-rank", 2)
    assert code == 0, output
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["eval"]["accuracy"] > 0.8 and summary["world_size"] == 2


def test_a_pipeline_of_two_ranks_runs_on_gloo(processes: Any, tmp_path: Path) -> None:
    code, output = launched(processes, tmp_path, *QUIET, "--nproc", 2, EXAMPLES / "pipeline.py", 30)
    logs = output + "".join(path.read_text() for path in tmp_path.glob("**/rank-*.log"))
    assert code == 0, logs
    losses = [float(number) for number in re.findall(r"step \d+: loss ([\d.]+)", logs)]
    assert len(losses) >= 3 and losses[2] < losses[0], logs
    assert "rank 0: gradients within" in logs and not re.search(r"within \de-0[0-5]", logs), logs


def test_local_ranks_have_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_devices("cpu", 1, 2) == (torch.device("cpu"), torch.device("cpu"))
    monkeypatch.setattr(groups.torch.cuda, "device_count", lambda: 5)
    assert choose_devices("auto", 1, 2) == (torch.device("cuda", 2), torch.device("cuda", 3))
    assert choose_devices("cuda", 4) == (torch.device("cuda", 4),)
    with pytest.raises(ConfigError, match="local rank 2 has no 2 GPUs of its own: .* use --nproc 2"):
        choose_devices("cuda", 2, 2)
    with pytest.raises(ConfigError, match="use --devices-per-rank 5"):
        choose_devices("cuda", 0, 8)
    one, several = (
        ProcessGroup(Position(), torch.device("cuda", 2), d) for d in ((), choose_devices("auto", 1, 2))
    )
    assert one.ddp_devices == [torch.device("cuda", 2)] and several.ddp_devices is None


def test_what_needs_one_device_says_so() -> None:
    require_strategy("fsdp")
    cpu = torch.device("cpu")
    group = ProcessGroup(Position(), cpu, (cpu, cpu))
    for name in ("dp", "fsdp"):
        with pytest.raises(ConfigError, match="--strategy ddp or single"):
            strategies.load(name, group)

    class Plain:
        def build_model(self) -> Any: ...
        def build_datasets(self) -> Any: ...
        def loss(self, model: Any, batch: Any) -> Any: ...

    with pytest.raises(ConfigError, match=r"place\(model, DEVICE, ...\) .* 2 devices"):
        model_of(TaskWithDefaults(Plain()), group.devices)
