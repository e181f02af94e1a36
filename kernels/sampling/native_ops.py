"""Random numbers, argmax and unfiltered sampling in native code (native.cpp). See README.md.

At decode sizes PyTorch's operators cost more to call than to run, and its argmax of bfloat16 is slow at any size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specmamba.kernels.native import library
from specmamba.kernels.native.tensors import is_native, require
from specmamba.kernels.sampling.reference import Filter

SOURCE = Path(__file__).parent / "native.cpp"
_STREAM = 0xD1342543DE82EF95


def can_take(x: Tensor) -> bool:
    """Whether native code computes on logits x: float32 or bfloat16 on the CPU."""
    return is_native(x) and code() is not None


def can_draw(seeds: Tensor, positions: Tensor) -> bool:
    """Whether native code makes the random numbers of these counters."""
    return seeds.is_cpu and positions.is_cpu and code() is not None


def uniform(seeds: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """One call."""
    rows = positions.shape[0]
    require(seeds.shape == (rows,) and seeds.dtype is positions.dtype is torch.int64, "rows need an int64 seed each")
    seeds, positions = seeds.contiguous(), positions.contiguous()
    out = torch.empty(positions.shape)
    count, key = positions[0].numel() if rows else 0, stream * _STREAM & (1 << 64) - 1
    library.required(code()).sampling_uniform(seeds.data_ptr(), positions.data_ptr(), out.data_ptr(), rows, count, key)
    return out


def argmax(logits: Tensor) -> Tensor:
    """One call; a row that has only NaN gives 0."""
    return _of_rows(library.required(code()).sampling_argmax, logits, torch.int64)


def has_finite_max(logits: Tensor) -> Tensor:
    """One call."""
    return _of_rows(library.required(code()).sampling_has_finite_max, logits, torch.bool)


def likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """One call: a maximum, a sum and a choice of the k largest for each row."""
    logits, size = logits.contiguous(), logits.shape[-1]
    require(0 < k <= size, "so many tokens cannot be chosen")
    tokens = torch.empty(*logits.shape[:-1], k, dtype=torch.int64)
    logprobs = torch.empty(tokens.shape)
    library.required(code()).sampling_likeliest(
        *(x.data_ptr() for x in (logits, tokens, logprobs)),
        *(tokens.numel() // k, size, k, logits.dtype is torch.bfloat16, torch.get_num_threads()),
    )
    return tokens, logprobs


def sample(
    logits: Tensor, temperature: Tensor, top_k: Filter, top_p: Filter, min_p: Filter, uniforms: Tensor
) -> Tensor:
    """One call; filters must be None."""
    batch, nodes, size = logits.shape
    require(top_k is top_p is min_p is None, "native code has no filters")
    fits = temperature.shape == (batch,) and uniforms.shape == (batch, nodes) and size > 0
    require(fits and temperature.dtype is uniforms.dtype is torch.float32, "logits, settings and uniforms do not fit")
    logits, temperature, uniforms = logits.contiguous(), temperature.contiguous(), uniforms.contiguous()
    tokens = torch.empty(batch, nodes, dtype=torch.int64)
    library.required(code()).sampling_sample(
        *(x.data_ptr() for x in (logits, temperature, uniforms, tokens)),
        *(batch * nodes, nodes, size, logits.dtype is torch.bfloat16, torch.get_num_threads()),
    )
    return tokens


def _of_rows(function: Callable[..., None], logits: Tensor, dtype: torch.dtype) -> Tensor:
    logits, size = logits.contiguous(), logits.shape[-1]
    require(size > 0, "there is nothing to choose from")
    out = torch.empty(logits.shape[:-1], dtype=dtype)
    rows, is_bfloat16 = out.numel(), logits.dtype is torch.bfloat16
    function(logits.data_ptr(), out.data_ptr(), rows, size, is_bfloat16, torch.get_num_threads())
    return out


@cache
def code() -> ctypes.CDLL | None:
    """The library of this operator, or None where native code cannot run."""
    signatures = {
        "sampling_uniform": [*[c_void_p] * 3, c_int64, c_int64, c_uint64],
        "sampling_argmax": [*[c_void_p] * 2, c_int64, c_int64, c_int, c_int],
        "sampling_has_finite_max": [*[c_void_p] * 2, c_int64, c_int64, c_int, c_int],
        "sampling_likeliest": [*[c_void_p] * 3, *[c_int64] * 3, c_int, c_int],
        "sampling_sample": [*[c_void_p] * 4, *[c_int64] * 3, c_int, c_int],
    }
    return library.load_functions(SOURCE, signatures)
