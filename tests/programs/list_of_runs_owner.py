import sys
import time
from pathlib import Path

from tandem.run.lease import claim

claim(Path(sys.argv[1]))
print("mine", flush=True)
time.sleep(300)
