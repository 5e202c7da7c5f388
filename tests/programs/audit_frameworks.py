"""Audit programs of one framework: `audit_frameworks.py PROGRAM.py KIND:SEED:KILLS...`, a line of JSON each.

Runs with the frameworks' Python. The runs are forks of a process that has imported the framework.
"""

import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from forked import Forked
from tandem.signals import StopFlag
from tandem.verify.audit import Audit, AuditOptions
from tandem.verify.audit_runner import Audited


def popen(command, **options):
    options.pop("preexec_fn")
    return Forked(command, text=True, **options)


def main():
    program, asked = Path(sys.argv[1]), sys.argv[2:]
    for word in asked:
        kind, seed, kills = word.split(":")
        began, lines = time.monotonic(), []
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "source"
            source.mkdir()
            shutil.copy(program, source)
            options = AuditOptions([sys.executable, program.name, kind], kills=int(kills))
            audited = Audited(options.command, source, dict(os.environ), Path(folder), popen)
            verdict = Audit(options, audited, StopFlag(), lines.append).run(random.Random(int(seed)))
        found = {
            "kind": kind,
            "verdict": verdict.verdict,
            "kinds": [finding.kind for finding, _ in verdict.kinds],
            "seconds": round(time.monotonic() - began, 1),
            "lines": [*lines, *verdict.lines()],
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
