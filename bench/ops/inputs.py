"""What recurrent operators are timed on: layers with checkpoints, pending records and trees in their buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.bench.ops.case import Case, Place, generator
from specmamba.kernels import state_records
from specmamba.kernels import tree as tree_ops

QWEN = {"key_heads": 16, "heads": 32, "key": 128, "value": 128}  # Qwen3-Next, Qwen3.5
FALCON = {"key_heads": 1, "heads": 24, "key": 128, "value": 64}  # Falcon-H1-0.5B
NEMOTRON = {"key_heads": 8, "heads": 128, "key": 128, "value": 64}  # Nemotron-H-8B
TINY = {"key_heads": 1, "heads": 2, "key": 16, "value": 16}
WINDOW = 3


@dataclass(frozen=True)
class Layer:
    """Buffers and trees of one layer, row r and slot r its r-th request; what the nodes bring, in argument order."""

    inputs: tuple[Tensor, ...]
    buffers: state_records.Buffers
    trees: state_records.Trees
    parents: Tensor

    def copied(self) -> Layer:
        """With buffers of its own."""
        b = self.buffers
        own = replace(b, states=b.states.clone(), k=b.k.clone(), u=b.u.clone(), decay=b.decay.clone())
        return replace(self, buffers=own)


def tree_parents(case: Case) -> Tensor:
    """[B, N]: chains, or trees whose every other node has two children, as drafts of top-k look."""
    nodes = range(case["nodes"])
    parents = [i - 1 for i in nodes] if case.kind == "chain" else [-1, *((i - 1) // 2 for i in nodes[1:])]
    return torch.tensor([parents] * case["batch"])


def delta_inputs(case: Case, length: int, gen: torch.Generator) -> tuple[Tensor, ...]:
    """q, k, v, g, beta of the gated delta rule, on the CPU."""
    batch, heads = case["batch"], case["heads"]
    q, k = F.normalize(torch.randn(2, batch, length, case["key_heads"], case["key"], generator=gen), dim=-1).unbind()
    v = torch.randn(batch, length, heads, case["value"], generator=gen)
    g = -F.softplus(torch.randn(batch, length, heads, generator=gen) - 3)
    return q * case["key"] ** -0.5, k, v, g, torch.rand(batch, length, heads, generator=gen)


def ssd_inputs(case: Case, length: int, gen: torch.Generator) -> tuple[Tensor, ...]:
    """c, b, u, g of Mamba2, on the CPU."""
    batch, heads = case["batch"], case["heads"]
    c, b = (torch.randn(2, batch, length, case["key_heads"], case["key"], generator=gen) * case["key"] ** -0.5).unbind()
    u = torch.randn(batch, length, heads, case["value"], generator=gen)
    return c, b, u, -F.softplus(torch.randn(batch, length, heads, generator=gen) - 3)


def make_layer(case: Case, place: Place, inputs_of: Callable[..., tuple[Tensor, ...]]) -> Layer:
    """Checkpoints, pending records and nodes. Row 0 and slot 0 are padding, as in the pools."""
    gen, batch, pending, nodes = generator(case), case["batch"], case["pending"], case["nodes"]
    records = max(16, 2 * nodes, pending + nodes)  # as the cache sizes them
    channels = 2 * case["key_heads"] * case["key"] + case["heads"] * case["value"]
    shape = batch + 1, records
    buffers = state_records.Buffers(
        states=torch.randn(batch + 1, case["heads"], case["key"], case["value"], generator=gen),
        conv_inputs=torch.randn(batch + 1, WINDOW + records, channels, generator=gen),
        k=F.normalize(torch.randn(*shape, case["key_heads"], case["key"], generator=gen), dim=-1),
        u=torch.randn(*shape, case["heads"], case["value"], generator=gen),
        decay=-torch.rand(*shape, case["heads"], generator=gen).mul(0.1).cumsum(1),
        windows=torch.randn(batch + 1, WINDOW, channels, generator=gen),
    )
    parents = tree_parents(case)
    index = tree_ops.conv_index(parents, WINDOW + 1) + WINDOW + pending
    places, counts = torch.arange(1, batch + 1), torch.full((batch,), pending)
    trees = state_records.Trees(places, places.clone(), index, counts, pending, tree_ops.ancestors(parents))
    inputs = inputs_of(case, nodes, gen)
    to = partial(moved, device=place.device)
    return Layer(tuple(x.to(place.device) for x in inputs), to(buffers), to(trees), parents.to(place.device))


def moved(operand: Any, device: torch.device) -> Any:
    """On a device, its tensors' strides kept."""
    values = {field.name: getattr(operand, field.name) for field in fields(operand)}
    return replace(operand, **{name: x.to(device) for name, x in values.items() if isinstance(x, Tensor)})


def records_of(layer: Layer, nodes: slice) -> tuple[Tensor, ...]:
    """The nodes' records, as views."""
    b = layer.buffers
    return b.k[1:, nodes], b.u[1:, nodes], b.decay[1:, nodes]


def triton_ops(name: str) -> Any:
    """The Triton launchers of an operator. Raises ImportError."""
    return import_module(f"specmamba.kernels.{name}.triton_ops")
