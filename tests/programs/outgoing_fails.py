from pathlib import Path

from small import Small


class Failing(Small):
    def loss(self, model, batch):
        Path("trains").touch()
        if Path("fail").exists():
            raise RuntimeError("that is enough of it")
        return super().loss(model, batch)
