import subprocess
import sys
import time
from pathlib import Path

volume, checkpoint, line = Path(sys.argv[1]), *sys.argv[2:4]
output = Path("output.txt")
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(volume)], check=True)
with output.open("w") as file:
    run = subprocess.Popen(sys.argv[4:], stdout=file, stderr=file)


def until(condition, what):
    deadline = time.monotonic() + 200
    while not condition():
        if run.poll() is not None or time.monotonic() > deadline:
            run.kill()
            sys.exit(f"no {what}: {output.read_text()}")
        time.sleep(0.01)


until((volume / "run" / "checkpoints" / checkpoint).exists, "checkpoint")
try:
    (volume / "filler").write_bytes(bytes(2_000_000))
except OSError:
    pass
until(lambda: line in output.read_text(), "failed save")
(volume / "filler").unlink()
code = run.wait(90)
print(output.read_text(), *sorted(path.name for path in (volume / "run" / "checkpoints").iterdir()))
sys.exit(code)
