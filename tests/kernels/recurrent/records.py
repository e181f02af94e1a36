"""Records of recurrent states for tests, whichever layer they come from."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specmamba.kernels.state_records import TreePlacement
from tests.kernels.rounding import tolerance
from tests.kernels.trees import batch_of_parents, mask_of, path_to

TOLERANCE = tolerance(terms=160)

# (Hk, Hv, K, V): equal heads, grouped heads, narrow and odd widths
HEADS = [(1, 1, 8, 8), (2, 4, 16, 24), (1, 3, 7, 5), (4, 4, 32, 32)]
WIDE_HEADS = [(2, 4, 64, 64), (1, 2, 128, 128), (2, 2, 100, 72), (1, 2, 128, 64), (1, 3, 33, 80), (2, 2, 16, 200)]


class Records(NamedTuple):
    """Record buffers of a batch, in the argument order of the ops."""

    k: Tensor  # [B, R, Hk, K]
    u: Tensor  # [B, R, Hv, V]
    decay: Tensor  # [B, R, Hv] or [B, R, Hv, K]

    def clone(self, dtype: torch.dtype = torch.float32) -> Records:
        return Records(*(x.to(dtype, copy=True) for x in self))


def make_state(batch: int, heads: tuple[int, int, int, int], seed: int) -> Tensor:
    """Checkpoints [B, Hv, K, V]."""
    return torch.randn(batch, *heads[1:], generator=torch.Generator().manual_seed(seed))


def make_records(
    batch: int,
    capacity: int,
    heads: tuple[int, int, int, int],
    num_pending: Tensor,
    seed: int,
    has_channels: bool = False,
) -> Records:
    """Plausible pending records; all the others hold finite rubbish that overflows if it is exponentiated.

    ``has_channels``: with a log decay for each key channel.
    """
    (hk, hv, key_dim, value_dim), gen = heads, torch.Generator().manual_seed(seed)
    k = torch.nn.functional.normalize(torch.randn(batch, capacity, hk, key_dim, generator=gen), dim=-1)
    u = torch.randn(batch, capacity, hv, value_dim, generator=gen)
    of_decay = (hv, key_dim) if has_channels else (hv,)
    g = -torch.nn.functional.softplus(torch.randn(batch, capacity, *of_decay, generator=gen) - 1)
    pending = torch.arange(capacity) < num_pending[:, None]
    return Records(
        torch.where(pending[..., None, None], k, 1e3),
        torch.where(pending[..., None, None], u, -1e3),
        torch.where(pending.view(batch, capacity, *[1] * len(of_decay)), g, 500.0),
    )


def check_rounds(
    make_tokens: Callable[[int, tuple[int, int, int, int], int], Any],
    recurrence: Callable[[Any, Tensor], tuple[Tensor, Tensor]],
    ops: ModuleType,
    of_records: ModuleType,
    checkpoint: Tensor,
    seed: int,
) -> None:
    """Rounds of verifying a random tree, accepting a random path and folding when it is due equal plain decoding.

    Args:
        make_tokens: inputs of ``ops.tree_verify`` as a named tuple, for a length, ``HEADS[1]`` and a seed.
        recurrence: outputs and last state of tokens and a state, in float64.
        ops: with the operator ``tree_verify``.
        of_records: with the operator ``fold``.
        checkpoint: [B, Hv, K, V], where the texts begin.
        seed: of tokens, trees and paths.
    """
    rng, heads, batch, nodes, node_offset, rounds = random.Random(seed), HEADS[1], len(checkpoint), 7, 12, 5
    has_channels = make_tokens(1, heads, 0).g.dim() == 4
    start, none = checkpoint.double(), torch.zeros(batch)
    records = make_records(batch, node_offset + nodes, heads, none, seed, has_channels)
    num_pending = torch.zeros(batch, dtype=torch.int64)
    accepted: list[list[Any]] = [[] for _ in range(batch)]  # every accepted token so far, per row
    for round_ in range(rounds):
        due = num_pending + nodes > node_offset
        checkpoint = of_records.fold(checkpoint, *records, torch.where(due, num_pending, 0))
        num_pending = torch.where(due, 0, num_pending)
        parents = batch_of_parents(("bushy", "binary"), nodes, seed=10 * seed + round_)
        tokens = make_tokens(nodes, heads, 100 * seed + round_)
        out = ops.tree_verify(*tokens, checkpoint, records, TreePlacement(num_pending, node_offset, mask_of(parents)))
        for b in range(batch):
            path = path_to(parents[b].tolist(), rng.randrange(nodes))
            accepted[b].append([x[b : b + 1, path].double() for x in tokens])
            history = type(tokens)(*(torch.cat(parts, 1) for parts in zip(*accepted[b], strict=True)))
            want, want_state = recurrence(history, start[b : b + 1])
            torch.testing.assert_close(out[b, path].double(), want[0, -len(path) :], **TOLERANCE)
            moved = slice(int(num_pending[b]), int(num_pending[b]) + len(path))
            for x in records:
                x[b, moved] = x[b, [node_offset + i for i in path]]
            num_pending[b] += len(path)
            now = of_records.fold(checkpoint, *records, num_pending)
            torch.testing.assert_close(now[b].double(), want_state[0], **TOLERANCE)
