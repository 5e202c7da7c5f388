"""From a rank's death to the script's first line: `tandem launch script.py` beside torchrun, in the same run.

    python benchmarks/script_restart.py --kills 5 --json benchmarks/results/script_restart.json

The script is tests/scripts/programs/ddp_tutorial.py, two ranks on one node, gloo. Its first line prints the
time after `import torch`; rank 1 is killed a few times. torchrun gets as many --max-restarts.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "tests" / "scripts" / "programs" / "ddp_tutorial.py"
FIRST_LINE = re.compile(r"^first line (\S+) pid (\d+) rank (\d)$", re.M)
LIMIT_SECONDS = 300.0


def lives(text: str) -> dict[int, list[tuple[float, int]]]:
    """{rank: [(time of the first line, process)]}."""
    found: dict[int, list[tuple[float, int]]] = {0: [], 1: []}
    for at, pid, rank in FIRST_LINE.findall(text):
        found[int(rank)].append((float(at), int(pid)))
    return found


def restarts(command: list[str], output: list[Path], kills: int, folder: Path) -> list[float]:
    """Seconds from each kill of rank 1 to the first line of the last rank of the next generation."""
    words = [str(SCRIPT), "--epochs", "100000", "--pause", "0.05", "--snapshot", str(folder / "snapshot.pt")]
    with (folder / "terminal").open("w") as terminal:
        streams = {"stdout": terminal, "stderr": terminal}
        process = subprocess.Popen([*command, *words], start_new_session=True, **streams)
    seconds, killed_at = [], 0.0
    try:
        for number in range(1, kills + 2):
            deadline = time.monotonic() + LIMIT_SECONDS
            while True:
                now = lives("".join(path.read_text() for path in output if path.exists()))
                if all(len(each) >= number for each in now.values()):
                    break
                said = (folder / "terminal").read_text()
                assert process.poll() is None and time.monotonic() < deadline, said
                time.sleep(0.01)
            if number > 1:
                seconds.append(max(each[number - 1][0] for each in now.values()) - killed_at)
            time.sleep(5.0)  # some steps, and time to get ready for the next one
            if number <= kills:
                killed_at = time.time()
                os.kill(now[1][number - 1][1], signal.SIGKILL)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    allowed = ["--max-restarts", str(options.kills)]
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for launcher in ("tandem", "torchrun"):
            folder = Path(name, launcher)
            folder.mkdir()
            if launcher == "tandem":
                ours = ["--nproc", "2", "--metrics-port", "0", "--run-dir", str(folder)]
                command = [sys.executable, "-m", "tandem", "launch", *ours, *allowed]
                output = [folder / "log" / f"rank-{rank}.log" for rank in (0, 1)]
            else:
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                command += ["--nproc-per-node", "2", *allowed]
                output = [folder / "terminal"]
            found[launcher] = restarts(command, output, options.kills, folder)
    print("| launcher | kills | median s | longest s |\n|---|---|---|---|")
    for launcher, seconds in found.items():
        print(f"| {launcher} | {len(seconds)} | {statistics.median(seconds):.2f} | {max(seconds):.2f} |")
    ratio = statistics.median(found["torchrun"]) / statistics.median(found["tandem"])
    print(f"\ntorchrun / tandem: {ratio:.1f}")
    if options.json:
        options.json.write_text(json.dumps({**found, "ratio": ratio}, indent=2) + "\n")


if __name__ == "__main__":
    main()
