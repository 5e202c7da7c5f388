"""`python3 -m tandem.cluster`, which the make targets run. Messages name make's targets and variables."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current directory, which -m adds

from tandem.cluster.command_line import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
