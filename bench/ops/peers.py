"""The same operators in other packages, through their public functions.

The packages are flash-linear-attention (``fla``), ``mamba_ssm``, ``causal_conv1d`` and ``flashinfer``. Adapters
rearrange operands before anything is timed. They were written against the packages' published sources and
documentation, on a machine without a GPU, and none of them has run: where a package has changed its functions, its row
says "could not run" and why. The results of each one are compared with PyTorch's form as those of all forms are.

None of these packages verifies trees. What is comparable is a chain behind a checkpoint with nothing pending, and even
that is less work: they leave the state after the last node and no way back to an earlier one.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from specmamba.bench.ops.case import Candidate, Run

NO_WAY_BACK = "leaves the last state only"
HALF = 2e-2  # relative to the largest: what bfloat16 operands do to sums of this length


def fla_recurrent(inputs: tuple[Tensor, ...], states: Tensor) -> list[Candidate]:
    """``fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule`` over a chain; it reads and writes the state once.

    q, k [B, T, H, K], v [B, T, HV, V], g (log decay) and beta [B, T, HV], states [B, HV, K, V], all as ours.
    """

    def prepare() -> Run:
        function = import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
        q, k, v, g, beta = inputs
        given: dict[str, Any] = {"scale": 1.0, "initial_state": states, "output_final_state": True}
        return lambda: (function(q, k, v, g=g, beta=beta, **given)[0],)

    return [Candidate("fla", prepare, package="fla", note=NO_WAY_BACK)]


def fla_chunk(inputs: tuple[Tensor, ...], states: Tensor) -> list[Candidate]:
    """``fla.ops.gated_delta_rule.chunk_gated_delta_rule``: bfloat16 operands, key heads repeated per value head."""

    def prepare() -> Run:
        function = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        q, k, v, g, beta = inputs
        groups = v.shape[2] // k.shape[2]
        q, k = (x.repeat_interleave(groups, 2).bfloat16() for x in (q, k))
        v = v.bfloat16()
        given: dict[str, Any] = {"scale": 1.0, "initial_state": states, "output_final_state": True}
        return lambda: function(q, k, v, g=g, beta=beta, **given)

    return [Candidate("fla", prepare, HALF, "fla", "bfloat16 operands")]


def _without_step(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """x [B, L, H, P], dt [B, L, H], A [H], B and C [B, L, G, N] of u = dt x and g = dt A, with A = -1."""
    c, b, u, g = inputs
    dt = -g
    return u / dt[..., None], dt, torch.full_like(dt[0, 0], -1.0), b, c


def mamba_update(inputs: tuple[Tensor, ...], states: Tensor) -> list[Candidate]:
    """``selective_state_update``: one token; chains of several are so many calls. The state is [B, H, P, N] there."""

    def prepare() -> Run:
        function = import_module("mamba_ssm.ops.triton.selective_state_update").selective_state_update
        x, dt, a, b, c = _without_step(inputs)
        own = states.transpose(2, 3).contiguous()
        (_, length, heads, width), size = x.shape, own.shape[3]
        a = a[:, None, None].expand(heads, width, size)
        dt = dt[..., None].expand(*dt.shape, width)
        tokens = [(x[:, i], dt[:, i], a, b[:, i], c[:, i]) for i in range(length)]
        return lambda: (torch.stack([function(own, *token) for token in tokens], 1),)

    return [Candidate("mamba_ssm", prepare, package="mamba_ssm", note=NO_WAY_BACK)]


def mamba_chunk(inputs: tuple[Tensor, ...], states: Tensor) -> list[Candidate]:
    """``mamba_chunk_scan_combined`` over a prompt. The state is [B, H, P, N] there."""

    def prepare() -> Run:
        function = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
        x, dt, a, b, c = _without_step(inputs)
        before = states.transpose(2, 3).contiguous()

        def run() -> tuple[Tensor, ...]:
            y, after = function(x, dt, a, b, c, chunk_size=256, initial_states=before, return_final_states=True)
            return y, after.transpose(2, 3)

        return run

    return [Candidate("mamba_ssm", prepare, HALF, "mamba_ssm")]


def conv_update(x: Tensor, windows: Tensor, weight: Tensor, bias: Tensor | None) -> list[Candidate]:
    """``causal_conv1d_update`` over a chain: x [B, L, C], windows [B, W - 1, C]; channels before tokens there."""

    def prepare() -> Run:
        function = import_module("causal_conv1d").causal_conv1d_update
        tokens, state = x.transpose(1, 2).contiguous(), windows.transpose(1, 2).contiguous()
        own, b = weight.to(x.dtype).contiguous(), None if bias is None else bias.to(x.dtype)
        return lambda: (function(tokens, state, own, b, activation="silu").transpose(1, 2),)

    return [Candidate("causal_conv1d", prepare, HALF, "causal_conv1d", NO_WAY_BACK)]


def conv_prompt(x: Tensor, windows: Tensor, weight: Tensor, bias: Tensor | None) -> list[Candidate]:
    """``causal_conv1d_fn`` over a prompt: what it calls channels-last is our layout."""

    def prepare() -> Run:
        function = import_module("causal_conv1d").causal_conv1d_fn
        before, b = windows.to(x.dtype).transpose(1, 2), None if bias is None else bias.to(x.dtype)
        tokens, own = x.transpose(1, 2), weight.to(x.dtype).contiguous()
        given: dict[str, Any] = {"initial_states": before, "return_final_states": True, "activation": "silu"}

        def run() -> tuple[Tensor, ...]:
            y, after = function(tokens, own, b, **given)
            return y.transpose(1, 2), after.transpose(1, 2)

        return run

    return [Candidate("causal_conv1d", prepare, HALF, "causal_conv1d")]


def flashinfer_attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor, mask: Tensor) -> list[Candidate]:
    """``BatchPrefillWithPagedKVCacheWrapper`` with pages of one token and a mask per request, planned beforehand."""

    def prepare() -> Run:
        wrapper_class = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        (batch, nodes, heads, dim), length = q.shape, slots.shape[1]
        wrapper = wrapper_class(torch.empty(128 << 20, dtype=torch.uint8, device=q.device), "NHD")
        starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        wrapper.plan(
            *(starts * nodes, starts * length, slots.flatten().int(), torch.ones_like(starts[1:])),
            *(heads, k_pool.shape[1], dim, 1),
            custom_mask=mask.flatten(),
            q_data_type=q.dtype,
        )
        pools = k_pool[:, None], v_pool[:, None]
        flat = q.flatten(0, 1)
        return lambda: (wrapper.run(flat, pools).view(batch, nodes, heads, dim),)

    return [Candidate("flashinfer", prepare, package="flashinfer")]


def flashinfer_rows(kind: str, x: Tensor, weight: Tensor | None, eps: float) -> list[Candidate]:
    """``flashinfer.norm.rmsnorm`` and ``flashinfer.activation.silu_and_mul``, bfloat16 only."""

    def prepare() -> Run:
        if weight is None:
            silu = import_module("flashinfer.activation").silu_and_mul
            return lambda: (silu(x.flatten(0, 1)).view(*x.shape[:2], -1),)
        norm, own = import_module("flashinfer.norm").rmsnorm, weight.to(x.dtype)
        return lambda: (norm(x.flatten(0, 1), own, eps).view(x.shape),)

    return [Candidate("flashinfer", prepare, HALF, "flashinfer")] if kind in ("rms_norm", "silu_mul") else []
