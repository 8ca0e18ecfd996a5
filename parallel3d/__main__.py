"""`python -m parallel3d …` is the `parallel3d` command."""

import sys

from parallel3d.cli import main

if __name__ == "__main__":
    sys.exit(main())
