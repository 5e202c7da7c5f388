"""Fine-tune a Hugging Face model to classify texts, with `datasets`.

    pip install transformers datasets
    tandem launch --nodes 2 --task examples/recipes/finetune.py:FineTune --task.data data/reviews.csv

The file has the columns text and label. docs/recipes.md explains it.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

from tandem import Datasets
from tandem.errors import ConfigError

FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]"}


@dataclass
class FineTune:
    data: Path = Path("data/reviews.csv")
    pretrained: Path | None = None  # a folder of save_pretrained; none: a small model, from its configuration
    held_out: float = 0.1  # of the rows, for evaluation
    length: int = 128  # tokens of a text at most
    width: int = 64
    layers: int = 2
    words: int = 8_000  # of the small model's vocabulary
    lr: float = 5e-4
    train_body: bool = True  # else the head alone

    def __post_init__(self) -> None:
        if self.data.suffix not in FORMATS or not self.data.is_file():
            expected = f"expected a file that ends in {', '.join(FORMATS)}"
            raise ConfigError(f"--task.data: {self.data} is no such file; {expected}")
        rows = load_dataset(FORMATS[self.data.suffix], data_files=str(self.data), split="train")
        if missing := {"text", "label"} - set(rows.column_names):
            found, wanted = ", ".join(rows.column_names), " and ".join(sorted(missing))
            raise ConfigError(f"--task.data: {self.data} has the columns {found}; expected {wanted} as well")
        self.labels = sorted(map(str, rows.unique("label")))
        self.parts = rows.train_test_split(test_size=self.held_out, seed=0)
        if self.pretrained:
            self.tokenizer = AutoTokenizer.from_pretrained(self.pretrained, local_files_only=True)
        else:
            self.tokenizer = word_tokenizer(self.parts["train"], self.words)
        self.collate = DataCollatorWithPadding(self.tokenizer)

    def build_model(self) -> nn.Module:
        names = dict(enumerate(self.labels))
        labels = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
        if self.pretrained:
            model = AutoModelForSequenceClassification.from_pretrained(
                self.pretrained, local_files_only=True, ignore_mismatched_sizes=True, **labels
            )
        else:
            config = BertConfig(
                vocab_size=len(self.tokenizer),
                hidden_size=self.width,
                intermediate_size=4 * self.width,
                num_hidden_layers=self.layers,
                num_attention_heads=max(1, self.width // 32),
                max_position_embeddings=self.length,
                pad_token_id=self.tokenizer.pad_token_id,
                **labels,
            )
            model = AutoModelForSequenceClassification.from_config(config)
        model.base_model.requires_grad_(self.train_body)
        return model

    def build_datasets(self) -> Datasets:
        return Datasets(self._tokens(self.parts["train"]), self._tokens(self.parts["test"]))

    def _tokens(self, rows: Dataset) -> Dataset:
        numbers = {name: number for number, name in enumerate(self.labels)}

        def encode(batch):
            encoded = self.tokenizer(batch["text"], truncation=True, max_length=self.length)
            return {**encoded, "labels": [numbers[str(label)] for label in batch["label"]]}

        # In memory: the ranks of a node would write the same cache file.
        return rows.map(encode, batched=True, remove_columns=rows.column_names, keep_in_memory=True)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [each for each in model.parameters() if each.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr, weight_decay=0.01)

    def loss(self, model: nn.Module, batch):
        output = model(**batch)
        right = (output.logits.argmax(dim=1) == batch["labels"]).sum()
        return output.loss, {"accuracy": (right, torch.full_like(right, len(batch["labels"])))}


def word_tokenizer(rows: Dataset, words: int) -> PreTrainedTokenizerFast:
    """A tokenizer of the most frequent words, without any download."""
    tokenizer = Tokenizer(models.WordLevel(unk_token=SPECIAL["unk_token"]))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = list(SPECIAL.values())
    trainer = trainers.WordLevelTrainer(vocab_size=words, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(rows["text"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
