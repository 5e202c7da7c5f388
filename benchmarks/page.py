"""Write every measured figure of README and docs from benchmarks/results/*.json.

    python benchmarks/page.py [--check]

docs/benchmarks.md is generated whole: one table per question. In the other pages, what stands between
`<!-- figure: NAME -->` and `<!-- end -->` is generated. NAME is a key of FIGURES, a result file (its machine
and its table), or an entry of recorded.json: figures from before their program kept its results.
A question without a result file is shown as not measured. A row that misses its target shows that.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peers_table
from questions import QUESTIONS, Question
from table import Row, render, tandem_version

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md"
PAGES = (ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path != PAGE))
MARK = re.compile(r"(<!-- figure: ([\w-]+) -->)(.*?)(<!-- end -->)", re.DOTALL)
HEAD = """# Benchmarks
`make bench` runs the CPU benchmarks, and `make gpu-check` runs those that need a GPU. Both write \
`benchmarks/results/*.json`. `python benchmarks/page.py` generates this page, and the measured figures of \
README and the other pages, from those files. tandem and its baselines run in the same invocation and take \
turns. Missed targets are shown, too.

- **Figures** are medians. A range in parentheses is the smallest and the largest value.
- **Ratios** are ratios of the two medians, except where a section says "ratio of rounds". There, each round \
gives one ratio, and the table shows the median of those. It can differ from the ratio of the two medians, \
even in direction. The snapshot rows compare means.
- **Older results** are marked. They have no commit, or are of an earlier release.
- **Load:** the load average at the end includes the benchmark itself.
- **Other machines:** neither times nor ratios carry over. On idle cores, torchrun restarted faster than on \
busy ones, and [the ratio shrank](reliability.md#recovery).
"""
FIRST = "0.1.0"
"""The version of results from before the version was recorded."""

def _load(results: Path, name: str) -> Any:
    return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))


def _rows(results: Path, name: str) -> list[Row]:
    return [Row(**row) for row in _load(results, name)["rows"]]


def _measured_on(machine: dict[str, Any]) -> str:
    """Where, when and of which commit, and what an old file does not have."""
    before, after, cores = machine.get("load_before"), machine.get("load"), machine["cores"]
    known = {
        "CPU": machine.get("processor"),
        "torch": machine.get("torch") and f"torch {machine['torch']}",
        "Python": machine.get("python") and f"Python {machine['python']}",
        "date": machine["time"],
        "commit": machine.get("commit") and f"commit {machine['commit']}",
        "command": machine.get("command") and f"`{machine['command']}`",
    }
    loads = {
        "load before the start": before is not None
        and f"{'quiet' if before < 0.3 * cores else 'busy'} machine (load {before} before the start)",
        "load at the end": after is not None and f"15-minute load average {after} at the end",
    }
    where = ", ".join([f"{cores} cores", *(machine.get("gpus") or []), *filter(None, known.values())])
    load = ", ".join(filter(None, loads.values()))
    said = f"Measured on {where}." + (f" {load[0].upper()}{load[1:]}." if load else "")
    unknown = ", ".join(name for name, value in {**known, **loads}.items() if not value)
    old = f" {_age(machine)}." if _age(machine) else ""
    return said + old + (f" Not recorded: {unknown}." if unknown else "")


def _age(machine: dict[str, Any]) -> str:
    """Why a result is older than this release; "" if it is not, or this checkout has no source to compare."""
    if machine.get("added_in"):
        return f"**Older result**, added in {machine['added_in']}"
    measured = machine.get("tandem", FIRST)
    return f"**Older result**, of tandem {measured}" if tandem_version() not in (None, measured) else ""


def _origin(results: Path, name: str) -> str:
    """The commit of a result, and whether it is an older one."""
    found = _load(results, name)
    machine = found.get("machine") or next(iter(found["machines"].values()))
    commit = machine.get("commit") or machine["time"]
    return f"older, {commit}" if _age(machine) else commit


def _table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(map(str, line))} |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def _answer(question: Question, path: Path) -> str:
    """What was trained, the machine and the table of one result file."""
    found = json.loads(path.read_text(encoding="utf-8"))
    about = " ".join(filter(None, (question.setup, _measured_on(found["machine"]))))
    return f"{about}\n\n{render([Row(**row) for row in found['rows']])}"


def _cost(results: Path, name: str) -> str:
    (row,) = (row for row in _rows(results, "framework_cost") if row.name == f"a step of {name}")
    return row.ratio


def _readme(results: Path) -> str:
    """The table of README."""
    recovery, hangs = _rows(results, "reliability_recovery")[0], _rows(results, "reliability_hangs")[:3]
    scripts = [row for row in _rows(results, "scripts") if row.control]
    (chaos,), resumes = _rows(results, "reliability_chaos"), _rows(results, "reliability_resume")
    worst = max(float(re.findall(r"worst ([\d.]+) s", row.outcome)[0]) for row in hangs)
    named, equal = (sum(int(row.outcome.split()[0]) for row in rows) for rows in (hangs, resumes))
    ours, theirs = ([getattr(row, of) for row in scripts] for of in ("seconds", "control_seconds"))
    kills = sum(row.trials for row in scripts)
    goodput = re.findall(r"[\d.]+%", chaos.outcome)[0]
    costs = {
        "script": "the bare script under tandem launch",
        "task": "tandem, TensorDataset",
        "Accelerate": "Accelerate",
        "Lightning": "Lightning",
    }
    shown = ", ".join(f"{name} {_cost(results, row)}" for name, row in costs.items())
    page, rounds = "docs/reliability.md", _rows(results, "framework_cost")[0].trials
    rows = [
        (
            f"[time from killing a rank to the next step]({page}#recovery)",
            f"{recovery.trials}; torchrun {recovery.control_trials}",
            f"median {recovery.seconds:.2f} s; torchrun {recovery.control_seconds:.2f} s",
            "reliability_recovery",
        ),
        (
            f"[scripts, to their first output]({page}#scripts)",
            f"{kills}; torchrun {sum(row.control_trials or 0 for row in scripts)}",
            f"medians {min(ours):.2f} to {max(ours):.2f} s; "
            f"torchrun {min(theirs):.2f} to {max(theirs):.2f} s",
            "scripts",
        ),
        (
            f"[killed and resumed at 1 to {len(resumes)} ranks]({page}#exact-resume)",
            sum(row.trials for row in resumes),
            f"{equal} bit-identical to an uninterrupted run",
            "reliability_resume",
        ),
        (
            f"[stopped rank, skipped collective, cut link]({page}#hangs)",
            sum(row.trials for row in hangs),
            f"the right rank named in {named}, at most {worst:.2f} s after the timeout",
            "reliability_hangs",
        ),
        (
            f"[a fault every 5 s]({page}#under-steady-fire)",
            f"{chaos.trials} faults",
            f"{goodput} of the uninterrupted speed",
            "reliability_chaos",
        ),
        (
            "[step time, DDP = 1](docs/benchmarks.md#what-a-framework-costs-a-step)",
            f"{rounds} rounds",
            shown,
            "framework_cost",
        ),
    ]
    if (results / "peers.json").exists():
        about = "[the same kill under other tools](docs/compared.md#one-rank-killed)"
        rows.append((about, *peers_table.brief(_load(results, "peers")), "peers"))
    rows = [(*cells, _origin(results, name)) for *cells, name in rows]
    return _table(("measured", "trials", "outcome", "commit"), rows)


def _compression(results: Path) -> str:
    found = _load(results, "gradient_compression")
    by_rate: dict[str, dict[str, Any]] = {}
    for row in found["rows"]:
        by_rate.setdefault(row["rate"], {})[row["compression"]] = row
    kinds = ("bf16", "fp16", "powersgd")
    rows = [
        (rate, f"{row['none']['step_ms']:.0f} ms", *(f"{row[kind]['ratio']:.2f}" for kind in kinds))
        for rate, row in by_rate.items()
    ]
    sent = [found["rows"][place]["bytes"] for place in range(4)]
    head = ("rate of the link", "none", *(f"{kind}, relative" for kind in kinds))
    words = ", ".join(f"{size:,} with {kind}" for kind, size in zip(("none", *kinds), sent, strict=True))
    return (
        f"{_measured_on(found['machine'])}\n\n{_table(head, rows)}\n\n"
        f"Medians of {found['steps']} steps each. Bytes per step: {words}."
    )


def _monitoring(results: Path) -> str:
    found = _load(results, "monitoring")
    trials, blocks = found["straggler_trials"], f"{found['cost_blocks']} blocks of 50 steps"

    def added(name: str) -> str:
        return f"{found[name]:+.1%} of the step, standard error {found[f'{name}_error']:.1%}"

    def named(name: str) -> str:
        return f"{found[name] * trials:.0f}"

    windows = f"{trials} windows of 20 steps"
    right = f"that rank reported in {named('straggler_named')}, "
    right += f"another rank in {named('straggler_named_wrongly')}"
    scrape = f"a scrape of 64 ranks' series ({found['page_bytes'] / 1000:.0f} kB, "
    scrape += f"{found['page_milliseconds']:.0f} ms) every second on the same cores"
    watching = "monitoring, compared with a run without clocks, gather and messages"
    rows = [
        ("one rank is 1.33 times as slow as the others", windows, right, "at least 99%"),
        ("no rank is slow", windows, f"a rank reported in {named('straggler_false_alarms')}", "at most 1%"),
        (watching, blocks, added("cost_of_watching"), "under 1%"),
        (scrape, blocks, added("cost_of_scraping"), "under 1%"),
    ]
    about = f"Over gloo, steps of {found['step_milliseconds']:.1f} ms (2 ranks; 4 for the stragglers)."
    about = f"{about} {_measured_on(found['machine'])}"
    return f"{about}\n\n{_table(('what', 'trials', 'outcome', 'target'), rows)}"


def _shares(results: Path) -> str:
    found = _load(results, "dp_vs_ddp")
    rates = found["shares"]["samples_per_second"]
    each = zip(rates["none"], rates["3:1"], strict=True)
    rows = [
        (number, *(f"{rate:,.0f}" for rate in of), f"{of[1] / of[0]:.2f}")
        for number, of in enumerate(each, 1)
    ]
    head = ("round", "equal, 32:32", "`3:1`, 48:16", "`3:1` relative to equal")
    return f"{_measured_on(found['machines']['shares'])}\n\n{_table(head, rows)}"


def _bytes(results: Path) -> str:
    rows = _load(results, "dp_vs_ddp")["bytes"]
    off = {size: 0.0 for size in sorted({row["parameters"] for row in rows})}
    for row in rows:
        size = row["parameters"]
        off[size] = max(off[size], abs(row["sent"] / row["formula"] - 1))
    small, *large = off.values()
    most = [row for row in rows if row["ranks"] == 4 and row["parameters"] == max(off)]
    sent = {row["way"]: row for row in most}
    return (
        f"At 1 and at 10 million parameters they are within {max(large):.2%} of the formula; at 10 thousand "
        f"they are up to {small:.1%} above it. For 10 million parameters on 4 ranks, the busiest device "
        f"sends {sent['server']['sent'] / 1e6:.1f} MB if one device serves all others, and "
        f"{sent['ring']['sent'] / 1e6:.1f} MB in the ring. Over all links both send "
        f"{statistics.mean(row['all'] for row in most) / 1e6:.1f} MB."
    )


def _threads(results: Path) -> str:
    found = _load(results, "dp_vs_ddp")
    rows = [(row["model"], f"{row['threads']:.2f}", f"{row['processes']:.2f}") for row in found["threads"]]
    about = _measured_on(found["machines"]["threads"])
    return f"{about}\n\n{_table(('model', 'threads', 'processes'), rows)}"


def _peers(results: Path) -> str:
    if not (results / "peers.json").exists():
        return "Not measured."
    found = _load(results, "peers")
    titles: dict[str, list[str]] = {}
    for name, entry in found["contenders"].items():
        titles.setdefault(_measured_on(found["machines"][name]), []).append(entry["title"])
    about = [f"- {', '.join(each)}: {on}" for on, each in titles.items()]
    return "\n".join([peers_table.render(found), *(about if len(about) > 1 else ["", *titles])])


def _audits(results: Path) -> str:
    found = _load(results, "audits")
    rows = []
    for row in found["rows"]:
        kinds = "; ".join(f"{each['title']}: {each['evidence']}" for each in row["kinds"])
        bad = sum(trial["difference"] is not None for trial in row["trials"])
        issue = f" ([{row['issue'].split('/')[-1]}]({row['issue']}))" if row["issue"] else ""
        rows.append(
            (
                f"{row['framework']} {row['version']}",
                row["way"],
                f"**{row['verdict']}**, {bad} of {len(row['trials'])} killed runs differ",
                f"{kinds}{issue}",
                row["confirmed"],
            )
        )
    head = ("framework", "way", "verdict", "reason (public issue)", "without the audit")
    correct = found["correct"]
    exact = sum(each["verdict"] == "exact" for each in correct)
    seconds = [each["seconds"] for each in (*found["rows"], *correct)]
    table = f"{_table(head, rows)}\n\n{_measured_on(found['machine'])}"
    return (
        f"{table} Of {len(correct)} audits of programs that resume exactly, {exact} had the "
        f"verdict **exact**. An audit took {statistics.median(seconds):.0f} s (median; at most "
        f"{max(seconds):.0f} s)."
    )


FIGURES: dict[str, Callable[[Path], str]] = {
    "readme": _readme,
    "peers": _peers,
    "audits": _audits,
    "gradient-compression": _compression,
    "monitoring": _monitoring,
    "dp-shares": _shares,
    "dp-bytes": _bytes,
    "dp-threads": _threads,
}


def figure(name: str, results: Path = RESULTS) -> str:
    """What stands between the marks of this name. Raises KeyError for an unknown one."""
    if name in FIGURES:
        return FIGURES[name](results)
    for question in QUESTIONS:
        if question.place and question.file == f"{name}.json":
            return _answer(question, results / question.file)
    entry = _load(results, "recorded")[name]
    if "text" in entry:
        return str(entry["text"])
    return f"{_provenance(entry)}\n\n{_table(entry['head'], entry['rows'])}"


def _provenance(entry: dict[str, Any]) -> str:
    words = [each for each in (entry["trials"], entry["on"], entry["date"]) if each]
    unknown = ["CPU", "load", "commit", *(name for name in ("trials", "on") if not entry[name])]
    unknown = [{"on": "machine"}.get(name, name) for name in unknown]
    old = f"**Older figure**, added in {entry['added_in']}"
    return f"Measured once: {', '.join(words)}. {old}. Not recorded: {', '.join(unknown)}."


def fill(text: str, results: Path = RESULTS) -> str:
    """A page with every figure between its marks. A table gets a line of its own, other text none."""

    def made(match: re.Match[str]) -> str:
        content = figure(match[2], results)
        gap = "\n\n" if "\n" in content else ""
        return f"{match[1]}{gap}{content}{gap}{match[4]}"

    return MARK.sub(made, text)


def page(results: Path) -> str:
    """The whole of docs/benchmarks.md."""
    parts = [HEAD]
    for question in (each for each in QUESTIONS if not each.place):
        program = f"`python benchmarks/{question.program}`, `benchmarks/results/{question.file}`."
        answers = sorted(results.glob(question.file))
        if not answers:
            parts.append(f"## {question.title}\n{program} Not measured.\n")
        elif "*" in question.file:
            shown = [f"`{answer.name}`: {_answer(question, answer)}\n" for answer in answers]
            parts.append("\n".join((f"## {question.title}\n{program}\n", *shown)))
        else:
            parts.append(f"## {question.title}\n{program} {_answer(question, answers[0])}\n")
    links = [
        (f"[{each.title}]({each.place})", f"`{each.program}`", f"`{each.file}`")
        for each in QUESTIONS
        if each.place
    ]
    parts.append(f"## On other pages\n{_table(('what', 'program', 'results'), links)}\n")
    return "\n".join([*parts, _recorded(results)])


def _recorded(results: Path) -> str:
    head = "## Recorded without their program's output\n"
    if not (results / "recorded.json").exists():
        return head + "None.\n"
    rows = [(f"`{name}`", _provenance(entry)) for name, entry in _load(results, "recorded").items()]
    about = "Other pages show these figures of `recorded.json`, one measurement each."
    return f"{head}{about}\n\n{_table(('figure', 'provenance'), rows)}\n"


def misplaced() -> list[str]:
    """What is wrong with where figures are shown: each belongs on one page."""
    shown = [name for path in PAGES for _, name, *_ in MARK.findall(path.read_text(encoding="utf-8"))]
    elsewhere = [question.file.removesuffix(".json") for question in QUESTIONS if question.place]
    made = {name.replace("-", "_") for name in FIGURES} | {"dp_vs_ddp"}
    wanted = {name for name in elsewhere if (RESULTS / f"{name}.json").exists()} - made
    wanted |= set(_load(RESULTS, "recorded"))
    twice = sorted(name for name in set(shown) if shown.count(name) > 1)
    nowhere = sorted(wanted - set(shown))
    return [*(f"{name}: on two pages" for name in twice), *(f"{name}: on no page" for name in nowhere)]


def made_of(results: Path, path: Path) -> str:
    """A page's text as these results make it."""
    return page(results) if path == PAGE else fill(path.read_text(encoding="utf-8"), results)


def main() -> int:
    """Write the pages whose text changes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where a page would change")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="with --print")
    parser.add_argument("--print", metavar="PAGE", help="print one page, such as README.md, and write none")
    asked = parser.parse_args()
    if asked.print:
        print(made_of(asked.results, ROOT / asked.print), end="")
        return 0
    new = {path: made_of(RESULTS, path) for path in (PAGE, *PAGES)}
    changed = [
        path for path, text in new.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in changed:
        if not asked.check:
            path.write_text(new[path], encoding="utf-8")
        word = "differs from the results" if asked.check else "written"
        print(f"{word}: {path.relative_to(ROOT)}", file=sys.stderr)
    wrong = misplaced() if asked.check else []
    for line in wrong:
        print(line, file=sys.stderr)
    return int(asked.check and bool(changed or wrong))


if __name__ == "__main__":
    sys.exit(main())
