"""Trains rows of the zoo on two ranks: by plain DDP, as a task, in a loop of one's own, as a script.

`python zoo_ranks.py FOLDER ROW...` trains each row by plain DDP without a kill, then as a task and in a
loop, each killed and resumed, and prints a line of JSON for each: what differs from plain DDP, "" for
nothing. Ranks are forked from this process, which has imported torch. `python zoo_ranks.py --script FOLDER
ROW...` is a rank of a launcher: it trains all rows in turn, is killed in each, and resumes from a checkpoint.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # here and below: what ranks import when they need it, in each process anew
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate
from zoo_rows import BATCH, KILLED_AT, SAMPLES, SAVED_AT, STEPS, ZOO, Row, average_of, die_once

import tandem
import tandem.cli
import tandem.custom_loop.run
import tandem.launch.standalone_rank
import tandem.rank.task
import tandem.report.server
from tandem.checkpoint.state import deserialize
from tandem.checkpoint.store import CheckpointStore
from tandem.config import Settings
from tandem.data.sampler import GlobalOrder
from tandem.data.seeds import seed_micro_step, seed_model

RANKS, PAIRS = 2, 2
LIMIT_SECONDS = 100.0
SEED = Settings().run.seed
HERE = Path(__file__).resolve().parent


def state_of(row: Row, average: nn.Module | None, model: nn.Module) -> dict[str, Tensor]:
    prefix = {} if average is None else {f"average.{n}": v for n, v in average.state_dict().items()}
    return {**dict(model.state_dict()), **prefix}


def built(row: Row) -> nn.Module:
    """From the seed; a lazy module gets its shapes from a batch, as DDP asks for."""
    seed_model(SEED)
    model = row.model()
    if any(isinstance(p, nn.UninitializedParameter) for p in model.parameters()):
        data = row.data()
        with torch.no_grad():
            row.loss(model.eval(), default_collate([data[0], data[1]]))
        model.train()
    return model


def step_with(
    row: Row,
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    loss_of: Callable[[], Tensor],
    backward: Callable[[Tensor], None],
) -> None:
    """One step as people write it."""

    def closure() -> Tensor:
        for each in optimizers:
            each.zero_grad()
        loss = loss_of()
        backward(scaler.scale(loss))
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / RANKS

    closure()
    for each in optimizers:
        if row.closure:
            each.step(closure)  # type: ignore[arg-type]
        else:
            scaler.step(each)
    if scaler.is_enabled():
        scaler.update()


def scaler_of(row: Row) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=row.scaler or 1.0, enabled=bool(row.scaler))


def train_plainly(row: Row, rank: int, checkpoint: Path | None) -> dict[str, Tensor]:
    """By torch alone; with `checkpoint`, it is saved there at SAVED_AT, and resumed from there."""
    model, data, order = built(row), row.data(), GlobalOrder(SAMPLES, BATCH, SEED)
    average = average_of(model) if row.average else None
    saved = torch.load(checkpoint) if checkpoint is not None and checkpoint.exists() else None
    if saved is not None:
        _load(model, saved["model"])
    wrapped = DistributedDataParallel(model, find_unused_parameters=row.finds_unused)
    optimizers, scaler = row.optimizers(wrapped.module), scaler_of(row)
    if saved is not None:
        for each, state in zip(optimizers, saved["optimizers"], strict=True):
            each.load_state_dict(state)
        scaler.load_state_dict(saved["scaler"])
        if average is not None:
            average.load_state_dict(saved["average"])
    for step in range(SAVED_AT if saved is not None else 0, STEPS):
        if checkpoint is not None:
            if saved is None:
                die_once(step, rank, checkpoint)
            if step == SAVED_AT and rank == 0:
                parts = {
                    "model": model.state_dict(),
                    "optimizers": [each.state_dict() for each in optimizers],
                    "scaler": scaler.state_dict(),
                    "average": average.state_dict() if average is not None else {},
                }
                torch.save(parts, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").rename(checkpoint)
        _, indices = order.batch(step)
        batch = default_collate([data[index] for index in indices[rank::RANKS].tolist()])
        seed_micro_step(SEED, step, 0, rank)
        step_with(row, optimizers, scaler, lambda: row.loss(wrapped, batch), lambda loss: loss.backward())  # noqa: B023
        if average is not None:
            average.update_parameters(model)
    return state_of(row, average, model)


def _load(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Buffers take the form that they were saved in."""
    for name, _ in [*model.named_buffers()]:
        if name in saved and saved[name].shape != model.get_buffer(name).shape:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, torch.empty_like(saved[name]))
    for name in saved.keys() - model.state_dict().keys():
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner).register_buffer(last, torch.empty_like(saved[name]))
    for name, buffer in model.named_buffers():
        if saved[name].dtype != buffer.dtype:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, torch.empty_like(saved[name]))
    model.load_state_dict(saved)


def as_script(folder: Path, names: Sequence[str]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name in names:
        target = folder / f"{name}.script.pt"
        if not target.exists():
            state = train_plainly(ZOO[name], rank, folder / f"{name}.checkpoint.pt")
            if rank == 0:
                torch.save(state, target.with_suffix(".new"))
                target.with_suffix(".new").rename(target)
        dist.barrier()
    dist.destroy_process_group()


def as_control(folder: Path, names: Sequence[str], rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/control", rank=rank, world_size=RANKS)
    for name in names:
        state = train_plainly(ZOO[name], rank, None)
        if rank == 0:
            torch.save(state, folder / f"{name}.control.pt")
    dist.destroy_process_group()


def as_loop(name: str) -> None:
    """A loop as people write it with tandem."""
    row = ZOO[name]
    run = tandem.start()
    bare = built(row)
    average = average_of(bare) if row.average else None
    model = run.wrap(bare)
    optimizers, scaler = row.optimizers(bare), scaler_of(row)
    kept: dict[str, Any] = {f"optimizer{n}": each for n, each in enumerate(optimizers)}
    kept |= {"average": average} if average is not None else {}
    run.keep(model=model, scaler=scaler, **kept)
    saved = Path(os.environ["TANDEM_RUN_DIR"], "checkpoints", f"step-{SAVED_AT:09}")
    for batch in run.batches(row.data(), batch_size=BATCH, steps=STEPS):
        die_once(run.step, run.rank, saved)
        step_with(row, optimizers, scaler, lambda: row.loss(model, batch), run.backward)  # noqa: B023
        if average is not None:
            average.update_parameters(bare)


def as_task(name: str) -> None:
    kind = "ZooAveraged" if ZOO[name].average else "Zoo"
    task = ["--task", f"{HERE}/zoo_rows.py:{kind}", "--task.row", name]
    sys.argv = ["tandem", "train", *task, "--batch-size", str(BATCH), "--steps", str(STEPS)]
    tandem.cli.main()


def forked(entry: Callable[[], None], output: Path, variables: dict[str, str]) -> int:
    """A process that runs `entry` as its whole program; its number."""
    process = os.fork()
    if process:
        return process
    os.environ.update(variables)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = ["zoo.py"]
    try:
        entry()
    except SystemExit:
        raise
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    sys.exit(0)


def differences(control: dict[str, Any], state: dict[str, Any]) -> str:
    """The first name in which two states differ."""
    for name in sorted(control.keys() | state.keys()):
        one, other = control.get(name), state.get(name)
        if one is None or other is None:
            return f"{name} is {'only with' if other is None else 'not with'} plain DDP"
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"{name} is {one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"
        if not torch.equal(one, other) and not torch.allclose(one, other, 0, 0, equal_nan=True):
            return f"{name} differs by {(one - other).abs().max():g}"
    return ""


class Pair:
    """Two ranks of one run of a row, by `entry`; begun when it is made, in the main thread."""

    def __init__(self, folder: Path, entry: str, name: str, life: int) -> None:
        self.folder, self.entry, self.name, self.life = folder, entry, name, life
        self.place = folder / entry / name.replace(" ", "-").replace(",", "")
        self.place.mkdir(parents=True, exist_ok=True)
        self.outputs = [self.place / f"{life}-{rank}.txt" for rank in range(RANKS)]
        call = {"loop": as_loop, "task": as_task}[entry]
        self.ranks = [
            forked(lambda: call(name), self.outputs[rank], self._variables(rank)) for rank in range(RANKS)
        ]
        self.codes: list[int | None] = [None] * RANKS
        self.deadline = time.monotonic() + LIMIT_SECONDS * float(os.environ.get("TEST_PATIENCE", 1))

    def _variables(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
            "TANDEM_MASTER": f"file://{self.place}/meet-{self.life}",
            "TANDEM_RUN_DIR": str(self.place / "run"), "TANDEM_CHECKPOINT_EVERY": "2",
            "TANDEM_METRICS": "0", "TANDEM_METRICS_LINGER": "0",
            "TANDEM_FIND_UNUSED": str(ZOO[self.name].finds_unused).lower(),
            "ZOO_KILL": "1" if self.life == 0 else "",
        }  # fmt: skip

    @property
    def is_over(self) -> bool:
        for rank, process in enumerate(self.ranks):
            if self.codes[rank] is None:
                ended, status = os.waitpid(process, os.WNOHANG)
                self.codes[rank] = os.waitstatus_to_exitcode(status) if ended else None
                if not ended and time.monotonic() > self.deadline:
                    os.kill(process, signal.SIGKILL)
        return None not in self.codes

    def said(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in self.outputs)

    def outcome(self) -> str | None:
        """None: go on with the next life; else what differs from plain DDP, or "line" where it is refused."""
        word = ZOO[self.name].lines.get(self.entry)
        if word is not None:
            last = self.outputs[0].read_text().splitlines()[-1:]
            if self.codes == [2, 2] and last and word in last[0]:
                return "line"
            return f"codes {self.codes}, no line with {word}:\n{self.said()}"
        if self.life == 0:
            if self.codes == [200, -signal.SIGKILL]:
                return None
            return f"codes {self.codes} of a killed run:\n{self.said()}"
        if self.codes != [0, 0]:
            return f"codes {self.codes} of a resumed run:\n{self.said()}"
        return self._compared()

    def _compared(self) -> str:
        summary = json.loads((self.place / "run" / "summary.json").read_text())
        if not 2 <= summary["resumed_from_step"] <= KILLED_AT:
            return f"resumed from step {summary['resumed_from_step']}"
        store = CheckpointStore(self.place / "run" / "checkpoints")
        state = deserialize(store.read(STEPS)[0])
        found = dict(state["model"])
        if ZOO[self.name].average and self.entry == "task":
            found |= {f"average.{n}": v for n, v in state["task"]["state"].items()}
        elif ZOO[self.name].average:
            found = {n.removeprefix("model."): v for n, v in found.items()}
        return differences(torch.load(self.folder / f"{self.name}.control.pt"), found)


def outcomes(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(row, entry, what differs)."""
    waiting = [(entry, name, 0) for name in names for entry in ("task", "loop")]
    waiting = [each for each in waiting if each[0] != "task" or not ZOO[each[1]].scaler]
    running: list[Pair] = []
    while waiting or running:
        while waiting and len(running) < PAIRS:
            entry, name, life = waiting.pop(0)
            running.append(Pair(folder, entry, name, life))
        time.sleep(0.01)
        for pair in [pair for pair in running if pair.is_over]:
            running.remove(pair)
            outcome = pair.outcome()
            if outcome is None:
                waiting.insert(0, (pair.entry, pair.name, 1))
            else:
                yield pair.name, pair.entry, outcome


def main(folder: Path, names: Sequence[str]) -> None:
    controls = [
        forked(lambda rank=rank: as_control(folder, names, rank), folder / f"control-{rank}.txt", {})  # type: ignore[misc]
        for rank in range(RANKS)
    ]
    for process in controls:
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if status:
            for rank in range(RANKS):
                print((folder / f"control-{rank}.txt").read_text(), file=sys.stderr)
            sys.exit(f"plain DDP ended with {status}")
    for name, entry, outcome in outcomes(folder, names):
        print(json.dumps([name, entry, outcome]), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "--script":
        as_script(Path(sys.argv[2]), sys.argv[3:])
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
