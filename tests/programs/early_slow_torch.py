import sys
import time


class Slow:
    def find_spec(self, name, path=None, target=None):
        for _ in range(3000 * (name == "torch")):
            time.sleep(0.01)


sys.meta_path.insert(0, Slow())
