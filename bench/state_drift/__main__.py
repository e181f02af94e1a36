"""How far a text drifts when recurrent states are kept in fewer bits: --mamba-ssm-dtype measured.

    specmamba bench state-drift [--tokens 4000] [--texts 3] [--json FILE] [any engine flag]

The same real text is replayed with states in float32, bfloat16 and float16, and after every token the logits are
compared with those of float32. Decoding is plain, so that with records a state is rounded once for every full list of
pending records, and with --speculative-state snapshots after every token. What is compared is defined in
run.py. Weights and activations are float32 here unless --dtype says otherwise, so that nothing else is
rounded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from specmamba.command_line import exit_with_error, parse_command_line
from specmamba.errors import SpecmambaError
from specmamba.measure.report import JsonOption, NoRadixCache, machine, versions, write_json

PROG = "specmamba bench state-drift"


class StateDriftConfig(JsonOption):
    """How far states kept in bfloat16 and float16 lead a text away from states kept in float32."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    speculative_algorithm: Annotated[
        Literal["none"], Field(description="text is replayed by plain decoding, so that all types round alike")
    ] = "none"
    disable_radix_cache: NoRadixCache = True
    tokens: Annotated[int, Field(ge=16, description="tokens of a text that are replayed")] = 4000
    texts: Annotated[int, Field(ge=1, description="texts; each starts from an empty state")] = 3
    prompts: Annotated[
        Path | None,
        Field(description="take the text from the prompts of this file; none: bundled ones and held-out Python files"),
    ] = None

    @model_validator(mode="after")
    def _all_types_are_run(self) -> StateDriftConfig:
        if "mamba_ssm_dtype" in self.model_fields_set:
            raise ValueError("--mamba-ssm-dtype: this measures all of its types, one after the other; drop it")
        return self


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status: 0, or 130 after Ctrl-C."""
    try:
        config = parse_command_line(StateDriftConfig, PROG, sys.argv[1:] if arguments is None else arguments)
        report = measure_and_report(config)
        put_out(config, report)
    except SpecmambaError as error:
        exit_with_error(PROG, error)
    except KeyboardInterrupt:
        return 130
    return 0


def measure_and_report(config: StateDriftConfig) -> dict[str, Any]:
    """All figures, as in the JSON file. Raises SpecmambaError."""
    from specmamba.bench.state_drift.run import measure

    description, results = measure(config)
    return {
        "model": Path(str(description["model"])).name,
        "architecture": description["architecture"],
        "parameters": description["parameters"],
        "dtype": description["dtype"],
        "device": description["device"],
        "speculative_state": description["speculative_state"],
        "machine": machine(),
        "versions": versions(),
        "seed": config.seed,
        "texts": config.texts,
        "tokens_per_text": config.tokens,
        "results": results,
    }


def put_out(config: StateDriftConfig, report: dict[str, Any]) -> None:
    """Table and JSON."""
    from specmamba.bench.state_drift.tables import print_report

    print_report(report)
    if config.json is not None:
        write_json(config.json, report)


if __name__ == "__main__":
    sys.exit(main())
