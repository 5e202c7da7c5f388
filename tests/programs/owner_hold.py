import sys
from pathlib import Path

from tandem.run.lease import acquire

mine = acquire(Path(sys.argv[1]), "a job")
assert mine.problem is None, mine.problem
print(mine.token.number, flush=True)
input()
mine.close()
