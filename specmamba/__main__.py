"""``python -m specmamba``."""

import sys

from specmamba.cli import main

if __name__ == "__main__":
    sys.exit(main())
