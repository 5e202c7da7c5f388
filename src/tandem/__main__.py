"""`python -m tandem`, also under torchrun. Nothing that lies in the current folder is imported."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder, which -m has put there

from tandem.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
