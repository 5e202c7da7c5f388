import os
import subprocess
import sys

subprocess.Popen([sys.executable, "hears.py", "below", sys.argv[2]])
subprocess.Popen([sys.executable, "-c", "open('ready-helper', 'w'); import time; time.sleep(300)"])
os.execv(sys.executable, [sys.executable, "hears.py", "above", sys.argv[1]])
