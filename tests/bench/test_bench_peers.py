"""Adapters to operators of other packages: short stand-ins compute what the packages document from their arguments."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.bench.ops import peers as op_peers
from specmamba.bench.ops.case import TORCH, Place
from specmamba.bench.ops.measure import largest_error
from specmamba.bench.ops.suite import OPERATORS

PLACE = Place(torch.device("cpu"), has_triton=False)
BY_NAME = {operator.name: operator for operator in OPERATORS}


def gated_delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any, initial_state: Any, **_: Any) -> Any:
    """fla's: one token after the other, key heads shared by consecutive value heads."""
    groups, state, outputs = v.shape[2] // k.shape[2], initial_state.double(), []
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    for i in range(v.shape[1]):
        state = state * g[:, i, :, None, None].exp()
        u = beta[:, i, :, None] * (v[:, i] - (state * k[:, i, :, :, None]).sum(2))
        state = state + k[:, i, :, :, None] * u[:, :, None]
        outputs.append((state * q[:, i, :, :, None]).sum(2) * scale)
    return torch.stack(outputs, 1).float(), state.float()


def selective_state_update(state: Any, x: Any, dt: Any, a: Any, b: Any, c: Any) -> Any:
    """mamba_ssm's: state [B, H, P, N], in place; x and dt [B, H, P], a [H, P, N], b and c [B, G, N]."""
    assert state.is_contiguous()
    b, c = (y.repeat_interleave(x.shape[1] // y.shape[1], 1)[:, :, None] for y in (b, c))
    state.copy_(state * (dt[..., None] * a).exp() + dt[..., None] * b * x[..., None])
    return (state * c).sum(-1)


def mamba_chunk_scan_combined(x: Any, dt: Any, a: Any, b: Any, c: Any, chunk_size: int, **given: Any) -> Any:
    """mamba_ssm's: x [B, L, H, P], dt [B, L, H], a [H], b and c [B, L, G, N]."""
    state, width = given["initial_states"].clone(), x.shape[-1]
    whole = a[:, None, None].expand(len(a), width, state.shape[-1])
    steps = dt[..., None].expand(*dt.shape, width)
    out = [selective_state_update(state, x[:, i], steps[:, i], whole, b[:, i], c[:, i]) for i in range(x.shape[1])]
    return torch.stack(out, 1), state


def causal_conv1d_fn(x: Any, weight: Any, bias: Any, **given: Any) -> Any:
    """causal_conv1d's: x [B, C, L], initial_states [B, C, W - 1]."""
    inputs = torch.cat([given["initial_states"], x], -1)
    y = F.silu(F.conv1d(inputs, weight[:, None], bias, groups=len(weight)))
    return y, inputs[:, :, -given["initial_states"].shape[2] :]


def causal_conv1d_update(x: Any, conv_state: Any, weight: Any, bias: Any, activation: str) -> Any:
    """causal_conv1d's, the state in place."""
    y, after = causal_conv1d_fn(x, weight, bias, initial_states=conv_state)
    conv_state.copy_(after)
    return y


class Wrapper:
    """flashinfer's BatchPrefillWithPagedKVCacheWrapper, for pages of one token."""

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert layout == "NHD"

    def plan(self, q_starts: Any, kv_starts: Any, slots: Any, last: Any, *sizes: int, **given: Any) -> None:
        assert last.tolist() == [1] * (len(q_starts) - 1)
        assert sizes[3] == 1
        self._spans, self._slots, self._mask = (q_starts.tolist(), kv_starts.tolist()), slots, given["custom_mask"]

    def run(self, q: Any, pools: Any) -> Any:
        outputs, (q_starts, kv_starts), at = [], self._spans, 0
        for b in range(len(q_starts) - 1):
            queries, slots = q[q_starts[b] : q_starts[b + 1]], self._slots[kv_starts[b] : kv_starts[b + 1]]
            k, v = (pool[slots.long(), 0].repeat_interleave(q.shape[1] // pool.shape[2], 1) for pool in pools)
            mask = self._mask[at : at + len(queries) * len(slots)].view(len(queries), len(slots))
            at += mask.numel()
            queries, k, v = (x.transpose(0, 1) for x in (queries, k, v))
            outputs.append(F.scaled_dot_product_attention(queries, k, v, attn_mask=mask).transpose(0, 1))
        return torch.cat(outputs)


PEERS: dict[str, dict[str, Any]] = {
    "fla.ops.gated_delta_rule": {
        "fused_recurrent_gated_delta_rule": gated_delta_rule,
        "chunk_gated_delta_rule": gated_delta_rule,
    },
    "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": selective_state_update},
    "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": mamba_chunk_scan_combined},
    "causal_conv1d": {"causal_conv1d_fn": causal_conv1d_fn, "causal_conv1d_update": causal_conv1d_update},
    "flashinfer": {"BatchPrefillWithPagedKVCacheWrapper": Wrapper},
}


@pytest.mark.parametrize(
    ("operator", "kind", "peer"),
    [
        ("gated_delta_rule.tree_verify", "chain", "fla"),
        ("gated_delta_rule.extend", "", "fla"),
        ("ssd.tree_verify", "chain", "mamba_ssm"),
        ("ssd.extend", "", "mamba_ssm"),
        ("causal_conv1d", "prompt", "causal_conv1d"),
        ("causal_conv1d", "chain", "causal_conv1d"),
        ("paged_attention", "", "flashinfer"),
    ],
)
def test_other_packages_get_what_they_document(
    operator: str, kind: str, peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, functions in PEERS.items():
        module = types.ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    case = next(c for c in BY_NAME[operator].cases if c.is_tiny and (c.kind == kind or kind == "chain"))
    sizes = {**case.sizes, "pending": 0} if kind == "chain" else case.sizes
    candidates = BY_NAME[operator].candidates(replace(case, kind=kind, sizes=sizes), PLACE)
    expected, got = (next(c for c in candidates if c.name == name) for name in (TORCH, peer))
    tolerance = got.tolerance or BY_NAME[operator].tolerance
    assert largest_error(got.prepare()(), expected.prepare()()) <= tolerance


def test_adapters_import_nothing_before_they_run() -> None:
    made = op_peers.fla_recurrent((torch.zeros(1),) * 5, torch.zeros(1))
    assert [candidate.package for candidate in made] == ["fla"]
    with pytest.raises(ImportError):
        made[0].prepare()
