"""Assert in a test of your own that a training program resumes exactly.

    from tandem.verify.pytest import assert_resumes

    def test_my_trainer_resumes():
        assert_resumes(["python", "train.py", "--epochs", "2"])

It works with any test runner, and the program needs no tandem.
"""

import os
import re
from collections.abc import Mapping, Sequence

from tandem.signals import StopFlag
from tandem.verify.audit import AuditOptions, AuditVerdict, audit


def assert_resumes(
    command: Sequence[str],
    *,
    launcher: str = "none",
    nproc: int = 1,
    kills: int = 3,
    outputs: Sequence[str] = (),
    log: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> AuditVerdict:
    """Audit `command` in copies of the current directory, and return the verdict.

    The arguments are the options of `tandem verify-resume -- COMMAND`; `environ` replaces the environment.
    Raises AssertionError with the report if a killed run differs or could not be judged, and RunFailedError
    if the program fails without a kill.
    """
    pattern = re.compile(log, re.MULTILINE) if log else None
    asked = AuditOptions(tuple(command), launcher, nproc, kills, tuple(outputs), pattern)
    lines: list[str] = []
    # No handler is installed: Ctrl-C ends the test, and the block of each run kills its processes.
    found = audit(asked, os.environ if environ is None else environ, StopFlag(), lines.append)
    if found.exit_code:
        raise AssertionError("\n".join(lines))
    return found
