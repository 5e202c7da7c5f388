"""The lines of docs/scripts.md by which scripts find their own checkpoints: killed, they go on from them."""

import os
import re
import subprocess
import sys
from typing import Any

import pytest
from unchanged import PROGRAMS

pytestmark = [pytest.mark.multi, pytest.mark.timeout(400)]

KILL = """
def killed_once():
    import signal
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
"""
CHANGES = {
    "torch": [
        ('default="snapshot.pt"', 'default=""'),
        ("        self.epoch = 0\n", """\
        self.epoch = 0
        path = os.path.join(os.environ.get("TANDEM_RUN_DIR", "."), "snapshot.pt")
        options.snapshot = path
"""),
        ("""\
        if os.path.exists(options.snapshot):
            snapshot = torch.load(options.snapshot)
            self.model.module.load_state_dict(snapshot["model"])
""", """\
        if os.path.exists(path):
            snapshot, model = torch.load(path, map_location="cpu"), self.model.module
            if self.rank == 0:
                print("found its checkpoint", flush=True)
            model.load_state_dict(snapshot["model"])
"""),
        ("                self.save()\n", """\
                self.save()
            if self.epoch == 1:
                dist.barrier()
                killed_once()
"""),
    ],
    "accelerate": [
        ("    for _ in range(options.epochs):\n", """\
    folder = os.path.join(os.environ["TANDEM_RUN_DIR"], "state")
    if os.path.isdir(folder):
        accelerator.load_state(folder)
        accelerator.print("found its checkpoint", flush=True)
    for epoch in range(options.epochs):
        if epoch == 1:
            accelerator.save_state(folder)
            accelerator.wait_for_everyone()
            killed_once()
"""),
    ],
    "lightning": [
        ("        enable_checkpointing=False,\n", """\
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(os.environ["TANDEM_RUN_DIR"], save_last=True)],
"""),
        ("    trainer.fit(Regression(options.pause), data)\n", """\
    last = os.path.join(os.environ["TANDEM_RUN_DIR"], "last.ckpt")
    if os.path.exists(last) and trainer.is_global_zero:
        print("found its checkpoint", flush=True)
    model = Regression(options.pause)
    trainer.fit(model, data, ckpt_path=last if os.path.exists(last) else None)
"""),
        ("    def configure_optimizers", """\
    def on_train_epoch_start(self):
        if self.current_epoch == 2:
            torch.distributed.barrier()
            killed_once()

    def configure_optimizers"""),
    ],
    "transformers": [
        ('        output_dir="out",\n', '        output_dir=os.environ["TANDEM_RUN_DIR"],\n'),
        ('        save_strategy="no",\n', '        save_strategy="epoch",\n'),
        ("    result = trainer.train()\n", """\
    import transformers
    class Killing(transformers.TrainerCallback):
        def on_epoch_begin(self, args, state, control, **_):
            if state.epoch and state.epoch >= 1:
                torch.distributed.barrier()
                killed_once()
    trainer.add_callback(Killing())
    folder = os.environ["TANDEM_RUN_DIR"]
    last = transformers.trainer_utils.get_last_checkpoint(folder)
    if last and trainer.is_world_process_zero():
        print("found its checkpoint", flush=True)
    result = trainer.train(resume_from_checkpoint=last)
"""),
    ],
}  # fmt: skip


PROGRAM = {name: "ddp_tutorial.py" if name == "torch" else f"with_{name}.py" for name in CHANGES}
DOCUMENTED = ("torch", "accelerate", "transformers", "lightning")  # in the order of docs/scripts.md


def changed(package: str) -> str:
    """The program with its lines for a checkpoint, and one that kills rank 1 once."""
    text = (PROGRAMS / PROGRAM[package]).read_text()
    for old, new in [*CHANGES[package], ("\n\ndef main():", f"{KILL}\n\ndef main():")]:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_the_lines_are_those_of_the_documentation() -> None:
    text = (PROGRAMS.parents[2] / "docs/scripts.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    assert len(blocks) == len(DOCUMENTED)
    for package, block in zip(DOCUMENTED, blocks, strict=True):
        for line in block.splitlines():
            code = line.partition("  #")[0].strip()
            if code != 'model.load_state_dict(torch.load(path, map_location="cpu"))':  # it keeps more
                assert code in changed(package), f"{package}: {code}"


@pytest.mark.parametrize("package", [pytest.param("torch", marks=pytest.mark.soak), "transformers"])
def test_a_killed_script_goes_on_from_its_own_checkpoint(package: str, scripts: Any, require: Any) -> None:
    python = os.environ.get("FRAMEWORKS_PYTHON") or sys.executable
    look = f"import importlib.util as util; exit(util.find_spec('{package}') is None)"
    found = subprocess.run([python, "-c", look], check=False).returncode == 0
    require("frameworks", found, f"no package {package}: make frameworks")
    scripts.python = python
    (scripts.folder / "train.py").write_text(changed(package))
    code, said = scripts.run(scripts.tandem("--nproc", 2, "train.py"))
    assert code == 0, said
    assert said.count("found its checkpoint") == 1 and said.count("final loss") == 1, said
    assert len(scripts.lives(1)) == 2
