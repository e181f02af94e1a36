"""Recurrences over chunks of 64 tokens with operands in 16 bits, as flash-linear-attention's kernels round them.

The formulas are those of the kernels' README files (WY form of the delta rule, arXiv 2412.06464, section 3.3; by key
channel arXiv 2510.26692, section 3). What is rounded was learned from the forward kernels of flash-linear-attention
(its repository's ``ops/gated_delta_rule``, ``ops/kda``, ``ops/simple_gla`` and ``ops/common``, read in November 2026):

- q, k and v are bfloat16, cumulated log decays and sums of all products float32;
- K K^T of the delta rule is a product of bfloat16 numbers. (I + L)^-1 is made in float32, by substitution in blocks of
  16 tokens; blocks are joined by products in tf32, or with decays by key channel in three of them, which count as
  exact here. It is stored in bfloat16;
- by key channel, scores between blocks of 16 tokens are products in tf32 of keys with decays, those inside a block sums
  in float32;
- beta v and beta e^G k are bfloat16 where the inverse meets them, and so are the results w and u;
- the state is float32 from chunk to chunk, and bfloat16 where w and q meet it, and so are scores and what is added.

Outputs are given before they are stored in bfloat16, which rounds a number by up to 2^-9 of itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 64
BLOCK = 16  # tokens whose system is solved by substitution
Rounding = Callable[[Tensor], Tensor]


def to_bf16(x: Tensor) -> Tensor:
    """The nearest bfloat16 number, as float32."""
    return x.bfloat16().float()


def to_tf32(x: Tensor) -> Tensor:
    """The nearest number of 11 significant bits, as float32; finite numbers alone."""
    bits = x.contiguous().view(torch.int32)
    to_even = (bits >> 13) & 1
    return ((bits + 0xFFF + to_even) & ~0x1FFF).view(torch.float32)


def to_fp32(x: Tensor) -> Tensor:
    """The number itself."""
    return x


def extend(tokens: tuple[Tensor, ...], state: Tensor, to_operand: Rounding) -> tuple[Tensor, Tensor]:
    """Run a text through a recurrence, a chunk after the other.

    Args:
        tokens: of one row and as many key heads as value heads: q, k [L, H, K], v [L, H, V], log decays g [L, H] or
            [L, H, K], and of the delta rule beta [L, H]; float32.
        state: [H, K, V] float32.
        to_operand: ``to_bf16``: as above; another one: what is rounded to bfloat16 there is rounded so.

    Returns:
        Outputs [L, H, V] and the state behind the last token, float32.
    """
    chunk: Callable[..., tuple[Tensor, Tensor]] = _channel_chunk
    if len(tokens) == 4:
        chunk = _add_chunk
    elif tokens[3].dim() == 2:
        chunk = _delta_chunk
    outputs, heads_first = [], [x.transpose(0, 1) for x in tokens]
    for first in range(0, len(tokens[0]), CHUNK):
        out, state = chunk(*(x[:, first : first + CHUNK] for x in heads_first), state, to_operand)
        outputs.append(out)
    return torch.cat(outputs, 1).transpose(0, 1), state


def _add_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, to: Rounding) -> tuple[Tensor, Tensor]:
    """Of Mamba2: what is added does not depend on the state."""
    path = g.cumsum(1)
    scores = (to(q) @ to(k).mT) * _decay(path).tril()
    out = (to(q) @ to(state)) * path.exp()[..., None] + to(scores) @ to(v)
    behind = (path[:, -1:] - path).exp()[..., None]
    return out, state * path[:, -1].exp()[:, None, None] + to(k).mT @ to(v * behind)


def _delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, to: Rounding
) -> tuple[Tensor, Tensor]:
    path, beta = g.cumsum(1), beta[..., None]
    decay = _decay(path)
    inverse = to(_inverse(((to(k) @ to(k).mT) * decay * beta).tril(-1), to_tf32 if to is to_bf16 else to))
    u, w = to(inverse @ to(beta * v)), to(inverse @ to(beta * path.exp()[..., None] * k))
    new = u - w @ to(state)
    scores = ((to(q) @ to(k).mT) * decay).tril()
    out = (to(q) @ to(state)) * path.exp()[..., None] + to(scores) @ to(new)
    behind = (path[:, -1:] - path).exp()[..., None]
    return out, state * path[:, -1].exp()[:, None, None] + to(k).mT @ to(new * behind)


def _channel_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, to: Rounding
) -> tuple[Tensor, Tensor]:
    path, beta = g.cumsum(1), beta[..., None]
    of_pairs = to_tf32 if to is to_bf16 else to
    inverse = to(_inverse((_pairs(to(k), to(k), path, of_pairs) * beta).tril(-1), to_fp32))
    u, w = to(inverse @ to(beta * v)), to(inverse @ to(beta * path.exp() * k))
    new = u - w @ to(state)
    scores = to(_pairs(to(q), to(k), path, of_pairs).tril())
    out = to(q * path.exp()) @ to(state) + scores @ to(new)
    return out, state * path[:, -1].exp()[..., None] + to(k * (path[:, -1:] - path).exp()).mT @ to(new)


def _decay(path: Tensor) -> Tensor:
    """e^(path_i - path_j) [H, C, C]; above the diagonal it is 1."""
    return (path[:, :, None] - path[:, None]).clamp(max=0).exp()


def _pairs(rows: Tensor, columns: Tensor, path: Tensor, to: Rounding) -> Tensor:
    """Sums over channels of rows_i columns_j e^(path_i - path_j), [H, C, C]; 0 where a later block would be read."""
    heads, size, _ = rows.shape
    out = rows.new_zeros(heads, size, size)
    for first in range(0, size, BLOCK):
        here, before = slice(first, min(first + BLOCK, size)), slice(0, first)
        start = path[:, first : first + 1]
        of_rows = to(rows[:, here] * (path[:, here] - start).exp())
        out[:, here, before] = of_rows @ to(columns[:, before] * (start - path[:, before]).exp()).mT
        between = (path[:, here, None] - path[:, None, here]).clamp(max=0).exp()
        out[:, here, here] = (rows[:, here, None] * columns[:, None, here] * between).sum(-1)
    return out


def _inverse(below: Tensor, to: Rounding) -> Tensor:
    """(I + L)^-1 of strictly lower L [H, C, C]: blocks on the diagonal by substitution, those below by products."""
    size = below.shape[1]
    blocks = [slice(first, min(first + BLOCK, size)) for first in range(0, size, BLOCK)]
    out = torch.zeros_like(below)
    for i, rows in enumerate(blocks):
        one = torch.eye(rows.stop - rows.start).expand(len(below), -1, -1)
        own = torch.linalg.solve_triangular(one + below[:, rows, rows], one, upper=False, unitriangular=True)
        out[:, rows, rows] = own
        for j, columns in enumerate(blocks[:i]):
            read = sum(to(below[:, rows, m]) @ to(out[:, m, columns]) for m in blocks[j:i])
            assert isinstance(read, Tensor)
            out[:, rows, columns] = -(to(own) @ to(read))
    return out
