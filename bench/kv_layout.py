"""Keys and values of a layer side by side, or those of a token: what attention and copies of prefixes take of either.

    python -m specmamba.bench.kv_layout [--json FILE] [--contexts 512,2048,8192,32768] [--batches 1,8] [--nodes 1,4,8]
                                        [--dtypes fp32,bf16] [--orders runs,scattered] [--prefix 2000] [--rounds 9]
                                        [--max-gib 4] [--threads N] [--clock wall|cpu]

Layer-major pools have a tensor of keys and one of values for each layer, as the engine's; token-major ones have all
layers of a token in one run of memory. Attention is timed over all layers, as a step runs them, so a small pool stays
in caches and a large one does not, by its own size. Copies bring all layers of a prefix from slots of a pool into one
piece of memory, and back, by the calls that tiers of the prefix cache make. Both layouts are views on the same memory,
and take turns within a round. Slots are one run for each text, as a fresh pool gives them out ("runs"), or in random
order ("scattered"), as a full pool does in the end. The ratio is token-major over layer-major, within each round.
Cases that need more memory than ``--max-gib`` are left out, and named. On a machine that others use too, ``--threads 1
--clock cpu`` counts the time that the processor works for this process alone.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BeforeValidator, Field

from specmamba.config import CommandLine
from specmamba.measure.command import Page, Report, in_turns, put_out, run_command
from specmamba.measure.report import (
    Count,
    JsonFile,
    machine,
    median_with_range,
    progress_bar,
    range_text,
    split_numbers,
    versions,
)

if TYPE_CHECKING:  # --help must not wait for torch
    from torch import Tensor

    from specmamba.kernels.paged_attention import AttentionConfig, AttentionMetadata

PROG = "python -m specmamba.bench.kv_layout"
MIN_ROUND_S = 0.02  # of one layout in one round
ROTATED = 0.25  # of a head
Order = Literal["runs", "scattered"]
DType = Literal["fp32", "bf16"]
Counts = Annotated[tuple[Count, ...], Field(min_length=1), BeforeValidator(split_numbers)]
Run = Callable[[], object]


class Model(NamedTuple):
    """Attention layers of a model, its draft head's included; all have gates and normed heads."""

    layers: int
    heads: int
    key_heads: int
    head_dim: int


MODELS = {"Qwen3.5-0.8B": Model(7, 8, 2, 256), "demo": Model(3, 4, 2, 64)}


class KVLayoutConfig(CommandLine, JsonFile):
    """Attention and copies of prefixes on layer-major and on token-major keys and values, on a CPU."""

    contexts: Annotated[Counts, Field(description="tokens before a step")] = (512, 2048, 8192, 32_768)
    batches: Annotated[Counts, Field(description="texts of a step")] = (1, 8)
    nodes: Annotated[Counts, Field(description="nodes of each text's tree, a chain; 1: plain decoding")] = (1, 4, 8)
    dtypes: Annotated[
        tuple[DType, ...], Field(min_length=1, description="of keys and values"), BeforeValidator(split_numbers)
    ] = ("fp32", "bf16")
    orders: Annotated[
        tuple[Order, ...],
        Field(min_length=1, description="of slots that attention reads"),
        BeforeValidator(split_numbers),
    ] = ("runs", "scattered")
    threads: Annotated[Count | None, Field(description="of attention; none: PyTorch's choice")] = None
    clock: Annotated[
        Literal["wall", "cpu"],
        Field(description="cpu: time that processors work for this process, all threads together"),
    ] = "wall"
    prefix: Annotated[Count, Field(description="tokens of a prefix that is copied")] = 2000
    rounds: Annotated[Count, Field(description="rounds; medians and ranges over them are reported")] = 9
    max_gib: Annotated[float, Field(gt=0, description="of a pool; cases with larger ones are left out")] = 4.0


@dataclass(frozen=True)
class KVViews:
    """Both layouts of one memory of ``slots`` tokens: for each layer keys and values [slots, heads, head_dim]."""

    memory: Tensor
    model: Model
    slots: int

    @property
    def by_layer(self) -> Tensor:
        """[2, layers, slots, heads, head_dim]."""
        return self.memory.view(2, self.model.layers, self.slots, self.model.key_heads, self.model.head_dim)

    @property
    def by_token(self) -> Tensor:
        """[slots, layers, 2, heads, head_dim]."""
        return self.memory.view(self.slots, self.model.layers, 2, self.model.key_heads, self.model.head_dim)

    def layers(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """Keys and values of every layer, in either layout."""
        k, v = self.by_layer
        tokens = self.by_token
        return {
            "layer-major": [(k[i], v[i]) for i in range(self.model.layers)],
            "token-major": [(tokens[:, i, 0], tokens[:, i, 1]) for i in range(self.model.layers)],
        }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 0, or 130 after Ctrl-C."""
    return run_command(PROG, KVLayoutConfig, arguments, lambda config: put_out(config, run(config), print_report))


def run(config: KVLayoutConfig) -> dict[str, Any]:
    """Time all cases; the report as a JSON object."""
    import torch

    torch.manual_seed(0)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    clock = time.perf_counter if config.clock == "wall" else time.process_time
    orders: tuple[Order, ...] = get_args(Order)
    steps = [*product(MODELS, config.dtypes, config.orders, config.batches, config.contexts, config.nodes)]
    copies = [*product(MODELS, config.dtypes, orders)]
    rows, left_out = [], []
    with torch.inference_mode(), progress_bar("kv layout", len(steps) + len(copies)) as advance:
        for name, dtype, order, batch, context, nodes in steps:
            case = {"model": name, "dtype": dtype, "slots": order, "batch": batch, "context": context, "nodes": nodes}
            if pool_bytes(MODELS[name], dtype, batch * (context + nodes) + 1) > config.max_gib * 2**30:
                left_out.append(case)
            else:
                runs = step_runs(MODELS[name], dtype, order, batch, context, nodes)
                rows.append({"what": "attention", **case, **compare(runs, config.rounds, clock)})
            advance()
        for name, dtype, order in copies:
            for what, runs in copy_runs(MODELS[name], dtype, order, config.prefix).items():
                case = {"model": name, "dtype": dtype, "slots": order, "tokens": config.prefix}
                rows.append({"what": what, **case, **compare(runs, config.rounds, clock)})
            advance()
    return {
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "clock": config.clock,
        "versions": versions(("specmamba", "torch")),
        "rounds": config.rounds,
        "results": rows,
        "left_out": left_out,
    }


def pool_bytes(model: Model, dtype: DType, slots: int) -> int:
    """Bytes of keys and values of all layers in so many slots."""
    return 2 * model.layers * slots * model.key_heads * model.head_dim * (2 if dtype == "bf16" else 4)


def step_runs(model: Model, dtype: DType, order: Order, batch: int, context: int, nodes: int) -> dict[str, Run]:
    """Attention of a step over all layers, by layout: the new tokens' keys and values are stored, and all attended to.

    The result of a call is the output of each layer, [batch, nodes, heads * head_dim].
    """
    import torch

    from specmamba.kernels.paged_attention import LayerKV, attend_layer

    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    views = new_views(model, kind, 1 + batch * (context + nodes))
    metadata, write_slots = step_places(order, batch, context, nodes)
    config = attention_config(model)
    width = 2 * (model.heads + model.key_heads) * model.head_dim
    projected = torch.randn(batch, nodes, width).to(kind)
    angles = torch.rand(batch, nodes, 1, int(ROTATED * model.head_dim))
    turn = angles.cos().to(kind), angles.sin().to(kind)

    def over(layers: Sequence[tuple[Tensor, Tensor]]) -> Run:
        pools = [LayerKV(k, v, write_slots) for k, v in layers]
        return lambda: [attend_layer(projected, config, turn, kv, metadata) for kv in pools]

    return {name: over(layers) for name, layers in views.layers().items()}


def new_views(model: Model, dtype: Any, slots: int) -> KVViews:
    """Random keys and values; a block of numbers repeats itself, since so many take long to draw."""
    import torch

    count = 2 * model.layers * slots * model.key_heads * model.head_dim
    block = torch.randn(min(count, 1 << 20)).to(dtype)
    memory = torch.empty(count, dtype=dtype)
    for start in range(0, count, len(block)):
        piece = memory[start : start + len(block)]
        piece.copy_(block[: len(piece)])
    return KVViews(memory, model, slots)


def attention_config(model: Model) -> AttentionConfig:
    """Heads that are normed, and an output with a gate."""
    import torch

    from specmamba.kernels.paged_attention import AttentionConfig

    heads, key_heads, dim = model.heads, model.key_heads, model.head_dim
    return AttentionConfig(
        heads, key_heads, dim, dim**-0.5, torch.ones(heads + key_heads, dim), norm_eps=1e-6, has_gate=True
    )


def step_places(order: Order, batch: int, context: int, nodes: int) -> tuple[AttentionMetadata, Tensor]:
    """Which slots a verify of chains reads, and the slots [batch * nodes] that it writes; slot 0 is padding."""
    import torch

    from specmamba.kernels.paged_attention import AttentionMetadata

    slots = 1 + slot_order(order, batch * (context + nodes)).view(batch, -1)
    table = torch.cat([torch.zeros_like(slots[:1]), slots])
    roots = torch.full((batch,), context)
    last, seen = (roots - 1)[:, None].expand(batch, nodes), torch.ones(batch, nodes, nodes, dtype=torch.bool).tril()
    rows = torch.arange(1, batch + 1)
    metadata = AttentionMetadata(table, rows, last, context + nodes, roots=roots, seen=seen, first_row=1)
    return metadata, slots[:, context:].flatten()


def slot_order(order: Order, count: int) -> Tensor:
    """[count] int64."""
    import torch

    return torch.arange(count) if order == "runs" else torch.randperm(count)


def copy_runs(model: Model, dtype: DType, order: Order, tokens: int) -> dict[str, dict[str, Run]]:
    """Copies of a prefix of all layers, by direction and layout, in a pool of four times its size."""
    import torch

    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    views = new_views(model, kind, 1 + 4 * tokens)
    slots = 1 + slot_order(order, 4 * tokens)[:tokens]
    # today's copies have two groups of tensors, keys and values
    layers, rows = views.by_layer, views.by_token
    of_layers = torch.empty(2, model.layers, tokens, model.key_heads, model.head_dim, dtype=kind)
    of_tokens = of_layers.view(tokens, model.layers, 2, model.key_heads, model.head_dim)

    def take_layers() -> None:
        for group, target in zip(layers, of_layers, strict=True):
            torch.index_select(group, 1, slots, out=target)

    def put_layers() -> None:
        for group, source in zip(layers, of_layers, strict=True):
            group.index_copy_(1, slots, source)

    return {
        "take a prefix": {
            "layer-major": take_layers,
            "token-major": lambda: torch.index_select(rows, 0, slots, out=of_tokens),
        },
        "put a prefix": {"layer-major": put_layers, "token-major": lambda: rows.index_copy_(0, slots, of_tokens)},
    }


def compare(runs: dict[str, Run], rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Milliseconds of each layout, and of token-major over layer-major within a round: medians with ranges."""
    for each in runs.values():
        each()
    counts = {name: max(1, int(MIN_ROUND_S / max(_seconds(each, 1, clock), 1e-7))) for name, each in runs.items()}
    names, times = [*runs], dict[str, list[float]]((name, []) for name in runs)
    for number in range(rounds):
        for name in in_turns(names, number):
            times[name].append(_seconds(runs[name], counts[name], clock))
    ratios = [later / earlier for earlier, later in zip(times["layer-major"], times["token-major"], strict=True)]
    milliseconds = {name: median_with_range([1e3 * x for x in found], 4) for name, found in times.items()}
    return {"ms": milliseconds, "ratio": median_with_range(ratios, 3)}


def _seconds(run: Run, count: int, clock: Callable[[], float]) -> float:
    began = clock()
    for _ in range(count):
        run()
    return (clock() - began) / count


def print_report(report: Report) -> None:
    """Print a table of all cases, and of their ratios together."""
    page = Page()
    page.lines(f"{report['machine']}, {report['threads']} threads, {report['rounds']} rounds, {report['clock']} clock")
    keys = "what", "model", "dtype", "slots", "batch", "context", "nodes"
    rows = [
        (
            *(f"{row.get(key, '')}" for key in keys),
            *(range_text(row["ms"][name], lambda x: f"{x:.3f}") for name in ("layer-major", "token-major")),
            range_text(row["ratio"], lambda x: f"{x:.2f}"),
        )
        for row in report["results"]
    ]
    page.table((*keys, "layer-major, ms", "token-major, ms", "ratio"), rows, text_columns=(0, 1, 2, 3))
    page.lines(*_summary(report))


def _summary(report: Report) -> Iterator[str]:
    for what in dict.fromkeys(row["what"] for row in report["results"]):
        ratios = sorted(row["ratio"]["median"] for row in report["results"] if row["what"] == what)
        yield (
            f"{what}: token-major takes {ratios[0]:.2f} to {ratios[-1]:.2f} of the time of layer-major, "
            f"{statistics.median(ratios):.2f} in the median of {len(ratios)} cases"
        )
    if report["left_out"]:
        yield f"{len(report['left_out'])} cases need more memory than --max-gib allows"


if __name__ == "__main__":
    sys.exit(main())
