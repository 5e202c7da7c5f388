"""The lines of docs/scripts.md by which scripts find their own checkpoints: killed, they go on from them."""

import os
import subprocess
import sys
from typing import Any

import pytest

from conftest import PROGRAMS

pytestmark = [pytest.mark.multi, pytest.mark.slow, pytest.mark.timeout(400)]

KILL = """
def killed_once():
    import signal
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
"""
CHANGES = {
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
    trainer.fit(Regression(options.pause), data, ckpt_path=last if os.path.exists(last) else None)
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
    last = transformers.trainer_utils.get_last_checkpoint(os.environ["TANDEM_RUN_DIR"])
    if last and trainer.is_world_process_zero():
        print("found its checkpoint", flush=True)
    result = trainer.train(resume_from_checkpoint=last)
"""),
    ],
}  # fmt: skip


@pytest.mark.parametrize("package", CHANGES)
def test_a_killed_script_goes_on_from_its_own_checkpoint(package: str, scripts: Any, require: Any) -> None:
    python = os.environ.get("FRAMEWORKS_PYTHON") or sys.executable
    look = f"import importlib.util as util; exit(util.find_spec('{package}') is None)"
    found = subprocess.run([python, "-c", look], check=False).returncode == 0
    require("frameworks", found, f"no package {package}: make frameworks")
    scripts.python = python
    text = (PROGRAMS / f"with_{package}.py").read_text()
    for old, new in [*CHANGES[package], ("\n\ndef main():", f"{KILL}\n\ndef main():")]:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (scripts.folder / "train.py").write_text(text)
    code, said = scripts.run(scripts.tandem("--nproc", 2, "train.py"))
    assert code == 0, said
    assert said.count("found its checkpoint") == 1 and said.count("final loss") == 1, said
    assert len(scripts.lives(1)) == 2
