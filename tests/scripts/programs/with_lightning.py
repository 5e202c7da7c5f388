"""A Lightning script: module, Trainer with strategy ddp, as its documentation begins."""

import argparse
import os
import time

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

print(f"first line {time.time():.3f} pid {os.getpid()} rank {os.environ['RANK']}", flush=True)


class Regression(lightning.LightningModule):
    def __init__(self, pause):
        super().__init__()
        self.pause = pause
        self.layer = torch.nn.Linear(10, 1)

    def training_step(self, batch, _index):
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        time.sleep(self.pause)
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args()
    lightning.seed_everything(0)
    x = torch.randn(256, 10, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=options.epochs,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.fit(Regression(options.pause), data)
    if trainer.is_global_zero:
        print(f"final loss {trainer.callback_metrics['loss'].item():.9f}", flush=True)


if __name__ == "__main__":
    main()
