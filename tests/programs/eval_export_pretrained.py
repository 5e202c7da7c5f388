from small import Small
from torch import nn  # noqa: F401
from transformers import GPT2Config, GPT2LMHeadModel


class Tiny(Small):
    def build_model(self):
        return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2))

    def loss(self, model, batch):
        ids = batch[0].abs().long().clamp(max=15)
        return model(input_ids=ids, labels=ids).loss
