"""What the audit finds in frameworks, shown without it: `audits_confirmed.py FRAMEWORK`, a line for each way.

A process trains to the end and saves on the way. A new process resumes at that save, as the framework's
documentation says. Nothing is killed. What the steps after the save used is compared: the samples, their
contents, and the numbers that dropout draws.
"""

import multiprocessing
import os
import shutil
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

SAMPLES, BATCH, EPOCHS = 64, 4, 2
STEPS = SAMPLES // BATCH
MIDDLE = 5
"""A step in the middle of the first epoch, after which is saved."""


class Used(NamedTuple):
    """What one step used: its samples, their contents, and what dropout drew."""

    samples: list[int]
    contents: list[int]
    drawn: list[float]


def shuffled() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.arange(SAMPLES)), BATCH, shuffle=True)


def drawn() -> list[float]:
    """Draw as a layer of dropout does."""
    return list(torch.nn.functional.dropout(torch.ones(16), 0.5).tolist())


def accelerate(way: str, folder: Path, is_resumed: bool) -> list[Used]:
    """`save_state` in an epoch, then `load_state` and `skip_first_batches`."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    loading = DataLoaderConfiguration(use_seedable_sampler=way == "seedable")
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    set_seed(7)
    whole = accelerator.prepare(shuffled())
    step = 0
    if is_resumed:
        accelerator.load_state(str(folder))
        step = MIDDLE
    used = []
    for epoch in range(EPOCHS):
        whole.set_epoch(epoch)
        loader = accelerator.skip_first_batches(whole, step) if 0 < step < STEPS else whole
        for (batch,) in loader:
            used.append(Used(batch.tolist(), batch.tolist(), drawn()))
            step += 1
            if step == MIDDLE and not is_resumed:
                accelerator.save_state(str(folder))
    return used


def lightning(way: str, folder: Path, is_resumed: bool) -> list[Used]:
    """`ModelCheckpoint` in an epoch or at its end, then `fit(ckpt_path=...)`."""
    import lightning as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    used = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            samples = batch[0]
            used.append(Used(samples.tolist(), samples.tolist(), drawn()))
            return self.layer(samples.float()[:, None]).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-4)

    pl.seed_everything(7, verbose=False)
    every: dict[str, Any] = (
        {"every_n_epochs": 1, "save_on_train_epoch_end": True}
        if way == "epochs"
        else {"every_n_train_steps": MIDDLE}
    )
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, logger=False, enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, "{step}", save_top_k=-1, **every)],
    )  # fmt: skip
    first = folder / f"step={STEPS if way == 'epochs' else MIDDLE}.ckpt"
    trainer.fit(Module(), shuffled(), ckpt_path=first if is_resumed else None)
    return used


def transformers(way: str, folder: Path, is_resumed: bool) -> list[Used]:
    """`save_steps`, then `train(resume_from_checkpoint=True)` with the first checkpoint alone."""
    from transformers import Trainer, TrainingArguments

    used = []

    class Data(Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> dict[str, Any]:
            noise = int(torch.randint(1000, ())) if way == "augmented" else 0
            return {"x": torch.tensor([index, noise]), "labels": 0}

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            used.append(Used(x[:, 0].tolist(), x[:, 1].tolist(), drawn()))
            return {"loss": self.layer(x[:, :1].float()).mean()}

    if is_resumed:
        shutil.copytree(folder / f"checkpoint-{MIDDLE}", folder / "alone" / f"checkpoint-{MIDDLE}")
        folder = folder / "alone"
    arguments = TrainingArguments(
        str(folder), num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, learning_rate=1e-4,
        use_cpu=True, report_to=[], save_steps=MIDDLE, disable_tqdm=True, seed=7, logging_strategy="no",
    )  # fmt: skip
    Trainer(Model(), arguments, train_dataset=Data()).train(resume_from_checkpoint=is_resumed)
    return used


WAYS = {
    "accelerate": (accelerate, ("default", "seedable")),
    "lightning": (lightning, ("steps", "epochs")),
    "transformers": (transformers, ("plain", "augmented")),
}


def named(is_same: bool) -> str:
    return "same" if is_same else "different"


def compared(whole: list[Used], resumed: list[Used]) -> str:
    """Say how the steps after the save differ, in the rest of that epoch and after it."""
    due, got = whole[len(whole) - len(resumed) :], resumed
    parts = []
    if len(resumed) not in (len(whole) - MIDDLE, len(whole) - STEPS):
        parts.append(f"{MIDDLE + len(resumed)} steps instead of {len(whole)}")
        due = whole[MIDDLE:]
    first = STEPS - (len(whole) - len(due)) or STEPS
    samples = [[sample for step in steps[:first] for sample in step.samples] for steps in (due, got)]
    parts.append(f"{named(samples[0] == samples[1])} order")
    if samples[1] == [sample for step in whole[:first] for sample in step.samples]:
        parts.append("the order of the first steps repeats")
    lost = set(samples[0]) - set(samples[1])
    parts.append(f"{len(lost) or 'no'} samples lost")
    same = samples[0] == samples[1]
    is_same = [one.contents == two.contents for one, two in zip(due, got, strict=False)]
    parts.append(f"{named(all(is_same))} contents" if same else "")
    is_same = [one.drawn == two.drawn for one, two in zip(due, got, strict=False)]
    parts.append(f"{named(all(is_same))} dropout")
    return ", ".join(filter(None, parts))


def main() -> None:
    train, ways = WAYS[sys.argv[1]]
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    new = multiprocessing.get_context("spawn")
    for way in ways:
        with (
            tempfile.TemporaryDirectory() as folder,
            ProcessPoolExecutor(1, mp_context=new, max_tasks_per_child=1) as processes,
        ):
            whole, resumed = (
                processes.submit(train, way, Path(folder), is_resumed).result()
                for is_resumed in (False, True)
            )
        print(f"{sys.argv[1]}, {way}: {compared(whole, resumed)}", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
