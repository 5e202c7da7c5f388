import random

import numpy
import torch
from torch import nn

import tandem

run = tandem.start()
rows = [random.randrange(96), int(numpy.random.randint(96)), *torch.randperm(96).tolist()]
print("rows:", rows, flush=True)
model = run.wrap(nn.Linear(8, 1))
run.keep(model=model)
