import ctypes

from small import Small


class Stuck(Small):
    def after_step(self, model, step):
        if step == 30:
            ctypes.PyDLL(None).sleep(600)  # holds the interpreter: no thread of this rank runs any more
