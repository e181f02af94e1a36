"""Rounding errors of recurrent kernels for 16-bit models, beside those of chunks in bfloat16.

    TRITON_INTERPRET=1 python -m specmamba.bench.precision [--seeds 2] [--head-dim 64] [--json FILE]

Random texts run through our Triton kernels, as nodes of a draft tree and as a prompt, through the same recurrence in
chunks of 64 tokens with operands in bfloat16, as flash-linear-attention rounds them (``chunked.py`` says what is
rounded), and in tf32, and through the transformers library's PyTorch. Every error is the largest difference from the
float64 recurrence over the largest number of it: of outputs, and of the state behind the last token. The report has
the largest over seeds.

Without a GPU kernels run in Triton's interpreter, where numbers in bfloat16 are multiplied as float32 numbers: exactly,
as tensor cores do it, and summed in float32.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from specmamba.config import CommandLine
from specmamba.errors import ConfigError
from specmamba.measure.command import Page, Report, put_out, run_command
from specmamba.measure.report import Count, JsonFile, machine, versions

if TYPE_CHECKING:
    from specmamba.bench.precision.forms import Advanced, Text

PROG = "python -m specmamba.bench.precision"
OPERATORS = "gdn", "kda", "ssd"
NODES = 4, 16, 64
PROMPT = 256  # tokens
NAMES = {"gdn": "gated delta rule", "kda": "decays by channel", "ssd": "Mamba2"}
Errors = tuple[float, float]  # of outputs, and of the state
Heads = tuple[int, int, int]  # heads, keys, values


class PrecisionConfig(CommandLine, JsonFile):
    """Rounding errors of recurrent kernels for 16-bit models."""

    seeds: Annotated[Count, Field(description="texts of each length; the largest error is reported")] = 2
    head_dim: Annotated[Count, Field(description="keys, and values, of the one head")] = 64


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; returns the exit status: 0, or 130 after Ctrl-C."""
    return run_command(PROG, PrecisionConfig, arguments, lambda config: put_out(config, run(config), print_report))


def run(config: PrecisionConfig) -> dict[str, Any]:
    """Errors of all forms; the report as a JSON object.

    Raises:
        ConfigError: kernels cannot run here.
    """
    from specmamba.kernels import gpu

    if not gpu.has_triton():
        raise ConfigError("our kernels need Triton: pip install 'specmamba[gpu]'")
    _check_interpreter()
    heads = 1, config.head_dim, config.head_dim
    rows = [row for operator in OPERATORS for row in rows_of(operator, heads, config.seeds)]
    names = ("specmamba", "torch", "triton", "transformers")
    sizes = dict(zip(("heads", "keys", "values"), heads, strict=True))
    return {"machine": machine(), "versions": versions(names), "seeds": config.seeds, **sizes, "rows": rows}


def rows_of(operator: str, heads: Heads, seeds: int) -> Iterator[dict[str, Any]]:
    """One row for every way in which tokens come: nodes of a tree, of a chain that is known as one, a prompt."""
    for length in NODES:
        yield row_of(operator, "tree", length, heads, seeds)
    yield row_of(operator, "chain", NODES[0], heads, seeds)
    yield row_of(operator, "prompt", PROMPT, heads, seeds)


def row_of(operator: str, kind: str, length: int, heads: Heads, seeds: int) -> dict[str, Any]:
    """{"operator", "kind", "tokens", "errors": {form: [of outputs, of the state]}}."""
    from specmamba.bench.precision.forms import in_float64, make_text

    largest: dict[str, Errors] = {}
    for seed in range(seeds):
        text = make_text(operator, length, heads, seed)
        want = in_float64(text)
        for name, form in forms_of(kind).items():
            try:
                errors = errors_of(form(text), want)
            except ImportError:
                continue
            old = largest.get(name, errors)
            largest[name] = max(old[0], errors[0]), max(old[1], errors[1])
    rounded = {name: [float(f"{error:.2g}") for error in errors] for name, errors in largest.items()}
    return {"operator": operator, "kind": kind, "tokens": length, "errors": rounded}


def forms_of(kind: str) -> Mapping[str, Callable[[Text], Advanced]]:
    """What is compared, by name."""
    import torch

    from specmamba.bench.precision import chunked, forms

    def ours(dtype: torch.dtype) -> Callable[[Text], Advanced]:
        return forms.as_prompt(dtype) if kind == "prompt" else forms.as_nodes(dtype, kind == "chain")

    return {
        "ours, 16-bit models": ours(torch.bfloat16),
        "ours, float32 models": ours(torch.float32),
        "chunks in bfloat16": forms.in_chunks(chunked.to_bf16),
        "chunks in tf32": forms.in_chunks(chunked.to_tf32),
        "transformers, float32": forms.in_transformers,
    }


def errors_of(got: Advanced, want: Advanced) -> Errors:
    """The largest differences over the largest numbers: of outputs, and of states."""
    out, state = (float((x - y).abs().max() / y.abs().max()) for x, y in zip(got, want, strict=True))
    return out, state


def print_report(report: Report) -> None:
    """Print a table: a line for each row of the report."""
    page, names = Page(), list(report["rows"][0]["errors"])
    page.lines(f"largest errors of outputs / of the state, {report['keys']} keys and {report['values']} values")
    lines = [
        (
            f"{NAMES[row['operator']]}, {row['kind']} of {row['tokens']}",
            *("{:.1e} / {:.1e}".format(*row["errors"][name]) if name in row["errors"] else "" for name in names),
        )
        for row in report["rows"]
    ]
    page.table(("", *names), lines)


def _check_interpreter() -> None:
    """Raise ConfigError unless TRITON_INTERPRET is 1, which is read when kernels are imported."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(f"texts are on the CPU, where kernels run in Triton's interpreter: TRITON_INTERPRET=1 {PROG}")


if __name__ == "__main__":
    sys.exit(main())
