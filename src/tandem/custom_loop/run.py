"""The public API of custom loops: `tandem.start()` and the run that it returns."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from tandem.custom_loop.engine import Engine
from tandem.custom_loop.kept import KeptState, KeptValues
from tandem.custom_loop.limits import check_dataset, check_model
from tandem.distributed.replica import Replica, broadcast_weights
from tandem.errors import ConfigError, TandemError
from tandem.launch.script_process import ScriptRank
from tandem.training.resume import Redistribute

_started: "Run | None" = None


def start(argv: Sequence[str] = ()) -> "Run":
    """Join the process group of this launch, or run alone. Call it once, before you create the model.

    Settings come from TANDEM_ variables, .env and a file, as for `tandem train`. The script's command line
    is not read unless you pass arguments as `argv`.

        import tandem
        import torch

        run = tandem.start()
        print(f"rank {run.rank} begins after step {run.step}")

    Raises ConfigError (one line, exit code 2) for invalid settings.
    """
    global _started
    if _started is not None:
        raise ConfigError(
            "tandem.start() was called twice; a script has one run; pass on what the first call returned"
        )
    try:
        here = ScriptRank(argv)
    # A script does not catch it, and a user needs one line instead of a stack trace.
    except TandemError as error:
        print(f"tandem: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error
    _started = Run(here)
    return _started


class Run:
    """One run of a script on this rank, created by `tandem.start()`."""

    def __init__(self, here: ScriptRank) -> None:
        self._engine = Engine(here)
        here.end_with(self._engine.close)
        self._state: KeptState | None = None
        self._has_loop = False

    @property
    def rank(self) -> int:
        """This process's rank, from 0.

        torch.distributed.get_world_size() gives the number of ranks, also for a single process.

            if run.rank == 0:
                print("said once")
        """
        return self._engine.world.rank

    @property
    def step(self) -> int:
        """The number of finished steps, including those before a resume.

        It increases when the next batch is requested.

            rate = 0.1 if run.step < 1000 else 0.01
        """
        return self._engine.step

    def wrap(self, model: nn.Module) -> nn.Module:
        """Move `model` to this rank's device and average its gradients over all ranks.

        Call this before you create the optimizer. A model without trainable parameters is moved and gets
        rank 0's weights. With --devices-per-rank N above 1, the parts stay on the devices where the script
        put them, starting at LOCAL_RANK * N.

            model = run.wrap(torch.nn.Linear(8, 2))
            teacher = run.wrap(torch.nn.Linear(8, 2).requires_grad_(False))
        """
        check_model(model)
        if self._state is not None:
            raise ConfigError("run.wrap was called after run.keep; wrap every model first, then keep them")
        world = self._engine.world
        backward = self._engine.backward
        # With several devices, the script has placed the parts itself.
        if len(world.devices) == 1:
            model = model.to(world.device)
        if self._engine.settings.compute.sync_batchnorm:
            model = world.synchronize_batchnorm(model)
        model.register_forward_pre_hook(_forward_hook(self._engine))
        # DDP rejects a module without gradients; a frozen model only needs equal weights.
        if not any(parameter.requires_grad for parameter in model.parameters()):
            broadcast_weights(model, world)
            backward.watch_frozen(model)
            return model
        wrapped: nn.Module = model
        if world.size > 1:
            wrapped = Replica(model, world, backward.piggybacked, self._engine.settings.exchange)
        backward.watch(wrapped)
        return wrapped

    def keep(
        self,
        *,
        per_rank: Mapping[str, Any] | None = None,
        redistribute: Redistribute | None = None,
        **objects: Any,
    ) -> KeptValues:
        """Register what a checkpoint contains, and load the newest one. Call it once, after `wrap`.

        Accepts objects with state_dict() and load_state_dict() (modules, optimizers, schedulers), tensors,
        arrays, numbers and random generators. They are the same on all ranks; the checkpoint saves rank
        0's. Pass state that differs between ranks (an environment, a replay buffer) in `per_rank`: each
        rank gets its own back. Read and change numbers on the returned object.

            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            noise = torch.Generator().manual_seed(run.rank)
            kept = run.keep(model=model, optimizer=optimizer, best=0.0, per_rank={"noise": noise})
            kept.best = max(kept.best, 0.5)

        If the number of ranks changes, `redistribute(states, rank, ranks)` returns this rank's {name: state}
        from the states of the ranks that saved. Without it, the change is an error.

        Raises ConfigError for an unsupported object, a trained model that was not wrapped, and a checkpoint
        of a different script.
        """
        if self._state is not None:
            raise ConfigError("run.keep was called twice; pass everything in one call")
        if not self._engine.backward.models:
            raise ConfigError(
                "run.keep was called before any model was wrapped; call model = run.wrap(model) first"
            )
        own = dict(per_rank or {})
        if twice := sorted(own.keys() & objects.keys()):
            raise ConfigError(
                f"run.keep got {twice[0]!r} twice; name it once, either in per_rank or outside it"
            )
        kept = KeptValues(**objects, **own)
        self._state = KeptState(kept, self._engine.backward.models, self._engine.world, list(own))
        for value in objects.values():
            if isinstance(value, torch.amp.GradScaler):
                self._engine.backward.watch_scaler(value)
        self._engine.begin(self._state, redistribute)
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
        """Yield this rank's share of each global batch of `dataset`, on its device, from the current step on.

        `batch_size` is the global batch size, over all ranks. A setting such as TANDEM_STEPS=40 overrides the
        argument. A stream is read in its own order, and resumes from its state_dict() if it has one. When
        the loop ends, the run ends with a last save and the summary. A stop signal leaves the loop with a
        checkpoint and SystemExit(143).

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
            raise ConfigError("run.batches was called before run.keep; first name what a checkpoint saves")
        if self._has_loop:
            raise ConfigError("run.batches was called twice; a run has one loop over its batches")
        check_dataset(dataset)
        self._has_loop = True
        asked = {"batch_size": batch_size, "epochs": epochs, "steps": steps}
        return self._engine.loop(self._state, dataset, collate, asked)

    def parts(self, batch: Any, count: int) -> Iterator[Any]:
        """Split `batch` into `count` parts with one backward pass each; gradients add up to the batch's.

        Ranks exchange gradients only in the last part. Each part is weighted by its number of samples.

            for inputs, labels in run.batches(dataset, batch_size=16, epochs=2):
                for x, y in run.parts((inputs, labels), 2):
                    run.backward(torch.nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        """
        return self._engine.parts.of(batch, count, self.step)

    def backward(self, loss: Tensor) -> None:
        """Run backward from `loss`, the mean over this rank's samples; gradients become means over all ranks.

        If the loss or a gradient is not finite on any rank, no rank updates anything in this step, and
        --on-nonfinite decides whether the run continues.

            run.backward(loss)

        Raises ConfigError if the loss is not a scalar, or if earlier gradients were not cleared.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = (
                f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            )
            raise ConfigError(f"run.backward: invalid loss, {got}; expected a scalar such as loss.mean()")
        if not loss.requires_grad:
            raise ConfigError("run.backward got a loss without a gradient; compute it with a wrapped model")
        if not self._engine.is_in_step:
            raise ConfigError(
                "run.backward was called outside of the loop; call it inside `for batch in run.batches(...)`"
            )
        parts = self._engine.parts
        self._engine.backward.run(loss, parts.weight, parts.is_last)

    def log(self, **numbers: SupportsFloat) -> None:
        """Report numbers to the log, metrics.jsonl and the page, as means over steps and ranks.

        This does not wait for the device or other ranks until the next log line is due. The `loss` passed to
        `backward` is always reported.

            run.log(loss=loss, weight=model.weight.norm())
        """
        for name, value in numbers.items():
            # `backward` reports the loss already.
            if name != "loss":
                self._engine.backward.numbers.add(name, value)

    def stop(self) -> None:
        """End the run after this step or the next, on all ranks as soon as one rank calls it.

        The run counts as complete: started again, it does not train.

            if loss.item() < 0.01:
                run.stop()
        """
        self._engine.backward.wants_end = True


def _forward_hook(engine: Engine) -> Callable[..., None]:
    """Return a hook that notifies the clock.

    It is a function, so that a copy of the model does not copy the engine.
    """

    def forward_begins(*_: Any) -> None:
        # An evaluation inside the loop is not a part of the step's forward time.
        if engine.is_in_step and torch.is_grad_enabled():
            engine.clock.enter("forward")

    return forward_begins
