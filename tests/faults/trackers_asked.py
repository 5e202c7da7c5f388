"""What a tracker has of a run, as JSON; run by an interpreter that has the tracker's package.

python trackers_asked.py mlflow RUN_DIR, or wandb FILE.wandb...
"""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def of_mlflow(run_dir: str) -> dict[str, Any]:
    import mlflow

    client = mlflow.MlflowClient()
    run = client.get_run(json.loads(Path(run_dir, "tracker.json").read_text())["mlflow"]["run"])
    names = ("train/loss", "eval/accuracy")
    steps = {name: [each.step for each in client.get_metric_history(run.info.run_id, name)] for name in names}
    others = client.search_runs([each.experiment_id for each in client.search_experiments()])
    return {
        "run": run.info.run_id,
        "runs": len(others),
        "status": run.info.status,
        "experiment": client.get_experiment(run.info.experiment_id).name,
        "params": run.data.params,
        "tags": run.data.tags,
        **steps,
    }


def of_wandb(path: str) -> dict[str, Any]:
    found: dict[str, Any] = {"rows": [], "exit": None}
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found["run"] = record.run.run_id
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
        elif kind == "history":
            items = record.history.item
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            found["rows"].append(row)
    return found


def records(path: str) -> Iterator[Any]:
    """Those of a .wandb file, which is a log as LevelDB writes it, after 7 bytes of W&B's own."""
    from wandb.proto import wandb_internal_pb2

    content, at, held = Path(path).read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        held += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or a last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(held)
            held = b""
            yield record


if __name__ == "__main__":
    program, words = sys.argv[1], sys.argv[2:]
    print(json.dumps(of_mlflow(words[0]) if program == "mlflow" else [of_wandb(path) for path in words]))
