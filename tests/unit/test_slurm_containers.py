"""`tandem doctor` about Apptainer, Pyxis and Enroot, with programs that answer as the real ones do."""

from pathlib import Path

import pytest

from tandem.launch.connectivity import ConnectivityProblem
from tandem.verify import machine

APPTAINER = "echo apptainer version 1.4.5"
ENROOT = "echo 4.1.2"
SRUN = "echo '  -N, --nodes=N'"
PYXIS = "echo '      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH'"
IN_JOB = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node1"}


def found(
    folder: Path, programs: dict[str, str], limit: str = "100", **variables: str
) -> list[ConnectivityProblem]:
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    (folder / "limit").write_text(limit + "\n")
    return list(machine.container_findings({"PATH": str(folder), **variables}, folder / "limit"))


@pytest.mark.parametrize("programs", [{}, {"srun": SRUN}], ids=["nothing", "slurm alone"])
def test_a_machine_without_them_has_no_line(tmp_path: Path, programs: dict[str, str]) -> None:
    assert found(tmp_path, programs) == []


@pytest.mark.parametrize(("programs", "variables", "name", "state", "key"), [
    ({"apptainer": APPTAINER}, {}, "apptainer", "pass", "version 1.4.5"),
    ({"apptainer": APPTAINER, "singularity": "exit 1"}, {}, "apptainer", "pass", "version 1.4.5"),
    ({"singularity": "echo singularity-ce version 4.1.5"}, {}, "singularity", "pass", "version 4.1.5"),
    ({"apptainer": APPTAINER, "srun": SRUN}, {}, "apptainer", "warn", "not inside an allocation"),
    ({"apptainer": APPTAINER, "srun": SRUN}, IN_JOB, "apptainer", "pass", "in job 7"),
    ({"apptainer": "echo first >&2; echo no starter >&2; exit 255"}, {}, "apptainer", "warn", "no starter"),
    ({"srun": PYXIS, "enroot": ENROOT}, IN_JOB, "pyxis", "pass", "enroot 4.1.2, in job 7"),
    ({"srun": PYXIS, "enroot": ENROOT}, {}, "pyxis", "warn", "not inside an allocation"),
    ({"srun": PYXIS}, {}, "pyxis", "warn", "not inside an allocation"),
    ({"srun": PYXIS}, IN_JOB, "pyxis", "warn", "enroot is not on PATH"),
    ({"srun": SRUN, "enroot": ENROOT}, IN_JOB, "pyxis", "warn", "srun has no --container-image"),
    ({"enroot": ENROOT}, {}, "pyxis", "warn", "srun is not on PATH"),
    ({"srun": "echo no slurm.conf >&2; exit 1", "enroot": ENROOT}, {}, "pyxis", "warn", "no slurm.conf"),
    ({"srun": PYXIS, "enroot": "exit 3"}, IN_JOB, "pyxis", "warn", "exit code 3"),
])  # fmt: skip
def test_one_line_for_each(
    tmp_path: Path, programs: dict[str, str], variables: dict[str, str], name: str, state: str, key: str
) -> None:
    [finding] = found(tmp_path, programs, **variables)
    assert (finding.name, finding.state) == (name, state) and key in finding.text, finding
    assert bool(finding.remedy) == (state == "warn") and "\n" not in finding.text


def test_without_namespaces_a_setuid_installation_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    programs = tmp_path / "bin"
    programs.mkdir()
    everything = {"apptainer": APPTAINER, "srun": PYXIS, "enroot": ENROOT}
    states = [each.state for each in found(programs, everything, "0", **IN_JOB)]
    assert states == ["warn", "warn"]
    helper = tmp_path / "libexec/apptainer/bin/starter-suid"
    helper.parent.mkdir(parents=True)
    helper.touch()
    states = [each.state for each in found(programs, everything, "0", **IN_JOB)]
    assert states == ["pass", "warn"]
