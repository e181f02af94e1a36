"""What is computed for each token on its own, in native code (native.cpp). See README.md."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.native import library
from specmamba.kernels.native.live import live_count
from specmamba.kernels.native.tensors import FLOATS, is_native, require, struct, tokens_of
from specmamba.kernels.rowwise.torch_ops import L2_EPS

SOURCE = Path(__file__).parent / "native.cpp"

_Norm = struct(
    "Norm",
    ["x", "gate", "weight", "y", "live"],
    ["tokens", "heads", "width", "x_stride", "gate_stride", "weight_stride", "is_sigmoid"],
    ["eps"],
)
_DeltaInputs = struct(
    "DeltaInputs",
    ["mixed", "a", "b", "negative_a", "dt_bias", "q", "k", "g", "beta"],
    ["tokens", "channels", "gates_stride", "key_heads", "key_dim", "value_heads"],
    ["eps", "step_scale"],
)
_ScanLayer = struct(
    "ScanLayer",
    ["gate", "x", "of_channel", "y", "first", "second"],
    ["tokens", "channels", "gate_stride", "x_stride", "y_stride"],
)


def can_take(x: Tensor, *others: Tensor) -> bool:
    """Whether native code computes on x, float32 or bfloat16 on the CPU, with these others, which must be float32."""
    if not is_native(x) or code() is None:
        return False
    for other in others:  # noqa: SIM110 -- ``all`` would cost more than what it asks
        if other.dtype is not torch.float32:
            return False
    return True


def can_take_angles(positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype) -> bool:
    """Whether native code computes angles: on the CPU, in float32 or bfloat16."""
    return positions.is_cpu and inverse_frequencies.is_cpu and dtype in FLOATS and code() is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One call; the weight of a head is reused for all tokens."""
    require(weight.shape == x.shape[x.dim() - weight.dim() :], "the weight has another shape")
    x, stride = tokens_of(x, weight.dim())
    y = torch.empty(x.shape, dtype=x.dtype)
    width, heads = x.shape[-1], weight.shape[0] if weight.dim() == 2 else 1
    weight, tokens = weight.contiguous(), y.numel() // (heads * width)
    norm = _Norm(
        *(x.data_ptr(), None, weight.data_ptr(), y.data_ptr(), live_count(y.shape, tokens)),
        *(tokens, heads, width, stride, 0, width if weight.dim() == 2 else 0, False),
        eps,
    )
    library.required(code()).rowwise_rms_norm(norm, x.dtype is torch.bfloat16, torch.get_num_threads())
    return y


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """One call for sum and norm."""
    require(added.shape == x.shape and weight.shape == x.shape[-1:], "x, added and weight do not fit")
    (x, x_stride), added, weight = tokens_of(x, 1), added.contiguous(), weight.contiguous()
    total, y = (torch.empty(x.shape, dtype=x.dtype) for _ in range(2))
    width = x.shape[-1]
    tokens = y.numel() // width
    norm = _Norm(
        *(x.data_ptr(), added.data_ptr(), weight.data_ptr(), y.data_ptr(), live_count(y.shape, tokens)),
        *(tokens, 1, width, x_stride, width, 0, False),
        eps,
    )
    is_bfloat16 = x.dtype is torch.bfloat16
    library.required(code()).rowwise_add_rms_norm(norm, total.data_ptr(), is_bfloat16, torch.get_num_threads())
    return total, y


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, is_sigmoid: bool = False) -> Tensor:
    """One call for norm and gate."""
    heads, width = x.shape[-2:]
    require(gate.shape == x.shape and weight.shape == (width,), "x, gate and weight do not fit")
    weight = weight.contiguous()
    (x, x_stride), (gate, gate_stride) = tokens_of(x, 2), tokens_of(gate, 2)
    y = torch.empty(x.shape, dtype=gate.dtype)
    tokens = y.numel() // (heads * width)
    norm = _Norm(
        *(x.data_ptr(), gate.data_ptr(), weight.data_ptr(), y.data_ptr(), live_count(y.shape, tokens)),
        *(tokens, heads, width, x_stride, gate_stride, 0, is_sigmoid),
        eps,
    )
    library.required(code()).rowwise_gated_rms_norm(norm, gate.dtype is torch.bfloat16, torch.get_num_threads())
    return y


def silu_mul(gate_up: Tensor) -> Tensor:
    """One call."""
    require(gate_up.shape[-1] % 2 == 0, "gate and up do not have the same width")
    gate_up, width = gate_up.contiguous(), gate_up.shape[-1] // 2
    y = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype)
    library.required(code()).rowwise_silu_mul(
        gate_up.data_ptr(),
        y.data_ptr(),
        y.numel() // width,
        live_count(y.shape, y.numel() // width),
        width,
        gate_up.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    return y


def clamped_silu_mul(gate_up: Tensor, limit: float) -> Tensor:
    """One call."""
    require(gate_up.shape[-1] % 2 == 0, "gate and up do not have the same width")
    gate_up, width = gate_up.contiguous(), gate_up.shape[-1] // 2
    y = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype)
    tokens = y.numel() // width
    library.required(code()).rowwise_clamped_silu_mul(
        *(gate_up.data_ptr(), y.data_ptr(), tokens, live_count(y.shape, tokens), width, limit),
        *(gate_up.dtype is torch.bfloat16, torch.get_num_threads()),
    )
    return y


def sigmoid(x: Tensor) -> Tensor:
    """One call."""
    return _activated(x, 0)


def silu(x: Tensor) -> Tensor:
    """One call."""
    return _activated(x, 1)


def gelu(x: Tensor) -> Tensor:
    """One call."""
    return _activated(x, 2)


def gelu_tanh(x: Tensor) -> Tensor:
    """One call."""
    return _activated(x, 3)


def _activated(x: Tensor, kind: int) -> Tensor:
    """``kind``: Activation in native.cpp."""
    x, width = x.contiguous(), x.shape[-1] if x.dim() else 1
    y = torch.empty(x.shape, dtype=x.dtype)
    tokens = x.numel() // max(1, width)
    library.required(code()).rowwise_activate(
        *(x.data_ptr(), y.data_ptr(), tokens, live_count(y.shape, tokens), width, kind),
        *(x.dtype is torch.bfloat16, torch.get_num_threads()),
    )
    return y


def rotary_angles(
    positions: Tensor, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """One call; the second half of the frequencies is assumed to repeat the first."""
    size = inverse_frequencies.numel()
    require(positions.dtype is torch.int64 and inverse_frequencies.dtype is torch.float32, "wrong dtypes")
    require(size % 2 == 0, "so many components cannot rotate")
    positions, inverse_frequencies = positions.contiguous(), inverse_frequencies.contiguous()
    cos, sin = (torch.empty(*positions.shape, 1, size, dtype=dtype) for _ in range(2))
    library.required(code()).rowwise_rotary_angles(
        *(x.data_ptr() for x in (positions, inverse_frequencies, cos, sin)),
        *(positions.numel(), size, scaling, dtype is torch.bfloat16, torch.get_num_threads()),
    )
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One call; x, cos and sin need one dtype."""
    require(cos.dtype is x.dtype and sin.dtype is x.dtype, "x, cos and sin differ in dtype")
    require(cos.shape == sin.shape == (*x.shape[:2], 1, cos.shape[-1]), "cos and sin have another shape")
    require(cos.shape[-1] <= x.shape[-1] and cos.shape[-1] % 2 == 0, "so many components cannot rotate")
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    y, (heads, width) = torch.empty(x.shape, dtype=x.dtype), x.shape[2:]
    library.required(code()).rowwise_rotate(
        *(t.data_ptr() for t in (x, cos, sin, y)),
        *(x.shape[0] * x.shape[1], heads, width, cos.shape[-1]),
        x.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    return y


def delta_inputs(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    negative_a: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    key_dim: int,
    step_scale: float = 1.0,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One call for all four results; for decays by head."""
    require(lower_bound is None, "native code bounds no decays")
    batch, length, value_heads = a.shape
    require(b.shape == a.shape == (*mixed.shape[:2], value_heads) and b.dtype is a.dtype, "mixed, a and b do not fit")
    require(mixed.shape[2] >= 2 * num_key_heads * key_dim, "there are fewer channels than queries and keys")
    require(negative_a.shape == dt_bias.shape == (value_heads,), "decays and gates differ in heads")
    mixed, negative_a, dt_bias = mixed.contiguous(), negative_a.contiguous(), dt_bias.contiguous()
    (a, a_stride), (b, b_stride) = tokens_of(a, 1), tokens_of(b, 1)
    if a_stride != b_stride:
        a, b, a_stride = a.contiguous(), b.contiguous(), value_heads
    q, k = (torch.empty(batch, length, num_key_heads, key_dim) for _ in range(2))
    g, beta = (torch.empty(batch, length, value_heads) for _ in range(2))
    arguments = _DeltaInputs(
        *(x.data_ptr() for x in (mixed, a, b, negative_a, dt_bias, q, k, g, beta)),
        *(batch * length, mixed.shape[2], a_stride, num_key_heads, key_dim, value_heads),
        *(L2_EPS, step_scale),
    )
    library.required(code()).rowwise_delta_inputs(arguments, a.dtype is torch.bfloat16, torch.get_num_threads())
    return q, k, g, beta


def time_steps(raw: Tensor, bias: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """One call for both results."""
    require(raw.shape == x.shape and bias.shape == x.shape[-1:], "raw, bias and x do not fit")
    (raw, raw_stride), (x, x_stride), bias = tokens_of(raw, 1), tokens_of(x, 1), bias.contiguous()
    steps, weighted = (torch.empty(x.shape) for _ in range(2))
    arguments = _ScanLayer(
        *(raw.data_ptr(), x.data_ptr(), bias.data_ptr(), None, steps.data_ptr(), weighted.data_ptr()),
        *(x.numel() // x.shape[-1], x.shape[-1], raw_stride, x_stride, 0),
    )
    library.required(code()).rowwise_time_steps(arguments, raw.dtype is torch.bfloat16, torch.get_num_threads())
    return steps, weighted


def skip_gate(y: Tensor, x: Tensor, skip: Tensor, gate: Tensor) -> Tensor:
    """One call for sum and gate."""
    require(y.shape == x.shape == gate.shape and skip.shape == x.shape[-1:], "y, x, skip and gate do not fit")
    (y, y_stride), (x, x_stride), (gate, gate_stride) = (tokens_of(z, 1) for z in (y, x, gate))
    skip, out = skip.contiguous(), torch.empty(gate.shape, dtype=gate.dtype)
    arguments = _ScanLayer(
        *(gate.data_ptr(), x.data_ptr(), skip.data_ptr(), y.data_ptr(), out.data_ptr(), None),
        *(x.numel() // x.shape[-1], x.shape[-1], gate_stride, x_stride, y_stride),
    )
    library.required(code()).rowwise_skip_gate(arguments, gate.dtype is torch.bfloat16, torch.get_num_threads())
    return out


@cache
def code() -> ctypes.CDLL | None:
    """The library of this operator, or None where native code cannot run."""
    arguments: dict[str, list[Any]] = {
        "rms_norm": [POINTER(_Norm)],
        "add_rms_norm": [POINTER(_Norm), c_void_p],
        "gated_rms_norm": [POINTER(_Norm)],
        "silu_mul": [c_void_p, c_void_p, c_int64, c_void_p, c_int64],
        "clamped_silu_mul": [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_double],
        "activate": [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64],
        "rotary_angles": [*[c_void_p] * 4, c_int64, c_int64, c_double],
        "rotate": [*[c_void_p] * 4, *[c_int64] * 4],
        "delta_inputs": [POINTER(_DeltaInputs)],
        "time_steps": [POINTER(_ScanLayer)],
        "skip_gate": [POINTER(_ScanLayer)],
    }
    signatures = {f"rowwise_{name}": [*types, c_int, c_int] for name, types in arguments.items()}
    return library.load_functions(SOURCE, signatures)
