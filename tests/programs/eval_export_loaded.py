import sys

import torch
from transformers import GPT2LMHeadModel

model = GPT2LMHeadModel.from_pretrained(sys.argv[1])
theirs = torch.load(sys.argv[2], weights_only=True)
assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.state_dict().items()), "weights"
