"""Check the container runtimes of Slurm jobs: Apptainer or Singularity, and Pyxis with Enroot.

A runtime that is not installed has no line.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from tandem.launch.connectivity import ConnectivityProblem
from tandem.timeouts import TOOL_ANSWER_SECONDS

USER_NAMESPACES = Path("/proc/sys/user/max_user_namespaces")
NO_NAMESPACES = "user namespaces are disabled (user.max_user_namespaces is 0)"
ASK = "ask your cluster administrator to fix it"
ASK_SETUID = "ask your cluster administrator for a setuid installation"
PYXIS_OPTION = "--container-image"

Environment = Mapping[str, str]


def findings(environ: Environment, namespaces: Path = USER_NAMESPACES) -> Iterator[ConnectivityProblem]:
    """Yield one line for each container runtime installed here."""
    # Apptainer installs `singularity` as a link to itself, which would be the same line again.
    for name in ("apptainer", "singularity"):
        if program := _program(name, environ):
            yield _apptainer(name, program, environ, namespaces)
            break
    yield from _pyxis(environ, namespaces)


def _apptainer(name: str, program: str, environ: Environment, namespaces: Path) -> ConnectivityProblem:
    works, answer = _answer([program, "--version"], environ)
    if not works:
        return ConnectivityProblem(name, "warn", f"{program} fails: {answer}", ASK)
    # Root and the setuid helper mount images without user namespaces.
    if os.geteuid() and not _has_namespaces(namespaces) and not _is_setuid(name, program):
        return ConnectivityProblem(name, "warn", f"{answer}, and {NO_NAMESPACES}", ASK_SETUID)
    return _placed(name, answer, "slurm/train-apptainer.sbatch", environ)


def _pyxis(environ: Environment, namespaces: Path) -> Iterator[ConnectivityProblem]:
    name = "pyxis"
    srun = _program("srun", environ)
    enroot = _program("enroot", environ)
    works, answer = _answer([enroot, "version"], environ) if enroot else (True, "enroot is not on PATH")
    version = answer if not enroot or not works else f"enroot {answer}"
    helps, options = _answer([srun, "--help"], environ) if srun else (True, "")
    is_loaded = PYXIS_OPTION in options
    # Neither part is installed, so this cluster does not use Pyxis.
    if not enroot and not is_loaded:
        return
    if not works or not helps:
        yield ConnectivityProblem(
            name, "warn", f"{srun if works else enroot} fails: {answer if helps else options}", ASK
        )
    elif not is_loaded:
        missing = f"srun has no {PYXIS_OPTION}" if srun else "srun is not on PATH"
        remedy = "load spank_pyxis.so in Slurm's plugstack.conf, or use `srun enroot start`"
        yield ConnectivityProblem(name, "warn", f"{version}, but {missing}", remedy)
    elif enroot and os.geteuid() and not _has_namespaces(namespaces):
        yield ConnectivityProblem(name, "warn", f"{version}, and {NO_NAMESPACES}", ASK)
    # Pyxis starts enroot where slurmd runs the task. A login node may lack it.
    elif not enroot and "SLURMD_NODENAME" in environ:
        yield ConnectivityProblem(name, "warn", f"srun has {PYXIS_OPTION}, but {version} on this node", ASK)
    else:
        yield _placed(name, f"srun has {PYXIS_OPTION}, {version}", "slurm/train-pyxis.sbatch", environ)


def _placed(name: str, version: str, file: str, environ: Environment) -> ConnectivityProblem:
    """Pass inside a job or without Slurm; on a login node, say how to get into a job."""
    if job := environ.get("SLURM_JOB_ID"):
        return ConnectivityProblem(name, "pass", f"{version}, in job {job}")
    if _program("srun", environ) is None:
        return ConnectivityProblem(name, "pass", version)
    remedy = f"submit {file}, or check a node with `srun tandem doctor`"
    return ConnectivityProblem(name, "warn", f"{version}, but this is not inside an allocation", remedy)


def _program(name: str, environ: Environment) -> str | None:
    return shutil.which(name, path=environ.get("PATH", os.defpath))


def _answer(command: list[str], environ: Environment) -> tuple[bool, str]:
    """Run a command; return (success, output), or the last line of its output if it fails."""
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, encoding="utf-8", timeout=TOOL_ANSWER_SECONDS
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    if done.returncode == 0:
        return True, done.stdout.strip()
    lines = (done.stderr or done.stdout).strip().splitlines()
    return False, lines[-1] if lines else f"exit code {done.returncode}"


def _has_namespaces(limit: Path) -> bool:
    """Return False if user namespaces are disabled; a kernel without that limit has them."""
    try:
        return limit.read_text(encoding="ascii").strip() != "0"
    except OSError:
        return True


def _is_setuid(name: str, program: str) -> bool:
    """Return True if the setuid helper is installed next to the program."""
    prefix = Path(program).resolve().parents[1]
    # The directory depends on the distribution: Debian's packages install below lib/<triplet>.
    folders = ("libexec", "lib", f"lib/{platform.machine()}-linux-gnu")
    return any((prefix / folder / name / "bin" / "starter-suid").is_file() for folder in folders)
