"""A trainer with Lightning: `audit_lightning.py KIND`. It resumes exactly, or has one known bug.

Correct are `steps` (checkpoints in an epoch, with a loader that skips what was used), and `epochs` (a
checkpoint after each epoch). `documented` and `documented-epochs` do what Lightning's documentation shows:
`fit(ckpt_path="last")`. The other kinds are bugs that users have filed.
"""

import os
import random
import sys
import time
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

KIND = sys.argv[1]
EPOCHS, SAMPLES, BATCH, SAVE_EVERY = 3, 64, 4, 5
BY_EPOCH = KIND in ("epochs", "documented-epochs", "random", "order-repeats")
SEEDED = KIND in ("steps", "optimizer-lost", "optimizer-permuted", "order-repeats")
HAS_DROPOUT = KIND not in ("schedule", "data-restarts")
CHECKPOINT = Path("checkpoints/last.ckpt")
torch.set_num_threads(1)
warnings.simplefilter("ignore")


class Order:
    """A sampler with another order for each epoch, which Lightning announces."""

    epoch = 0

    def __len__(self):
        return SAMPLES

    def set_epoch(self, epoch):
        if KIND != "order-repeats":
            self.epoch = epoch

    def __iter__(self):
        order = list(range(SAMPLES))
        random.Random(self.epoch).shuffle(order)
        if KIND == "order-repeats":
            self.epoch += 1  # this count begins again after a restart
        return iter(order)


class Resumable(DataLoader):
    """A loader that skips what an interrupted epoch has used."""

    used = 0
    skip = 0

    def __iter__(self):
        skip = self.skip
        self.skip = 0
        for at, batch in enumerate(super().__iter__()):
            self.used = at + 1
            if at >= skip:
                yield batch


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        drop = nn.Dropout(0.2) if HAS_DROPOUT else nn.Identity()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), drop, nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        )
        self.begun = 0

    def training_step(self, batch, _index):
        if SEEDED:
            torch.manual_seed(1000 * self.global_step + self.global_rank)
        self.begun += 1
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        time.sleep(0.01)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        parameters = list(self.parameters())
        if KIND == "optimizer-permuted" and CHECKPOINT.exists():
            # Two layers of one shape in another order, which torch cannot notice.
            parameters = [*parameters[:2], *parameters[4:6], *parameters[2:4], *parameters[6:]]
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        # `begun` is a count of the module's own, which is in no checkpoint.
        schedule: torch.optim.lr_scheduler.LRScheduler = (
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.9**self.begun)
            if KIND == "schedule"
            else torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.8)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_load_checkpoint(self, checkpoint):
        if KIND == "optimizer-lost":
            for state in checkpoint["optimizer_states"]:
                state["state"] = {}


class RandomState(Callback):
    """Restores the random state, which Lightning does not."""

    loaded = None

    def state_dict(self):
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state):
        self.loaded = state["torch"]

    def on_train_batch_start(self, trainer, module, batch, index):
        if self.loaded is not None:
            torch.set_rng_state(self.loaded)
            self.loaded = None


def loader_of(data):
    if KIND.startswith("documented"):
        return DataLoader(data, BATCH, shuffle=True)
    # The base seed for workers, which are not there, is not to be drawn from the global state.
    make = DataLoader if BY_EPOCH or KIND == "data-restarts" else Resumable
    return make(data, BATCH, sampler=Order(), generator=torch.Generator().manual_seed(0))


class Position(Callback):
    """Keeps the position of a `Resumable` loader: the batches that were trained, not those fetched ahead."""

    def state_dict(self):
        return {"used": self.used}

    def load_state_dict(self, state):
        self.loader.skip = state["used"] % len(self.loader)

    def __init__(self, loader):
        self.loader, self.used = loader, 0

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.used = index + 1


def main():
    lightning.seed_everything(7, verbose=False)
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    loader = loader_of(TensorDataset(inputs, inputs.sum(1, keepdim=True)))
    when = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
    if not BY_EPOCH:
        when = {"every_n_train_steps": SAVE_EVERY}
    callbacks = [ModelCheckpoint("checkpoints", save_last=True, **when)]
    if KIND == "epochs":
        callbacks.insert(0, RandomState())
    if isinstance(loader, Resumable):
        callbacks.insert(0, Position(loader))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_epochs=EPOCHS,
        logger=CSVLogger("logs"),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        use_distributed_sampler=KIND.startswith("documented"),
    )
    trainer.fit(Regression(), loader, ckpt_path="last")
    if trainer.is_global_zero:
        torch.save(trainer.lightning_module.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
