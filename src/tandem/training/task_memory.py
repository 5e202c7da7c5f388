"""Save what a task itself remembers between steps, and let it end its run."""

from collections.abc import Mapping
from typing import Any

from tandem.distributed.group import ProcessGroup
from tandem.tasks.base import WholeTask
from tandem.tasks.build import answer_of

REMEMBERING = ("state_dict", "after_evaluation")


class Memory:
    """The state of a task that has one of REMEMBERING, up to the last evaluation that it was told about.

    A checkpoint that is due together with an evaluation is begun before it, so its scores are in the
    manifest. A resumed task is told about them again.
    """

    def __init__(self, task: WholeTask, world: ProcessGroup) -> None:
        self._task = task
        self._world = world
        self._heard = 0

    def after_evaluation(self, step: int, scores: Mapping[str, float]) -> bool:
        """Tell the task about an evaluation; return whether it ends the run. All ranks call this.

        Rank 0's answer counts. Raises ConfigError for an invalid answer.
        """
        self._heard = step
        if "after_evaluation" not in self._task.own:
            return False
        return bool(self._world.broadcast_json(answer_of(self._task, scores)))

    def state(self) -> dict[str, Any]:
        """Return {"task": ...} for a checkpoint, or {} if the task has none of REMEMBERING."""
        if not self._task.own.intersection(REMEMBERING):
            return {}
        return {"task": {"heard": self._heard, "state": self._task.state_dict()}}

    def load(self, state: Mapping[str, Any], scores: Mapping[str, float]) -> None:
        """Restore the task from a checkpoint's state.

        If the checkpoint was begun before the evaluation of its step, tell the task these `scores` again.
        """
        saved = state.get("task", {})
        recall(self._task, state)
        if scores and saved.get("heard") != state["step"]:
            self.after_evaluation(int(state["step"]), scores)


def recall(task: WholeTask, state: Mapping[str, Any]) -> None:
    """Restore what a task remembered in a checkpoint's state, if it is there."""
    saved = state.get("task", {})
    if "load_state_dict" in task.own and "state" in saved:
        task.load_state_dict(saved["state"])
