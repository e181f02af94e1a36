"""Bytes of recurrent state that one verify moves, and that one running request holds: records against snapshots.

    python -m specmamba.bench.state_bytes [--json FILE] [--timed-shape qwen3-next] [--no-time]

Counted per layer and request, from tensor sizes. What both ways of verifying read and write alike (q, k, v, gates,
weights, the outputs) is left out, and what a kernel has just computed is not read again, be it a record or a state.
With Hk key heads, Hv value heads, head widths K and V, convolution width W over C channels, N nodes, a tokens accepted
per verify (the bonus token counted), c bytes per convolution input, and

    S = 4 Hv K V                      a recurrent state, float32
    X = c C                           one token's convolution input; a window is (W - 1) X
    r = 4 (Hk K + Hv V + Hv) + X      one token's record: k, u, path decay, convolution input
    R = max(16, 2 N)                  records that may be pending; a fold is due when N more would not fit,
    f = (R - N) // a + 1              so every f verifies, with P = f a records pending then

records, one verify:
    verify   reads S, N windows and the pending records, a (f - 1) / 2 on average; writes N records
    commit   reads and writes a records (so it is for a tree, whose path moves up; a chain's need not move)
    fold     reads S, P records and a window, writes S and two windows (slot and buffer); one f-th of that
snapshots, one verify:
    verify   reads N states and N windows (a node reads its parent's, the root the slot's), writes N of both
    commit   reads one state and one window and writes them to the slot: (2 N + 2) (S + (W - 1) X) in all
memory of a running request:
    records R r + (W - 1) X           snapshots N (S + (W - 1) X)

The fold is counted as the pass over the state of its own that it is; a kernel that folds within the verify saves S.
The ratio is given for ``--accept-length`` and for the worst of all acceptance lengths. The exit status is 1 when a
ratio at N = 16 is above 0.2.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from specmamba.command_line import exit_with_error, read_flags
from specmamba.errors import SpecmambaError
from specmamba.measure.report import CommandLine, Count, JsonFile, machine, versions, write_json

PROG = "python -m specmamba.bench.state_bytes"
NODES = (1, 2, 4, 8, 16, 32, 64)
JUDGED_NODES, LIMIT = 16, 0.2
ShapeName = Literal["demo", "qwen3.5-0.8b", "qwen3-next"]


class StateBytesConfig(CommandLine, JsonFile):
    """State traffic and memory of a verify: records against snapshots."""

    accept_length: Annotated[Count, Field(description="tokens per verify; trees smaller than that accept all")] = 4
    dtype: Annotated[
        Literal["bfloat16", "float32"],
        Field(description="of convolution inputs, and of all activations that are timed"),
    ] = "bfloat16"
    time: Annotated[bool, Field(description="time the layers too")] = True
    timed_shape: Annotated[ShapeName, Field(description="whose layers to time")] = "qwen3-next"
    timed_nodes: Annotated[Count, Field(description="nodes of the timed trees")] = JUDGED_NODES
    batch_size: Annotated[Count, Field(description="timed requests")] = 2
    layers: Annotated[Count, Field(description="timed layers: their states together should exceed the caches")] = 6
    rounds: Annotated[Count, Field(description="timed rounds; the median over them is reported")] = 5
    num_threads: Annotated[Count | None, Field(description="CPU threads; none: all cores")] = None


@dataclass(frozen=True)
class LayerShape:
    """One gated-delta-net layer; the letters are those of the formulas above."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state(self) -> int:
        """S."""
        return 4 * self.value_heads * self.key_dim * self.value_dim

    def window(self, itemsize: int) -> int:
        """(W - 1) X."""
        return (self.conv_width - 1) * itemsize * self.channels

    def record(self, itemsize: int) -> int:
        """r."""
        floats = self.key_heads * self.key_dim + self.value_heads * (self.value_dim + 1)
        return 4 * floats + itemsize * self.channels


SHAPES: dict[ShapeName, LayerShape] = {
    "demo": LayerShape(4, 4, 64, 64),
    "qwen3.5-0.8b": LayerShape(16, 16, 128, 128),
    "qwen3-next": LayerShape(16, 32, 128, 128),
}


def capacity(num_nodes: int) -> int:
    """R."""
    return max(16, 2 * num_nodes)


def verifies_per_fold(num_nodes: int, accept_length: int) -> int:
    """f."""
    return (capacity(num_nodes) - num_nodes) // accept_length + 1


def record_traffic(shape: LayerShape, num_nodes: int, accept_length: int, itemsize: int) -> float:
    """Bytes that one verify, its commit and its share of a fold read and write, with records."""
    state, window, record = shape.state, shape.window(itemsize), shape.record(itemsize)
    period = verifies_per_fold(num_nodes, accept_length)
    pending = accept_length * (period - 1) / 2
    verify = state + num_nodes * window + (pending + num_nodes) * record
    commit = 2 * accept_length * record
    fold = 2 * state + period * accept_length * record + 3 * window
    return verify + commit + fold / period


def snapshot_traffic(shape: LayerShape, num_nodes: int, itemsize: int) -> int:
    """Bytes that one verify and its commit read and write, with snapshots."""
    return (2 * num_nodes + 2) * (shape.state + shape.window(itemsize))


def record_memory(shape: LayerShape, num_nodes: int, itemsize: int) -> int:
    """Bytes of record buffers per running request."""
    return capacity(num_nodes) * shape.record(itemsize) + shape.window(itemsize)


def snapshot_memory(shape: LayerShape, num_nodes: int, itemsize: int) -> int:
    """Bytes of snapshots per running request."""
    return num_nodes * (shape.state + shape.window(itemsize))


def count(shape: LayerShape, num_nodes: int, accept_length: int, itemsize: int) -> dict[str, Any]:
    """All counted figures of one shape and tree size."""
    accepted = min(accept_length, num_nodes)
    by_length = [record_traffic(shape, num_nodes, a, itemsize) for a in range(1, num_nodes + 1)]
    snapshots = snapshot_traffic(shape, num_nodes, itemsize)
    memory = record_memory(shape, num_nodes, itemsize), snapshot_memory(shape, num_nodes, itemsize)
    return {
        "num_nodes": num_nodes,
        "accept_length": accepted,
        "record_traffic_bytes": round(by_length[accepted - 1]),
        "snapshot_traffic_bytes": snapshots,
        "traffic_ratio": by_length[accepted - 1] / snapshots,
        "worst_traffic_ratio": max(by_length) / snapshots,
        "record_memory_bytes": memory[0],
        "snapshot_memory_bytes": memory[1],
        "memory_ratio": memory[0] / memory[1],
    }


def run(config: StateBytesConfig) -> dict[str, Any]:
    """Everything that is reported, as a JSON object."""
    itemsize = {"bfloat16": 2, "float32": 4}[config.dtype]
    counted = {
        name: [count(shape, nodes, config.accept_length, itemsize) for nodes in NODES] for name, shape in SHAPES.items()
    }
    judged = [row for rows in counted.values() for row in rows if row["num_nodes"] == JUDGED_NODES]
    worst = max(max(row["worst_traffic_ratio"], row["memory_ratio"]) for row in judged)
    report: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(("specmamba", "torch")),
        "dtype": config.dtype,
        "counted": counted,
        "limit": LIMIT,
        "worst_ratio_at_16_nodes": worst,
        "passed": worst <= LIMIT,
    }
    if config.time:
        from specmamba.bench.state_timing import time_kernels

        report["timed"] = time_kernels(config, SHAPES[config.timed_shape])
    return report


def print_report(report: dict[str, Any]) -> None:
    """A table per shape, the verdict, and the timing."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for name, rows in report["counted"].items():
        table = Table("N", "acc.", "records", "snapsh.", "ratio", "worst", "records", "snapsh.", "ratio")
        table.box, table.title = box.SIMPLE_HEAD, f"{name}, per layer and request: KiB moved by a verify | KiB held"
        for row in rows:
            table.add_row(
                str(row["num_nodes"]), str(row["accept_length"]),
                kib(row["record_traffic_bytes"]), kib(row["snapshot_traffic_bytes"]),
                f"{row['traffic_ratio']:.3f}", f"{row['worst_traffic_ratio']:.3f}",
                kib(row["record_memory_bytes"]), kib(row["snapshot_memory_bytes"]), f"{row['memory_ratio']:.3f}",
            )  # fmt: skip
        console.print(table)
    verdict = "as required" if report["passed"] else "TOO MUCH"
    console.print(
        f"largest ratio at {JUDGED_NODES} nodes, any acceptance length, traffic or memory: "
        f"{report['worst_ratio_at_16_nodes']:.3f} (limit {report['limit']}): {verdict}"
    )
    if "timed" in report:
        print_timing(console.print, report["machine"], report["timed"])


def print_timing(show: Any, machine_name: str, timed: dict[str, Any]) -> None:
    """The timed ratios; ``show`` prints a line."""
    show(
        f"timed on {machine_name}, {timed['num_threads']} threads: {timed['shape']}, {timed['layers']} layers, batch "
        f"{timed['batch_size']}, {timed['num_nodes']} nodes, {timed['accept_length']} accepted, "
        f"{timed['states_mib']:.0f} MiB of states; one verify with its commit and its share of folds"
    )
    for row in timed["results"]:
        low, high = row["ratio_range"]
        show(
            f"  {row['trees']}, {row['kernels']}: records {row['records_ms']:.2f} ms, snapshots "
            f"{row['snapshots_ms']:.2f} ms, ratio {row['ratio']:.2f} ({low:.2f}-{high:.2f})"
        )


def kib(num_bytes: int) -> str:
    """Bytes as KiB with separators."""
    return f"{num_bytes / 1024:,.0f}"


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    try:
        config = read_flags(StateBytesConfig, PROG, sys.argv[1:] if arguments is None else arguments)
        report = run(config)
        print_report(report)
        if config.json is not None:
            write_json(config.json, report)
    except SpecmambaError as error:
        exit_with_error(PROG, error)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
