"""`tandem.start()` and the run that it gives: what a training loop of one's own is written with."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tandem.distributed.replica import Replica, give_rank_0s_weights
from tandem.errors import ConfigError, TandemError
from tandem.launch.script import ScriptRank
from tandem.own_loop.engine import Engine
from tandem.own_loop.kept import Kept, KeptState

_started: "Run | None" = None


def start(argv: Sequence[str] = ()) -> "Run":
    """Join the world that is there, or be alone; call it once, before the model is made.

    Settings come from TANDEM_ variables, .env and a file, as for `tandem train`; the script's own command
    line is left alone unless words of it are handed in as `argv`.

        import tandem
        import torch

        run = tandem.start()
        print(f"rank {run.rank} begins after step {run.step}")

    Raises ConfigError, one line and exit code 2, for settings that cannot be.
    """
    global _started
    if _started is not None:
        raise ConfigError(
            "tandem.start() was called twice; a script has one run: hand on what the first call gave"
        )
    try:
        here = ScriptRank(argv)
    except TandemError as error:
        print(f"tandem: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error
    _started = Run(here)
    return _started


class Run:
    """One run of a script on this rank, made by `tandem.start()`."""

    def __init__(self, here: ScriptRank) -> None:
        self._engine = Engine(here)
        here.end_with(self._engine.close)
        self._state: KeptState | None = None
        self._has_loop = False

    @property
    def rank(self) -> int:
        """This process's number, from 0.

        How many there are says torch.distributed.get_world_size(), also to one alone.

            if run.rank == 0:
                print("said once")
        """
        return self._engine.world.rank

    @property
    def step(self) -> int:
        """Finished steps of the run, those before a resume included.

        It rises when the next batch is asked for.

            rate = 0.1 if run.step < 1000 else 0.01
        """
        return self._engine.step

    def wrap(self, model: nn.Module) -> nn.Module:
        """`model` on this rank's device; backward passes through it average gradients over ranks.

        With --devices-per-rank N above 1 it stays where the script has put its parts, on devices from
        LOCAL_RANK * N on. Call this before the optimizer is made. A model in which nothing is to be trained
        is moved, and gets rank 0's weights, no more.

            model = run.wrap(torch.nn.Linear(8, 2))
            teacher = run.wrap(torch.nn.Linear(8, 2).requires_grad_(False))
        """
        if not isinstance(model, nn.Module):
            raise ConfigError(f"run.wrap got {type(model).__name__}, valid is a torch.nn.Module")
        if self._state is not None:
            raise ConfigError("run.wrap after run.keep: wrap every model first, then keep them")
        world = self._engine.world
        if len(world.devices) == 1:
            model = model.to(world.device)
        if self._engine.settings.compute.sync_batchnorm:
            model = world.synchronise_batchnorm(model)
        model.register_forward_pre_hook(_tells(self._engine))
        if not any(parameter.requires_grad for parameter in model.parameters()):
            give_rank_0s_weights(model, world)
            return model
        backward = self._engine.backward
        wrapped: nn.Module = model
        if world.size > 1:
            wrapped = Replica(model, world, backward.passenger, self._engine.settings.exchange)
        backward.watch(wrapped)
        return wrapped

    def keep(self, **objects: Any) -> Kept:
        """Name what a checkpoint holds, and load the newest one that is here; call it once, after `wrap`.

        Modules, optimizers, schedulers, averages: whatever has state_dict() and load_state_dict(), tensors,
        and numbers. What is kept has to be the same on all ranks. A number is read and changed in what this
        gives.

            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            kept = run.keep(model=model, optimizer=optimizer, best=0.0)
            kept.best = max(kept.best, 0.5)

        Raises ConfigError for what cannot be kept, a trained model that was not wrapped, and a checkpoint of
        another script.
        """
        if self._state is not None:
            raise ConfigError("run.keep was called twice; name everything in one call")
        if not self._engine.backward.models:
            raise ConfigError("run.keep before any model was wrapped: model = run.wrap(model) comes first")
        kept = Kept(**objects)
        self._state = KeptState(kept, self._engine.backward.models)
        for optimizer in self._state.optimizers:
            self._engine.backward.leave_out(optimizer)
        self._engine.begin(self._state)
        return kept

    def batches(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:
        """This rank's share of each global batch of `dataset`, on its device, from where the run stands.

        `batch_size` samples over all ranks make a step; a setting that was given (TANDEM_STEPS=40) goes
        before the number here. A stream is read in its own order, and goes on from its own state_dict() if it
        has one. The end of the loop is the end of the run: the last save and the summary. A stop signal
        leaves the loop with a checkpoint and SystemExit(143).

            x = torch.randn(64, 8)
            dataset = torch.utils.data.TensorDataset(x, x[:, :2].argmax(1))
            for inputs, labels in run.batches(dataset, batch_size=16, epochs=2):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
        """
        if self._state is None:
            raise ConfigError(
                "run.batches before run.keep: name what a checkpoint holds, then ask for batches"
            )
        if self._has_loop:
            raise ConfigError("run.batches was called twice; a run has one loop over its batches")
        self._has_loop = True
        asked = {"batch_size": batch_size, "epochs": epochs, "steps": steps}
        return self._engine.loop(self._state, dataset, collate, asked)

    def parts(self, batch: Any, count: int) -> Iterator[Any]:
        """`batch` in `count` parts, for one backward pass each: their gradients add up to those of the batch.

        Ranks exchange gradients in the last part alone. Weighs each part by its samples.

            for inputs, labels in run.batches(dataset, batch_size=16, epochs=2):
                for x, y in run.parts((inputs, labels), 2):
                    run.backward(torch.nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        """
        return self._engine.parts.of(batch, count, self.step)

    def backward(self, loss: Tensor) -> None:
        """Backward from `loss`, the mean over this rank's samples: gradients become means over all ranks.

        Where the loss or a gradient is not finite on any rank, no rank changes anything in this step, and the
        run ends or goes on as --on-nonfinite says.

            run.backward(loss)

        Raises ConfigError for a loss that is no scalar, and for gradients of an earlier backward.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = (
                f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            )
            raise ConfigError(f"run.backward got {got}, valid is a scalar such as loss.mean()")
        if not loss.requires_grad:
            raise ConfigError("run.backward got a loss without a gradient: no wrapped model took part in it")
        if not self._engine.is_in_step:
            raise ConfigError(
                "run.backward outside of the loop: call it inside `for batch in run.batches(...)`"
            )
        parts = self._engine.parts
        self._engine.backward.run(loss, parts.weight, parts.is_last)

    def log(self, **numbers: Tensor | float) -> None:
        """Numbers for the next line of the log, of metrics.jsonl and of the page: means over steps and ranks.

        Nobody waits for a device or another rank before the line is due. `loss` is what `backward` was called
        with, and is there anyway.

            run.log(loss=loss, weight=model.weight.norm())
        """
        for name, value in numbers.items():
            if name != "loss":
                self._engine.backward.numbers.add(name, value)

    def stop(self) -> None:
        """End the run after this step or the next, as if it were its last: on all ranks when one asks.

        Started again, the run is complete.

            if loss.item() < 0.01:
                run.stop()
        """
        self._engine.backward.wants_end = True


def _tells(engine: Engine) -> Callable[..., None]:
    """A hook that tells the clock; a function, so that a copy of the model does not copy the engine."""

    def forward_begins(*_: Any) -> None:
        if engine.is_in_step and torch.is_grad_enabled():
            engine.clock.enter("forward")

    return forward_begins
