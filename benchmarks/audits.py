"""Audit the documented ways to resume with Accelerate, Lightning and transformers, and confirm what is found.

    python benchmarks/audits.py [--kills 3] [--jobs 1] [--json benchmarks/results/audits.json]

Needs `make frameworks`, and FRAMEWORKS_PYTHON if that environment is elsewhere. Each row is a run of
`tandem verify-resume -- python PROGRAM WAY` with a program of tests/programs. `audits_confirmed.py` there
shows the same without the audit. Programs that resume exactly are audited, too; a finding there is
false.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
CORRECT = (
    *(("trainer", kind, seed) for kind in ("plain", "workers", "epochs", "manual") for seed in "12"),
    *((f"audit_{name}", kind) for name in ("accelerate", "lightning") for kind in ("steps", "epochs") * 2),
    *(("audit_transformers", kind) for kind in ("documented", "plain", "epochs", "documented")),
)
"""Programs of tests/programs that resume exactly, with their arguments; some are audited twice."""


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


def audited(program: str, arguments: Sequence[str], kills: int) -> dict[str, Any]:
    """Return the verdict on a program of tests/programs, without paths of this machine, and the seconds."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tandem-audits-") as folder:
        copy = shutil.copy(PROGRAMS / f"{program}.py", folder)
        # The program is alone there, because the audit copies its directory.
        audit = (sys.executable, "-m", "tandem", "verify-resume", "--json", "--kills", str(kills), "--")
        found = json.loads(said(*audit, python(), Path(copy).name, *arguments, folder=folder))
    seconds = round(time.monotonic() - began, 1)
    print(f"{program} {' '.join(arguments)}: {found['verdict']}, {seconds} s", file=sys.stderr, flush=True)
    return {**{key: found[key] for key in ("verdict", "why", "kinds", "trials")}, "seconds": seconds}


def confirmed(framework: str) -> dict[str, str]:
    """Return {way: what is found without the audit}."""
    lines = said(python(), str(PROGRAMS / "audits_confirmed.py"), framework).splitlines()
    start = f"{framework}, "
    found = [line.removeprefix(start).partition(": ") for line in lines if line.startswith(start)]
    return {way: text for way, _, text in found}


def version_of(framework: str) -> str:
    look = f"import importlib.metadata; print(importlib.metadata.version({framework!r}))"
    return said(python(), "-c", look).strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=3, help="killed runs for each row [3]")
    parser.add_argument("--jobs", type=int, default=1, help="audits at a time [1]")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    asked = parser.parse_args()
    if asked.jobs < 1:
        parser.error(f"--jobs: invalid value {asked.jobs}; expected an integer >= 1")
    python()  # before any thread starts: one line if it is missing
    frameworks = list(dict.fromkeys(way.framework for way in WAYS))
    with ThreadPoolExecutor(asked.jobs) as jobs:
        versions = jobs.map(version_of, frameworks)
        again = jobs.map(confirmed, frameworks)
        ways = [jobs.submit(audited, f"audit_{way.framework}", (way.kind,), asked.kills) for way in WAYS]
        correct = [jobs.submit(audited, program, words, asked.kills) for program, *words in CORRECT]
    about = {name: (version, found) for name, version, found in zip(frameworks, versions, again, strict=True)}
    rows = []
    for way, job in zip(WAYS, ways, strict=True):
        version, found = about[way.framework]
        row = {"framework": way.framework, "version": version, "way": way.about}
        issue = way.issue and f"{GITHUB}/{way.issue}"
        rows.append({**row, "issue": issue, **job.result(), "confirmed": found[way.confirmed]})
    named = zip(map(" ".join, CORRECT), correct, strict=True)
    audits = [{"program": program, **job.result()} for program, job in named]
    if asked.json:
        save({"rows": rows, "correct": audits}, asked.json)
    else:
        print(json.dumps({"rows": rows, "correct": audits}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
