import sys
import time
from pathlib import Path

from tandem.run.lease import acquire

acquire(Path(sys.argv[1]))
print("mine", flush=True)
time.sleep(300)
