"""Scripts of others' frameworks and examples, unchanged: the final loss is torchrun's.

Accelerate, Lightning and transformers are no dependencies: `make frameworks` gives them an environment of
their own beside tandem's packages. TANDEM_REQUIRE=frameworks fails where one is missing.
"""

import os
import re
import subprocess
import sys
from typing import Any

import pytest
from unchanged import PROGRAMS

pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]


def final_loss(text: str) -> float:
    (found,) = re.findall(r"^final loss (\S+)$", text, re.M)
    return float(found)


@pytest.mark.parametrize("program, package", [
    ("imagenet_structure.py", "torch"),
    pytest.param("with_transformers.py", "transformers", marks=pytest.mark.soak),
])  # fmt: skip
def test_the_loss_is_torchruns(program: str, package: str, scripts: Any, require: Any) -> None:
    python = os.environ.get("FRAMEWORKS_PYTHON") or sys.executable
    look = f"import importlib.util as util; exit(util.find_spec('{package}') is None)"
    found = subprocess.run([python, "-c", look], check=False).returncode == 0
    require("frameworks", found, f"no package {package}: make frameworks")
    scripts.python = python
    path = str(PROGRAMS / program)
    code, said = scripts.run(scripts.tandem("--nodes", 2, path))
    assert code == 0, said
    (scripts.folder / "checkpoint.pth.tar").unlink(missing_ok=True)
    code, theirs = scripts.by_torchrun("--nproc-per-node", 2, path)
    # torchrun says 1 for scripts that gloo's threads abort at the interpreter's end.
    assert code == 0 or "terminate called" in theirs or "SIGABRT" in theirs, theirs
    assert final_loss(said) == pytest.approx(final_loss(theirs), rel=1e-6)
    assert scripts.lives(0) and scripts.lives(1)
