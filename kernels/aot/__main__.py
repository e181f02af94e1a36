"""The command ``python -m specmamba.kernels.aot --target sm_90``."""

import os
import sys
from importlib.util import find_spec

if __name__ == "__main__":
    if find_spec("triton") is None:
        sys.exit("compiling kernels needs Triton: pip install 'specmamba[gpu]'")
    os.environ.pop(
        "TRITON_INTERPRET", None
    )  # read when kernels are defined: those for the interpreter cannot be compiled

    from specmamba.kernels.aot.command import main

    sys.exit(main(sys.argv[1:]))
