"""A transformers script: a small model from a configuration, Trainer, data made here."""

import argparse
import os
import time

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

print(f"first line {time.time():.3f} pid {os.getpid()} rank {os.environ['RANK']}", flush=True)


class Sentences(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, 50, (128, 12), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": int(ids.sum()) % 2}


class Pausing(TrainerCallback):
    def __init__(self, pause):
        self.pause = pause

    def on_step_end(self, args, state, control, **_):
        time.sleep(self.pause)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args()
    set_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    arguments = TrainingArguments(
        output_dir="out",
        num_train_epochs=options.epochs,
        per_device_train_batch_size=8,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1000,
    )
    trainer = Trainer(model=BertForSequenceClassification(config), args=arguments, train_dataset=Sentences())
    trainer.add_callback(Pausing(options.pause))
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"final loss {result.training_loss:.9f}", flush=True)


if __name__ == "__main__":
    main()
