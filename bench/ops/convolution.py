"""The convolution of recurrent layers, over trees and prompts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specmamba.bench.ops import peers
from specmamba.bench.ops.case import TORCH, TRITON, Candidate, Case, Cost, Operator, Place, Run, dtype_of, generator
from specmamba.bench.ops.inputs import WINDOW, make_layer, ssd_inputs, triton_ops
from specmamba.kernels.causal_conv1d import torch_ops as conv_torch


def conv_candidates(case: Case, place: Place) -> list[Candidate]:
    """Trees (``kind`` of their shape) and prompts."""
    gen, batch, channels = generator(case), case["batch"], case["channels"]
    weight = (torch.randn(WINDOW + 1, channels, generator=gen) * 0.5).t().to(place.device)
    bias = torch.randn(channels, generator=gen).to(place.device)
    if case.kind == "prompt":
        return _prompt_candidates(case, place, weight, bias)
    heads = {"key_heads": 1, "heads": 1, "key": 1, "value": channels - 2}  # of which only the channels matter
    layer = make_layer(replace(case, sizes={**case.sizes, **heads}), place, ssd_inputs)
    dtype, t = dtype_of(case), layer.trees
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

    found = [Candidate(TORCH, in_torch)]
    found += [Candidate(TRITON, in_triton)] if place.has_triton else []
    is_plain_chain = case.kind == "chain" and not case["pending"]
    return found + (peers.conv_update(x, stored[1:, :WINDOW], weight, bias) if is_plain_chain else [])


def _prompt_candidates(case: Case, place: Place, weight: Tensor, bias: Tensor) -> list[Candidate]:
    gen, batch, dtype = generator(case), case["batch"], dtype_of(case)
    x = torch.randn(batch, case["tokens"], case["channels"], generator=gen).to(place.device, dtype)
    windows = torch.randn(batch + 1, WINDOW, case["channels"], generator=gen).to(place.device, dtype)
    lengths = torch.full((batch,), case["tokens"], device=place.device)
    slots = torch.arange(1, batch + 1, device=place.device)

    def in_triton() -> Run:
        ops, own = triton_ops("causal_conv1d"), windows.clone()
        return lambda: (ops.extend_in_place(x, own, slots, weight, lengths, bias), own[1:])

    found = [Candidate(TORCH, lambda: lambda: conv_torch.extend(x, windows[1:], weight, lengths, bias))]
    found += [Candidate(TRITON, in_triton)] if place.has_triton else []
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


OPERATORS = (
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
