"""Try to lose or corrupt checkpoints: kill the writer at every system call, flip bits, cut the power.

    python benchmarks/store_trials.py [crash] [rot] [power] [--trials N] [--json FILE]

By default, all three run with their full counts, in some minutes; `--trials` reduces the random parts. `rows`
is for `benchmarks/reliability.py`; tests run this program with small counts. tests/trials has the writers,
and the simulated disk that loses its power.
"""

import argparse
import logging
import os
import random
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.checkpoint.store import CheckpointStore

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from trials.power import SESSIONS, Promise, failing_fsyncs, lose_power, lose_power_in  # noqa: E402
from trials.store import SCENARIOS, Row, Scenario, judge, newest_valid, scratch, state, store_in  # noqa: E402
from trials.system_calls import can_trace, mark, points, trace  # noqa: E402

if TYPE_CHECKING:
    import table

FLIPS, PAGES, TRUNCATIONS, SHUFFLES = 10_000, 1_000, 1_000, 100


# ---- crash anywhere --------------------------------------------------------------------------------------


def kill_everywhere(scenario: Scenario) -> Counter[str]:
    """Kill the writer before and within each of its calls on the run directory; count what is found then,
    and what is left over ("left over") when the next process has done the same to the end."""
    found: Counter[str] = Counter()
    with scratch() as place:
        template, root = place / "template", place / "root"
        template.mkdir()
        scenario.prepare(store_in(template))

        def renew() -> Path:
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(template, root)
            return root

        for at in points(lambda: scenario.act(store_in(root)), renew()):
            killed = trace(lambda: scenario.act(store_in(root)), renew(), kill_at=at)
            assert killed.killed, f"not killed at {at}: exit code {killed.code}"
            found[judge(root, scenario)] += 1
            scenario.act(store_in(root))
            hidden = scenario.tidy and any(store_in(root).directory.glob(".*"))
            if judge(root, scenario) != "new" or hidden:
                found["left over"] += 1
    return found


def crash_anywhere(control: bool = True) -> list[Row]:
    """Return one row per action of a writer.

    "mixed": a mix of two checkpoints was loaded; "lost": a checkpoint older than allowed was loaded.
    """
    rows = []
    for name, scenario in SCENARIOS.items():
        found = kill_everywhere(scenario)
        rows.append(_crash_row(f"killed at every call: {name}", found))
    if not control:
        return rows
    for name, (write, read) in controls().items():
        rows.append(_crash_row(f"control: {name}", kill_control(write, read)))
    ours = [row for row in rows if not row.name.startswith("control")]
    trials, bad = sum(row.trials for row in ours), sum(row.bad for row in ours)
    dcp = next(row for row in rows if "distributed.checkpoint" in row.name)
    total = Row(
        "crash anywhere",
        trials,
        bad,
        f"{bad} lost or mixed",
        dcp.name.removeprefix("control: "),
        dcp.trials,
        dcp.bad,
    )
    return [total, *rows]


def _crash_row(name: str, found: Mapping[str, int]) -> Row:
    trials = sum(count for kind, count in found.items() if kind != "left over")
    bad = sum(found.get(kind, 0) for kind in ("lost", "mixed", "false alarm", "left over"))
    words = ("old", "new", "lost", "mixed", "false alarm", "left over")
    shown = [f"{found[kind]} {kind}" for kind in words if found.get(kind) or kind in ("lost", "mixed")]
    return Row(name, trials, bad, ", ".join(shown))


Control = tuple[Callable[[Path, int], object], Callable[[Path], set[float]]]


def controls() -> dict[str, Control]:
    """Other ways to write a state of four tensors that all hold the version: (write, values read back)."""
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

    warnings.simplefilter("ignore")
    logging.disable()  # DCP logs what it then raises
    torch.set_num_threads(1)

    def tensors(version: float) -> dict[str, Any]:
        return {f"w{index}": torch.full((300, 300), float(version)) for index in range(4)}

    def values(found: Mapping[str, Any]) -> set[float]:
        return {float(value) for tensor in found.values() for value in tensor.unique()}

    def write_dcp(root: Path, version: int) -> None:
        save_dcp(tensors(version), checkpoint_id=root / "dcp")

    def read_dcp(root: Path) -> set[float]:
        into = tensors(-1)
        load(into, checkpoint_id=root / "dcp")
        return values(into)

    def write_latest(root: Path, version: int) -> None:
        (root / f"step-{version}").mkdir()
        torch.save(tensors(version), root / f"step-{version}" / "state.pt")
        (root / "latest").write_text(f"step-{version}")

    def read_latest(root: Path) -> set[float]:
        return values(torch.load(root / (root / "latest").read_text() / "state.pt", weights_only=True))

    return {
        "torch.distributed.checkpoint into one directory": (write_dcp, read_dcp),
        "torch.save in place": (
            lambda root, version: torch.save(tensors(version), root / "state.pt"),
            lambda root: values(torch.load(root / "state.pt", weights_only=True)),
        ),
        "a directory per step and a file `latest`": (write_latest, read_latest),
    }


def kill_control(write: Callable[[Path, int], object], read: Callable[[Path], set[float]]) -> Counter[str]:
    """Return what loads if the writer of version 2 is killed at every call, after version 1."""
    found: Counter[str] = Counter()
    with scratch() as place:
        template, root = place / "template", place / "root"
        template.mkdir()
        write(template, 1)

        def renew() -> Path:
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(template, root)
            return root

        for at in points(lambda: write(root, 2), renew()):
            trace(lambda: write(root, 2), renew(), kill_at=at)
            try:
                got = read(root)
            except KeyboardInterrupt:
                raise
            except BaseException:  # noqa: B036 - whatever a loader raises (DCP's is no Exception): nothing is loaded
                found["lost"] += 1
            else:
                found["old" if got == {1.0} else "new" if got == {2.0} else "mixed"] += 1
    return found


# ---- bit rot ---------------------------------------------------------------------------------------------


Change = tuple[int, bytes | None]  # where, and what stands there then; None: the file ends there


def flip(raw: bytes, dice: random.Random) -> Change:
    """Flip one bit."""
    place = dice.randrange(len(raw))
    return place, bytes([raw[place] ^ 1 << dice.randrange(8)])


def zero_page(raw: bytes, dice: random.Random) -> Change:
    """Replace 4 KiB that are not zero by zeros."""
    while True:
        start = dice.randrange(len(raw)) // 4096 * 4096
        page = raw[start : start + 4096]
        if any(page):
            return start, bytes(len(page))


def truncate(raw: bytes, dice: random.Random) -> Change:
    return dice.randrange(len(raw)), None


DAMAGES: dict[str, Callable[[bytes, random.Random], Change]] = {
    "flipped bits": flip,
    "zeroed pages": zero_page,
    "truncations": truncate,
}


@contextmanager
def damaged(path: Path, raw: bytes, kind: str, dice: random.Random) -> Iterator[None]:
    """Damage the file with bytes `raw` in this block, and repair it afterward, wherever it was moved."""
    start, new = DAMAGES[kind](raw, dice)
    with path.open("r+b", buffering=0) as file:
        file.truncate(start) if new is None else os.pwrite(file.fileno(), new, start)
        yield
        os.pwrite(file.fileno(), raw[start:] if new is None else raw[start : start + len(new)], start)


def training_state(width: int = 256) -> dict[str, Any]:
    """Return the model and AdamW of a small net after one step: about 2.4 MB at width 256."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(784, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 784)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 200}


def bit_rot(
    flips: int = FLIPS, pages: int = PAGES, truncations: int = TRUNCATIONS, control: bool = True
) -> list[Row]:
    """Damage one file of the newest checkpoint, all files in turn, and see which checkpoint is used."""
    from tandem.checkpoint.state import serialize

    counts = dict(zip(DAMAGES, (flips, pages, truncations), strict=True))
    content = training_state()
    with scratch() as place:
        store = store_in(place)
        store.save(100, b"the one before", {})
        store.save(200, serialize(content), {"eval": {"accuracy": 0.9}, "task": "digits"})
        path = store.path(200)
        rows = [_rot_row(store, path, name, count) for name, count in counts.items()]
        if control:
            rows = [_with_torch_load(row, place / "plain.pt", content, row.name) for row in rows]
    return rows


def _rot_row(store: CheckpointStore, path: Path, name: str, count: int) -> Row:
    dice, found = random.Random(name), Counter[str]()
    files = [(file, file.read_bytes()) for file in sorted(path.iterdir())]
    for trial in range(count):
        file, raw = files[trial % len(files)]
        with damaged(file, raw, name, dice):
            newest = newest_valid(store, lambda step, problem: None)
        if newest is None or newest[0] != 100:
            found["silent" if newest else "lost"] += 1
        else:
            found["fell back"] += 1
            (aside,) = store.directory.glob("corrupt-*")
            aside.rename(path)
    bad = count - found["fell back"]
    return Row(name, count, bad, f"{found['silent']} silent, {found['fell back']} fell back")


def _with_torch_load(row: Row, path: Path, content: Mapping[str, Any], name: str) -> Row:
    """Damage a file of torch.save in the same way. Silent: it loads, with wrong values."""
    import torch

    torch.save(content, path)
    raw, dice, silent = path.read_bytes(), random.Random(name), 0
    for _ in range(row.trials):
        with damaged(path, raw, name, dice):
            try:
                silent += not _same(content, torch.load(path, weights_only=True))
            except Exception:  # whatever it raises: not silent
                continue
    return Row(row.name, row.trials, row.bad, row.outcome, "torch.load, silent", row.trials, silent)


def _same(one: object, other: object) -> bool:
    import torch

    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and list(one) == list(other)
            and all(_same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(_same, one, other))
    return one == other


# ---- power loss ------------------------------------------------------------------------------------------


def power_loss(shuffles: int = SHUFFLES, control: bool = True) -> list[Row]:
    """Return rows: each session without errors, with EIO at one and at all later fsyncs; the baselines."""
    rows = [lose_power_in(name, shuffles) for name in SESSIONS]
    rows += [lose_power_in(name, max(1, shuffles // 10), failing_fsyncs(name)) for name in SESSIONS]
    if not control:
        return rows
    plain = {name: _power_control(write, shuffles) for name, write in PLAIN.items()}
    ours, trials, bad = rows, sum(row.trials for row in rows), sum(row.bad for row in rows)
    rows = ours + [
        Row(f"control: {name}", found["kept"] + found["lost"], found["lost"], f"{found['lost']} lost")
        for name, found in plain.items()
    ]
    last = rows[-1]
    outcome = f"the last acknowledged step is lost in {bad}"
    return [
        Row("power loss", trials, bad, outcome, last.name.removeprefix("control: "), last.trials, last.bad),
        *rows,
    ]


def _in_place(root: Path, version: int) -> None:
    (root / "state.pt").write_bytes(state(version))


def _replaced(root: Path, version: int) -> None:
    (root / "state.tmp").write_bytes(state(version))
    os.replace(root / "state.tmp", root / "state.pt")


PLAIN: dict[str, Callable[[Path, int], None]] = {
    "written in place": _in_place,
    "temporary file, then os.replace, no fsync": _replaced,
}


def _power_control(write: Callable[[Path, int], None], shuffles: int) -> Counter[str]:
    def session(root: Path) -> None:
        for step in (100, 200, 300):
            mark(f"begin {step} {step}")
            write(root, step)
            mark(f"done {step} {step}")

    def is_kept(root: Path, promise: Promise) -> bool:
        allowed = [state(step) for step in promise.versions if step >= promise.step]
        file = root / "state.pt"
        return (file.read_bytes() in allowed) if file.exists() else not promise.step

    with scratch() as root:
        return lose_power(root, lambda: session(root), is_kept, Promise(), shuffles)


# ---- as a program ----------------------------------------------------------------------------------------


def rows_of(names: list[str], trials: int | None = None, control: bool = True) -> list[Row]:
    """Return all rows of "crash", "rot" and "power"; `trials` limits the random parts."""
    rows: list[Row] = []
    if "crash" in names:
        rows += crash_anywhere(control)
    if "rot" in names:
        counts = (FLIPS, PAGES, TRUNCATIONS) if trials is None else (trials,) * 3
        rows += bit_rot(*counts, control=control)
    if "power" in names:
        rows += power_loss(SHUFFLES if trials is None else trials, control)
    return rows


def rows(full: bool) -> "list[table.Row]":
    """Return the rows for `reliability.py`: the promises, without their parts."""
    from table import Row as Line

    none = "none lost, none mixed", "none silent, all fall back", "the last acknowledged step always loads"
    targets = dict(
        zip(("crash anywhere", *DAMAGES, "power loss"), (none[0], *[none[1]] * 3, none[2]), strict=True)
    )
    found = rows_of(["crash", "rot", "power"], None if full else 20)
    return [
        Line(
            row.name,
            row.trials,
            row.outcome,
            f"{row.control}: {row.control_bad:,} of {row.control_trials:,} bad",
            f"{row.ratio:.1f}" if row.ratio is not None else "",
            targets[row.name],
            row.bad == 0,
            row.control_trials or None,
        )
        for row in found
        if row.name in targets
    ]


def markdown(rows: Sequence[Row]) -> str:
    """Return the table of docs/checkpoints.md; ratio: share of good ends, ours over the baseline's."""
    lines = ["| trial | bad of all | outcome | control | ratio |", "|---|---|---|---|---|"]
    for row in rows:
        control = f"{row.control}: {row.control_bad:,} of {row.control_trials:,} bad" if row.control else ""
        ratio = f"{row.ratio:.1f}" if row.ratio is not None else ""
        lines.append(f"| {row.name} | {row.bad:,} of {row.trials:,} | {row.outcome} | {control} | {ratio} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=["crash", "rot", "power"], metavar="crash|rot|power")
    parser.add_argument("--trials", type=int, help="how many random trials; the kills are always all")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    parser.add_argument("--no-control", action="store_true", help="leave the others out")
    asked = parser.parse_args()
    if asked.json:
        import table

        table.refuse_changes(asked.json)
    if not can_trace():
        parser.exit(3, "this machine does not let a process trace its child (ptrace)\n")
    rows = rows_of(asked.names, asked.trials, not asked.no_control)
    print(markdown(rows))
    if asked.json:
        table.save({"rows": [row.to_dict() for row in rows]}, asked.json)
    return int(any(row.bad for row in rows if not row.name.startswith("control")))


if __name__ == "__main__":
    sys.exit(main())
