"""How each workload explains the end of a generation, and what else the agent asks it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoint.decision import ResumeDecision
from tandem.config import Settings
from tandem.distributed.position import Grant, Position
from tandem.errors import FAILED, FINISHED, KILLED, PEER_LOST, STOPPED, ConfigError
from tandem.platforms.detection import Placement
from tandem.run.directory import RunDir
from tandem.script.job import Program
from tandem.signals import StopFlag
from tandem.work.base import NOTHING, SAVED, TRAINED, Cause, GenerationEnd, Workload, any_rank, gpu_index
from tandem.work.program import ProgramWorkload
from tandem.work.task import TaskWorkload

NODE_1_KILLED = Cause(1, 1, "b", KILLED)


class Store(dict[str, Any]):
    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def at(rank: int, nodes: int) -> Position:
    return Position(
        rank=rank, local_rank=rank, world_size=2, node_rank=0, nodes=nodes, ranks_on_host=2, platform="none",
        node_name="a",
    )  # fmt: skip


def end(codes: Mapping[int, int | None], nodes: int = 1, **changes: Any) -> GenerationEnd:
    def unexpected() -> dict[int, int]:
        raise AssertionError("waited for a rank to blame")

    given: dict[str, Any] = {
        "codes": codes, "now": lambda: codes, "blamed": unexpected, "nodes": nodes, "stop": StopFlag(),
        "positions": {rank: at(rank, nodes) for rank in codes}, "is_forwarded": False, "last_words": "",
        "store": Store(), "prefix": "g", "grant": Grant(),
    }  # fmt: skip
    return GenerationEnd(**{**given, **changes})


def task(folder: Path, **values: object) -> TaskWorkload:
    settings = Settings().replace(run_dir=folder, **values)
    return TaskWorkload(RunDir.of(settings), settings, ())


def program(folder: Path, kind: Any = "script", **values: object) -> ProgramWorkload:
    settings = Settings().replace(run_dir=folder, **values)
    return ProgramWorkload(Program(kind, "train.py", ("--lr", "1")), RunDir.of(settings), settings, ())


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (end({0: FINISHED, 1: FINISHED}), FINISHED),
        (end({0: STOPPED, 1: STOPPED}), STOPPED),
        (end({0: FINISHED}, is_forwarded=True), FINISHED),  # it had finished before
        (end({0: FAILED, 1: None}), FAILED),
        (end({0: PEER_LOST, 1: None}, nodes=2), PEER_LOST),  # the cause is elsewhere
        (end({0: PEER_LOST, 1: None}, blamed=lambda: {0: PEER_LOST, 1: KILLED}), KILLED),
        (end({0: PEER_LOST}, nodes=2, last_words="its words", blamed=lambda: {1: FAILED}), FAILED),
    ],
)
def test_a_tasks_exit_codes_say_how_it_ended(given: GenerationEnd, code: int, tmp_path: Path) -> None:
    assert task(tmp_path).explain(given) == (code, None)


@pytest.mark.parametrize(
    ("given", "code", "cause"),
    [
        (end({0: FINISHED}), FINISHED, None),
        (end({0: FINISHED}, is_forwarded=True), STOPPED, None),  # a framework that stops with 0
        (end({0: STOPPED}), KILLED, None),  # nobody asked it to stop
        (end({0: None, 1: KILLED}, blamed=lambda: {0: FAILED}), KILLED, (1, KILLED)),
        (end({0: PEER_LOST, 1: FINISHED}, blamed=dict), FAILED, (0, FAILED)),  # a rank returned too early
        (end({0: FAILED, 1: None}, nodes=2, blamed=dict), FAILED, (0, FAILED)),
        (
            end({0: FAILED}, 2, blamed=dict, store=Store({"g/ended/1": NODE_1_KILLED.to_json()})),
            KILLED,
            (1, KILLED),
        ),
    ],
)
def test_a_programs_end_has_one_cause(
    given: GenerationEnd, code: int, cause: tuple[int, int] | None, tmp_path: Path
) -> None:
    found, why = program(tmp_path).explain(given)
    assert (found, why and (why.rank, why.code)) == (code, cause)
    if why is not None and given.nodes > 1:
        assert Cause.from_json(given.store["g/ended/0"]).code == given.codes[0]


def test_what_there_is_at_a_stop(tmp_path: Path) -> None:
    fresh, resumed = ResumeDecision("fresh"), ResumeDecision("resume", 5)
    works: list[Workload] = [task(tmp_path), program(tmp_path)]
    asked = (False, fresh), (False, resumed), (True, fresh)
    found = [[each.progress(*each_time) for each_time in asked] for each in works]
    assert found == [[NOTHING, SAVED, TRAINED], [TRAINED] * 3]
    assert [each.is_done() for each in works] == [False, True]


def test_what_is_restarted(tmp_path: Path) -> None:
    works = task(tmp_path), program(tmp_path), program(tmp_path, restart_on_error=True)
    for code, expected in (
        (KILLED, [True] * 3), (PEER_LOST, [True] * 3), (FAILED, [False, False, True]), (STOPPED, [False] * 3),
    ):  # fmt: skip
        assert [each.is_retried(code) for each in works] == expected


def test_standby_processes_fit_their_rank(tmp_path: Path) -> None:
    assert task(tmp_path).standby_key is any_rank
    assert task(tmp_path, warm_gpu=True).standby_key is gpu_index
    assert program(tmp_path).standby_key(at(1, 2)) == (1, 1, 2, 2)
    # A new interpreter drops what was imported.
    assert program(tmp_path).preload == ["tandem.launch.preload", "tandem.script.rank"]
    assert program(tmp_path, fresh_interpreter=True).preload == ["tandem.script.rank"]
    assert program(tmp_path, "command").preload == ["tandem.script.rank"]


def test_a_platforms_rank_launches_no_program(tmp_path: Path) -> None:
    placement = Placement("slurm", 2, 0, 1, "a", 1)
    program(tmp_path).check(placement, list)
    with pytest.raises(ConfigError, match="slurm already starts each rank; `tandem launch train.py`"):
        program(tmp_path).check(Placement("slurm", 2, 0, 1, "a", 1, rank=1), list)
    assert program(tmp_path, "command").words == ["--", "train.py", "--lr", "1"]
