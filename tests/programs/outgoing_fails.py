import pathlib


class Failing(Small):  # noqa: F821
    def loss(self, model, batch):
        pathlib.Path("trains").touch()
        if pathlib.Path("fail").exists():
            raise RuntimeError("that is enough of it")
        return super().loss(model, batch)


Small = Failing
