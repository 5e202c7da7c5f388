"""slurm/train-apptainer.sbatch and train-pyxis.sbatch: what they start, and that a stopped job comes back.

Apptainer is the real one where it is installed. Elsewhere, and for Pyxis, programs in stand_ins/ take their
place: they check the options, set the variables of the image, and run the command under the real Slurm.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slurm_jobs import SBATCH_FILES, TRAIN, Slurm

from patience import patient

STAND_INS = Path(__file__).with_name("stand_ins")
SRC = SBATCH_FILES.parent / "src"
APPTAINER, PYXIS = (SBATCH_FILES / f"train-{tool}.sbatch" for tool in ("apptainer", "pyxis"))
BOTH = pytest.mark.parametrize("file", [APPTAINER, PYXIS], ids=lambda file: file.stem)
# As tandem's own image has them (docker/Dockerfile): what a job sets has to count all the same.
VALUES = {
    "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    "PYTHONPATH": str(SRC),
    "TANDEM_RUN_DIR": "/checkpoints/run",
    "TANDEM_STATE_DIR": "/run/tandem",
    "TANDEM_METRICS": "0.0.0.0:19469",
}
PRINTS = '#!/bin/sh\n[ "$1" = --help ] && exec echo "  --container-image=PATH"\nprintf "%s\\n" "$@"; env\n'


def image(folder: Path, file: Path) -> Path:
    """A value of CONTAINER_IMAGE: a sandbox directory, or for Pyxis's stand-in a file of variables."""
    if file == PYXIS:
        made = folder / "image.sqsh"
        made.write_text("".join(f"{name}={value}\n" for name, value in VALUES.items()))
        return made
    made = folder / "image"
    for name in ("dev", "etc", "home", "proc", "root", "sys", "tmp", "usr", "var/tmp", ".singularity.d/env"):
        (made / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (made / name).symlink_to(f"usr/{name}")
    for name in ("group", "passwd", "hosts", "resolv.conf", "localtime"):
        (made / "etc" / name).touch()
    lines = "".join(f'export {name}="{value}"\n' for name, value in VALUES.items())
    (made / ".singularity.d/env/10-docker2singularity.sh").write_text(lines)
    (made / ".singularity.d/env/99-base.sh").touch()  # Apptainer sets APPTAINERENV_* after it
    return made


def mounts() -> str:
    """The directories of this host that the image lacks: Python, the packages, tandem."""
    paths = {"/usr", str(SRC), sys.prefix, sys.base_prefix, str(Path(sys.prefix).resolve())}
    return ",".join(f"{path}:{path}" for path in sorted(paths))


def outside_slurm(
    folder: Path, file: Path, *words: str, srun: str = PRINTS, **variables: str
) -> tuple[int, str]:
    """The file run by a shell as Slurm would, with an srun that prints its arguments and variables."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name in ("srun", "apptainer"):
        (programs / name).write_text(srun)
        (programs / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "digits", "TRAIN_SBATCH": str(TRAIN)}
    environ = {"PATH": f"{programs}:/usr/bin:/bin", "PYTHONPATH": "/host", **job, **variables}
    done = subprocess.run(
        ["bash", str(file), *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    return done.returncode, done.stdout + done.stderr


def test_the_three_files_ask_for_the_same_job() -> None:
    options = [
        [line for line in path.read_text().splitlines() if line.startswith("#SBATCH")]
        for path in sorted(SBATCH_FILES.glob("*.sbatch"))
    ]
    assert len(options) == 3 and options[0] and options[0] == options[1] == options[2]


def test_they_are_sound_shell() -> None:
    for path in SBATCH_FILES.glob("*.sbatch"):
        subprocess.run(["bash", "-n", str(path)], check=True)
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", "-x", str(path)], check=True, cwd=SBATCH_FILES.parent)


@BOTH
def test_the_command(tmp_path: Path, file: Path) -> None:
    """The container's options, then tandem's words as they are; the job's variables count inside."""
    folder, runs = tmp_path / "here", tmp_path / "runs" / "deep"
    folder.mkdir()
    where = image(folder, file)
    given = {"CONTAINER_IMAGE": where.name, "CONTAINER_MOUNTS": "/data:/data", "TANDEM_RUN_DIR": f"{runs}/a"}
    code, output = outside_slurm(folder, file, "--task", "two words", SLURM_GPUS_ON_NODE="2", **given)
    assert code == 0, output
    lines = output.splitlines()
    bound = f"{folder}:{folder},{runs}:{runs},/data:/data"
    start = ["--kill-on-bad-exit=0", "--wait=0", "--no-kill"]
    if file == APPTAINER:
        program = str(folder / "programs" / "apptainer")
        start += [program, "exec", "--bind", bound, "--pwd", str(folder), "--nv", where.name]
    else:
        assert (kept := lines[6].removeprefix("--container-env=")) != lines[6]
        known = {"TANDEM_RUN_DIR", "TANDEM_STATE_DIR", "TANDEM_METRICS", "TANDEM_JOB_SECRET"}
        assert known <= set(kept.split(","))
        start += [f"--container-image={where}", f"--container-mounts={bound}"]
        start += [f"--container-workdir={folder}", lines[6], "--no-container-entrypoint"]
    start += ["tandem", "launch", "--task", "two words"]
    assert lines[: len(start)] == start
    values = dict(line.partition("=")[::2] for line in lines[len(start) :])
    assert "PYTHONPATH" not in values and runs.is_dir() and not (runs / "a").exists()
    assert values["TANDEM_METRICS"] == "127.0.0.1:19469" and values["TANDEM_STATE_DIR"] == "/tmp/tandem-7"
    if file == APPTAINER:
        assert values["APPTAINERENV_TANDEM_RUN_DIR"] == f"{runs}/a"
        assert values["APPTAINERENV_TANDEM_JOB_SECRET"] == values["TANDEM_JOB_SECRET"]


def test_without_gpus_there_is_no_option_for_them(tmp_path: Path) -> None:
    image(tmp_path, APPTAINER)
    code, output = outside_slurm(tmp_path, APPTAINER, CONTAINER_IMAGE="image")
    assert code == 0 and "--nv" not in output.splitlines()


@BOTH
def test_what_is_missing_is_one_line(tmp_path: Path, file: Path) -> None:
    code, output = outside_slurm(tmp_path, file)
    assert code == 2 and re.fullmatch(rf"{file.name}: CONTAINER_IMAGE: no file tandem\.\w+; .+\n", output)
    code, output = outside_slurm(tmp_path, file, TRAIN_SBATCH="nowhere")
    assert code == 2 and re.fullmatch(rf"{file.name}: no file nowhere; set TRAIN_SBATCH .+\n", output)


def test_a_container_that_does_not_start_is_not_tried_again(tmp_path: Path) -> None:
    """Apptainer ends with 255 then."""
    given = {"CONTAINER_IMAGE": str(image(tmp_path, APPTAINER)), "srun": "#!/bin/sh\nexit 255\n"}
    code, output = outside_slurm(tmp_path, APPTAINER, **given)
    assert (code, output) == (255, "")


def test_without_pyxis_srun_is_not_started(tmp_path: Path) -> None:
    given = {"CONTAINER_IMAGE": str(image(tmp_path, PYXIS)), "srun": "#!/bin/sh\necho\n"}
    code, output = outside_slurm(tmp_path, PYXIS, **given)
    assert code == 2 and re.fullmatch(r"train-pyxis.sbatch: srun has no --container-image: .+\n", output)


@pytest.mark.slurm
@pytest.mark.multi
@pytest.mark.timeout(900)
@BOTH
def test_a_stopped_job_saves_and_comes_back_in_its_container(
    file: Path, slurm: Slurm, undisturbed: dict[str, Any]
) -> None:
    """SIGTERM to the whole step, a requeue, and the weights of an undisturbed run without any container."""
    run, output = f"runs/{file.stem}", slurm.folder / f"{file.stem}.out"
    programs = slurm.folder / "programs"
    programs.mkdir(exist_ok=True)
    stand_in = "srun" if file == PYXIS else "apptainer"
    if file == PYXIS or shutil.which("apptainer") is None:
        shutil.copy(STAND_INS / stand_in, programs)
    path = f"{programs}:{slurm.environment['PATH']}:{os.environ['PATH']}"
    variables = {"PATH": path, "PYTHONPATH": "/host", "TANDEM_RUN_DIR": run, "CONTAINER_MOUNTS": mounts()}
    variables["CONTAINER_IMAGE"] = str(image(slurm.folder, file))
    hold = slurm.folder / "hold"
    hold.touch()
    sbatch = ("sbatch", "--parsable", "--partition=low", "--gpus-per-node=0", f"--output={output}", str(file))
    code, job = slurm.run(*sbatch, *slurm.task(), **variables)
    assert code == 0, job
    job = job.strip()
    try:
        slurm.until(lambda: slurm.step(run) >= 5 or ended(slurm, job), "it trains in its container")
        assert not ended(slurm, job), slurm.said()
        slurm.cluster.run("scancel", "--signal=TERM", job)
        slurm.until(lambda: slurm.cluster.job(job)["Restarts"] == "1", "it stopped and was requeued")
        assert slurm.summary(run)["exit_code"] == 143
    finally:
        hold.unlink()
    slurm.until(lambda: slurm.cluster.job(job)["JobState"] == "COMPLETED" or ended(slurm, job), "it ended")
    assert slurm.cluster.job(job)["JobState"] == "COMPLETED", slurm.said()
    summary = slurm.summary(run)
    assert summary["world_size"] == 2 and summary["resumed_from_step"] >= 5
    assert summary["weights_sha256"] == undisturbed["weights_sha256"]


def ended(slurm: Slurm, job: str) -> bool:
    return slurm.cluster.job(job)["JobState"] in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
