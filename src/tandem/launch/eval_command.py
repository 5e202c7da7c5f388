"""Implement `tandem eval`: as a single process, as several local ranks, or as one rank of a platform."""

import contextlib
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from tandem import layout
from tandem.checkpoint.decision import locate, warn_damaged
from tandem.checkpoint.manifest import check_fits
from tandem.checkpoint.store import CheckpointStore
from tandem.config import SETTINGS, Given, Settings, as_flags, resolve
from tandem.config.slices import LaunchConfig
from tandem.config.task_names import describe_task_code, is_script
from tandem.distributed.position import RankStart
from tandem.errors import FAILED, FINISHED, ConfigError, PeerLostError, TandemError, job_code, shell_code
from tandem.launch.run_dir import scratch
from tandem.launch.simulated import stop_with_parent
from tandem.launch.standalone_rank import connection_of, position_of
from tandem.launch.torch_variables import use_loopback
from tandem.log import printable, setup
from tandem.platforms.detection import detect
from tandem.tasks.traces import short_trace, what_and_where
from tandem.telemetry.journal import to_json
from tandem.text import one_line
from tandem.timeouts import SUPERVISE_SECONDS

log = logging.getLogger("tandem.run")

OF_THIS_MACHINE = ("data_dir", "download", "device", "threads", "workers", "eval_batch_size", "nproc")
"""Settings that variables and files may also set. All others are the checkpoint's, or set by a flag."""
NOT_OF_THE_RUN = ("device", "threads", "workers", "batch_shares", "compile")
"""Settings of the training that do not apply to an evaluation, or to another machine."""


def evaluate(source: str, given: Mapping[str, Given], environ: Mapping[str, str], as_json: bool) -> int:
    """Evaluate the newest valid checkpoint at `source`, or the step that it names; return the exit code.

    `environ` is what `outside_steps` returned. Raises TandemError.
    """
    store, step = locate(source)
    step, info = _newest(store) if step is None else (step, store.info(step))
    settings, note = settings_of(store.directory, info, given, environ)
    placement = detect(environ, socket.gethostname(), settings.launch)
    exactly = f"{store.directory}@{step}"
    nproc = settings.launch.nproc
    if placement.rank is None and placement.nodes > 1:
        raise ConfigError(
            f"`tandem eval` starts ranks on one node only, and here are {placement.nodes}; start each rank "
            "with torchrun or srun, or use --nproc N on one machine"
        )
    # No platform has started ranks, so this process starts them and waits.
    if placement.rank is None and nproc not in ("auto", 1):
        return _start_ranks(exactly, given, environ, int(nproc), as_json)
    setup(None, placement.rank or 0, placement.node_rank, True, settings.telemetry.log_format == "json")
    if note and not placement.rank:
        print(f"tandem: {note}", file=sys.stderr, flush=True)
    placement = replace(placement.as_rank(), nproc=placement.nproc or 1)
    if placement.nodes == 1:
        use_loopback()
    start = RankStart(position_of(placement), connection_of(placement, settings.launch))
    return _as_rank(settings, start, store, step, as_json)


def _as_rank(settings: Settings, start: RankStart, store: CheckpointStore, step: int, as_json: bool) -> int:
    from tandem.distributed.devices import not_deterministic
    from tandem.distributed.peers import is_peer_loss
    from tandem.rank.task import score

    position = start.position
    try:
        scores = score(settings, start, f"{store.directory}@{step}")
    except TandemError:
        raise
    except Exception as error:
        if is_peer_loss(error, position.world_size):
            raise PeerLostError(f"lost the other ranks: {one_line(error)}") from error
        if (refused := not_deterministic(error)) is not None:
            raise refused from error
        log.error("%s\nthe task failed: %s", short_trace(error), what_and_where(error))
        return FAILED
    if position.rank == 0:
        print(format_scores(store, step, scores, position.world_size, as_json))
    return FINISHED


def format_scores(
    store: CheckpointStore, step: int, scores: Mapping[str, float], ranks: int, as_json: bool
) -> str:
    """Return what `tandem eval` prints."""
    if as_json:
        facts = {"checkpoint": str(store.path(step)), "step": step, "ranks": ranks, "eval": dict(scores)}
        return to_json(facts)
    text = ", ".join(f"{name} {value:.4f}" for name, value in sorted(scores.items()))
    directory = printable(str(store.directory))
    return f"step {step:,} in {directory}: {text or 'no score: the evaluation set is empty'}"


def settings_of(
    directory: PurePath, info: Mapping[str, Any], given: Mapping[str, Given], environ: Mapping[str, str]
) -> tuple[Settings, str]:
    """Return the settings of the checkpoint in `directory`, overridden by those given now.

    Launch settings are not taken from the checkpoint. Also returns a line to print before the task is
    imported, if the checkpoint names the task. Raises ConfigError, for example if the checkpoint names a task
    file inside the run directory: anyone who can write there could run code.
    """
    ran = Settings.from_dict(info.get("settings", {}), tolerant=True)
    default = Settings()
    ran = replace(ran, launch=LaunchConfig()).replace(**{n: default.value(n) for n in NOT_OF_THE_RUN})
    loaded = resolve(given, environ)
    now = {
        name: loaded.settings.value(name)
        for name in loaded.chosen
        if name in SETTINGS and (name in given or name in OF_THIS_MACHINE or SETTINGS[name].slice == "launch")
    }
    fields = {name.removeprefix("task."): each.text for name, each in given.items() if name[:5] == "task."}
    theirs = {} if now.get("task", ran.run.task) != ran.run.task else ran.run.task_fields
    settings = ran.replace(**{**now, "task_fields": {**theirs, **fields}})
    if "task" in given:
        return settings, ""
    if is_script(settings.run.task):
        raise ConfigError(
            f"this run came from a script ({printable(settings.run.task)}), which has no evaluation and no "
            "task that builds its model: use `tandem export RUN` for its weights"
        )
    run_dir = directory.parent if directory.name.startswith(layout.CHECKPOINTS) else directory
    return settings, describe_task_code(
        settings.run.task, f"the checkpoint in {printable(str(directory))}", run_dir
    )


def _newest(store: CheckpointStore) -> tuple[int, dict[str, Any]]:
    def whole(step: int) -> dict[str, Any]:
        info = store.info(step)
        check_fits(store.path(step), store.sizes().get(step, 0))
        store.verify(step)
        return info

    found = store.newest(whole, warn_damaged, quarantine=False)
    if found is None:
        raise ConfigError(f"{store.directory} contains no valid checkpoint")
    return found


def _start_ranks(
    source: str, given: Mapping[str, Given], environ: Mapping[str, str], count: int, as_json: bool
) -> int:
    """Start `count` ranks on this machine that connect through a file; return the exit code of all.

    Rank 0 has the terminal.
    """
    # With these settings, each rank would start ranks itself.
    own = {name: each for name, each in given.items() if name not in ("nproc", "nodes")}
    with scratch() as folder, contextlib.ExitStack() as opened:
        words = [source, *(["--json"] if as_json else []), *as_flags(own), f"--master=file://{folder}/meet"]
        outputs = [opened.enter_context((folder / f"rank-{rank}.txt").open("w+")) for rank in range(1, count)]
        ranks = [
            _start(words, environ, rank, count, None if rank == 0 else outputs[rank - 1])
            for rank in range(count)
        ]
        codes = _wait(ranks)
        code = job_code(codes)
        if codes[0] != code:  # another rank's output explains the failure
            print(
                (folder / f"rank-{codes.index(code)}.txt").read_text(errors="replace"),
                end="",
                file=sys.stderr,
            )
    return code


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Return the exit codes of all ranks; if one fails, terminate the others, which would wait for it."""
    while any(rank.poll() is None for rank in ranks):
        time.sleep(SUPERVISE_SECONDS)
        if any(rank.poll() not in (None, FINISHED) for rank in ranks):
            for rank in ranks:
                rank.terminate()
    return [shell_code(rank.returncode) for rank in ranks]


def _start(
    words: Sequence[str], environ: Mapping[str, str], rank: int, count: int, output: Any
) -> subprocess.Popen[bytes]:
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    return subprocess.Popen(
        [sys.executable, "-m", "tandem", "eval", *words],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**environ, **variables, "WORLD_SIZE": str(count)},
        preexec_fn=stop_with_parent,
    )
