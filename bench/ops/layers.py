"""Whole recurrent layers between their projections, and the convolution in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specmamba.bench.ops.case import (
    NATIVE,
    TORCH,
    TRITON,
    Candidate,
    Case,
    Cost,
    Operator,
    Place,
    Run,
    counted,
    dtype_of,
    generator,
)
from specmamba.bench.ops.inputs import (
    FALCON,
    QWEN,
    TINY,
    WINDOW,
    Layer,
    delta_inputs,
    make_layer,
    moved,
    records_of,
    ssd_inputs,
    triton_ops,
)
from specmamba.bench.ops.recurrent_cost import verify_cost
from specmamba.kernels import delta_net, mamba2, state_records
from specmamba.kernels.causal_conv1d import torch_ops as conv_torch
from specmamba.kernels.gated_delta_rule import torch_ops as delta_torch
from specmamba.kernels.mamba2 import native_ops as mamba_native
from specmamba.kernels.ssd import torch_ops as ssd_torch

Compose = Callable[..., Tensor]


def channels_of(case: Case) -> int:
    """What the convolution runs over: two of [G, K] and one of [H, V]."""
    return 2 * case["key_heads"] * case["key"] + case["heads"] * case["value"]


def projected(case: Case, gen: torch.Generator, *sizes: int) -> tuple[Tensor, ...]:
    """Parts of one projection, as views of it [B, N, size]."""
    whole = torch.randn(case["batch"], case["nodes"], sum(sizes), generator=gen)
    return tuple(whole.to(dtype_of(case)).split(list(sizes), -1))


def delta_layer(case: Case, gen: torch.Generator) -> tuple[delta_net.Inputs, delta_net.Weights]:
    """A gated delta net."""
    heads, values, channels = case["heads"], case["heads"] * case["value"], channels_of(case)
    mixed, gate, b, a = projected(case, gen, channels, values, heads, heads)
    inputs = delta_net.Inputs(mixed, gate.unflatten(-1, (heads, case["value"])), b, a)
    weights = delta_net.Weights(
        conv=(torch.randn(WINDOW + 1, channels, generator=gen) * 0.5).t(),
        negative_a=-torch.rand(heads, generator=gen),
        dt_bias=torch.randn(heads, generator=gen) - 3,
        norm=torch.ones(case["value"]),
        norm_eps=1e-6,
        num_key_heads=case["key_heads"],
        key_dim=case["key"],
    )
    return inputs, weights


def mamba_layer(case: Case, gen: torch.Generator) -> tuple[mamba2.Inputs, mamba2.Weights]:
    """A Mamba2 layer with a norm."""
    heads, values, channels = case["heads"], case["heads"] * case["value"], channels_of(case)
    inputs = mamba2.Inputs(*projected(case, gen, values, channels, heads))
    weights = mamba2.Weights(
        conv=(torch.randn(WINDOW + 1, channels, generator=gen) * 0.5).t(),
        conv_bias=torch.randn(channels, generator=gen),
        negative_a=-torch.rand(heads, generator=gen),
        dt_bias=torch.randn(heads, generator=gen) - 3,
        skip=torch.ones(heads),
        norm=torch.ones(values),
        norm_eps=1e-6,
        norm_groups=1,
        norm_before_gate=False,
        num_groups=case["key_heads"],
        state_dim=case["key"],
        head_dim=case["value"],
    )
    return inputs, weights


def part_by_part(layer: Layer, compose: Compose, recurrence: Any) -> Tensor:
    """What PyTorch does: inputs are stored, each node's window gathered, then the recurrence."""
    b, t, nodes = layer.buffers, layer.trees, layer.trees.ancestors.shape[1]
    first = WINDOW + t.node_offset

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        b.conv_inputs[1:, first : first + nodes] = x
        return conv_torch.tree_verify(b.conv_inputs[1:], t.conv_index, weight, bias)

    def recur(*inputs: Tensor) -> Tensor:
        records = b.states[1:], b.k[1:], b.u[1:], b.decay[1:]
        out: Tensor = recurrence(*inputs, *records, t.num_pending, t.node_offset, t.ancestors)
        return out

    return compose(convolve, recur)


def layer_candidates(case: Case, place: Place, is_delta: bool) -> list[Candidate]:
    """A whole layer: one call of ours against PyTorch's parts."""
    package: Any = delta_net if is_delta else mamba2
    inputs, weights = (delta_layer if is_delta else mamba_layer)(case, generator(case))
    inputs, weights = moved(inputs, place.device), moved(weights, place.device)
    layer = make_layer(case, place, delta_inputs if is_delta else ssd_inputs)
    stored = layer.buffers.conv_inputs.to(inputs.mixed.dtype)
    layer = replace(layer, buffers=replace(layer.buffers, conv_inputs=stored))
    written = slice(case["pending"], case["pending"] + case["nodes"])
    recurrence = (delta_torch if is_delta else ssd_torch).tree_verify
    compose = partial(package.compose, inputs, weights)

    def run(verify: Callable[[state_records.Buffers], Tensor] | None) -> Run:
        own = layer.copied()
        if verify is None:
            return lambda: (part_by_part(own, compose, recurrence), *records_of(own, written))
        return lambda: (verify(own.buffers), *records_of(own, written))

    def ours(ops: Any) -> Run:
        return run(lambda buffers: ops.tree_verify(inputs, weights, buffers, layer.trees))

    found = [Candidate(TORCH, lambda: run(None))]
    name = "delta_net" if is_delta else "mamba2"
    if place.has_triton:
        return [*found, Candidate(TRITON, lambda: ours(triton_ops(name)))]
    if (package.can_fuse if is_delta else mamba_native.can_take)(inputs, weights, layer.buffers):
        found.append(Candidate(NATIVE, lambda: ours(package)))
    return found


def layer_cost(case: Case, is_delta: bool) -> Cost:
    """The recurrence, with inputs in the model's type, the gates, and the inputs and windows of the convolution.

    Nothing between convolution and recurrence has to cross memory.
    """
    inner = verify_cost(case, is_delta)
    nodes, batch, channels = case["nodes"], case["batch"], channels_of(case)
    values = case["heads"] * case["value"]
    in_float32 = 4 * batch * nodes * (channels + values + (2 if is_delta else 1) * case["heads"])
    own = case.itemsize * batch * nodes * (2 * channels + 2 * values + (2 if is_delta else 1) * case["heads"])
    window = case.itemsize * batch * WINDOW * channels
    conv = 2 * (WINDOW + 1) * batch * nodes * channels
    return Cost(inner.bytes - in_float32 + own + window, inner.flops + conv)


def _layer_cases(heads: dict[str, int], of: str) -> tuple[Case, ...]:
    def case(nodes: int, batch: int, is_quick: bool = False) -> Case:
        sizes = {**heads, "batch": batch, "nodes": nodes, "pending": 8}
        return Case(f"{counted(nodes, 'node')}, batch {batch}{of}", sizes, "bfloat16", is_quick=is_quick)

    tiny = {**TINY, "batch": 2, "nodes": 4, "pending": 2}
    return case(1, 1, True), case(8, 1), case(8, 32, True), case(16, 32), Case("tiny", tiny, is_tiny=True)


OPERATORS = (
    Operator(
        "delta_net.tree_verify",
        ("delta_net",),
        _layer_cases(QWEN, ""),
        partial(layer_cost, is_delta=True),
        partial(layer_candidates, is_delta=True),
        tolerance=2e-2,
        gpu_tests=("delta_net_triton",),
    ),
    Operator(
        "mamba2.tree_verify",
        ("mamba2",),
        _layer_cases(FALCON, " (Falcon-H1)"),
        partial(layer_cost, is_delta=False),
        partial(layer_candidates, is_delta=False),
        tolerance=2e-2,
        gpu_tests=("mamba2_triton",),
    ),
)
