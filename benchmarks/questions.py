"""The questions that the benchmarks answer: one table each, on docs/benchmarks.md or another page."""

from typing import NamedTuple

CNN = "Over gloo, a CNN of 11,074 parameters."
SMALL = "Over gloo, a model of 5,059 parameters (`benchmarks/small_task.py`)."
BY_ROUND = " Ratio of rounds."


class Question(NamedTuple):
    """What was asked: its title, the benchmark program, its result file, and what was trained.

    A `file` with a star matches several files, each measured separately, on its own machine and day. With a
    `place`, another page shows the table, and this page links to it.
    """

    title: str
    program: str
    file: str
    setup: str = ""
    place: str = ""


QUESTIONS = (
    Question("What a framework costs a step", "framework_cost.py", "framework_cost.json", CNN + BY_ROUND),
    Question("Data loading alone, without a model", "data_path.py", "data_path.json", BY_ROUND.strip()),
    Question(
        "Blocks of samples, and the formats' own readers",
        "block_reads.py",
        "block_reads.json",
        "Without a model, in one process. Tar shards of 1,024 samples, each 2 KB and a label. Parquet in row "
        "groups of 100 rows, and Arrow: a label and 16 floats. An epoch has 61,440 samples, over http "
        f"245,760.{BY_ROUND}",
    ),
    Question(
        "Shards behind a faulty server",
        "shard_faults.py",
        "shard_faults.json",
        "An epoch of 200 shards of 12 samples over http, once per reader and fault, each in a process of its "
        "own with an empty cache and a time limit. Each sample is compared with what was written. Readers "
        "have their defaults, unless their name says otherwise. litdata and Mosaic Streaming have no reader "
        "for http. Here, litdata downloads with obstore, as it does from S3, and Mosaic Streaming with "
        "Python's urllib, its own retries and its own timeout. *Logged* means: only in the log, "
        "while the loop ends as after a whole epoch. Seconds are of the whole process, with imports.",
    ),
    Question(
        "Time to 98% accuracy, from program start",
        "time_to_98.py",
        "time_to_98.json",
        f"{CNN} The baseline trains the tutorials' model.{BY_ROUND}",
    ),
    Question(
        "Saves and recoveries, short version",
        "reliability.py saves recovery",
        "saves_and_recovery.json",
        SMALL,
    ),
    Question("Host memory of a resume", "big_resume.py", "big_resume.json"),
    Question(
        "Saves of sharded state",
        "sharded_saves.py",
        "sharded_saves.json",
        "Model and AdamW state under `fully_shard`, over gloo. The slowest rank counts.",
    ),
    Question(
        "What snapshots cost a step",
        "snapshot_cost.py",
        "snapshot_cost.json",
        f"Over gloo, two nodes of one rank; an MLP with AdamW.{BY_ROUND}",
    ),
    Question(
        "A node is lost, or a rank under fsdp",
        "node_trials.py",
        "node_trials.json",
        "Over gloo, on one machine. A node is killed with its agent and started again at once.",
    ),
    Question(
        "A spare takes the place of a lost node",
        "spare_trials.py",
        "spare_trials.json",
        "Over gloo, two nodes and a spare on one machine, steps of at least 20 ms.",
        place="reliability.md#spares",
    ),
    Question("From the command to the first step", "launch_cost.py", "launch_cost.json", CNN),
    Question(
        "Clock differences, second launches, secrets, signals", "trust_trials.py", "trust_*.json", SMALL
    ),
    Question(
        "Node check",
        "join_trials.py",
        "node_check.json",
        "`tandem doctor --join` on eight network namespaces of one machine.",
    ),
    Question(
        "The time ledger and a clock outside the run",
        "ledger_trials.py",
        "ledger.json",
        f"{SMALL} Two ranks, a step of 20 ms and more; without snapshots in memory.",
    ),
    Question(
        "What a replay check costs", "replay_cost.py", "replay_cost.json", "Over gloo, an MLP with AdamW."
    ),
    Question(
        "What progress in the TrainJob and OpenTelemetry cost a step",
        "outgoing_cost.py",
        "outgoing_cost.json",
        f"Over gloo, two ranks on one node; the servers run on the same cores.{BY_ROUND}",
    ),
    Question("A long run that is killed repeatedly", "endurance.py", "endurance.json", SMALL),
    Question("A long run without faults", "endurance.py --steps 1000000 --kills 0", "long_run.json", SMALL),
    Question("A CPU hog on each core", "busy_machine.py", "busy_machine.json", CNN),
    Question("Node 0 and rank 0 at 1,024 ranks", "thousand_ranks.py", "thousand_ranks.json"),
    Question(
        "Sample order of 1,000,000,000 samples",
        "thousand_ranks.py --only order --samples 1000000000",
        "order.json",
    ),
    Question("One GPU", "gpu_check.py", "gpu.json", BY_ROUND.strip()),
    Question(
        "One GPU: compiled steps, resume, recovery",
        "gpu_check.py --only gpt124m verify-resume recovery",
        "gpu_steps.json",
        f"Since then, the check for non-finite gradients reads them only once.{BY_ROUND}",
    ),
    Question(
        "Recovery",
        "reliability.py --full recovery",
        "reliability_recovery.json",
        SMALL,
        "reliability.md#recovery",
    ),
    Question("Hangs", "reliability.py --full hangs", "reliability_hangs.json", SMALL, "reliability.md#hangs"),
    Question(
        "Exact resume",
        "reliability.py --full resume",
        "reliability_resume.json",
        "Over gloo, the model of `benchmarks/hard_task.py`.",
        "reliability.md#exact-resume",
    ),
    Question(
        "Exact resume of custom loops",
        "own_loop_trials.py",
        "own_loops.json",
        "Over gloo, the models of the examples.",
        "reliability.md#exact-resume",
    ),
    Question(
        "Unmodified scripts",
        "script_trials.py",
        "scripts.json",
        "Two ranks over gloo, the small models of `tests/scripts/programs`.",
        "reliability.md#scripts",
    ),
    Question(
        "Saves and snapshots",
        "reliability.py --full saves",
        "reliability_saves.json",
        place="reliability.md#what-safety-costs-a-step",
    ),
    Question(
        "A fault every 5 seconds",
        "reliability.py --full chaos",
        "reliability_chaos.json",
        SMALL,
        "reliability.md#under-steady-fire",
    ),
    Question(
        "Crashes, damage and power loss",
        "reliability.py --full store",
        "reliability_store.json",
        place="checkpoints.md#trials",
    ),
    Question(
        "Compressed gradients",
        "gradient_compression.py",
        "gradient_compression.json",
        place="gradient-compression.md#when-it-helps",
    ),
    Question("Audits of frameworks", "audits.py", "audits.json", place="audit.md#current-releases"),
    Question("tandem and its peers", "peers.py", "peers.json", place="compared.md#one-rank-killed"),
    Question("Monitoring", "monitoring.py", "monitoring.json", place="monitoring.md#what-it-costs"),
    Question(
        "DataParallel and DDP", "dp_vs_ddp.py", "dp_vs_ddp.json", place="dp-vs-ddp.md#what-is-sent-in-a-step"
    ),
)
