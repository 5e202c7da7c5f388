"""The names of all files in a run directory. `run/directory.py` opens the directory.

The names of a checkpoint's own files are in `checkpoint/storage/protocol.py`. Standard library only.
"""

import re

ABOUT = "about.json"
CONFIG = "config.json"
EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
METRICS_PAGE = "metrics.prom"
REPORT = "report.html"
STARTS = "starts.json"
SUMMARY = "summary.json"
TRACKER = "tracker.json"
OLDER = ".1"
"""What the name of a file ends with that was full and put aside (`rotation.older`)."""

CHECKPOINTS = "checkpoints"
CHECKPOINTS_BEFORE = "checkpoints-before-"
"""Followed by a time: the checkpoints of a run that began again."""
LOG = "log"
OWNER = "owner"
PROFILE = "profile"
TENSORBOARD = "tensorboard"
WANDB = "wandb"

TRACKER_LOG = "tracker.log"

COPIED = (
    ABOUT,
    CONFIG,
    EVENTS,  # before the older one: it begins with what was counted there
    EVENTS + OLDER,
    METRICS,
    METRICS_PAGE,
    SUMMARY,
    TRACKER,
)
"""The files that are copied to the address of a run."""
NOTES = frozenset((*COPIED, REPORT))
"""The files that tandem writes about a run, by their names in the run's folder."""
FOLDERS_OF_NOTES = {
    LOG: re.compile(r"((rank|node)-\d+|tracker)\.log(\.1)?|(flight|ended)-.+\.json|stacks-rank-\d+\.txt"),
    TENSORBOARD: re.compile(r"events\.out\.tfevents\..+"),
    PROFILE: re.compile(r"rank-\d+\.json"),
    WANDB: re.compile(r"(offline-)?run-.+|latest-run|debug(-internal)?\.log|settings"),
}
"""The folders beside them, and what tandem and wandb call what they write there: the rest is a person's."""
PROCESS_LOG = re.compile(r"(rank|node)-(\d+)\.log")


def rank_log(rank: int | str) -> str:
    """In LOG, as all that follow."""
    return f"rank-{rank}.log"


def node_log(node: int) -> str:
    return f"node-{node}.log"


def stacks(rank: int) -> str:
    return f"stacks-rank-{rank}.txt"


def flight(rank: int) -> str:
    """What torch's flight recorder holds."""
    return f"flight-rank-{rank}.json"


def ended(container: str) -> str:
    return f"ended-{container}.json"


def profile(rank: int) -> str:
    """In PROFILE."""
    return f"rank-{rank}.json"


def array_note(array: str) -> str:
    """Which task of a job array the run belongs to."""
    return f"array-{array}"


def begun_note(job: str) -> str:
    """Which start of a job has begun the run."""
    return f"begun-{job}"
