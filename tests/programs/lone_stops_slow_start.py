import time

from small import Small


class SlowStart(Small):
    def build_datasets(self):
        print("making data", flush=True)
        time.sleep(600)
