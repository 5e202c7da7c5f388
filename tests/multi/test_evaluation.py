"""The same weights evaluated by one, two and three gloo processes: equal counts, equal means."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from patience import patient
from tandem.data.datasets import TensorRows
from tandem.distributed.group import ProcessGroup
from tandem.distributed.position import Connection, Position
from tandem.distributed.strategy import load
from tandem.tasks.base import TaskWithDefaults
from tandem.training.evaluate import Evaluation

pytestmark = pytest.mark.multi

SAMPLES, FEATURES, CLASSES = 1003, 12, 5  # 2 and 3 do not divide 1003: shares and last batches differ
LIMIT_SECONDS = 80.0


def set_of(samples: int) -> TensorRows:
    """Rows whose target is their own index, so that a task can tell which samples it was given."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(samples, FEATURES, generator=generator) * 3 + 1
    return TensorRows(rows, torch.arange(samples))


def labels_of(indices: Tensor) -> Tensor:
    return indices.square() % CLASSES


def trained_model() -> nn.Sequential:
    """Weights from one seed, with running statistics that are not those of a new BatchNorm."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
    model(set_of(240).inputs)
    return model


class ByLoss:
    """Scores by way of `loss`, as most tasks have them."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, tuple[Any, Any]]]:
        assert not model.training and not torch.is_grad_enabled()
        rows, indices = batch
        self.seen += indices.tolist()
        logits, labels = model(rows), labels_of(indices)
        correct = (logits.argmax(dim=1) == labels).sum()
        return functional.cross_entropy(logits, labels), {"accuracy": (correct, len(labels))}


class ByEvaluateBatch(ByLoss):
    """Own `evaluate_batch`; only the batch with sample 0 counts, so that means are sums over the set."""

    def evaluate_batch(self, model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        loss, metrics = self.loss(model, batch)
        once = float((batch[1] == 0).sum())
        return {
            "loss": (loss * len(batch[1]), len(batch[1])),
            "samples": (len(batch[1]), once),
            "correct": (metrics["accuracy"][0], once),
        }


class ByOutputs(ByLoss):
    """Scores that depend on every row and on their order, and on text."""

    def evaluate_batch(self, model: nn.Module, batch: Any) -> Any:
        loss, _ = self.loss(model, batch)
        rows, indices = batch
        shown = [f"sample {index}" for index in indices.tolist()]
        outputs = {"index": indices, "row": model(rows), "text": shown}
        return {"loss": (loss * len(indices), len(indices))}, outputs

    def evaluate_all(self, outputs: dict[str, Any]) -> dict[str, Any]:
        count = len(outputs["text"])
        assert outputs["text"] == [f"sample {index}" for index in range(count)]
        assert torch.equal(outputs["index"], torch.arange(count))
        return {"count": count, "weighed": (outputs["row"].double().sum(1) * torch.arange(count)).sum()}


def work(rank: int, size: int, port: int, folder: str, samples: int, batch_size: int) -> None:
    torch.set_num_threads(1)
    position = Position(rank=rank, local_rank=rank, world_size=size, ranks_on_host=size)
    connection = Connection(init="master" if size > 1 else "alone", master=("127.0.0.1", port))
    world = ProcessGroup.open(position, connection, torch.device("cpu"), LIMIT_SECONDS)
    model = trained_model()
    if rank:  # a rank's own statistics must not show: evaluation takes rank 0's
        batch_norm = model[1]
        assert isinstance(batch_norm, nn.BatchNorm1d) and batch_norm.running_mean is not None
        batch_norm.running_mean.add_(5.0)
    results = []
    for task in (ByLoss(), ByEvaluateBatch()):
        model.train()
        evaluation = Evaluation(
            world, load("ddp", world), TaskWithDefaults(task), model, set_of(samples), batch_size  # type: ignore[arg-type]
        )
        scores = evaluation.scores()
        assert model.training
        results.append({"scores": scores, "seen": task.seen})
    gathered = ByOutputs()
    evaluation = Evaluation(
        world, load("ddp", world), TaskWithDefaults(gathered), model,  # type: ignore[arg-type]
        {"val": set_of(samples), "test": set_of(samples)}, batch_size
    )  # fmt: skip
    scores = evaluation.scores()
    results.append({"scores": scores, "seen": gathered.seen[: len(gathered.seen) // 2]})
    (Path(folder) / f"{size}-{rank}.json").write_text(json.dumps(results))
    world.close()


def scores_in_a_world_of(
    size: int, folder: Path, port: int, samples: int, batch_size: int
) -> list[dict[str, float]]:
    """Scores of `ByLoss`, `ByEvaluateBatch` and `ByOutputs`, after a check that all ranks have the same."""
    arguments = (size, port, str(folder), samples, batch_size)
    # Forked: torch is imported here already, and costs each process of its own three seconds.
    context = torch.multiprocessing.start_processes(
        work, args=arguments, nprocs=size, join=False, start_method="fork"
    )
    deadline = time.monotonic() + patient(LIMIT_SECONDS)
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                pytest.fail(f"{size} ranks took longer than {LIMIT_SECONDS:g} s", pytrace=False)
    finally:
        for process in context.processes:
            process.kill()
    ranks = [json.loads((folder / f"{size}-{rank}.json").read_text()) for rank in range(size)]
    for of_task in zip(*ranks, strict=True):
        assert all(result["scores"] == of_task[0]["scores"] for result in of_task), of_task
        assert sorted(index for result in of_task for index in result["seen"]) == list(range(samples))
    return [result["scores"] for result in ranks[0]]


def in_one_pass(samples: int) -> tuple[float, int]:
    """Mean loss (float64) and number of right answers over the whole set, with nothing of tandem's."""
    model, dataset = trained_model().eval(), set_of(samples)
    labels = labels_of(dataset.targets)
    with torch.no_grad():
        logits = model(dataset.inputs)
    return float(functional.cross_entropy(logits.double(), labels)), int((logits.argmax(1) == labels).sum())


@pytest.mark.parametrize("samples, batch_size", [(SAMPLES, 64), (SAMPLES, 1000), (2, 64)])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_world_size_gives_the_counts_and_the_mean_of_one_pass(
    size: int, samples: int, batch_size: int, tmp_path: Path, free_port: int
) -> None:
    by_loss, by_batch, by_outputs = scores_in_a_world_of(size, tmp_path, free_port, samples, batch_size)
    loss, correct = in_one_pass(samples)
    assert by_loss["accuracy"] == correct / samples
    assert (by_batch["samples"], by_batch["correct"]) == (samples, correct)
    assert math.isclose(by_loss["loss"], loss, rel_tol=1e-6), (by_loss["loss"], loss)
    assert math.isclose(by_batch["loss"], loss, rel_tol=1e-6), (by_batch["loss"], loss)
    names = ("loss", "count", "weighed")
    assert set(by_outputs) == {f"{part}/{name}" for part in ("val", "test") for name in names}
    assert by_outputs["val/count"] == by_outputs["test/count"] == samples
    assert math.isclose(by_outputs["test/loss"], loss, rel_tol=1e-6)
    with torch.no_grad():
        rows = trained_model().eval()(set_of(samples).inputs).double().sum(1)
    weighed = float((rows * torch.arange(samples)).sum())
    assert math.isclose(by_outputs["test/weighed"], weighed, rel_tol=1e-5, abs_tol=1e-5)
