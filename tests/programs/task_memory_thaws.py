from remembers import die_at
from small import Small


class Thaws(Small):
    def __init__(self):
        pass

    def freeze(self, model, epoch):
        model[0].requires_grad_(epoch >= 2)
        model[1].requires_grad_(epoch != 1)

    def after_step(self, model, step):
        die_at(f"step {step}")
