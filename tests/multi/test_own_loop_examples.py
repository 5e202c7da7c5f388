"""Examples of loops of one's own: they differ little from plain ones, and killed they keep their bits."""

import difflib
import random
import time
from pathlib import Path
from typing import Any

import pytest
from own_loops import Scripts

pytestmark = pytest.mark.multi
EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("gan", "ema_frozen", "stream_lm", "distillation", "own_collective")
SOAK = ("ema_frozen", "distillation", "own_collective", "gan")
MOST_CHANGED_LINES = 12
RANKS = 2
KILLS, TRIES = 2, 6


@pytest.fixture
def scripts(tmp_path: Path, processes: Any) -> Scripts:
    return Scripts(tmp_path, processes)


@pytest.mark.parametrize("name", NAMES)
def test_at_most_twelve_lines_make_a_plain_script_one_of_many_ranks(name: str) -> None:
    plain, ours = ((EXAMPLES / f"{name}{kind}.py").read_text().splitlines() for kind in ("_plain", ""))
    changes = difflib.SequenceMatcher(None, plain, ours, autojunk=False).get_opcodes()
    changed = sum(max(b - a, d - c) for kind, a, b, c, d in changes if kind != "equal")
    assert 0 < changed <= MOST_CHANGED_LINES


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in SOAK else name for name in NAMES]
)
def test_killed_at_random_steps_it_ends_with_the_same_bits(
    name: str, scripts: Scripts, module_ports: list[int]
) -> None:
    script, ports, chance = EXAMPLES / f"{name}.py", list(module_ports), random.Random()
    ended = scripts.ranks(script, "calm", ports[0], RANKS)
    assert [code for code, _ in ended] == [0] * RANKS, ended
    kills = 0
    for attempt in range(TRIES):
        started = scripts.begin(script, "killed", ports[1 + attempt % 3], RANKS)
        if kills < KILLS and reached(scripts, chance.randint(4, 20) * (kills + 1), started):
            for each in started:
                scripts.processes.kill(each)
            kills += 1
        codes = [scripts.processes.wait(each)[0] for each in started]
        if codes == [0] * RANKS:
            break
    assert kills > 0, "every run was over before it could be killed"
    summary = scripts.summary("killed")
    assert summary["resumed_from_step"]
    assert summary["weights_sha256"] == scripts.summary("calm")["weights_sha256"]
    assert scripts.lines("killed") == scripts.lines("calm")


def reached(scripts: Scripts, step: int, started: list[Any]) -> bool:
    """Whether the log comes to `step` before the run ends."""
    path = scripts.folder / "killed" / "metrics.jsonl"
    while all(each.poll() is None for each in started):
        if path.exists() and path.read_bytes().count(b"\n") >= step:
            return True
        time.sleep(0.002)
    return False
