"""Build the task, data, model and optimizer, and define the checkpoint: all that the next step needs."""

import logging
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from tandem.checkpoint.state import flatten
from tandem.config.slices import ComputeConfig, DataConfig, ExchangeConfig, OptimizationConfig, RunConfig
from tandem.data.implementations import ShardedData
from tandem.data.kinds import takes_workers, training_data
from tandem.data.seeds import seed_model
from tandem.data.source import BatchReader
from tandem.distributed import strategy as strategies
from tandem.distributed.devices import cores_of
from tandem.distributed.group import ProcessGroup
from tandem.distributed.strategy import Strategy
from tandem.errors import ConfigError
from tandem.log import pluralize
from tandem.tasks.base import TaskWithDefaults, load_task
from tandem.tasks.build import answer_of, check_methods, datasets_of, model_of, order_of
from tandem.telemetry.clock import Clock
from tandem.telemetry.recorder import Recorder
from tandem.torch_private import compile_deterministically
from tandem.training.buffers import adopt_buffers, has_saved_buffers, is_lazy, materialize
from tandem.training.nonfinite import Policy
from tandem.training.optim import Schedule, build_optimizer, check_groups, groups_of
from tandem.training.precision import lay_out
from tandem.training.resume import ResumePoint
from tandem.training.step import TrainStep

log = logging.getLogger("tandem.run")

# The task's own state: a checkpoint saves it, and the task can end the run after an evaluation.

STATEFUL_METHODS = ("state_dict", "after_evaluation")


class TaskState:
    """The task's own state, for tasks that implement a method of STATEFUL_METHODS.

    When a checkpoint and an evaluation are due at the same step, the checkpoint starts first, and the scores
    are added to its manifest. `after_evaluation` is therefore called again when such a checkpoint is loaded.
    """

    def __init__(self, task: TaskWithDefaults, world: ProcessGroup) -> None:
        self._task = task
        self._world = world
        self._heard = 0

    def after_evaluation(self, step: int, scores: Mapping[str, float]) -> bool:
        """Call the task's `after_evaluation`; return whether it ends the run. All ranks call this.

        Rank 0's return value counts. Raises ConfigError if it is invalid.
        """
        self._heard = step
        if "after_evaluation" not in self._task.own:
            return False
        return bool(self._world.broadcast_json(answer_of(self._task, scores)))

    def state(self) -> dict[str, Any]:
        """Return {"task": ...} for a checkpoint, or {} if the task has none of STATEFUL_METHODS."""
        if not self._task.own.intersection(STATEFUL_METHODS):
            return {}
        return {"task": {"heard": self._heard, "state": self._task.state_dict()}}

    def load(self, state: Mapping[str, Any], scores: Mapping[str, float]) -> None:
        """Restore the task from a checkpoint's state.

        If the checkpoint started before the evaluation of its step, pass `scores` to the task again.
        """
        saved = state.get("task", {})
        recall(self._task, state)
        if scores and saved.get("heard") != state["step"]:
            self.after_evaluation(int(state["step"]), scores)


def recall(task: TaskWithDefaults, state: Mapping[str, Any]) -> None:
    """Restore the task's own state from a checkpoint, if both have one."""
    saved = state.get("task", {})
    if "load_state_dict" in task.own and "state" in saved:
        task.load_state_dict(saved["state"])


class TrainState:
    """The task with its data, its model under the strategy, and the object that takes steps."""

    def __init__(
        self,
        run: RunConfig,
        data: DataConfig,
        compute: ComputeConfig,
        optimization: OptimizationConfig,
        exchange: ExchangeConfig,
        world: ProcessGroup,
        clock: Clock,
        recorder: Recorder,
        chosen: Collection[str],
    ) -> None:
        """Build everything. `chosen`: the names of the settings that were set explicitly."""
        self.recorder = recorder
        self.strategy = strategies.load(compute.strategy, world, exchange, compute)
        flag = f"--strategy {compute.strategy}" if self.strategy.shards_parameters else ""
        self.task = TaskWithDefaults(load_task(run.task, run.task_fields, data.data_dir, data.download))
        # The ranks of a node share a data directory, and two downloads would write the same files.
        world.once_per_node(self.task.prepare)
        check_methods(self.task)
        self.task_state = TaskState(self.task, world)
        self.datasets = datasets_of(self.task, run.seed)
        loading = world.device, world.gather, cores_of(world.position)
        self._reader = BatchReader(data, run.seed, world.rank, world.size, self.task.collate, *loading)
        self.data = training_data(
            self.datasets.train, self._reader, run.steps, order_of(self.task, self.datasets.train)
        )
        self.order = self.data.order
        if isinstance(self.data, ShardedData):
            check_uneven(flag, compute.sync_batchnorm)
        if "freeze" in self.task.own:
            check_freezing(flag, exchange.gradient_compression)
        self.planned = run.steps or run.epochs * self.order.steps_per_epoch
        seed_model(run.seed)  # the same initial weights on every rank
        self.model = self.strategy.build(lambda: model_of(self.task, world.devices))
        # Layouts, strategies and optimizers need the shapes of all parameters.
        materialize(self.task, self.model, self.datasets.train, world)
        lay_out(self.model, compute.channels_last, flag)
        if compute.sync_batchnorm:
            self.model = world.synchronize_batchnorm(self.model)
        self._ranks_share = parameter_names(self.model)  # before a strategy replaces them
        self.model = self.strategy.shard(self.model)
        check_compilation(compute)
        # The optimizer is built after shard(), which may replace the parameters that it refers to.
        has_all_gradients = self.strategy.checks_gradients and not exchange.find_unused
        optimizer = build_optimizer(optimization, self.task, self.model, has_all_gradients)
        self._optimizer = self.strategy.shard_optimizer(optimizer)
        # torch's schedulers wrap the step of the optimizer that they receive, so they get the final one.
        self.schedule = Schedule(
            optimization,
            data.batch_size,
            self.task,
            self._optimizer,
            self.order.steps_per_epoch,
            self.planned,
        )
        if world.is_first:
            self._log_choices(data.workers, chosen)
        self.train_step = self._train_step(world, compute, optimization, data.batch_size, run.seed, clock)
        # On GPUs, zeroing needs a kernel per gradient. With unused parameters, an optimizer must skip those
        # without a gradient.
        self.train_step.drops_gradients = world.device.type == "cuda" or exchange.find_unused
        self.exchanges: dict[str, bool] = {}
        """See `Evaluation.exchanges`."""
        scaled = self.train_step.scaler.is_enabled
        self.nonfinite = Policy(optimization.on_nonfinite, scaled, recorder, self.train_step.culprit)

    @property
    def workers(self) -> int:
        """Loader processes of this rank, for data that is loaded sample by sample."""
        return self._reader.workers

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank in a global batch; empty if the shares are equal."""
        return self._reader.sizes

    def _train_step(
        self,
        world: ProcessGroup,
        compute: ComputeConfig,
        optimization: OptimizationConfig,
        batch_size: int,
        seed: int,
        clock: Clock,
    ) -> TrainStep:
        train_step = TrainStep(
            world,
            self.strategy,
            compute,
            optimization,
            batch_size,
            seed,
            self.task,
            self.model,
            self._optimizer,
            clock,
        )
        train_step.samples_of = self.order.samples
        if isinstance(self.data, ShardedData):
            train_step.may_miss_ranks = len(set(self.data.sharded.sizes)) > 1
        return train_step

    def _log_choices(self, workers: object, chosen: Collection[str]) -> None:
        if workers == "auto":
            log.info("--workers auto: %s", self._loading())
        text, is_warning = self.order.describe()
        if text:
            log.log(logging.WARNING if is_warning else logging.INFO, "%s", text)
        log.info("%s", self.schedule.describe())
        if unread := self.schedule.without_effect(chosen):
            log.warning("%s", unread)

    def _loading(self) -> str:
        if not takes_workers(self.datasets.train, self.task.collate):
            return "0, because the training set returns whole batches or is a stream"
        return f"{self.workers} per rank, which has {pluralize(self._reader.cores, 'CPU')}"

    def begin(self, resume_point: ResumePoint) -> None:
        """Restore what `full_state` returned, before the first step; without it, start fresh or from weights.

        Raises ConfigError for a state of another model, and for a batch that the ranks cannot share evenly.
        """
        saved = resume_point.state
        self.task.moment.resume(resume_point.step, self.order.steps_per_epoch)
        if saved is None:
            self._reader.check_shares()
            if resume_point.weights is not None:
                resume_point.weights.load(self.strategy, self.model)
        else:
            self._load(saved, resume_point.scores)

    def _load(self, saved: dict[str, Any], scores: Mapping[str, float]) -> None:
        ours = groups_of(self._optimizer, self.model.named_parameters())
        saved = self.strategy.with_shards(saved)  # from a snapshot; a checkpoint has whole tensors
        load_state(saved, self.strategy, self.model, self._optimizer, self.schedule, ours)
        self.data.load(saved.get("data", {}))
        self.recorder.load(saved.get("log", {}))
        self.exchanges.update(saved.get("exchanges", {}))
        self.strategy.load_exchange(saved.get("exchange", {}))
        if "scaler" in saved:
            self.train_step.scaler.load_state_dict(saved["scaler"])
        self.task_state.load(saved, scores)
        self.task.after_resume(self.model)

    def full_state(self) -> dict[str, Any]:
        """Return the state by part, "model" first. Tensors are complete on rank 0. All ranks call this."""
        sharded = {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}
        state = self.strategy.gather_full(sharded)
        return {**state, **self._remaining_state()}

    def local_state(self) -> dict[str, Any]:
        """See `CheckpointSource`."""
        sharded = {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}
        return {**self.strategy.local_state(sharded), **self._remaining_state()}

    def check_state(self) -> None:
        """Raise ConfigError, before the first step, for state that a checkpoint cannot contain."""
        # No shards are gathered for this check, because only types and names matter.
        sharded = {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}
        flatten({**sharded, **self._remaining_state()})

    def _remaining_state(self) -> dict[str, Any]:
        """Return the state next to the model and the optimizer; see `full_state`."""
        return {
            "schedule": self.schedule.state(),
            "scaler": self.train_step.scaler.state_dict(),
            "data": self.data.state(),
            "exchange": self.strategy.exchange_state(),
            "log": self.recorder.state(),
            "exchanges": dict(self.exchanges),
            **self.task_state.state(),
        }

    def checkpoint_extras(self, recorder: Recorder, step: int) -> dict[str, Any]:
        """Return the names of the optimizer's parameters, to compare them on resume. Exchanges nothing."""
        return {"groups": groups_of(self._optimizer, self.model.named_parameters())}

    @property
    def has_per_rank_state(self) -> bool:
        """False: a task's own state is equal on all ranks."""
        return False

    def per_rank_state(self) -> dict[str, Any]:
        """Return an empty dict; see `has_per_rank_state`."""
        return {}

    @property
    def has_rank_0_tensors(self) -> bool:
        """See `CheckpointSource`."""
        return has_saved_buffers(self.model)

    def rank_0_indices(self, state: Mapping[str, Any]) -> frozenset[int]:
        """See `CheckpointSource`."""
        return indices_outside(state["model"], self._ranks_share)

    def weights(self) -> dict[str, Any]:
        """Return only the model's part; see `full_state`."""
        return self.strategy.gather_full(self.model.state_dict())


def check_uneven(shares: str, sync_batchnorm: bool) -> None:
    """Raise ConfigError for settings that need all ranks in a forward pass, which some ranks may not run.

    `shares` is the flag that shards the parameters, if any.
    """
    for flag, is_set in ((shares, shares != ""), ("--sync-batchnorm", sync_batchnorm)):
        if is_set:
            raise ConfigError(
                f"{flag} does not work with a dataset that has of_rank(), because its parts may end early"
            )


def check_compilation(compute: ComputeConfig) -> None:
    """Compile the same kernels in every process with --deterministic, even in a new container.

    max-autotune chooses the kernels that were fastest when it tried them. Raises ConfigError for it.
    """
    if compute.compile is None or not compute.deterministic:
        return
    if compute.compile == "max-autotune":
        raise ConfigError(
            "--compile max-autotune chooses kernels by timing them, but --deterministic needs the same "
            "kernels in every process; use --compile default or reduce-overhead"
        )
    compile_deterministically()


def check_freezing(shares: str, compression: str) -> None:
    """Raise ConfigError for settings whose layout is fixed by the parameters of the first step.

    `shares` as for `check_uneven`.
    """
    if shares or compression != "none":
        flag = shares or f"--gradient-compression {compression}"
        raise ConfigError(
            f"{flag} does not work with a task that has freeze(), which changes what is all-reduced"
        )


def parameter_names(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))


def indices_outside(state: Mapping[str, Any], names: Set[str]) -> frozenset[int]:
    """Return the indices of the tensors in a flattened `state` whose names are not in `names`.

    These are buffers, in which ranks may differ.
    """
    own: set[int] = set()
    index = 0
    for name, value in state.items():
        # The result of get_extra_state() may contain any number of tensors.
        count = 1 if isinstance(value, Tensor) else len(flatten({name: value})[1])
        if name not in names:
            own.update(range(index, index + count))
        index += count
    return frozenset(own)


# Compare a checkpoint with the model, then load its state: model, optimizer, schedule.

KERNELS = ("fused", "foreach", "capturable")
"""Entries of an optimizer's group that select a kernel and do not change the result."""
# torch stores the result of a module's get_extra_state() under this name.
EXTRA = "_extra_state"


def check_shapes(model_state: Mapping[str, Any], saved_state: Mapping[str, Any]) -> None:
    """Raise ConfigError naming the first tensor that differs between a model's state and a checkpoint's.

    The result of a module's get_extra_state() may change its shape.
    """
    for name in sorted({*model_state, *saved_state}):
        if name in saved_state and is_lazy(model_state.get(name)):
            continue  # it gets its shape when it is loaded
        here = tuple(getattr(model_state[name], "shape", ())) if name in model_state else "missing"
        there = tuple(getattr(saved_state[name], "shape", ())) if name in saved_state else "missing"
        is_extra = name.rpartition(".")[2] == EXTRA and name in model_state and name in saved_state
        if here != there and not is_extra:
            raise ConfigError(
                f"the checkpoint is from a different model: {name} is {there} in it but {here} here; "
                "use another --run-dir or --resume never"
            )


def check_model(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Call `check_shapes` with an error for verbs that build a task's model for a checkpoint."""
    adopt_buffers(model, weights)
    try:
        check_shapes(model.state_dict(), weights)
    except ConfigError as error:
        raise ConfigError(
            f"{str(error).partition(';')[0]}; use the task and fields it was trained with"
        ) from error


def load_state(
    state: Mapping[str, Any],
    strategy: Strategy,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    named: Mapping[str, Any],
) -> None:
    """Load a checkpoint's state. `named`: the optimizer's groups from `groups_of`.

    The optimizer's numbers (weight decay, momentum) come from the settings, which may have changed, unless
    the task built the optimizer or has its own scheduler. Raises ConfigError for another model or other
    groups; the checkpoint is left untouched.
    """
    theirs = state["model"]
    # Buffers that a forward pass resized take the saved shape first, or they would be refused. No value is
    # loaded before everything has been compared.
    adopt_buffers(model, theirs)
    check_shapes(model.state_dict(), theirs)
    check_groups("optimizer", state["optimizer"], state.get("groups"), optimizer, named)
    strategy.load_model(model, theirs)
    # Loading replaces the values of the groups, which the settings may override below.
    groups = [dict(group) for group in optimizer.param_groups]
    strategy.load_optimizer(optimizer, state["optimizer"])
    if schedule.is_by_settings:
        for group, ours in zip(optimizer.param_groups, groups, strict=True):
            group.update({name: value for name, value in ours.items() if name != "params"})
    on_their_devices(optimizer, groups)
    schedule.load(state["schedule"], int(state["step"]))


def on_their_devices(optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]]) -> None:
    """Select this device's kernels, wherever the checkpoint comes from, and move step counters to match.

    `before`: the groups as the optimizer was built. Adam counts steps on the host, but with fused or
    capturable on its device; `load_state_dict` follows the saved state instead.
    """
    for group, ours in zip(optimizer.param_groups, before, strict=True):
        group.update({name: ours[name] for name in KERNELS if name in ours})
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = _moved_like(parameter, name, value, bool(on_device))


def _moved_like(
    parameter: torch.Tensor, name: str, value: torch.Tensor, steps_on_device: bool
) -> torch.Tensor:
    """Return a tensor of an optimizer's state on the device and in the layout that its kernels expect."""
    if name == "step":
        return value.to(parameter.device, torch.float32) if steps_on_device else value
    # A run with another --channels-last has saved its state with other strides.
    if value.shape == parameter.shape and value.stride() != parameter.stride():
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return value
