from small import Small
from stand import stand


class Stuck(Small):
    def after_step(self, model, step):
        if step == 30:
            stand()
