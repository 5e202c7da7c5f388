"""The learning rate of each step according to the settings."""

from tandem.config.slices import OptimizationConfig
from tandem.schedule import Cadence, learning_rate, scale_lr, scaling_of


class Rates:
    """A pure function of the step, so it has no state to save.

    It depends on the global batch size, not on the number of ranks.
    """

    def __init__(
        self, config: OptimizationConfig, batch_size: int, steps_per_epoch: int, steps_planned: int
    ) -> None:
        self._config = config
        self._batch_size = batch_size
        self._planned = steps_planned
        self._scaling, self._base = scaling_of(config.lr_scaling)
        self.peak = scale_lr(config.lr, self._scaling, batch_size, self._base)
        """The learning rate after the warm-up."""
        self._warmup = Cadence.parse(config.warmup).to_steps(steps_per_epoch, steps_planned) or 0

    def at(self, step: int) -> float:
        """Return the learning rate of the next step, numbered from 0."""
        return learning_rate(
            step,
            peak=self.peak,
            warmup_steps=self._warmup,
            steps_planned=self._planned,
            schedule=self._config.schedule,
        )

    def __str__(self) -> str:
        """Describe the rates: `lr 0.1 x 480/240 (linear) = 0.2, warm-up linear ..., then ...`."""
        config = self._config
        text = f"lr {self._config.lr:g}"
        if self._scaling != "none":
            ratio = f"{self._batch_size}/{self._base}"
            factor = f"sqrt({ratio})" if self._scaling == "sqrt" else ratio
            text += f" x {factor} ({self._scaling}) = {self.peak:.4g}"
        if self._warmup:
            text += f", warm-up linear over {self._warmup:,} steps"
        end = "" if config.schedule == "constant" else f" to step {self._planned:,}"
        return f"{text}, {'then ' if self._warmup else ''}{config.schedule}{end}"
