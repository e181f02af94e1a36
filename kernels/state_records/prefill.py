"""Long prompts of 16-bit models: launches over chunks of tokens, for a part of the prompt at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specmamba.kernels.gpu import launch, num_blocks
from specmamba.kernels.state_records import triton_prefill as kernels
from specmamba.kernels.state_records.tiles import CHUNK, chunk_constants, chunks_tile, outputs_tile, states_tile
from specmamba.kernels.state_records.triton_ops import block

SHORT = 2 * CHUNK  # tokens up to which there is too little to do side by side: one launch instead of four or five
MAX_KEYS = 128  # of a state that stays in registers
# tokens of all rows whose chunks are in memory at once: 192 MiB for 16 and 32 heads of 128 x 128, more by channel
PART = 2048


Sizes = tuple[int, int, int, str]  # keys, values, value heads of a key head; parts of products


class Places(NamedTuple):
    """Where states are: pool [slots, Hv, K, V], slots [B] int64, and how many tokens rows have, [B] int64."""

    states: Tensor
    slots: Tensor
    lengths: Tensor


class Chunks(NamedTuple):
    """What kernels leave to each other, of some chunks of each row: parts of bfloat16; C tokens, K and V padded."""

    keys: Tensor  # [B, Hk, chunks, 2, C, K]; decays by channel: [B, Hv, ...], with the decay behind each token
    grams: Tensor  # [B, Hk, chunks, 2, C, C] float32: Q K^T, K K^T; decays by channel: [B, Hv, ...], with decays
    solutions: Tensor | None  # [B, Hv, chunks, 2, C, C] of the chunk's system; None: there is none
    weights: Tensor | None  # [B, Hv, chunks, 2, C, K] of the state in updates; None: these do not depend on it
    updates: Tensor  # [B, Hv, chunks, 2, C, V]
    scores: Tensor  # [B, Hv, chunks, 2, C, C]
    before: Tensor  # [B, Hv, chunks, 2, K, V], the state before each chunk
    decays: Tensor  # [B, Hv, chunks, 2, C] float32: up to each token, and behind it; by channel: [B, Hv, chunks, K]
    state_queries: Tensor | None  # [B, Hv, chunks, 2, C, K] with decays by channel up to each token; None: by head
    state_keys: Tensor | None  # the same of keys

    @property
    def num_chunks(self) -> int:
        """Of each row."""
        return self.keys.shape[2]

    @classmethod
    def of(cls, k: Tensor, v: Tensor, count: int, has_system: bool, by_channel: bool) -> Chunks:
        """Memory, k [B, L, Hk, K] and v [B, L, Hv, V]."""
        keys, values, of_v = block(k.shape[3]), block(v.shape[3]), v.shape[:3:2]
        of_k = of_v if by_channel else k.shape[:3:2]

        def parts(of: torch.Size, rows: int, columns: int) -> Tensor:
            return k.new_empty(*of, count, 2, rows, columns, dtype=torch.bfloat16)

        return cls(
            parts(of_k, CHUNK, keys),
            k.new_empty(*of_k, count, 2, CHUNK, CHUNK),
            parts(of_v, CHUNK, CHUNK) if has_system else None,
            parts(of_v, CHUNK, keys) if has_system else None,
            parts(of_v, CHUNK, values),
            parts(of_v, CHUNK, CHUNK),
            parts(of_v, keys, values),
            k.new_empty(*of_v, count, keys) if by_channel else k.new_empty(*of_v, count, 2, CHUNK),
            *(parts(of_v, CHUNK, keys) if by_channel else None for _ in range(2)),
        )


def is_long(num_tokens: int, key_dim: int) -> bool:
    """Whether a call has enough tokens for several launches, and heads that their tiles can hold."""
    return num_tokens > SHORT and key_dim <= MAX_KEYS


def prefill_in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    places: Places,
    parts: str,
    prepare: Callable[[Chunks, int, int], None],
    has_system: bool,
    by_channel: bool = False,
) -> None:
    """Fill ``out`` and advance the states in their slots; padding and rows of slot 0 get zeros, and touch no state.

    Args:
        q, k: [B, L, Hk, K] float32, the last dimension dense.
        v: [B, L, Hv, V] float32, of which the shape alone is used.
        out: [B, L, Hv, V] float32, contiguous.
        places: states of any float dtype, the last dimension dense.
        parts: of products, as in ``triton_kernels.product``.
        prepare: the operator's own kernel, called with the memory of a part of the prompt, its first token and its
            number of chunks: it fills weights, updates, scores and decays of chunks that have tokens.
        has_system: updates depend on each other and on the state: there are weights, and K K^T is needed.
        by_channel: decays are, so that nothing is the same for value heads of a key head: ``prepare`` fills all of the
            memory but ``before``.
    """
    (batch, num_tokens, heads, value_dim), key_dim, states = v.shape, k.shape[3], places.states
    count = min(max(1, PART // (batch * CHUNK)), num_blocks(num_tokens, CHUNK))
    chunks, work = Chunks.of(k, v, count, has_system, by_channel), None
    if count * CHUNK < num_tokens and states.dtype is not torch.float32:  # a state is rounded once, at the end
        work = torch.empty(batch, *states.shape[1:], dtype=torch.float32, device=states.device)
    sizes = key_dim, value_dim, heads // k.shape[2], parts
    of_chunks = key_dim, value_dim, heads // chunks.keys.shape[1], parts
    for first in range(0, num_tokens, count * CHUNK):
        now = min(count, num_blocks(num_tokens - first, CHUNK))
        if not by_channel:
            _multiply_keys(chunks, places, (q, k), first, now, sizes)
        prepare(chunks, first, now)
        _run_states(chunks, places, work, first, of_chunks)
        _read_outputs(chunks, places, q, out, first, now, sizes)


def _multiply_keys(
    chunks: Chunks, places: Places, queries_and_keys: tuple[Tensor, Tensor], first: int, now: int, sizes: Sizes
) -> None:
    """Products of keys and queries of ``now`` chunks, and keys in parts."""
    (q, k), kernel, tile, (batch, key_heads) = (
        queries_and_keys,
        kernels.grams_kernel,
        chunks_tile(*sizes[:2]),
        chunks.keys.shape[:2],
    )
    constants = chunk_constants(kernel, tile, *sizes, HAS_SYSTEM=chunks.weights is not None)
    launch(
        *(kernel, (now, key_heads, batch), tile, constants),
        *(q, k, chunks.keys, chunks.grams, places.slots, places.lengths, first, chunks.num_chunks),
        *(*q.stride()[:3], *k.stride()[:3]),
    )


def _run_states(chunks: Chunks, places: Places, work: Tensor | None, first: int, sizes: Sizes) -> None:
    """From chunk to chunk: the states before each, and the updates behind these."""
    kernel, tile, (batch, heads) = kernels.states_kernel, states_tile(*sizes[:2]), chunks.before.shape[:2]
    c, by_channel = chunks, chunks.state_keys is not None
    constants = chunk_constants(kernel, tile, *sizes, BY_CHANNEL=by_channel)
    launch(
        *(kernel, (num_blocks(sizes[1], tile.values), heads, batch), tile, constants),
        *(places.states, work, c.keys, c.weights, c.updates, c.before, c.decays, places.slots, places.lengths),
        *(first, c.num_chunks, *places.states.stride()[:3]),
    )


def _read_outputs(chunks: Chunks, places: Places, q: Tensor, out: Tensor, first: int, now: int, sizes: Sizes) -> None:
    """Outputs of ``now`` chunks, from the states before them and their updates."""
    kernel, tile, (batch, heads) = kernels.outputs_kernel, outputs_tile(*sizes[:2]), chunks.before.shape[:2]
    launch(
        *(kernel, (now * num_blocks(sizes[1], tile.values), heads, batch), tile, chunk_constants(kernel, tile, *sizes)),
        *(q, chunks.state_queries, out, chunks.updates, chunks.scores, chunks.before, chunks.decays),
        *(places.slots, places.lengths),
        *(first, out.shape[1], chunks.num_chunks, *q.stride()[:3]),
    )
