"""The table of peers.py, and how each contender was run, created from its results."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

HEAD = (
    *("", "version", "kills", "to the next step", "all ranks again", "first step", "memory"),
    *("steps repeated", "samples lost", "samples used twice"),
)


def render(found: dict[str, Any]) -> str:
    """Return Markdown: a row per contender with median and worst trial, then its settings."""
    entries = found["contenders"].values()
    lines = [f"| {' | '.join(cells)} |" for cells in (HEAD, *map(_row, entries))]
    settings = [f"- **{entry['title']}:** {entry['settings']}{_reason(entry)}." for entry in entries]
    return "\n".join([lines[0], "|---" * len(HEAD) + "|", *lines[1:], "", *settings])


IN_BRIEF = ("task", "torchft", "in-process", "torchrun")


def brief(found: dict[str, Any]) -> tuple[str, str]:
    """Return the trials, and the median to the next step, of the contenders in IN_BRIEF that recovered."""
    medians, counts = [], []
    for entry in (found["contenders"][name] for name in IN_BRIEF if name in found["contenders"]):
        seconds = [each["next_step"] for each in entry["trials"] if each["next_step"] is not None]
        if seconds:
            medians.append(f"{entry['title']} {statistics.median(seconds):.2f} s")
            counts.append(len(entry["trials"]))
    fewest, most = min(counts, default=0), max(counts, default=0)
    return f"{fewest} each" if fewest == most else f"{fewest} to {most}", ", ".join(medians)


def _row(entry: dict[str, Any]) -> list[str]:
    trials: list[dict[str, Any]] = entry["trials"]
    version = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
    if not trials:
        return [entry["title"], version, "0", "**not measured**", *[""] * (len(HEAD) - 4)]
    recovered = [each for each in trials if each["all_ranks"] is not None]
    all_recover = len(recovered) == len(trials)
    kills = str(len(trials)) if all_recover else f"{len(recovered)} of {len(trials)} recover"
    return [
        *(entry["title"], version, kills),
        *(_seconds(recovered, name) for name in ("next_step", "all_ranks")),
        *(_seconds(trials, "first_step"), _shown(trials, "megabytes", "{:,.0f} MB".format)),
        *(_shown(recovered, name, "{:g}".format) for name in ("repeated_steps", "lost", "twice")),
    ]


def _seconds(trials: Sequence[dict[str, Any]], name: str) -> str:
    return _shown(trials, name, "{:.2f} s".format)


def _shown(trials: Sequence[dict[str, Any]], name: str, text: Callable[[float], str]) -> str:
    """Return the median, and the worst value if it is formatted differently."""
    values = [each[name] for each in trials]
    if not values:
        return ""
    median, worst = text(statistics.median(values)), text(max(values))
    return median if median == worst else f"{median} ({worst})"


def _reason(entry: dict[str, Any]) -> str:
    """Return why it was not measured, or what happened in the trials that did not recover."""
    ended = [each["ended"] for each in entry["trials"] if each["ended"]]
    said = [f"Not measured: {entry['error']}"] if entry["error"] and not entry["trials"] else []
    said += [f"{len(ended)} did not recover, the last: {ended[-1]}"] if ended else []
    return "".join(f". {each}" for each in said).replace("|", "/").rstrip(".")
