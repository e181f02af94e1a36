"""Whole recurrent layers between their projections, and the convolution in them over trees and prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specmamba.bench.ops import peers
from specmamba.bench.ops.case import (
    FALCON,
    QWEN,
    TINY,
    WINDOW,
    Candidate,
    Case,
    Cost,
    Operator,
    Place,
    Run,
    counted,
    make_layer,
    moved,
    records_of,
    ssd_inputs,
    triton_ops,
)
from specmamba.bench.ops.recurrent import DELTA, SSD, Recurrence, verify_cost
from specmamba.kernels import delta_net, gpu, mamba2
from specmamba.kernels.causal_conv1d import torch_ops as conv_torch
from specmamba.kernels.state_records import RecordOperands, RowSet
from specmamba.layers import gated_delta_net
from specmamba.layers import mamba2 as mamba2_layer


def channels_of(case: Case) -> int:
    """Channels of the convolution: two of [G, K] and one of [H, V]."""
    return 2 * case["key_heads"] * case["key"] + case["heads"] * case["value"]


def projected(case: Case, gen: torch.Generator, *sizes: int) -> tuple[Tensor, ...]:
    """Parts of one projection, as views of it [B, N, size]."""
    whole = torch.randn(case["batch"], case["nodes"], sum(sizes), generator=gen)
    return tuple(whole.to(case.torch_dtype).split(list(sizes), -1))


def delta_layer(case: Case, gen: torch.Generator) -> tuple[delta_net.Inputs, delta_net.Weights]:
    """Inputs and weights of a gated delta net."""
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
    """Inputs and weights of a Mamba2 layer with a norm."""
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


class LayerKind(NamedTuple):
    """One of the two kinds of recurrent layers."""

    name: str  # of its folder under kernels/
    package: Any
    recurrence: Recurrence
    make: Callable[[Case, torch.Generator], tuple[Any, Any]]  # inputs and weights
    mix: Callable[..., Tensor]  # the layer between its projections, operator by operator


DELTA_NET = LayerKind("delta_net", delta_net, DELTA, delta_layer, gated_delta_net.mix)
MAMBA2 = LayerKind("mamba2", mamba2, SSD, mamba_layer, mamba2_layer.mix)


def layer_candidates(case: Case, place: Place, kind: LayerKind) -> list[Candidate]:
    """A whole layer: one call of ours against PyTorch's parts."""
    inputs, weights = (moved(part, place.device) for part in kind.make(case, case.generator()))
    layer = make_layer(case, place, kind.recurrence.inputs_of)
    stored = layer.buffers.conv_inputs.to(inputs.mixed.dtype)
    layer = replace(layer, buffers=replace(layer.buffers, conv_inputs=stored))
    written = slice(case["pending"], case["pending"] + case["nodes"])
    rows = RowSet.of(range(1, case["batch"] + 1), place.device, layer.trees.rows)  # row and slot 0 are padding

    def run(verify: Callable[[RecordOperands], Tensor]) -> Run:
        own = layer.copied()
        state = RecordOperands(own.buffers, own.trees, rows, rows)
        return lambda: (verify(state), *records_of(own, written))

    def in_torch(state: RecordOperands) -> Tensor:
        with gpu.disabled():
            return kind.mix(inputs, weights, state)

    def in_triton(state: RecordOperands) -> Tensor:
        return kind.mix(inputs, weights, state)

    def fused(state: RecordOperands) -> Tensor:
        out: Tensor = kind.package.tree_verify(inputs, weights, state.buffers, state.trees)
        return out

    state = RecordOperands(layer.buffers, layer.trees, rows, rows)
    native = (lambda: run(fused)) if kind.package.can_fuse(state, inputs, weights) else None
    return place.forms(lambda: run(in_torch), lambda: run(in_triton), native)


def layer_cost(case: Case, kind: LayerKind) -> Cost:
    """The recurrence, with inputs in the model's type, the gates, and the inputs and windows of the convolution.

    Nothing between convolution and recurrence has to cross memory.
    """
    inner, gates = verify_cost(case, kind.recurrence), kind.recurrence.num_gates * case["heads"]
    nodes, batch, channels = case["nodes"], case["batch"], channels_of(case)
    values = case["heads"] * case["value"]
    in_float32 = 4 * batch * nodes * (channels + values + gates)
    own = case.itemsize * batch * nodes * (2 * channels + 2 * values + gates)
    window = case.itemsize * batch * WINDOW * channels
    conv = 2 * (WINDOW + 1) * batch * nodes * channels
    return Cost(inner.bytes - in_float32 + own + window, inner.flops + conv)


def _layer_cases(heads: dict[str, int], of: str) -> tuple[Case, ...]:
    def case(nodes: int, batch: int, is_quick: bool = False) -> Case:
        sizes = {**heads, "batch": batch, "nodes": nodes, "pending": 8}
        return Case(f"{counted(nodes, 'node')}, batch {batch}{of}", sizes, "bfloat16", is_quick=is_quick)

    tiny = {**TINY, "batch": 2, "nodes": 4, "pending": 2}
    return case(1, 1, True), case(8, 1), case(8, 32, True), case(16, 32), Case("tiny", tiny, is_tiny=True)


def conv_candidates(case: Case, place: Place) -> list[Candidate]:
    """The convolution over trees (``kind`` is their shape) and prompts."""
    gen, batch, channels = case.generator(), case["batch"], case["channels"]
    weight = (torch.randn(WINDOW + 1, channels, generator=gen) * 0.5).t().to(place.device)
    bias = torch.randn(channels, generator=gen).to(place.device)
    if case.kind == "prompt":
        return _prompt_candidates(case, place, weight, bias)
    heads = {"key_heads": 1, "heads": 1, "key": 1, "value": channels - 2}  # only their channels matter
    layer = make_layer(replace(case, sizes={**case.sizes, **heads}), place, ssd_inputs)
    dtype, t = case.torch_dtype, layer.trees
    stored = layer.buffers.conv_inputs.to(dtype)
    x = torch.randn(batch, case["nodes"], channels, generator=gen).to(place.device, dtype)
    first = WINDOW + t.node_offset

    def in_torch() -> Run:
        own = stored.clone()

        def run() -> tuple[Tensor, ...]:
            own[1:, first : first + case["nodes"]] = x
            return conv_torch.tree_verify(own[1:], t.conv_index, weight, bias), own[1:]

        return run

    def in_triton() -> Run:
        ops, buffers = triton_ops("causal_conv1d"), replace(layer.buffers, conv_inputs=stored.clone())
        return lambda: (ops.tree_verify_in_place(x, buffers, t, weight, bias), buffers.conv_inputs[1:])

    found = place.forms(in_torch, in_triton)
    is_plain_chain = case.kind == "chain" and not case["pending"]
    return found + (peers.conv_update(x, stored[1:, :WINDOW], weight, bias) if is_plain_chain else [])


def _prompt_candidates(case: Case, place: Place, weight: Tensor, bias: Tensor) -> list[Candidate]:
    gen, batch, dtype = case.generator(), case["batch"], case.torch_dtype
    x = torch.randn(batch, case["tokens"], case["channels"], generator=gen).to(place.device, dtype)
    windows = torch.randn(batch + 1, WINDOW, case["channels"], generator=gen).to(place.device, dtype)
    lengths = torch.full((batch,), case["tokens"], device=place.device)
    slots = torch.arange(1, batch + 1, device=place.device)

    def in_triton() -> Run:
        ops, own = triton_ops("causal_conv1d"), windows.clone()
        return lambda: (ops.extend_in_place(x, own, slots, weight, lengths, bias), own[1:])

    found = place.forms(lambda: lambda: conv_torch.extend(x, windows[1:], weight, lengths, bias), in_triton)
    return found + peers.conv_prompt(x, windows[1:], weight, bias)


def conv_cost(case: Case) -> Cost:
    """Tokens and windows in, float32 out; with trees the tokens are stored too, with prompts the window."""
    rows, channels = case["batch"], case["channels"]
    tokens = case.sizes.get("tokens") or case["nodes"]
    stored = WINDOW if case.kind == "prompt" else tokens
    size = rows * channels * (case.itemsize * (tokens + WINDOW + stored) + 4 * tokens) + 4 * channels * (WINDOW + 2)
    return Cost(size, 2 * (WINDOW + 1) * rows * tokens * channels)


def _conv_case(name: str, kind: str, is_quick: bool = False, **sizes: int) -> Case:
    return Case(name, {"channels": 8192, "pending": 0, **sizes}, "bfloat16", kind, is_quick)


def _layer_operator(kind: LayerKind, heads: dict[str, int], of: str) -> Operator:
    return Operator(
        f"{kind.name}.tree_verify",
        (kind.name,),
        _layer_cases(heads, of),
        partial(layer_cost, kind=kind),
        partial(layer_candidates, kind=kind),
        tolerance=2e-2,
        gpu_tests=(f"{kind.name}_triton",),
    )


OPERATORS = (
    _layer_operator(DELTA_NET, QWEN, ""),
    _layer_operator(MAMBA2, FALCON, " (Falcon-H1)"),
    Operator(
        "causal_conv1d",
        ("causal_conv1d",),
        (
            _conv_case("chain of 1, batch 32", "chain", batch=32, nodes=1, is_quick=True),
            _conv_case("tree of 8, batch 32", "tree", batch=32, nodes=8, pending=8, is_quick=True),
            _conv_case("prompt of 512, batch 1", "prompt", batch=1, tokens=512, is_quick=True),
            Case("tiny tree", {"channels": 24, "pending": 2, "batch": 2, "nodes": 4}, kind="tree", is_tiny=True),
            Case("tiny prompt", {"channels": 24, "pending": 0, "batch": 2, "tokens": 5}, kind="prompt", is_tiny=True),
        ),
        conv_cost,
        conv_candidates,
        tolerance=1e-3,
        gpu_tests=("causal_conv1d_triton",),
    ),
)
