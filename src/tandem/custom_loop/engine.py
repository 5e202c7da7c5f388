"""Implement `Run` with the same parts as a task's run, for a loop that the script writes."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tandem.checkpoint.decision import ResumeDecision, decide_resume
from tandem.config import Settings
from tandem.custom_loop.backward import Backward
from tandem.custom_loop.kept import KeptState, unwrapped
from tandem.custom_loop.limits import check_batch_size, check_settings, hints_as_arguments
from tandem.data.batch_shares import equal_shares
from tandem.data.kinds import training_data
from tandem.data.loader import batch_size_of, end_loaders, parts_of
from tandem.data.seeds import seed_micro_step, seed_model
from tandem.data.source import BatchReader, TrainingData
from tandem.distributed import strategy as strategies
from tandem.distributed.devices import cores_of
from tandem.errors import FINISHED, STOPPED, ConfigError, TandemError
from tandem.launch.script_process import ScriptRank
from tandem.rank.session import RankSession
from tandem.signals import StopFlag, default_stop_handlers
from tandem.telemetry.meter import Costs
from tandem.training.loop import LoopState, after_step
from tandem.training.nonfinite import Policy
from tandem.training.rank_checks import check_replicas
from tandem.training.resume import Redistribute

log = logging.getLogger("tandem.run")

NO_END = 2**62
"""The number of steps of a run whose end is not known yet; the script sets it after the resume decision."""


class MicroBatches:
    """Split a batch into several backward passes whose gradients add up to those of the whole batch.

    `share` is this rank's number of samples relative to an equal share.
    """

    def __init__(self, seed: int, rank: int, backward: Backward) -> None:
        self._seed = seed
        self._rank = rank
        self._backward = backward
        self.share = 1.0
        self._part_of_batch = 1.0
        self.is_last = True

    @property
    def weight(self) -> float:
        """The weight of the next loss, which makes the mean over ranks the mean over all samples."""
        return self.share * self._part_of_batch

    def of(self, batch: Any, count: int, step: int) -> Iterator[Any]:
        """Yield the parts. Raises ConfigError if `batch` has fewer than `count` samples."""
        size = batch_size_of(batch)
        if not 1 <= count <= size:
            raise ConfigError(
                f"run.parts(batch, {count}): invalid value {count}; expected 1 to {size}, "
                "the samples of the batch"
            )
        try:
            sizes = [size // count + (number < size % count) for number in range(count)]
            for number, part in enumerate(parts_of(batch, sizes)):
                self._part_of_batch = sizes[number] / size
                self.is_last = number == count - 1
                self._backward.set_gradient_sync(self.is_last)
                seed_micro_step(self._seed, step, number, self._rank)
                yield part
        finally:
            # The script may leave its loop over the parts early, and its next backward pass is for a whole
            # batch.
            self._part_of_batch = 1.0
            self.is_last = True
            self._backward.set_gradient_sync(True)


@dataclass
class Batches(Iterator[Any]):
    """Yield each step's batch; when asked for the next one, finish the previous step.

    `finish(finished)` ends the run. Raises SystemExit after a stop signal, so that the script's lines after
    the loop run only after a complete run.
    """

    loop_state: LoopState
    backward: Backward
    data: Iterator[list[Any]]
    stop: StopFlag
    seed: int
    optimizers: list[torch.optim.Optimizer]
    finish: Callable[[bool], None]
    first: int
    is_open: bool = False
    is_over: bool = False

    def __next__(self) -> Any:
        loop_state = self.loop_state
        planned = self.loop_state.event_schedule.steps_planned
        # The script has finished with a batch when it asks for the next one.
        if self.is_open:
            self.is_open = False
            if self._end_step():
                self._end(finished=False)
                raise SystemExit(STOPPED)
        if loop_state.step >= planned or self.backward.ends:
            # A script may call an iterator again after its end, but a run ends once.
            if not self.is_over:
                self._end(finished=True)
            raise StopIteration
        loop_state.clock.begin_step()
        # The reader makes no micro-batches here (see `_reader`).
        (batch,) = next(self.data)
        loop_state.clock.enter("transfer")
        seed_micro_step(self.seed, loop_state.step, 0, loop_state.world.rank)
        decisions = loop_state.event_schedule.decisions(loop_state.world.is_first)
        self.backward.begin_step(loop_state.step, bool(self.stop), decisions)
        loop_state.clock.enter("forward")
        self.is_open = True
        return batch

    def _end_step(self) -> bool:
        """Finish the step; return whether a signal ends the run."""
        loop_state = self.loop_state
        consensus = self.backward.end_step()
        rate = float(self.optimizers[0].param_groups[0]["lr"]) if self.optimizers else 0.0
        # A save contains the log's sums, which all ranks must reduce first.
        if "save" in loop_state.event_schedule.due(loop_state.step + 1, consensus):
            self.backward.flush()
        return after_step(loop_state, consensus, rate, is_first=loop_state.step == self.first)

    def _end(self, finished: bool) -> None:
        self.is_over = True
        self.finish(finished)
        if finished:  # otherwise the process exits, and a second Ctrl-C may still need to end it
            self.stop.uninstall()


class Engine:
    """An open process group, and after `begin` and `loop` a run."""

    def __init__(self, here: ScriptRank) -> None:
        """Open the process group. Raises TandemError."""
        self.settings = here.settings
        self._chosen = here.chosen
        check_settings(self.settings)
        self._watch_stop_flag = here.watch_stop_flag
        self.session = session = RankSession(self.settings, here.start)
        if not here.is_launched:
            session.open_log()
        # Nothing can be saved yet, and without an agent no other process could end the wait.
        with nullcontext() if session.connection.store is not None else default_stop_handlers():
            session.join()
        self.world = session.world
        self.clock = session.clock
        self._strategy = strategies.load(self.settings.compute.strategy, self.world, self.settings.exchange)
        policy = self.settings.optimization.on_nonfinite
        self.backward = Backward(self.world, self._strategy, self.clock, policy)
        self.parts = MicroBatches(self.settings.run.seed, self.world.rank, self.backward)
        self._batches: Batches | None = None
        # The script builds its model next, and all ranks need the same initial weights.
        seed_model(self.settings.run.seed)

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self._batches.loop_state.step if self._batches else self.session.resume_point.step

    @property
    def is_in_step(self) -> bool:
        """Whether the script holds a batch."""
        return self._batches is not None and self._batches.is_open

    def begin(self, state: KeptState, redistribute: Redistribute | None = None) -> None:
        """Load the newest state, as --resume specifies. An error on rank 0 is raised on all ranks."""
        with self.clock.phase("resume"):
            decision = self.world.on_first(self._decision)
            resume_point = self.session.resume(decision, own=state.per_rank, redistribute=redistribute)
            if resume_point.state is not None:
                state.load(resume_point.state, resume_point.own)
            elif resume_point.weights is not None:
                resume_point.weights.load(self._strategy, state.as_module)

    def loop(
        self,
        state: KeptState,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None,
        asked: Mapping[str, int | None],
    ) -> Batches:
        """Return the remaining batches.

        `asked` has the script's arguments, which explicit settings override.
        """
        settings = self._with_run_settings(asked)
        session = self.session
        session.change(settings)
        with hints_as_arguments(self._chosen):
            reader = self._reader(settings, collate)
            # A run that resumes with another number of ranks may share its batch unevenly.
            if session.resume_point.state is None:
                reader.check_shares()
        check_batch_size(settings.data.batch_size, session.resume_point.state)
        with hints_as_arguments(self._chosen):
            data = training_data(dataset, reader, settings.run.steps)
        session.check_data(dataset, data.order)
        planned = settings.run.steps or settings.run.epochs * data.order.steps_per_epoch
        loop_state = self._loop_state(state, data, planned)
        stop = StopFlag().install()
        # Each step now reads the flag, so a stop signal leads to a save.
        stop.is_polled = True
        self._watch_stop_flag(stop)
        self._batches = Batches(
            loop_state=loop_state,
            backward=self.backward,
            data=data.steps(loop_state.step, loop_state.event_schedule.steps_planned),
            stop=stop,
            seed=settings.run.seed,
            optimizers=state.optimizers,
            finish=partial(self._finish, state, loop_state),
            first=loop_state.step,
        )
        self.clock.begin("train")
        return self._batches

    def close(self, code: int) -> int:
        """Return the exit code of a script that ended with `code`.

        Raises LoopLeftError if its loop has not ended.
        """
        batches = self._batches
        # Loader processes ignore stop signals, and a script may leave its loop at any point.
        end_loaders()
        if batches is None:
            return code
        if not batches.is_over:
            # The exit must not cut off a save that is still being written.
            self.session.saver.join_quietly()
            if code == FINISHED:
                # Without this error, the script would exit with 0 and the platform would not resume the run.
                raise LoopLeftError(
                    f"the script left its loop after step {self.step}, before the end of the run; "
                    "to end a run early, call run.stop() and let the loop finish"
                )
        # After a failure, closing the group could wait for ranks that are gone.
        elif code == FINISHED:
            self.session.close()
        return code or self.session.code

    def _with_run_settings(self, asked: Mapping[str, int | None]) -> Settings:
        length = {"steps", "epochs"}
        # Steps and epochs are alternatives: a setting of one overrides the script's argument for both.
        beaten = self._chosen | (length if self._chosen & length else set())
        values = {n: v for n, v in asked.items() if v is not None and n not in beaten}
        return Settings.from_dict(self.settings.to_dict() | values)

    def _reader(self, settings: Settings, collate: Callable[[list[Any]], Any] | None) -> BatchReader:
        world = self.world
        # The script splits its batches with run.parts, so the reader yields whole ones.
        whole = replace(settings.data, micro_batch_size=None)
        loading = world.device, None, cores_of(world.position)
        reader = BatchReader(whole, settings.run.seed, world.rank, world.size, collate, *loading)
        share = (reader.sizes or equal_shares(whole.batch_size, world.size))[world.rank]
        # The exchange averages equally over ranks; this weights each rank by its number of samples.
        self.parts.share = share * world.size / whole.batch_size
        return reader

    def _loop_state(self, state: KeptState, data: TrainingData, planned: int) -> LoopState:
        """Assemble what follows each step, from the settings and the loaded state."""
        session = self.session
        world = self.world
        backward = self.backward
        settings = session.settings
        recorder = session.recorder
        saved = session.resume_point.state or {}
        first = session.resume_point.step
        data.load(saved.get("data", {}))
        recorder.load(saved.get("log", {}))
        backward.recorder = recorder
        backward.numbers.load(saved.get("names", []))
        state.live = lambda: {
            "data": data.state(),
            "log": recorder.state(),
            "names": backward.numbers.state(),
            "batch_size": settings.data.batch_size,
            "ended": backward.ends,
        }
        # run.stop() ended the run, so a restart must not continue it.
        planned = min(planned, first) if saved.get("ended") else planned
        # The resume decision compares with these; the script's arguments are unknown to it.
        recorded = self.settings.replace(steps=NO_END)
        session.plan(state, self._strategy, data.order, planned, recorded=recorded)
        together = nn.ModuleDict(state.modules)
        loop_state = LoopState(
            world=world,
            train_step=backward,
            event_schedule=session.event_schedule,
            recorder=recorder,
            clock=self.clock,
            nonfinite=Policy(
                settings.optimization.on_nonfinite, lambda: backward.is_scaled, recorder, backward.culprit
            ),
            # The script evaluates in its own way, so these two do nothing.
            evaluate=dict,
            ends=lambda step, scores: False,
            check_replicas=partial(check_replicas, world, self._strategy, together, recorder),
            check_next_step=lambda: None,  # `check_settings` refuses --replay-check
            saver=session.saver,
            step=first,
        )
        if first >= planned and not self._is_unsaved:
            log.info(
                "the run in %s already finished at step %d; raise epochs or steps to continue",
                session.run.folder,
                first,
            )
            return loop_state
        session.begin_run(together)
        sync_bytes = self._strategy.sync_bytes(_trained(backward.models))
        recorder.costs(Costs(devices=world.size, sync_bytes=sync_bytes))
        return loop_state

    def _finish(self, state: KeptState, loop_state: LoopState, finished: bool) -> None:
        """End the run: wait for the save that is being written, then write the summary."""
        self.clock.begin("drain")
        session = self.session
        saver = loop_state.saver
        if loop_state.step == session.resume_point.step and finished and not self._is_unsaved:
            return  # it was already complete
        session.code = FINISHED if finished else STOPPED
        # Leaving the block waits for the save that is being written.
        with saver:
            pass
        # Ended early, between two saves.
        # Only rank 0's saver knows the last step, but a save needs all ranks.
        if finished and self.world.broadcast_json(saver.last_step != loop_state.step):
            with saver:
                saver.save(loop_state.step)
        session.finish(loop_state.step, state.weights)

    @property
    def _is_unsaved(self) -> bool:
        """True if this generation began from a snapshot in memory: no checkpoint may have that step."""
        return self.session.resume_point.is_from_memory

    def _decision(self) -> ResumeDecision:
        """Return where to resume, decided once per launch.

        After a restart, the checkpoints of this launch count, even with --resume never.
        """
        if self.session.grant.restart and self.settings.checkpoint.resume == "never":
            return ResumeDecision("fresh")
        return decide_resume(self.settings.replace(steps=NO_END), self.session.run.checkpoints)


class LoopLeftError(TandemError):
    """The script ended before its loop did."""


def _trained(models: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [p for model in models for p in unwrapped(model).parameters() if p.requires_grad]
