import torch
from small import Small


class Own(Small):
    def build_optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=0.003)
