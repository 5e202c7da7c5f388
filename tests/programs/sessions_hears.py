import signal
import sys
import time

for number in map(int, sys.argv[2].split(",")):
    signal.signal(number, lambda number, _: open(f"{sys.argv[1]}-{number}", "w").close())
open(f"ready-{sys.argv[1]}", "w").close()
time.sleep(300)
