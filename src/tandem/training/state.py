"""What a checkpoint holds of a run: all that the next step depends on beside its number."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tandem.data.source import TrainingData
from tandem.distributed.strategy import Strategy
from tandem.telemetry.recorder import Recorder
from tandem.training.optim import Schedule
from tandem.training.resume import load_state


class TrainingState:
    """The parts of a run that are saved, and put back by `load` before the first step."""

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        scaler: torch.amp.GradScaler,
        data: TrainingData,
        recorder: Recorder,
    ) -> None:
        self._strategy, self._model, self._optimizer = strategy, model, optimizer
        self._schedule, self._scaler, self._data, self._recorder = schedule, scaler, data, recorder

    def whole(self) -> dict[str, Any]:
        """The state by part, "model" first; tensors are whole on rank 0, and all ranks call this."""
        spread = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        return {
            **self._strategy.whole(spread),
            "schedule": self._schedule.state(),
            "scaler": self._scaler.state_dict(),
            "data": self._data.state(),
            "log": self._recorder.state(),
        }

    def weights(self) -> dict[str, Any]:
        """The model's part alone; as `whole`."""
        return self._strategy.whole(self._model.state_dict())

    def load(self, saved: Mapping[str, Any]) -> None:
        """Put back what `whole` gave. Raises ConfigError when it is of another model."""
        load_state(saved, self._strategy, self._model, self._optimizer, self._schedule)
        self._data.load(saved.get("data", {}))
        self._recorder.load(saved.get("log", {}))
        if "scaler" in saved:
            self._scaler.load_state_dict(saved["scaler"])
