"""``python -m specmamba.bench.inflate``."""

import sys

from specmamba.bench.inflate import main

sys.exit(main())
