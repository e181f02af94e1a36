"""The two operators of a gated-delta-net layer in a form that trains fast in plain PyTorch.

They stand in for the fallbacks of transformers' Qwen3.5 modules while a demo model is trained or evaluated: same
arguments, same results, differentiable, and without a state (training always starts a sequence from zero). Eager on
purpose: compiled by inductor for a CPU, the delta rule took 50 s to compile and then ran slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from specmamba.errors import ConfigError

CHUNK_SIZE = 64  # tokens; one state per chunk is kept for the backward pass
_CONV, _DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"  # names in transformers' module


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """Depthwise causal convolution as W shifted products: on a CPU much cheaper to differentiate than ``F.conv1d``.

    x ``[B, C, T]``, weight ``[C, W]``, bias ``[C]``; returns ``[B, C, T]`` in the type of x.
    """
    num_tokens, width = x.shape[-1], weight.shape[-1]
    padded = F.pad(x, (width - 1, 0))
    out = padded[..., :num_tokens] * weight[:, :1]
    for i in range(1, width):
        out = out + padded[..., i : i + num_tokens] * weight[:, i : i + 1]
    if bias is not None:
        out = out + bias[:, None]
    return (F.silu(out) if activation == "silu" else out).to(x.dtype)


def chunk_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = CHUNK_SIZE, **_: Any
) -> tuple[Tensor, None]:
    """The gated delta rule from a zero state, chunk by chunk (WY form), always in fp32.

    query, key ``[B, T, Hk, K]``, value ``[B, T, H, V]``, g (log decay) and beta ``[B, T, H]``; returns
    ``[B, T, H, V]`` in the type of query, and no state.
    """
    with torch.autocast(query.device.type, enabled=False):  # a bf16 solve would lose the small corrections
        out = _delta_rule_fp32(query, key, value, g, beta, chunk_size)
    return out.to(query.dtype), None


def _delta_rule_fp32(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk_size: int) -> Tensor:
    num_tokens, group = q.shape[1], v.shape[2] // q.shape[2]
    q, k = (_unit_rows(t.float()).repeat_interleave(group, dim=2) for t in (q, k))
    q = q * q.shape[-1] ** -0.5
    q, k, v, g, beta = (_chunks(t, chunk_size) for t in (q, k, v, g[..., None], beta[..., None]))  # [B, H, n, C, .]
    decay = g.cumsum(-2)  # [B, H, n, C, 1], log of the decay since the chunk began
    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).tril()
    pairwise = (decay - decay.mT).masked_fill(~causal, float("-inf")).exp()  # [B, H, n, C, C]

    # (I + L) [U0 | W] = beta [V | e^G K]: only L's strict lower part is read, the diagonal is taken as one
    system = beta * (k @ k.mT) * pairwise
    right = beta * torch.cat([v, decay.exp() * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    update, readout = solved.split([v.shape[-1], k.shape[-1]], dim=-1)  # U = U0 - W S

    last = decay[..., -1:, :]  # [B, H, n, 1, 1]
    keys_to_end = (k * (last - decay).exp()).mT  # [B, H, n, K, C]
    states = _states_at_chunk_starts(last.exp(), keys_to_end @ readout, keys_to_end @ update)
    attention = (q @ k.mT) * pairwise
    out = (q * decay.exp()) @ states + attention @ (update - readout @ states)
    tokens: Tensor = out.flatten(2, 3)[:, :, :num_tokens].transpose(1, 2)
    return tokens


def _states_at_chunk_starts(decay: Tensor, erase: Tensor, write: Tensor) -> Tensor:
    """Run ``S <- (decay - erase) S + write`` over the chunks: one batched product each, the only sequential part.

    decay ``[B, H, n, 1, 1]``, erase ``[B, H, n, K, K]``, write ``[B, H, n, K, V]``; returns ``[B, H, n, K, V]``.
    """
    eye = torch.eye(erase.shape[-1], device=erase.device)
    transition = (decay * eye - erase).flatten(0, 1)  # [B*H, n, K, K]
    flat_write = write.flatten(0, 1)
    states = [torch.zeros_like(flat_write[:, 0])]
    for chunk in range(write.shape[2] - 1):
        states.append(torch.baddbmm(flat_write[:, chunk], transition[:, chunk], states[-1]))
    stacked: Tensor = torch.stack(states, dim=1).unflatten(0, write.shape[:2])
    return stacked


def _unit_rows(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _chunks(x: Tensor, chunk_size: int) -> Tensor:
    """``[B, T, H, D]`` to fp32 ``[B, H, n, C, D]``; zero rows fill the last chunk (no decay, no write)."""
    x = F.pad(x.float().transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk_size))
    chunks: Tensor = x.contiguous().unflatten(2, (-1, chunk_size))
    return chunks


@contextmanager
def fast_operators() -> Iterator[None]:
    """Let transformers' Qwen3.5 modules run on the operators above inside the ``with`` block."""
    replacements: dict[str, Callable[..., Any]] = {_CONV: causal_conv1d, _DELTA_RULE: chunk_gated_delta_rule}
    missing = [name for name in replacements if not hasattr(modeling_qwen3_5, name)]
    if missing:
        raise ConfigError(f"this version of transformers has no {missing[0]} in its Qwen3.5 module: use 5.17 to 5.23")
    originals = {name: getattr(modeling_qwen3_5, name) for name in replacements}
    for name, function in replacements.items():
        setattr(modeling_qwen3_5, name, function)
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(modeling_qwen3_5, name, function)
