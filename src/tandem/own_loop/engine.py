"""Implement `Run` with the same parts as a task's run, for a loop that the script writes."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from tandem.checkpoint.decision import ResumeDecision
from tandem.config import Settings
from tandem.data.fingerprint import data_facts
from tandem.data.kinds import training_data
from tandem.data.loader import end_loaders
from tandem.data.seeds import seed_model
from tandem.data.shares import equal_shares
from tandem.data.source import Reader, TrainingData
from tandem.distributed import strategy as strategies
from tandem.distributed.devices import cores_of
from tandem.errors import FINISHED, STOPPED, ConfigError, TandemError
from tandem.launch.run_dir import decide
from tandem.launch.script import ScriptRank
from tandem.log import reporting
from tandem.own_loop.backward import Backward
from tandem.own_loop.batches import Batches
from tandem.own_loop.kept import KeptState, unwrapped
from tandem.own_loop.limits import check_batch_size, check_settings, hints_as_arguments
from tandem.own_loop.parts import Parts
from tandem.run.directory import RunDir
from tandem.signals import StopFlag, ended_by_stop_signals
from tandem.telemetry.channel import sender
from tandem.telemetry.life import count_log_messages
from tandem.telemetry.meter import Costs
from tandem.telemetry.recorder import Recorder
from tandem.telemetry.stacks import keep_stacks
from tandem.training.loop import Course, Timetable
from tandem.training.nonfinite import Policy
from tandem.training.opening import open_world, set_up_log
from tandem.training.replicas import check_replicas
from tandem.training.resume import Beginning, Redistribute, begin, check_data
from tandem.training.saving import Saver, snapshot_every
from tandem.training.summary import Facts, forget_summary, open_displays, write_summary

log = logging.getLogger("tandem.run")

NO_END = 2**62
"""The number of steps of a run whose end is not known yet; the script sets it after the resume decision."""


class Engine:
    """An open process group, and after `begin` and `loop` a run."""

    def __init__(self, here: ScriptRank) -> None:
        """Open the process group. Raises TandemError."""
        self._began = time.monotonic()
        self.settings, self._chosen, position = here.settings, here.chosen, here.position
        check_settings(self.settings)
        self._run, self._hear = RunDir.of(self.settings, position.owner), here.hear
        if not here.is_launched:
            set_up_log(self.settings.telemetry.log_format, position, self._run)
            keep_stacks(self._run.logs, position.rank)
        self._send = sender(position.sample_socket)
        if position.store is not None:
            count_log_messages(self._send)
        compute, reliability = self.settings.compute, self.settings.reliability
        common = self.settings.common_fields()
        # There is nothing to save yet, and without an agent no other process could end the wait.
        with nullcontext() if position.store is not None else ended_by_stop_signals():
            self.clock, self.world, self._threads = open_world(
                compute, reliability, common, position, self._send, self._run.logs
            )
        self._strategy = strategies.load(compute.strategy, self.world, self.settings.exchange)
        policy = self.settings.optimization.on_nonfinite
        self.backward = Backward(self.world, self._strategy, self.clock, policy)
        self.parts = Parts(self.settings.run.seed, self.world.rank, self.backward)
        self.beginning = Beginning(0, None)
        self._batches: Batches | None = None
        self._code = FINISHED
        seed_model(self.settings.run.seed)

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self._batches.course.step if self._batches else self.beginning.step

    @property
    def is_in_step(self) -> bool:
        """Whether the script holds a batch."""
        return self._batches is not None and self._batches.is_open

    def begin(self, state: KeptState, redistribute: Redistribute | None = None) -> None:
        """Load the newest state, as --resume says. An error on rank 0 is raised on all ranks."""
        with self.clock.phase("resume"):
            problem, position = "", self.world.position
            if self.world.is_first:
                try:
                    position = replace(position, resume=self._decision())
                except ConfigError as error:
                    problem = str(error)
            problem = str(self.world.broadcast_json(problem))
            if problem:
                raise ConfigError(problem)
            recorder = self._recorder(self.settings)
            config, download = self.settings.checkpoint, self.settings.data.download
            self.beginning = begin(
                self.world,
                self._run.checkpoints,
                config,
                position,
                recorder,
                download,
                own=state.per_rank,
                redistribute=redistribute,
            )
            if self.beginning.state is not None:
                state.load(self.beginning.state, self.beginning.own)
            elif self.beginning.weights is not None:
                self.beginning.weights.load(self._strategy, state.together)

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
        settings = self._settled(asked)
        self.world.check_same_settings(settings.common_fields())
        with hints_as_arguments(self._chosen):
            reader = self._reader(settings, collate)
            # A run that resumes with another number of ranks may share its batch unevenly.
            if self.beginning.state is None:
                reader.check_shares()
        check_batch_size(settings.data.batch_size, self.beginning.state)
        of_data = data_facts(dataset) if self.world.is_first else {}
        check_data(self.world, self.beginning, of_data, settings.checkpoint.on_data_change)
        with hints_as_arguments(self._chosen):
            data = training_data(dataset, reader, settings.run.steps)
        planned = settings.run.steps or settings.run.epochs * data.order.steps_per_epoch
        course = self._course(settings, state, data, planned, of_data)
        stop = StopFlag().install()
        stop.is_heeded = True
        self._hear(stop)
        self._batches = Batches(
            course=course,
            backward=self.backward,
            data=data.steps(course.step, course.timetable.steps_planned),
            stop=stop,
            seed=settings.run.seed,
            optimizers=state.optimizers,
            finish=partial(self._finish, state, course),
            first=course.step,
        )
        self.clock.begin("train")
        return self._batches

    def close(self, code: int) -> int:
        """Return the exit code of a script that is over with `code`.

        Raises LoopLeftError if its loop has not ended.
        """
        batches = self._batches
        end_loaders()
        if batches is None:
            return code
        if not batches.is_over:
            batches.course.saver.settle()
            if code == FINISHED:
                # Without this error, the script would exit with 0 and the platform would not resume the run.
                raise LoopLeftError(
                    f"the script left its loop after step {self.step}, before the end of the run; "
                    "to end a run early, call run.stop() and let the loop finish"
                )
        # After a failure, closing the group could wait for ranks that are gone.
        elif code == FINISHED:
            self.world.close()
        return code or self._code

    def _settled(self, asked: Mapping[str, int | None]) -> Settings:
        length = {"steps", "epochs"}
        beaten = self._chosen | (length if self._chosen & length else set())
        values = {n: v for n, v in asked.items() if v is not None and n not in beaten}
        return Settings.from_dict(self.settings.to_dict() | values)

    def _reader(self, settings: Settings, collate: Callable[[list[Any]], Any] | None) -> Reader:
        world, whole = self.world, replace(settings.data, micro_batch_size=None)
        place = world.device, None, cores_of(world.position)
        reader = Reader(whole, settings.run.seed, world.rank, world.size, collate, *place)
        share = (reader.sizes or equal_shares(whole.batch_size, world.size))[world.rank]
        self.parts.share = share * world.size / whole.batch_size
        return reader

    def _course(
        self,
        settings: Settings,
        state: KeptState,
        data: TrainingData,
        planned: int,
        of_data: Mapping[str, Any],
    ) -> Course:
        """Assemble what follows each step, from the settings and the loaded state."""
        world, saved, first = self.world, self.beginning.state or {}, self.beginning.step
        recorder = self.backward.recorder = self._recorder(settings)
        data.load(saved.get("data", {}))
        recorder.load(saved.get("log", {}))
        self.backward.numbers.load(saved.get("names", []))
        state.live = lambda: {
            "data": data.state(),
            "log": recorder.state(),
            "names": self.backward.numbers.state(),
            "batch_size": settings.data.batch_size,
            "ended": self.backward.ends,
        }
        # run.stop() ended the run, so a restart must not continue it.
        planned = min(planned, first) if saved.get("ended") else planned
        # `decide` compares with these; the script's arguments are unknown to it.
        given = self.settings.replace(steps=NO_END)
        self._facts = facts = Facts(
            run=settings.run,
            batch_size=settings.data.batch_size,
            precision=settings.compute.precision,
            settings=given.to_dict(),
            fingerprint=given.fingerprint_fields(),
            config_hash=settings.digest(),
            world=world,
            directory=self._run,
            order=data.order,
            planned=planned,
            threads=self._threads,
            first_step=first,
            started=self._began,
            data=of_data,
        )
        timetable = Timetable.of(
            data.order.steps_per_epoch,
            planned,
            log=settings.telemetry.log_every,
            eval="never",
            save=settings.checkpoint.checkpoint_every,
            check=settings.reliability.replica_check_every,
            snapshot=snapshot_every(settings.checkpoint.snapshot_every, world, self._strategy),
        )
        together = nn.ModuleDict(state.modules)
        course = Course(
            world=world,
            stepper=self.backward,
            timetable=timetable,
            recorder=recorder,
            clock=self.clock,
            nonfinite=Policy(
                settings.optimization.on_nonfinite,
                lambda: self.backward.is_scaled,
                recorder,
                self.backward.culprit,
            ),
            evaluate=dict,
            ends=lambda step, scores: False,
            check_replicas=partial(check_replicas, world, self._strategy, together, recorder),
            saver=Saver(
                settings.checkpoint,
                facts,
                state,
                recorder,
                self.beginning.slot,
                self.beginning.own_slot,
            ),
            step=first,
        )
        if first >= planned and not self._is_unsaved:
            log.info(
                "the run in %s already finished at step %d; raise epochs or steps to continue",
                self._run.folder,
                first,
            )
            return course
        if world.is_first:
            forget_summary(self._run)
        open_displays(facts, settings.telemetry, timetable.steps_between("save"), recorder, together)
        sync_bytes = self._strategy.sync_bytes(_trained(self.backward.models))
        recorder.costs(Costs(devices=world.size, sync_bytes=sync_bytes))
        return course

    def _finish(self, state: KeptState, course: Course, finished: bool) -> None:
        """End the run: wait for the save that is being written, then write the summary."""
        self.clock.begin("drain")
        if course.step == self._facts.first_step and finished and not self._is_unsaved:
            return  # it was already complete
        self._code = FINISHED if finished else STOPPED
        saver = course.saver
        with saver:
            pass
        # Ended early, between two saves.
        if finished and self.world.broadcast_json(saver.last_step != course.step):
            with saver:
                saver.save(course.step)
        if self.world.is_first:
            saver.end(course.step, finished)
            write_summary(self._facts, course.recorder, state.weights(), saver.last_step, self._code)
        with reporting("close the displays"):
            course.recorder.close()

    @property
    def _is_unsaved(self) -> bool:
        """True if this generation began from a snapshot in memory: no checkpoint may have that step."""
        return self.beginning.slot is not None

    def _decision(self) -> ResumeDecision:
        """Return where to resume, decided once per launch.

        After a restart, what this launch has saved counts, even with --resume never.
        """
        if self.world.position.restart and self.settings.checkpoint.resume == "never":
            return ResumeDecision("fresh")
        return decide(self._run, self.settings.replace(steps=NO_END))

    def _recorder(self, settings: Settings) -> Recorder:
        world = self.world
        return Recorder(
            world.rank, settings.data.batch_size, self._send, self.clock, world.position.node_rank
        )


class LoopLeftError(TandemError):
    """The script ended before its loop did."""


def _trained(models: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [p for model in models for p in unwrapped(model).parameters() if p.requires_grad]
