"""The names of all files in a run directory. `run/directory.py` opens the directory.

The names of the files in a checkpoint are in `checkpoint/storage/protocol.py`. Standard library only.
"""

import re

ABOUT = "about.json"
CONFIG = "config.json"
EVENTS = "events.jsonl"
GOODPUT = "goodput.jsonl"
HEALTH = "health.json"
HEALTH_TEMPORARY = ".health.json.tmp"
"""The name of HEALTH while it is being written; a kill may leave it there."""
INSPECTION = "inspection.json"
"""In LOG: where node 0's agent listens for `tandem stacks`."""
METRICS = "metrics.jsonl"
METRICS_PAGE = "metrics.prom"
OTEL_SENT = "otel-sent.json"
"""In LOG, like the next one: how far the run has been sent to OpenTelemetry."""
OTEL_SPANS = "otel-spans.jsonl"
REPORT = "report.html"
STARTS = "starts.json"
SUMMARY = "summary.json"
TRACKER = "tracker.json"
OLDER = ".1"
"""The suffix of a full file that was put aside (`rotation.older`)."""

CHECKPOINTS = "checkpoints"
CHECKPOINTS_BEFORE = "checkpoints-before-"
"""Prefix of a time: the earlier checkpoints of a run that started again from step 0."""
LOG = "log"
OWNER = "owner"
PROFILE = "profile"
TENSORBOARD = "tensorboard"
WANDB = "wandb"

TRACKER_LOG = "tracker.log"

COPIED = (
    ABOUT,
    CONFIG,
    EVENTS,  # copied before the older file: it begins with the counts of that file
    EVENTS + OLDER,
    GOODPUT,
    METRICS,
    METRICS_PAGE,
    SUMMARY,
    TRACKER,
)
"""The files that are copied to the address of a run."""
NOTES = frozenset((*COPIED, REPORT, HEALTH, HEALTH_TEMPORARY))
"""Names of the files that tandem writes about a run in its directory."""
FOLDERS_OF_NOTES = {
    LOG: re.compile(
        r"((rank|node)-\d+|tracker)\.log(\.1)?|(flight|ended)-.+\.json|inspection\.json|stacks-rank-\d+\.txt"
        r"|otel-(sent\.json|spans\.jsonl(\.1)?|metrics-\d+\.json)"
    ),
    TENSORBOARD: re.compile(r"events\.out\.tfevents\..+"),
    PROFILE: re.compile(r"rank-\d+\.json|steps-\d+-\d+\.json|memory-rank-\d+\.pickle"),
    WANDB: re.compile(r"(offline-)?run-.+|latest-run|debug(-internal)?\.log|settings"),
}
"""Directories next to them, with the names of files that tandem and wandb write there.

Others are the user's.
"""
PROCESS_LOG = re.compile(r"(rank|node)-(\d+)\.log")


def rank_log(rank: int | str) -> str:
    """The name of a rank's log in LOG, where the next four files are as well."""
    return f"rank-{rank}.log"


def node_log(node: int) -> str:
    return f"node-{node}.log"


def stacks(rank: int) -> str:
    return f"stacks-rank-{rank}.txt"


def flight(rank: int) -> str:
    """The dump of torch's flight recorder."""
    return f"flight-rank-{rank}.json"


def ended(container: str) -> str:
    return f"ended-{container}.json"


def profile(rank: int) -> str:
    """The name of a rank's profile in PROFILE."""
    return f"rank-{rank}.json"


def otel_metrics(launch: float) -> str:
    """The name in LOG of the metrics of a launch that began at this Unix time, for OpenTelemetry."""
    return f"otel-metrics-{round(launch * 1000)}.json"


def array_note(array: str) -> str:
    """The file that records which task of a job array owns the run."""
    return f"array-{array}"


def merged_profile(first: int, last: int) -> str:
    """The trace of all ranks in PROFILE that `tandem profile` writes."""
    return f"steps-{first}-{last}.json"


def memory_snapshot(rank: int) -> str:
    """The name of a GPU's allocator snapshot in PROFILE that `tandem memory` writes."""
    return f"memory-rank-{rank}.pickle"


def begun_note(job: str) -> str:
    """The file that records which start of a job created the run."""
    return f"begun-{job}"
