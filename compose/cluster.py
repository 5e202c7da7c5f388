#!/usr/bin/env python3
"""`compose/cluster.py up --nodes 2`: like `tandem cluster`, but needs no installation in a checkout."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1] / "src")

from tandem.cluster.command_line import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
