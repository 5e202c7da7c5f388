"""One sentence on what limits a run: planted bottlenecks, healthy runs, and pages that make no sense."""

from pathlib import Path

import pytest

from tandem.telemetry import metrics
from tandem.telemetry.metrics import Sample
from tandem.telemetry.registry import Registry
from tandem.telemetry.verdict import measured, verdict

DEFAULTS = {
    "workers": 0, "eval_every": "1epoch", "checkpoint_every": "1epoch", "gradient_compression": "none",
}  # fmt: skip


def page(
    own: list[float],
    step: float | None = None,
    data: list[float] | None = None,
    straggler: tuple[int, int, str, float] | None = None,
    steps: int = 1000,
    gpu: list[float] | None = None,
    sync_bytes: int = 100_000_000,
    restarts: int = 0,
    phases: dict[str, float] | None = None,
    **activities: float,
) -> str:
    """A run's page of metrics, as its agent makes it: the ranks' own times and data times in seconds.

    `phases`: of one step of rank 0; without them, what is not data is forward and backward.
    """
    registry = Registry()
    data = data or [0.0] * len(own)
    whole = step or max(own) + 0.001
    phases = phases or {"data": data[0], "forward": (own[0] - data[0]) / 2}
    phases = {**phases, "backward": phases.get("backward", whole - sum(phases.values()))}
    spent = {"startup": 8.0, "rendezvous": 2.0, "train": steps * whole, **activities}
    samples: list[Sample] = [
        metrics.STEPS.inc(steps),
        metrics.GRADIENT_SYNC_BYTES.inc(steps * sync_bytes),
        metrics.STEP_DURATION_SECONDS.observe(*[whole] * steps),
        *(metrics.STEP_PHASE_SECONDS.inc(steps * each, phase=name) for name, each in phases.items()),
        *(metrics.ACTIVITY_SECONDS.inc(seconds, activity=name) for name, seconds in spent.items()),
        *(metrics.RANK_COMPUTE_SECONDS.set(each, rank=rank, node=rank) for rank, each in enumerate(own)),
        *(metrics.RANK_DATA_SECONDS.set(each, rank=rank, node=rank) for rank, each in enumerate(data)),
        metrics.TYPICAL_STEP_SECONDS.set(whole),
        metrics.RESTARTS.inc(restarts, reason="crash"),
        *(metrics.GPU_UTILIZATION_RATIO.set(each, gpu=gpu_) for gpu_, each in enumerate(gpu or [])),
    ]
    if straggler is not None:
        rank, node, phase, excess = straggler
        samples.append(metrics.STRAGGLER_EXCESS_SECONDS.set(excess, rank=rank, node=node, phase=phase))
    registry.apply(samples)
    return registry.page().decode()


def of(text: str, **settings: object) -> str | None:
    return verdict(measured(text, {**DEFAULTS, **settings}))


PLANTED = {
    "the loader of a rank": (
        page([0.06, 0.06, 0.06, 0.1], 0.101, [0.001, 0.001, 0.001, 0.041]), {},
        ["data: 41%", "loader of rank 3", "--workers 2"],
    ),
    "all loaders": (
        page([0.1] * 4, 0.102, [0.05] * 4), {"workers": 3}, ["data: 49%", "loaders;", "--workers 6"],
    ),
    "a loader that stalls now and then": (
        page([0.1, 0.1], 0.101, phases={"data": 0.03, "forward": 0.03}), {"workers": "auto"},
        ["data: 30%", "cheaper", "cache"],
    ),
    "a slow rank": (
        page([0.03, 0.045], 0.046, straggler=(1, 1, "forward", 0.015)), {},
        ["slow rank: 33%", "rank 1 on node 1", "its forward takes 15 ms longer"],
    ),
    "saves": (
        page([0.1, 0.1], checkpoint=40.0), {"checkpoint_every": "50"},
        ["saves:", "28%", "--checkpoint-every 400"],
    ),
    "evaluations": (
        page([0.1, 0.1], eval=60.0), {"eval_every": "1epoch"}, ["evaluation:", "37%", "--eval-every 12epoch"],
    ),
    "a small batch": (
        page([0.002, 0.002], 0.005, sync_bytes=40_000), {},
        ["small batch: 60%", "5 ms", "40 kB", "--batch-size"],
    ),
    "a slow link": (
        page([0.2] * 8, 0.4, sync_bytes=1_200_000_000), {},
        ["slow link: 50%", "1.2 GB", "--gradient-compression bf16"],
    ),
    "an optimizer of a small batch": (
        page([0.1, 0.1], phases={"forward": 0.02, "optimizer": 0.06}), {},
        ["small batch: 59%", "optimizer", "--batch-size"],
    ),
    "a GPU that waits for its host": (
        page([0.01], gpu=[0.3], phases={"forward": 0.005}), {}, ["small batch:", "idle 70%", "--compile"],
    ),
    "waiting for a node": (page([0.1, 0.1], rendezvous=90.0), {}, ["nodes:", "47%", "tandem doctor"]),
    "restarts": (
        page([0.1, 0.1], rendezvous=50.0, resume=30.0, restarts=7), {},
        ["restarts:", "44%", "7 restarts", "events"],
    ),
    "copies to the GPU": (
        page([0.1], gpu=[0.9], phases={"transfer": 0.04, "forward": 0.03}), {},
        ["transfer: 40%", "uint8"],
    ),
    "several: the worst is named": (
        page([0.1, 0.1], 0.101, [0.03, 0.03], eval=200.0), {"eval_every": "30s"},
        ["evaluation:", "66%", "--eval-every"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bottleneck_is_named_with_what_to_try(name: str) -> None:
    text, settings, words = PLANTED[name]
    said = of(text, **settings) or ""
    assert all(word in said for word in words), said
    assert "\n" not in said and len(said) < 250


HEALTHY = {
    "one rank on a CPU": page([0.05], 0.05),
    "two ranks": page([0.1, 0.101], 0.11, [0.005, 0.005]),
    "eight GPUs": page([0.25] * 8, 0.27, gpu=[0.95] * 8),
    "short saves and evaluations": page([0.1, 0.1], eval=10.0, checkpoint=8.0),
    "a wait of 15% for gradients": page([0.17, 0.17], 0.2),
    "data in the time of two other phases": page([0.1, 0.1], 0.11, [0.015, 0.012]),
    "a short run: 3 s of training": page([0.03, 0.03], 0.05, steps=60),
    "few steps": page([2.0, 2.0], 4.0, steps=20),
    "a start of 10 s in a run of 30 s": page([0.1, 0.1], 0.11, rendezvous=10.0, steps=200),
    "noise: one of four ranks is slower, but not for long": page([0.1, 0.1, 0.1, 0.12], 0.125),
    "one restart in a long run": page(
        [0.1, 0.1], 0.11, rendezvous=25.0, resume=10.0, restarts=1, steps=5000
    ),
    "adam on a large model": page([0.3] * 4, 0.32, phases={"forward": 0.1, "optimizer": 0.06}),
    "a fast GPU that is busy": page([0.004], 0.004, gpu=[0.85], steps=5000),
}  # fmt: skip


RECORDED = sorted((Path(__file__).parents[1] / "fixtures" / "healthy_pages").glob("*.prom"))
"""Lines of the pages of real launches on two busy cores: the built-in digits, and steps of 50 ms."""


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_nothing_is_said_of_a_real_run(path: Path) -> None:
    run = measured(path.read_text(), DEFAULTS)
    assert run.steps >= 100 and run.step and run.ranks, "it has what a verdict needs"
    assert verdict(run) is None


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_a_healthy_run(name: str) -> None:
    assert of(HEALTHY[name]) is None


def test_a_straggler_of_a_script_is_named_although_its_steps_are_not_known() -> None:
    lines = [
        "tandem_rank_compute_seconds{node=\"0\",rank=\"0\"} 0.03",
        "tandem_rank_compute_seconds{node=\"1\",rank=\"1\"} 0.06",
        "tandem_straggler_excess_seconds{node=\"1\",phase=\"other\",rank=\"1\"} 0.03",
        "tandem_activity_seconds_total{activity=\"train\"} 60.0",
    ]  # fmt: skip
    said = of("\n".join(lines)) or ""
    assert "slow rank: 50%" in said and "rank 1 on node 1" in said and "it takes 30 ms longer" in said
    assert of("\n".join(lines[:2] + lines[3:])) is None, "no straggler: nothing is known"


@pytest.mark.parametrize("text", [
    "", "no metrics\n\x00", 'tandem_rank_compute_seconds{rank="a",node="0"} 1.0',
    'tandem_typical_step_seconds NaN\ntandem_activity_seconds_total{activity="train"} -5',
    "tandem_typical_step_seconds 0\ntandem_steps_total 1e9",
    'tandem_straggler_excess_seconds{rank="1",node="x",phase="data"} 1e400',
    f'tandem_rank_compute_seconds{{node="0",rank="{"1" * 5000}"}} 1.0',
    'tandem_straggler_excess_seconds{rank="1",node="1",phase="\x1b[31m"} 9\n'
    'tandem_activity_seconds_total{activity="train"} 60',
])  # fmt: skip
def test_a_page_that_says_nothing_gives_no_sentence(text: str) -> None:
    assert of(text) is None and verdict(measured(text, {"eval_every": None, "workers": "many"})) is None
