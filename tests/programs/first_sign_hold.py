import os
import sys
import time


class Hold:
    def find_spec(self, name, path=None, target=None):
        while name == "torch" and not os.path.exists("go"):
            time.sleep(0.02)


sys.meta_path.insert(0, Hold())
