"""Compare tandem with its peers: what the kill of one rank costs each of them.

    python benchmarks/peers.py [--trials 20] [--only NAME ...] [--json FILE]

All train the same model on two ranks of this machine over gloo (peer_programs/workload.py). Every trial is a
separate launch (peer_runs.py), and each round has one trial of every contender. Peers are installed from
PyPI, each into its own environment below --environments. For a peer that cannot be installed, or that does
not train, the row has the reason. With --only, the results of the other contenders in FILE are kept.
"""

import argparse
import json
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy

from peer_environments import Environment, NotInstalled, prepare, versions
from peer_runs import PROGRAMS, RunError, trial, workload
from peers_table import render
from table import ROOT, machine
from tandem.data.sampler import GlobalOrder

RANKS, SAVE_EVERY, SHARE = workload.RANKS, workload.SAVE_EVERY, workload.SHARE
TORCHRUN = "exec {python} -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1000"
TANDEM = (
    "exec {python} -m tandem launch --nproc 2 --run-dir {folder}/run --metrics 0 --metrics-linger 0 "
    "--max-restarts 1000"
)
LOOP = f"--threads 1 --checkpoint-every {SAVE_EVERY}"
TORCHFT = """
export TORCHFT_LIGHTHOUSE=http://localhost:{port} NUM_REPLICA_GROUPS=2
{bin}/torchft_lighthouse --bind [::]:{port} --min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000 \
    --heartbeat_timeout_ms 1000 &
for group in 0 1; do
    REPLICA_GROUP_ID=$group {python} -m torch.distributed.run --master-port $(({port} + 1 + group)) \
        --nnodes 1 --nproc-per-node 1 --max-restarts 1000 {programs}/replicas.py &
done
wait
"""
NVRX = Environment(
    (
        "--no-deps --only-binary=:all: --platform manylinux_2_39_x86_64 --python-version 312 --target {site} "
        "nvidia-resiliency-ext==0.7.0",
        "defusedxml fastapi grpcio<2,>=1.76 grpcio-tools<2,>=1.76 httpx nvidia-ml-py psutil "
        "pydantic-settings slowapi uvicorn[standard]",
    )
)
NVRX_WHEEL = "the wheel is for Python 3.12 and glibc 2.39; its Python files ran on 3.11"
SAVES = f"the script saves every {SAVE_EVERY} steps"
TWO_TRIES = 2
"""If a contender does not come to a first step so many times in a row, it has no more trials."""


@dataclass(frozen=True)
class Contender:
    """`command`: for a shell. `settings`: how it was run, for the page. `is_ours`: its order is tandem's."""

    title: str
    command: str
    settings: str
    packages: tuple[str, ...] = ()
    environment: Environment = Environment()
    variables: dict[str, str] = field(default_factory=dict)
    is_ours: bool = False


CONTENDERS = {
    "task": Contender(
        "tandem task",
        f"{TANDEM} {LOOP} --task {{programs}}/task.py:Peer --batch-size {RANKS * SHARE} --epochs 1",
        f"a snapshot after every step (default), a checkpoint every {SAVE_EVERY}",
        ("tandem-train",),
        is_ours=True,
    ),
    "loop": Contender(
        "tandem custom loop",
        f"{TANDEM} {LOOP} {{programs}}/loop.py",
        f"`tandem.start()`; a snapshot after every step (default), a checkpoint every {SAVE_EVERY}",
        ("tandem-train",),
        is_ours=True,
    ),
    "script": Contender(
        "tandem script",
        f"{TANDEM} {{programs}}/plain.py",
        f"the plain DDP script, unmodified; {SAVES}",
        ("tandem-train",),
    ),
    "torchrun": Contender(
        "torchrun",
        f"{TORCHRUN} {{programs}}/plain.py",
        f"`--monitor-interval` at its default, 0.1 s in this release; {SAVES}",
    ),
    "torchrun-fast": Contender(
        "torchrun (0.01 s monitor)",
        f"{TORCHRUN} --monitor-interval 0.01 {{programs}}/plain.py",
        f"`--monitor-interval 0.01`; {SAVES}",
    ),
    "ft_launcher": Contender(
        "NVRx `ft_launcher`",
        "exec {python} -m nvidia_resiliency_ext.fault_tolerance.launcher --nproc-per-node 2 "
        "--max-restarts 1000 --monitor-interval 0.1 {programs}/plain.py",
        f"`--monitor-interval 0.1` (default 0.3); {SAVES}; {NVRX_WHEEL}",
        ("nvidia-resiliency-ext",),
        NVRX,
    ),
    "in-process": Contender(
        "NVRx in-process restart",
        "exec {python} {programs}/in_process.py --ranks 3",
        "two active ranks and one in reserve, in the shape of the advanced example; its intervals at 0.1 s; "
        "its store is in the process that starts the ranks, because with the default, in rank 0, a kill of "
        f"rank 0 ends the job; {SAVES}; {NVRX_WHEEL}",
        ("nvidia-resiliency-ext",),
        NVRX,
    ),
    "torchft": Contender(
        "torchft",
        TORCHFT,
        "the shape of its example: a lighthouse, two replica groups of one process under torchrun, live "
        "recovery from the other group; `--heartbeat_timeout_ms 1000` (default 5000). The example does not "
        "save the position in the data",
        ("torchft-nightly",),
        Environment(("torchft-nightly==2026.10.26",)),
    ),
    "dlrover": Contender(
        "dlrover-run",
        "ELASTIC_JOB_NAME={job} exec {bin}/dlrover-run --standalone --nproc_per_node=2 --max_restarts=1000 "
        "--monitor_interval=0.1 {programs}/flash.py",
        f"Flash Checkpoint, to memory after every step and to disk every {SAVE_EVERY}; "
        "`--monitor_interval=0.1`; torch 2.6, because this release does not start with torch 2.15",
        ("dlrover",),
        Environment(("torch==2.6.0 numpy protobuf dlrover[k8s,torch]==0.6.1",), own_torch=True),
    ),
    "ray": Contender(
        "Ray Train",
        "exec {python} {programs}/with_ray.py",
        "`max_failures=-1`, `RAY_TRAIN_HEALTH_CHECK_INTERVAL_S=0.1` (default 2), a checkpoint reported "
        f"every {SAVE_EVERY} steps",
        ("ray",),
        Environment(("ray[train]==2.60.0",)),
        {
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
        },
    ),
}
SHARED = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without the second, torchrun's restarts often hang."""


class Entry:
    """One contender: its environment, its trials, and why it has no more of them."""

    def __init__(self, name: str, environments: Path) -> None:
        self.name, self.contender = name, CONTENDERS[name]
        self.python, self.error, self.failures = "", "", 0
        self.versions: dict[str, str] = {}
        self.trials: list[dict[str, Any]] = []
        try:
            self.python = prepare(_environment_name(name), self.contender.environment, environments)
            self.versions = versions(self.python, (*self.contender.packages, "torch"))
        except NotInstalled as error:
            self.error = f"not installed: {error}"
            print(f"{name}: {self.error}", file=sys.stderr, flush=True)

    def run(self, orders: Sequence[Sequence[int]]) -> None:
        """Run one trial, unless too many have failed."""
        if not self.python or self.failures >= TWO_TRIES:
            return
        with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as folder:
            try:
                found = trial(self._command(folder), Path(folder), SHARED | self.contender.variables, orders)
            except RunError as error:
                self.failures += 1
                self.error = f"does not train: {error}"
                print(f"{self.name}: {self.error}", file=sys.stderr, flush=True)
                return
            finally:
                for left in Path("/dev/shm").glob(f"{Path(folder).name}*"):  # of dlrover, which was killed
                    left.unlink()
        self.failures = 0
        self.trials.append(asdict(found))
        print(f"{self.name}: {_line(self.trials[-1])}", file=sys.stderr, flush=True)

    def _command(self, folder: str) -> str:
        python = Path(self.python)
        words = {"python": python, "bin": python.parent, "programs": PROGRAMS, "folder": folder}
        quoted = {name: shlex.quote(str(word)) for name, word in words.items()}
        return self.contender.command.format(**quoted, port=free_ports(), job=Path(folder).name)

    def result(self) -> dict[str, Any]:
        return {
            "title": self.contender.title,
            "settings": self.contender.settings,
            "versions": self.versions,
            "packages": " ".join(self.contender.environment.installs),
            "error": self.error,
            "trials": self.trials,
        }


def _environment_name(name: str) -> str:
    """Return the first contender with the same environment, which is created once."""
    wanted = CONTENDERS[name].environment
    return next(each for each, contender in CONTENDERS.items() if contender.environment == wanted)


def _line(found: dict[str, Any]) -> str:
    shown = {key: round(value, 2) if isinstance(value, float) else value for key, value in found.items()}
    return ", ".join(f"{key} {value}" for key, value in shown.items() if value not in ("", None))


def free_ports() -> int:
    """Return the first of three consecutive free ports."""
    while True:
        with socket.socket() as first, socket.socket() as second, socket.socket() as third:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
                third.bind(("127.0.0.1", port + 2))
            except (OSError, OverflowError):
                continue
            return port


def merged(entries: Sequence[Entry], path: Path | None) -> dict[str, Any]:
    """Return the other contenders' results in the file together with these, in CONTENDERS' order."""
    known = json.loads(path.read_text()) if path and path.exists() else {"machines": {}, "contenders": {}}
    for entry in (each for each in entries if each.trials or each.error):
        known["machines"][entry.name] = machine()
        known["contenders"][entry.name] = entry.result()
    return {
        part: {name: known[part][name] for name in CONTENDERS if name in known[part]}
        for part in ("machines", "contenders")
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=20, help="launches, and as many kills, of each [20]")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "peers", metavar="DIR")
    parser.add_argument("--json", type=Path, help="write the results there, too, after each trial")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the processes of a trial end with it
    ours = GlobalOrder(workload.SAMPLES, RANKS * SHARE, 0).at(0, numpy.arange(workload.SAMPLES)).tolist()
    theirs = [workload.order(rank) for rank in range(RANKS)]
    entries = [Entry(name, asked.environments.absolute()) for name in asked.only]
    for _ in range(asked.trials):
        for entry in entries:
            entry.run([ours[rank::RANKS] for rank in range(RANKS)] if entry.contender.is_ours else theirs)
            if asked.json:
                asked.json.write_text(json.dumps(merged(entries, asked.json), indent=1) + "\n")
    print(render(merged(entries, asked.json)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
