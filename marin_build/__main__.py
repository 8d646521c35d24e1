"""`python -m marin_build` is `marin-build`."""

import sys

from marin_build.cli import main

if __name__ == "__main__":
    sys.exit(main())
