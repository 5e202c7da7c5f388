"""`python -m tandem`, also under torchrun. Imports nothing from the current directory."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current directory, which -m puts there

from tandem.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
