import json
import os
import sys

import torch._dynamo  # as optimizers do: what a run imports is imported once for all  # noqa: F401

from tandem import cli
from tandem.config import resolve
from tandem.launch import standalone_rank  # noqa: F401
from tandem.rank import task  # noqa: F401

tasks, folder, words = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
resolve({}, {})
codes = {}
for name, more in words.items():
    if (child := os.fork()) == 0:
        output = os.open(f"{folder}/{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        sys.argv = ["tandem", "train", "--task", f"{tasks}:{name}", "--run-dir", f"{folder}/{name}", *more]
        cli.main()
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(codes))
