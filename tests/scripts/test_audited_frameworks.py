"""`tandem verify-resume -- COMMAND` on programs of Accelerate, Lightning and transformers.

A planted bug is named, a correct program is called correct, and what is documented has the known result. The
runs of one framework are forks of a process that has imported it. `make frameworks` installs the frameworks.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from patience import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(patient(900))]

TESTS = Path(__file__).parents[1]


class Framework(NamedTuple):
    """What the forking process imports, and {KIND:SEED:KILLS: the kinds of bug that are found}."""

    imports: str
    kinds: dict[str, list[str]]


FRAMEWORKS = {
    "accelerate": Framework(
        "accelerate safetensors.torch",
        {
            "steps:1:2": [],
            "epochs:3:1": [],
            "documented:2:2": ["random"],
            "seedable:1:2": ["random"],
            "optimizer-lost:1:1": ["optimizer-lost"],
            "schedule:1:1": ["schedule"],
            "data-restarts:1:1": ["data-restarts"],
            "order-repeats:1:1": ["order-repeats"],
            "skipped:1:1": ["skipped"],
            "repeated:1:1": ["repeated"],
        },
    ),
    "lightning": Framework(
        "lightning lightning.pytorch",
        {
            "steps:1:2": [],
            "epochs:3:1": [],
            "documented:2:1": ["data-restarts"],
            "documented-epochs:2:1": ["order-repeats"],
            "random:1:1": ["random"],
            "optimizer-lost:1:1": ["optimizer-lost"],
            "optimizer-permuted:1:1": ["optimizer-permuted"],
            "schedule:2:1": ["schedule"],
            "data-restarts:1:1": ["data-restarts"],
            "order-repeats:1:1": ["order-repeats"],
        },
    ),
    "transformers": Framework(
        "transformers transformers.trainer transformers.models.bert.modeling_bert accelerate",
        {
            "documented:2:2": [],
            "plain:1:1": [],
            "epochs:3:1": [],
            "augmented:1:1": ["random"],
            "random:1:1": ["random"],
            "optimizer-lost:1:1": ["optimizer-lost"],
            "schedule:2:1": ["schedule"],
            "data-restarts:1:1": ["data-restarts"],
        },
    ),
}
SOME = {
    "accelerate": ["steps:1:2", "documented:2:2", "schedule:1:1", "skipped:1:1", "repeated:1:1"],
    "lightning": ["epochs:3:1", "documented:2:1", "optimizer-permuted:1:1", "order-repeats:1:1"],
    "transformers": ["documented:2:2", "augmented:1:1", "optimizer-lost:1:1", "data-restarts:1:1"],
}
"""Each kind of bug once, and a correct program of each framework; `make soak` audits all."""
CONFIRMED = {
    "accelerate": [
        "accelerate, default: different order, 14 samples lost, different dropout",
        "accelerate, seedable: same order, no samples lost, same contents, different dropout",
    ],
    "lightning": [
        "lightning, steps: different order, the order of the first steps repeats, 20 samples lost, "
        "different dropout",
        "lightning, epochs: different order, the order of the first steps repeats, no samples lost, "
        "different dropout",
    ],
    "transformers": [
        "transformers, plain: same order, no samples lost, same contents, same dropout",
        "transformers, augmented: same order, no samples lost, different contents, different dropout",
    ],
}


def installed(name: str, require: Any) -> str:
    """Return the Python that has a framework."""
    python = os.environ.get("FRAMEWORKS_PYTHON") or sys.executable
    look = f"import importlib.util as util; exit(util.find_spec('{name}') is None)"
    has_it = subprocess.run([python, "-c", look], check=False).returncode == 0
    require("frameworks", has_it, f"no package {name}: make frameworks")
    return python


LONG = [pytest.param(name, marks=pytest.mark.soak) for name in ("lightning", "transformers")]


@pytest.mark.parametrize("name", ["accelerate", *LONG])
def test_a_finding_is_there_without_the_audit(name: str, require: Any) -> None:
    """If a line differs, a release has changed: repeat benchmarks/audits.py, too.

    The releases are pinned, so after a change of tests/scripts/requirements.txt, run all three: `make soak`.
    """
    command = [installed(name, require), str(TESTS / "programs" / "audits_confirmed.py"), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(300))
    found = [line for line in done.stdout.splitlines() if line.startswith(f"{name}, ")]
    assert found == CONFIRMED[name], done.stderr


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("audits_all", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_bugs_are_named_and_correct_programs_pass(name: str, audits_all: bool, require: Any) -> None:
    python = installed(name, require)
    imports, kinds = FRAMEWORKS[name]
    kinds = kinds if audits_all else {kind: kinds[kind] for kind in SOME[name]}
    programs = TESTS / "programs"
    command = [python, str(programs / "audit_frameworks.py"), str(programs / f"audit_{name}.py"), *kinds]
    own = {
        "TEST_FORKS_IMPORT": imports,
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        command, env={**os.environ, **own}, capture_output=True, text=True, timeout=patient(880)
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and len(found) == len(kinds), done.stderr
    for asked, each in zip(kinds, found, strict=True):
        said = "\n".join([asked, *each["lines"]])
        print(f"{name} {asked}: {each['kinds'] or 'exact'}, {each['seconds']} s", flush=True)
        assert each["kinds"] == kinds[asked], said
        assert each["verdict"] == ("differs" if kinds[asked] else "exact"), said
