import os
import subprocess
import sys
from pathlib import Path

from tandem.checkpoint.retention import Retention
from tandem.checkpoint.store import CheckpointStore
from tandem.errors import CheckpointError

root = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(root)], check=True)
store, filler = CheckpointStore(root / "run" / "checkpoints"), root / "filler"
state = os.urandom(200_000)


def names():
    return sorted(os.listdir(store.directory))


def refused(step, reason):
    try:
        store.save(step, state, {})
    except CheckpointError as error:
        assert reason in str(error) and "free space or repair" in str(error), error
        return True
    return False


store.save(100, state, {})
full = 0
for free in range(0, 300_000, 20_000):  # ENOSPC here and there: mkdir, state, manifest
    filler.write_bytes(b"")
    stat = os.statvfs(root)
    filler.write_bytes(bytes(max(0, stat.f_bavail * stat.f_frsize - free)))
    if not refused(200, "No space left on device"):
        break
    full += 1
    assert names() == ["step-000000100"], names()
    store.verify(100)
assert full >= 10 and names() == ["step-000000100", "step-000000200"], (full, names())
filler.unlink()
store.save(300, state, {})
assert store.prune(Retention(2)) == [100]

(store.path(300) / "state.pt").write_bytes(b"rotten")  # type: ignore[attr-defined]
subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
assert refused(400, "Read-only file system")
told = []
newest = store.newest(store.read, lambda step, problem: told.append(problem))  # type: ignore[has-type]
assert newest is not None and newest[0] == 200 and newest[1][0] == state
assert len(told) == 1 and "Read-only file system" in told[0] and "left in place" in told[0], told
try:
    store.prune(Retention(1))
except CheckpointError:
    pass
else:
    raise AssertionError("pruned on a read-only volume")
assert names() == ["step-000000200", "step-000000300"], names()
