"""The program of a rank that rank 0 has started: its standard input says which one it is, and what it runs."""

from __future__ import annotations

import json
import sys

from specmamba.config import EngineConfig
from specmamba.engine.mirror.start import run_other_rank
from specmamba.errors import SpecmambaError


def main() -> int:
    """Run until rank 0 ends. Returns the exit status."""
    given = json.loads(sys.stdin.buffer.read())
    try:
        return run_other_rank(EngineConfig(**given["flags"]), given["rank"], given["name"])
    except SpecmambaError as error:
        print(f"specmamba: rank {given['rank']}: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
