"""``specmamba info``: what a model is, what it takes, and what can be done with it. No weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path

from specmamba.command_line import parse_command_line
from specmamba.measure.report import JsonOption, write_json

PROG = "specmamba info"
STANDARD_OUTPUT = Path("-")


class InfoConfig(JsonOption):
    """What a model is, what it takes under these flags, and what can be done with it. --json -: to standard output."""


def main(arguments: list[str]) -> int:
    """Print a table, or JSON where that goes to standard output. Returns 0. Raises SpecmambaError."""
    config = parse_command_line(InfoConfig, PROG, arguments)
    from specmamba.engine.info_print import print_info
    from specmamba.engine.model_report import model_info

    info = model_info(config)
    if config.json == STANDARD_OUTPUT:
        print(json.dumps(info, indent=2))
        return 0
    print_info(info)
    if config.json is not None:
        write_json(config.json, info)
    return 0
