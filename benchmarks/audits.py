"""Audit the documented ways to resume with Accelerate, Lightning and transformers, and confirm what is found.

    python benchmarks/audits.py [--kills 3] [--only lightning ...] [--json benchmarks/results/audits.json]

Needs `make frameworks`, and FRAMEWORKS_PYTHON if that environment is elsewhere. Each row is a run of
`tandem verify-resume -- python PROGRAM WAY` with a program of tests/programs. `audits_confirmed.py` there
shows the same without the audit.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from table import ROOT, save

PROGRAMS = ROOT / "tests" / "programs"
GITHUB = "https://github.com"


class Way(NamedTuple):
    """A documented way to resume: its names in the two programs, its description, and a public issue."""

    framework: str
    kind: str
    confirmed: str
    about: str
    issue: str = ""


WAYS = (
    Way(
        "accelerate", "documented", "default",
        "`save_state` every 5 steps, `load_state`, `skip_first_batches`",
        "huggingface/accelerate/issues/2016",
    ),
    Way("accelerate", "seedable", "seedable", "the same with `use_seedable_sampler=True`"),
    Way(
        "lightning", "documented", "steps",
        '`ModelCheckpoint(every_n_train_steps=5)`, `fit(ckpt_path="last")`',
        "Lightning-AI/pytorch-lightning/issues/18780",
    ),
    Way(
        "lightning", "documented-epochs", "epochs",
        '`ModelCheckpoint(every_n_epochs=1)`, `fit(ckpt_path="last")`',
    ),
    Way("transformers", "documented", "plain", "`save_steps=5`, `train(resume_from_checkpoint=True)`"),
    Way(
        "transformers", "augmented", "augmented", "the same, with data that is masked at random",
        "huggingface/transformers/pull/46628",
    ),
)  # fmt: skip


def python() -> str:
    """Return the Python of the frameworks. Raises SystemExit with 2 if there is none."""
    found = os.environ.get("FRAMEWORKS_PYTHON") or str(ROOT / "build" / "frameworks" / "bin" / "python")
    if not Path(found).exists():
        print(f"audits.py: no {found}; type `make frameworks`, or set FRAMEWORKS_PYTHON", file=sys.stderr)
        raise SystemExit(2)
    return found


def said(*command: str, folder: str | None = None) -> str:
    """Return the standard output of a command; exit code 1 is a verdict."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):
        raise subprocess.CalledProcessError(done.returncode, command)
    return done.stdout


def audited(way: Way, kills: int) -> dict[str, Any]:
    """Return the verdict on one way, without paths of this machine."""
    with tempfile.TemporaryDirectory(prefix="tandem-audits-") as folder:
        program = shutil.copy(PROGRAMS / f"audit_{way.framework}.py", folder)
        # The program is alone there, because the audit copies its directory.
        audit = (sys.executable, "-m", "tandem", "verify-resume", "--json", "--kills", str(kills), "--")
        found = json.loads(said(*audit, python(), Path(program).name, way.kind, folder=folder))
    return {key: found[key] for key in ("verdict", "why", "kinds", "trials")}


def confirmed(framework: str) -> dict[str, str]:
    """Return {way: what is found without the audit}."""
    lines = said(python(), str(PROGRAMS / "audits_confirmed.py"), framework).splitlines()
    start = f"{framework}, "
    found = [line.removeprefix(start).partition(": ") for line in lines if line.startswith(start)]
    return {way: text for way, _, text in found}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    frameworks = list(dict.fromkeys(way.framework for way in WAYS))
    parser.add_argument("--kills", type=int, default=3, help="killed runs for each row [3]")
    parser.add_argument("--only", nargs="+", choices=frameworks, default=frameworks)
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    asked = parser.parse_args()
    rows = []
    for framework in asked.only:
        look = f"import importlib.metadata; print(importlib.metadata.version({framework!r}))"
        version, again = said(python(), "-c", look).strip(), confirmed(framework)
        for way in (each for each in WAYS if each.framework == framework):
            issue = way.issue and f"{GITHUB}/{way.issue}"
            row = {"framework": framework, "version": version, "way": way.about, "issue": issue}
            rows.append({**row, **audited(way, asked.kills), "confirmed": again[way.confirmed]})
            print(f"{framework} {version}, {way.kind}: {rows[-1]['verdict']}", file=sys.stderr, flush=True)
    if asked.json:
        save({"rows": rows}, asked.json)
    else:
        print(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
