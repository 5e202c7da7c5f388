"""`python3 -m tandem.cluster`: what the make targets call. Messages name make's targets and variables."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder, which -m has put there

from tandem.cluster.command_line import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
