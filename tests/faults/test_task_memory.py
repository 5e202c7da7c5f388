"""What a task remembers survives kills to the last bit, and a run that it ends is over for who resumes it."""

import json
from typing import Any

import pytest
import torch
from small_runs import Runs

from program_files import program_text
from tandem.checkpoint.state import deserialize, flatten
from tandem.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.timeout(300)

TASK = program_text("task_memory_task")
FLAGS = ("--task", "remembers.py:Remembers", "--threads", 1, "--steps", 150)


@pytest.fixture
def remembers(runs: Runs) -> Runs:
    (runs.folder / "remembers.py").write_text(TASK)
    command = runs.command

    def without_delay(verb: str, run: str, *flags: object, delay: float = 0.0) -> list[str]:
        words = command(verb, run, *flags, delay=delay)
        at = words.index("--task.delay")
        return words[:at] + words[at + 2 :]

    runs.command = without_delay  # type: ignore[method-assign]
    return runs


def memory_of(runs: Runs, run: str, step: int) -> list[Any]:
    store = CheckpointStore(runs.folder / run / "checkpoints")
    skeleton, tensors = flatten(deserialize(store.read(step)[0])["task"])
    return [repr(skeleton), *tensors]


def same(mine: list[Any], theirs: list[Any]) -> bool:
    pairs = zip(mine, theirs, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_a_kill_at_any_place_changes_no_bit_of_it(remembers: Runs) -> None:
    flags = (*FLAGS, "--eval-every", 20, "--checkpoint-every", 20)
    calm = remembers.finish("train", "calm", *flags)
    assert calm["ended_early"] and calm["state"] == "finished" and calm["global_step"] == 100
    for place in ("step 41", "evaluation 5"):
        run = place.replace(" ", "-")
        (remembers.folder / "die-at").write_text(place)
        code, output = remembers.processes.wait(remembers.start("train", run, *flags))
        assert code in (137, -9), output
        again = remembers.finish("train", run, *flags)
        assert again["ended_early"] and again["global_step"] == 100, place
        assert again["weights_sha256"] == calm["weights_sha256"], place
        assert same(memory_of(remembers, run, 100), memory_of(remembers, "calm", 100)), place


@pytest.mark.multi
@pytest.mark.soak
def test_two_ranks_end_together_and_the_run_is_complete(remembers: Runs) -> None:
    flags = (*FLAGS, "--eval-every", 20, "--checkpoint-every", 30)
    (remembers.folder / "die-at").write_text("evaluation 5")  # one of the ranks; the agent starts them again
    summary = remembers.finish("launch", "run", "--nproc", 2, *flags)
    assert summary["ended_early"] and summary["global_step"] == 100 and summary["restarts"] == 1
    assert summary["last_checkpoint_step"] == 100
    calm = remembers.finish("launch", "calm", "--nproc", 2, *flags)
    assert calm["weights_sha256"] == summary["weights_sha256"]
    code, output = remembers.processes.wait(remembers.start("launch", "run", "--nproc", 2, *flags))
    assert code == 0 and "already finished at step 100" in output, output
    longer = [*flags[:-5], 160, *flags[-4:]]
    lines = (remembers.folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["step"] for line in lines) == 100
    assert remembers.finish("launch", "run", "--nproc", 2, *longer)["global_step"] == 160


THAWS = program_text("task_memory_thaws")


@pytest.mark.multi
@pytest.mark.soak
def test_layers_that_are_thawed_later_are_so_exactly_over_kills(remembers: Runs) -> None:
    """10 steps an epoch; killed where a layer is frozen, and right after its first step."""
    (remembers.folder / "thaws.py").write_text(THAWS)
    flags = ("--task", "thaws.py:Thaws", "--threads", 1, "--steps", 34, "--batch-size", 240, "--nproc", 2)
    flags += ("--checkpoint-every", 10, "--eval-every", "never", "--checkpoint-keep", 9)
    flags += ("--weight-decay", 0.01, "--strategy", "ddp")
    calm = remembers.finish("launch", "calm", *flags)
    first, second, third = (_weights(remembers, "calm", step) for step in (10, 20, 30))
    assert torch.equal(first["0.weight"], second["0.weight"]), "frozen in two epochs"
    assert not torch.equal(second["0.weight"], third["0.weight"]), "thawed in the third"
    assert torch.equal(first["1.weight"], second["1.weight"]), "frozen in the second"
    assert not torch.equal(first["4.weight"], second["4.weight"])
    for place in ("step 16", "step 21"):
        run = place.replace(" ", "-")
        (remembers.folder / "die-at").write_text(place)
        summary = remembers.finish("launch", run, *flags)
        assert summary["restarts"] == 1 and summary["weights_sha256"] == calm["weights_sha256"], place


def _weights(runs: Runs, run: str, step: int) -> dict[str, torch.Tensor]:
    store = CheckpointStore(runs.folder / run / "checkpoints")
    return dict(deserialize(store.read(step)[0])["model"])
