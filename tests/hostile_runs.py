"""Run directories that somebody hostile has filled, made from a seed, and every reading command over them.

    python tests/hostile_runs.py --count 200 --seed 1

makes so many below a temporary folder, gives each to `runs`, `report`, `page`, `checkpoints ls`, `eval`,
`export` and `track`, and prints one line of JSON: how often each was called and did its work (the rest ended
with a line), how long it took at most, and what went wrong. Beside the
runs lies a folder with a canary, a word that links lead to and no output may have.
"""

import argparse
import hashlib
import io
import json
import os
import random
import re
import secrets
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from pathlib import Path
from typing import Any

from tandem.checkpoint.manifest import seal
from tandem.checkpoint.store import CheckpointStore

HARD_LIMIT_SECONDS = 60
COMMANDS = ("runs", "report", "page", "checkpoints ls", "eval", "export", "track")
FILES = (
    "config.json",
    "summary.json",
    "about.json",
    "events.jsonl",
    "events.jsonl.1",
    "metrics.jsonl",
    "metrics.prom",
    "tracker.json",
    "report.html",
    "log/rank-0.log",
    "log/node-0.log",
    "owner/000000001",
    "checkpoints/step-000000010/manifest.json",
    "checkpoints/step-000000010/state.pt",
    "checkpoints/step-000000020/manifest.json",
    "checkpoints/step-000000020/state.pt",
)
FOLDERS = ("log", "owner", "checkpoints", "checkpoints/step-000000020", "tensorboard", "wandb", "profile")
EVIL_TASK = "import pathlib\npathlib.Path({marker!r}).touch()\nclass Evil:\n    build_model = loss = 1\n"


class Outside:
    """A folder beside the runs: other people's secrets, and a run of theirs; all with the canary."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.canary, self.marker = folder, f"canary{secrets.token_hex(8)}", folder / "executed"
        run, self.good = folder / "run", folder.with_name("good")
        (run / "log").mkdir(parents=True)
        (folder / "secret.json").write_text(json.dumps({"auths": {"registry": {"auth": self.canary}}}))
        fill(run, self.canary, self.state({f"{self.canary}.weight": 1}))
        os.mkfifo(folder / "pipe")
        self.before = pictured(folder)

    def state(self, names: Mapping[str, int]) -> bytes:
        import torch

        from tandem.checkpoint.state import serialize

        return serialize({"model": {name: torch.zeros(2) for name in names}})


def fill(run: Path, word: str, state: bytes, task: str = "nowhere.py:Nothing") -> None:
    """A whole run, as tandem leaves one, with `word` wherever text stands."""
    for name in ("log", "owner"):
        (run / name).mkdir(parents=True, exist_ok=True)
    texts: dict[str, Any] = {
        "config.json": {"task": word, "tracker": "mlflow", "task_fields": {"field": word}},
        "summary.json": {
            "state": "failed", "reason": f"rank 0: {word}", "eval": {word: 0.5}, "global_step": 20,
            "loss": 1.5, "world_size": 2, "nodes": 1, "restarts": 1, "exit_code": 1,
        },
        "about.json": {"command": word, "folder": "/x", "hardware": [word], "started": 1.7e9},
        "tracker.json": {"mlflow": {"ours": "a", "run": None, "step": -1, "rows": 0, "sent": 0}},
    }  # fmt: skip
    for name, value in texts.items():
        (run / name).write_text(json.dumps(value))
    points = [{"step": step, "time": 1.7e9, "loss": 1.0, "eval": {word: 0.5}} for step in (10, 20)]
    events = [{"kind": "world", "time": 1.7e9, "nodes": 1}, {"kind": "failed", "time": 1.7e9, "reason": word}]
    for name, lines in (("metrics.jsonl", points), ("events.jsonl", events), ("events.jsonl.1", events)):
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "metrics.prom").write_text('tandem_activity_seconds_total{activity="train"} 8.5\n')
    (run / "log" / "rank-0.log").write_text(f"{word}\n")
    (run / "log" / "node-0.log").write_text(f"{word}\n")
    store = CheckpointStore(run / "checkpoints")
    for step in (10, 20):
        info = {"settings": {"task": task}, "eval": {word: 0.5}, "train_samples": 100, "steps_per_epoch": 10}
        store.save(step, state, info)


# What is put in the place of a file or folder. Each is called with its path, the random numbers and Outside.
Put = Callable[[Path, random.Random, Outside], object]


def linked(path: Path, dice: random.Random, outside: Outside) -> None:
    """A link to its like in the run outside, to a secret, to something endless, to nothing, to itself."""
    like = outside.folder / "run" / path.relative_to(run_of(path))
    target = dice.choice(
        [like, like, os.path.relpath(like, path.parent), outside.folder / "secret.json",
         outside.folder / "pipe", "/dev/zero", "nowhere", path.name, "/proc/self/environ"]
    )  # fmt: skip
    path.symlink_to(target)


def sized(path: Path, dice: random.Random, outside: Outside) -> None:
    size = dice.choice([0, 1, 5 << 20, 1 << 40])
    path.touch()
    os.truncate(path, size)


def special(path: Path, dice: random.Random, outside: Outside) -> None:
    kind = dice.choice(["pipe", "socket", "device", "directory", "full directory"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # an address is 108 bytes at most
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(path.name)
        os.chdir(here)
    elif kind == "device" and os.geteuid() == 0:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    else:
        path.mkdir()
        for number in range(300 if kind == "full directory" else 0):
            (path / f"{number}.txt").touch()


def junk(path: Path, dice: random.Random, outside: Outside) -> None:
    path.write_bytes(
        dice.choice(
            [
                b"[" * 100_000,
                b'{"a":' * 50_000,
                b"{}",
                b"[]",
                b"null",
                b'"text"',
                b"\xff\xfe\x00{",
                b'{"state": "\xff\xfe", "step": 1, "kind": "\x80"}\n' * 3,
                b"\n" * (4 << 20),
                b"x\n" * (1 << 20),
                b"{\n" * 100_000,
                b'{"step": 1}\n' * 100_000,
                b"9" * 100_000,
                b"[" + b"0," * 300_000 + b"0]",
                bytes(dice.randrange(256) for _ in range(2000)),
            ]
        )
    )


STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 10**400, -(10**300), float("nan"), float("inf"), -1e308, 1e300, 253402300800,
    "", "text", "NaN", "\x1b[2J\x07", "\ud800", "\u202etxet", "a\nb\rc", "x" * 100_000,
    [], {}, [[]], [1, "a", None], {"a": {"b": [{}]}}, {"step": {"x": 1}}, {"loss": "NaN", "b": "c"},
    {str(number): number for number in range(3000)},
    "s3://bucket/run", "/etc/passwd", "../../..", "os:system", "task.py:Evil", "{run}/task.py:Evil",
)  # fmt: skip


def retyped(path: Path, dice: random.Random, outside: Outside) -> None:
    """The file, with other values in some of its fields; a manifest gets the SHA-256 that it then has."""
    try:
        lines = path.read_text().splitlines() if path.suffix in (".jsonl", ".1") else [path.read_text()]
        changed = [json.loads(line) for line in lines]
        for value in changed:
            value.pop("manifest_sha256", None)
            for _ in range(dice.randint(1, 4)):
                change(value, dice, run_of(path))
    except (ValueError, AttributeError, TypeError, RecursionError):  # junk has been put there before
        return junk(path, dice, outside)
    if path.name == "manifest.json":
        path.write_bytes(seal(changed[0]))
    else:
        path.write_text("".join(json.dumps(each) + "\n" for each in changed))
    return None


def change(value: dict[str, Any], dice: random.Random, run: Path) -> None:
    """One field of an object, or of one in it."""
    inner = [each for each in value.values() if isinstance(each, dict) and each]
    if inner and dice.random() < 0.5:
        return change(dice.choice(inner), dice, run)
    new = deepcopy(dice.choice(STRANGE))
    new = new.format(run=run) if isinstance(new, str) and "{run}" in new else new
    name = dice.choice([*value, "more", "\ud801", "password"])
    if dice.random() < 0.15:
        for _ in range(dice.choice([20, 200])):
            new = [new]
    value[name] = new
    return None


def run_of(path: Path) -> Path:
    """The run that a path is in: each is called run-N, whatever follows."""
    return next(each for each in (path, *path.parents) if each.name.startswith("run-"))


def removed(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for each in path.iterdir():
            removed(each)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def make(number: int, folder: Path, seed: int, outside: Outside) -> Path:
    """Hostile run `number` in `folder`."""
    dice = random.Random(f"{seed} {number}")
    name = os.fsdecode(
        f"run-{number}".encode() + dice.choice([b"", b"", b"", b"\xff\xfe", b" a\nb", b"-\x1b[1m"])
    )
    run = folder / name
    state = dice.choice([b"the state", outside.state({"weight": 1}), b"PK" + b"\0" * 50])
    run.mkdir()
    (run / "task.py").write_text(EVIL_TASK.format(marker=str(outside.marker)))
    fill(
        run,
        "word",
        state,
        dice.choice(["nowhere.py:Nothing", f"{run}/task.py:Evil", "digitz", "os.path:join"]),
    )
    for _ in range(dice.randint(1, 4)):
        if dice.random() < 0.25:
            put: Put = dice.choice([linked, linked, special])
            place = run / dice.choice(FOLDERS)
        else:
            put = dice.choice([linked, linked, special, sized, junk, retyped, retyped])
            place = run / dice.choice(FILES)
        if os.path.realpath(place.parent) != str(place.parent) or not place.parent.is_dir():
            continue  # behind a link that was put there: never touch what is outside
        if put is not retyped:
            removed(place)
            put(place, dice, outside)
        elif place.is_file() and not place.is_symlink() and place.stat().st_size < 1 << 20:
            put(place, dice, outside)
    if dice.random() < 0.1:
        deep = run / "more"
        for _ in range(100):
            deep = deep / ("d" * 20)
        deep.mkdir(parents=True)
    return run


def pictured(folder: Path) -> str:
    """A digest of all there is in a folder: names, kinds, sizes and times."""
    digest = hashlib.sha256()
    for place, names, files in sorted(os.walk(folder)):
        for name in sorted([*names, *files]):
            facts = os.lstat(os.path.join(place, name))
            digest.update(repr((place, name, facts.st_mode, facts.st_size, facts.st_mtime_ns)).encode())
    return digest.hexdigest()


class Trial:
    """Calls commands, and takes down how long each took, what it said and what was wrong with that."""

    def __init__(self, outside: Outside) -> None:
        self.outside, self.wrong = outside, list[str]()
        self.longest = dict.fromkeys(COMMANDS, 0.0)
        self.ended, self.did = dict.fromkeys(COMMANDS, 0), dict.fromkeys(COMMANDS, 0)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        signal.alarm(HARD_LIMIT_SECONDS)
        started = time.monotonic()
        try:
            yield
        finally:
            signal.alarm(0)
            self.longest[name] = max(self.longest[name], time.monotonic() - started)
            self.ended[name] += 1

    def call(self, name: str, words: Sequence[str], run: Path) -> str:
        """What a command has said; an error of ours has to be one line, and no other may come out of it."""
        from tandem.cli import run as command
        from tandem.errors import TandemError

        said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict", write_through=True)
        line = ""
        with self.timed(name), redirect_stdout(said), redirect_stderr(said):
            try:
                command(name.partition(" ")[0], words, {})
                self.did[name] += 1
            except TandemError as error:
                line = str(error)
                if "\n" in line.replace(str(run), ""):
                    self.wrong.append(f"{name} {run.name!r}: several lines: {line!r}")
            except BaseException as error:
                self.wrong.append(f"{name} {run.name!r}: {type(error).__name__}: {error}"[:400])
        text = said.buffer.getvalue().decode() + line  # type: ignore[attr-defined]
        self.look(name, run, text.encode(errors="replace"))
        if not text.strip():
            self.wrong.append(f"{name} {run.name!r}: it has said nothing")
        return text

    def look(self, name: str, run: Path, output: bytes) -> None:
        if self.outside.canary.encode() in output:
            self.wrong.append(f"{name} {run.name!r}: the canary is in its output")

    def page(self, runs: Sequence[Path]) -> None:
        """Each run alone, and all of them beside a good one, which has to be there."""
        from tandem.report.report import ReportServer
        from tandem.report.web import Access

        server = ReportServer([self.outside.good, *runs], "127.0.0.1", 0, Access())
        try:
            for number, run in enumerate(runs):
                with self.timed("page"):
                    try:
                        code, _, body = server.answer(f"/{number + 2}", "")
                        self.look("page", run, body)
                        self.did["page"] += code == 200
                        if code not in (200, 404):
                            self.wrong.append(f"page {run.name!r}: {code}")
                    except BaseException as error:
                        self.wrong.append(f"page {run.name!r}: {type(error).__name__}: {error}"[:400])
            try:
                code, _, body = server.answer("/", "")
                self.look("page", runs[0], body)
                if code != 200 or b'"name": "good"' not in body:
                    self.wrong.append(f"page: {code} for all runs")
            except Exception as error:
                self.wrong.append(f"page of all: {type(error).__name__}: {error}"[:400])
        finally:
            server._http.server_close()


class Kept:
    """A tracker that keeps what it is sent."""

    id = "there"

    def __init__(self, _name: str, beginning: Any) -> None:
        SENT.append(repr(beginning))

    def rows(self, rows: Sequence[Any]) -> None:
        SENT.extend(map(repr, rows))

    def end(self, state: str, summary: Mapping[str, object]) -> None:
        SENT.append(repr((state, summary)))


SENT: list[str] = []


def try_all(trial: Trial, runs: Sequence[Path], folder: Path) -> None:
    """Every command over every run."""
    from tandem.report import tracking

    tracking.open_tracker, tracking.check_tracker = Kept, lambda name: None  # type: ignore[assignment]
    listed = trial.call("runs", [str(folder)], folder)
    for number, run in enumerate(runs):
        is_listed = re.search(rf"^run-{number}(?!\d)", listed, re.M) is not None
        if is_listed != os.path.lexists(run / "config.json"):
            trial.wrong.append(f"runs: no line for {run.name!r}")
        trial.call("runs", [str(run)], run)
    for start in range(0, len(runs), 15):
        trial.page(runs[start : start + 15])
    exported = folder.parent / "exported"
    for run in runs:
        before = pictured(run)
        trial.call("checkpoints ls", ["ls", str(run)], run)
        trial.call("eval", [str(run)], run)
        trial.call("export", [str(run), "--format", "torch", "--output", str(exported)], run)
        if exported.exists():
            trial.look("export", run, exported.read_bytes())
            exported.unlink()
        if pictured(run) != before:
            trial.wrong.append(f"{run.name!r}: a command that only reads has changed it")
        trial.call("report", [str(run)], run)
        if (run / "report.html").is_file() and not (run / "report.html").is_symlink():
            with (run / "report.html").open("rb") as file:
                trial.look("report", run, file.read(64 << 20))
        trial.call("track", [str(run)], run)
        trial.look("track", run, "".join(SENT).encode(errors="replace"))
        SENT.clear()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="tandem-hostile-") as top:
        folder = Path(top, "runs")
        folder.mkdir()
        os.chdir(top)
        outside = Outside(Path(top, "outside"))
        fill(outside.good, "good", b"the state")
        runs = [make(number, folder, options.seed, outside) for number in range(options.count)]
        trial = Trial(outside)
        try_all(trial, runs, folder)
        if outside.marker.exists():
            trial.wrong.append("a task in a run's folder was run")
        if pictured(outside.folder) != outside.before:
            trial.wrong.append("what is outside has changed")
        longest = {name: round(seconds, 2) for name, seconds in trial.longest.items()}
    told = {
        "runs": len(runs),
        "calls": trial.ended,
        "did": trial.did,
        "longest": longest,
        "wrong": trial.wrong,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
