"""Random numbers, penalties, filters, drawing and accepting in native code (native.cpp). See README.md.

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
from specmamba.kernels.sampling.reference import Filter, Strengths

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


def checked_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Two calls."""
    return argmax(logits), has_finite_max(logits)


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


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """One call: a row by itself, and of equal logits the lower id first."""
    logits, tokens, size = logits.contiguous(), tokens.contiguous(), logits.shape[-1]
    fits = tokens.shape == logits.shape[:-1] and tokens.dtype is torch.int64 and tokens.is_cpu
    require(fits and 0 <= num_top <= size and size > 0, "logits and tokens do not fit")
    own, top = torch.empty(tokens.shape), torch.empty(*tokens.shape, num_top)
    top_tokens = torch.empty(top.shape, dtype=torch.int64)
    library.required(code()).sampling_token_logprobs(
        *_pointers(logits, tokens, own, top, top_tokens),
        *(tokens.numel(), size, num_top, logits.dtype is torch.bfloat16, torch.get_num_threads()),
    )
    return own, top, top_tokens


def sample(
    logits: Tensor, temperature: Tensor, top_k: Filter, top_p: Filter, min_p: Filter, uniforms: Tensor
) -> Tensor:
    """One call; filters do not sort."""
    settings, sizes = _settings(logits, temperature, top_k, top_p, min_p)
    require(uniforms.shape == logits.shape[:2] and uniforms.dtype is torch.float32, "uniforms do not fit")
    logits, uniforms = logits.contiguous(), uniforms.contiguous()
    tokens = torch.empty(uniforms.shape, dtype=torch.int64)
    function = library.required(code()).sampling_sample
    function(*_pointers(logits, *settings, uniforms, tokens), *sizes)
    return tokens


def probabilities(logits: Tensor, temperature: Tensor, top_k: Filter, top_p: Filter, min_p: Filter) -> Tensor:
    """One call. 0 where a logit is NaN or +inf; all 0 where nothing can be drawn."""
    settings, sizes = _settings(logits, temperature, top_k, top_p, min_p)
    logits, probs = logits.contiguous(), torch.empty(logits.shape)
    function = library.required(code()).sampling_probabilities
    function(*_pointers(logits, *settings, probs), *sizes)
    return probs


def penalize(
    logits: Tensor, output_counts: Tensor, prompt_mask: Tensor, tokens: Tensor, ancestors: Tensor, strengths: Strengths
) -> Tensor:
    """One call, which reads and writes every logit once. The same results as PyTorch's form."""
    batch, nodes, size = logits.shape
    given = [x.contiguous() for x in (logits, output_counts, prompt_mask, tokens, ancestors, *strengths)]
    shapes = [logits.shape, *[(batch, size)] * 2, (batch, nodes), (batch, nodes, nodes), *[(batch,)] * 3]
    dtypes = [logits.dtype, torch.int32, torch.bool, torch.int64, torch.bool, *[torch.float32] * 3]
    fits = all(x.shape == shape and x.dtype is dtype for x, shape, dtype in zip(given, shapes, dtypes, strict=True))
    require(fits, "logits, histories and penalties do not fit")
    out = torch.empty(logits.shape)
    sizes = batch * nodes, nodes, size, logits.dtype is torch.bfloat16, torch.get_num_threads()
    library.required(code()).sampling_penalize(*_pointers(*given, out), *sizes)
    return out


def can_accept(probs: Tensor, draft_probs: Tensor | None, *uniforms: Tensor) -> bool:
    """Whether native code draws and accepts: float32 on the CPU, and uniforms of one dtype, float32 or float64."""
    given = [probs] if draft_probs is None else [probs, draft_probs]
    of_uniforms = {x.dtype for x in uniforms}
    return all(can_take(x) and x.dtype is torch.float32 for x in given) and (
        of_uniforms == {torch.float32} or of_uniforms == {torch.float64}
    )


def draw_children(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One call. A token that is not drawn is 0."""
    require(probs.dtype is uniforms.dtype is torch.float32, "probabilities and uniforms are float32")
    require(probs.shape[:-1] == uniforms.shape[:-1] and probs.shape[-1] > 0, "probabilities and uniforms do not fit")
    probs, uniforms = probs.contiguous(), uniforms.contiguous()
    tokens = torch.empty(uniforms.shape, dtype=torch.int64)
    is_drawn = torch.empty(uniforms.shape, dtype=torch.bool)
    size, k = probs.shape[-1], uniforms.shape[-1]
    sizes = probs.numel() // size, size, k, torch.get_num_threads()
    library.required(code()).sampling_draw_children(*_pointers(probs, uniforms, tokens, is_drawn), *sizes)
    return tokens, is_drawn


def residual_choice(
    probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    draft_probs: Tensor | None,
    max_children: int,
    accept_uniforms: Tensor,
    choice_uniforms: Tensor,
) -> Tensor:
    """One call. A child whose token is outside of the vocabulary is never accepted."""
    (batch, nodes, size), uniforms = probs.shape, (accept_uniforms, choice_uniforms)
    fits = all(x.shape == (batch, nodes) for x in (tokens, parents, *uniforms)) and size > 0
    fits = fits and (draft_probs is None or draft_probs.shape == probs.shape)
    require(fits and tokens.dtype is parents.dtype is torch.int64, "probabilities, trees and uniforms do not fit")
    require(can_accept(probs, draft_probs, *uniforms), "probabilities are float32, uniforms of one dtype")
    drafts = None if draft_probs is None else draft_probs.contiguous()
    given = [x.contiguous() for x in (tokens, parents, *uniforms)]
    probs, choice = probs.contiguous(), torch.empty(tokens.shape, dtype=torch.int64)
    library.required(code()).sampling_residual_choice(
        *_pointers(probs, drafts, *given, choice),
        *(batch * nodes, nodes, size, max_children, accept_uniforms.dtype is torch.float64, torch.get_num_threads()),
    )
    return choice


def finite(logits: Tensor) -> Tensor:
    """One call."""
    logits, out = logits.contiguous(), torch.empty(logits.shape)
    function = library.required(code()).sampling_finite
    function(*_pointers(logits, out), out.numel(), logits.dtype is torch.bfloat16)
    return out


def log(x: Tensor) -> Tensor:
    """One call."""
    require(x.dtype is torch.float32, "logarithms are of float32")
    x, out = x.contiguous(), torch.empty(x.shape)
    library.required(code()).sampling_log(*_pointers(x, out), out.numel())
    return out


def _settings(
    logits: Tensor, temperature: Tensor, top_k: Filter, top_p: Filter, min_p: Filter
) -> tuple[list[Filter], tuple[int, ...]]:
    """Settings as native code reads them, and its numbers."""
    batch, nodes, size = logits.shape
    settings = [None if x is None else x.contiguous() for x in (temperature, top_k, top_p, min_p)]
    dtypes = torch.float32, torch.int64, torch.float32, torch.float32
    fits = all(x is None or (x.shape == (batch,) and x.dtype is of) for x, of in zip(settings, dtypes, strict=True))
    require(fits and 0 < size < 2**31, "logits and settings do not fit")
    return settings, (batch * nodes, nodes, size, logits.dtype is torch.bfloat16, torch.get_num_threads())


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    return [None if x is None else x.data_ptr() for x in tensors]


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
        "sampling_token_logprobs": [*[c_void_p] * 5, *[c_int64] * 3, c_int, c_int],
        "sampling_sample": [*[c_void_p] * 7, *[c_int64] * 3, c_int, c_int],
        "sampling_probabilities": [*[c_void_p] * 6, *[c_int64] * 3, c_int, c_int],
        "sampling_penalize": [*[c_void_p] * 9, *[c_int64] * 3, c_int, c_int],
        "sampling_draw_children": [*[c_void_p] * 4, *[c_int64] * 3, c_int],
        "sampling_residual_choice": [*[c_void_p] * 7, *[c_int64] * 4, c_int, c_int],
        "sampling_finite": [*[c_void_p] * 2, c_int64, c_int],
        "sampling_log": [*[c_void_p] * 2, c_int64],
    }
    return library.load_functions(SOURCE, signatures)
