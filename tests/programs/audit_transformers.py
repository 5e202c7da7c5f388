"""A trainer with transformers' Trainer: `audit_transformers.py KIND`. It resumes exactly, or has a known bug.

`plain` has no dropout, and `epochs` saves after each epoch. `documented` does what the Trainer's
documentation shows: `resume_from_checkpoint=True`, and `augmented` the same with data that is masked at
random. The other kinds are bugs that users have filed.
"""

import os
import sys
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
from transformers.trainer_utils import get_last_checkpoint

KIND = sys.argv[1]
EPOCHS, SAMPLES, BATCH, SAVE_EVERY = 3, 64, 4, 5
DROPOUT = 0.0 if KIND in ("plain", "data-restarts", "schedule") else 0.1
torch.set_num_threads(1)


class Sentences(torch.utils.data.Dataset):
    def __init__(self):
        self.ids = torch.randint(0, 50, (SAMPLES, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        ids = self.ids[index]
        label = int(ids.sum()) % 2
        if KIND == "augmented":
            ids = ids.where(torch.rand(len(ids)) > 0.15, 0)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": label}


class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        time.sleep(0.01)


class Own(Trainer):
    def _load_optimizer_and_scheduler(self, checkpoint):
        if KIND == "optimizer-lost" and checkpoint is not None:
            # The optimizer's file is not read, only that of the schedule.
            self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, "scheduler.pt")))
            return
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint):
        if KIND != "random":
            super()._load_rng_state(checkpoint)


def with_own_count(model):
    """Return an optimizer, and a schedule with a count of its own, which is in no checkpoint."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    begun = [0]

    def factor(_):
        begun[0] += 1
        return 0.95 ** begun[0]

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def main():
    set_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=DROPOUT, attention_probs_dropout_prob=DROPOUT,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    arguments = TrainingArguments(
        output_dir="out",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="epoch" if KIND == "epochs" else "steps",
        save_steps=SAVE_EVERY,
        disable_tqdm=True,
        logging_steps=1,
        ignore_data_skip=KIND == "data-restarts",
    )
    optimizers = with_own_count(model) if KIND == "schedule" else (None, None)
    trainer = Own(model=model, args=arguments, train_dataset=Sentences(), optimizers=optimizers)
    trainer.add_callback(Slow())
    last = get_last_checkpoint("out") if os.path.isdir("out") else None
    trainer.train(resume_from_checkpoint=last is not None)
    trainer.save_model("final")


if __name__ == "__main__":
    main()
