"""What a task itself remembers from step to step, as a checkpoint holds it, and when it ends its run."""

from collections.abc import Mapping
from typing import Any

from tandem.distributed.group import ProcessGroup
from tandem.tasks.base import WholeTask
from tandem.tasks.parts import answer_of

REMEMBERING = ("state_dict", "after_evaluation")


class Memory:
    """The state of a task that has one of REMEMBERING, up to the evaluation that it has heard of last.

    A checkpoint that is due with an evaluation is begun before it, so it is the manifest that has the scores:
    a resumed task hears of them again.
    """

    def __init__(self, task: WholeTask, world: ProcessGroup) -> None:
        self._task, self._world = task, world
        self._heard = 0

    def hear(self, step: int, scores: Mapping[str, float]) -> bool:
        """Whether the task ends the run after this evaluation; rank 0's answer counts. All ranks call this.

        Raises ConfigError for an answer that is none.
        """
        self._heard = step
        if "after_evaluation" not in self._task.own:
            return False
        return bool(self._world.broadcast_json(answer_of(self._task, scores)))

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as {"task": ...}; nothing where the task has none of REMEMBERING."""
        if not self._task.own.intersection(REMEMBERING):
            return {}
        return {"task": {"heard": self._heard, "state": self._task.state_dict()}}

    def load(self, state: Mapping[str, Any], scores: Mapping[str, float]) -> None:
        """What a checkpoint's whole state has, and the scores of its step where it was begun before them."""
        mine = state.get("task", {})
        recall(self._task, state)
        if scores and mine.get("heard") != state["step"]:
            self.hear(int(state["step"]), scores)


def recall(task: WholeTask, state: Mapping[str, Any]) -> None:
    """Give a task what it remembered in a checkpoint's whole state, if it is there."""
    mine = state.get("task", {})
    if "load_state_dict" in task.own and "state" in mine:
        task.load_state_dict(mine["state"])
