"""Mixtures of experts in Triton. See README.md."""

import triton
import triton.language as tl

from specmamba.kernels.linear.triton_kernels import dot_codes, dot_rows, store_rows


@triton.jit(do_not_specialize=["num_pairs"])
def dispatch(
    x,  # [T, K]
    experts,  # [P] int64, of all pairs
    rows,  # [P, K]
    places,  # [P] int64
    ends,  # [E] int32
    num_pairs,
    num_chosen,
    width,
    x_stride,
    rows_stride,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A program copies the row of one pair to its place; those after the last pair count for one expert each."""
    program = tl.program_id(0)
    if program < num_pairs:
        place = count_before(experts, tl.load(experts + program), program, num_pairs, BLOCK_P)
        tl.store(places + program, place.to(tl.int64))
        copy_row(x, rows, program // num_chosen, place, width, x_stride, rows_stride, BLOCK_K)
    else:
        expert = program - num_pairs
        tl.store(ends + expert, count_before(experts, expert + 1, 0, num_pairs, BLOCK_P))


@triton.jit
def copy_row(x, rows, token, place, width, x_stride, rows_stride, BLOCK_K: tl.constexpr):
    """rows[place] = x[token]."""
    of_token, to = x + token.to(tl.int64) * x_stride, rows + place.to(tl.int64) * rows_stride
    for first in range(0, width, BLOCK_K):
        column = first + tl.arange(0, BLOCK_K)
        tl.store(to + column, tl.load(of_token + column, mask=column < width), mask=column < width)


@triton.jit
def count_before(experts, expert, pair, num_pairs, BLOCK_P: tl.constexpr):
    """How many pairs a stable sort by expert puts before this pair of this expert; int32."""
    counts = tl.zeros((BLOCK_P,), tl.int32)
    for first in range(0, num_pairs, BLOCK_P):
        other = first + tl.arange(0, BLOCK_P)
        of_other = tl.load(experts + other, mask=other < num_pairs, other=0)
        is_before = (of_other < expert) | ((of_other == expert) & (other < pair))
        counts += (is_before & (other < num_pairs)).to(tl.int32)
    return tl.sum(counts)


@triton.jit
def multiply(
    x,  # [P, K], sorted by expert
    weight,  # [E, N, K], of x's type or int8
    scale,  # [E, N] float32; None: the weight is as it is
    ends,  # [E] int32
    y,  # [P, N]
    num_experts,
    N,
    K,
    x_stride,
    expert_stride,
    weight_stride,
    scale_stride,
    y_stride,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """y[p] = W[expert of p] x[p]: a program has BLOCK_N outputs of up to BLOCK_M neighbouring rows of one expert.

    Along the second axis there are as many programs as any groups of P pairs can need; those left over do nothing.
    """
    expert, first, end = find_rows(ends, tl.program_id(1), num_experts, BLOCK_E, BLOCK_M)
    if first < end:
        outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = first + tl.arange(0, BLOCK_M)
        has_output, has_row = outputs < N, rows < end
        inputs = x + rows.to(tl.int64)[:, None] * x_stride
        weights = weight + expert.to(tl.int64) * expert_stride + outputs.to(tl.int64)[:, None] * weight_stride
        sums = dot_rows(inputs, has_row, weights, has_output, K, BLOCK_M, BLOCK_N, BLOCK_K, IS_EVEN, IS_WIDE)
        scales = scale
        if scale is not None:
            scales = scale + expert.to(tl.int64) * scale_stride
        store_rows(y, rows, has_row, y_stride, outputs, has_output, sums, scales)


@triton.jit(do_not_specialize=["offset"])
def multiply_codes(
    x,  # [P, K], sorted by expert
    codes,  # [E, steps, N, BLOCK_K] uint8
    scale,  # [E, groups, N] float16
    minimum,  # [E, groups, N] float16 or None
    factor,  # [E, N] float32
    table,  # [2] int64 or None
    ends,  # [E] int32
    y,  # [P, N]
    num_experts,
    N,
    K,
    offset,
    x_stride,
    expert_stride,
    scale_stride,
    step_stride,
    group_stride,
    y_stride,
    BLOCK_E: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_E4M3: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """``multiply`` with the experts' matrices in codes."""
    expert, first, end = find_rows(ends, tl.program_id(1), num_experts, BLOCK_E, BLOCK_M)
    if first < end:
        outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = first + tl.arange(0, BLOCK_M)
        has_output, has_row = outputs < N, rows < end
        inputs = x + rows.to(tl.int64)[:, None] * x_stride
        of_expert = expert.to(tl.int64)
        minima = minimum
        if minimum is not None:
            minima = minimum + of_expert * scale_stride
        sums = dot_codes(
            inputs, has_row, codes + of_expert * expert_stride, scale + of_expert * scale_stride, minima, table,
            outputs, has_output, K, offset, step_stride, group_stride,
            BITS, GROUP, IS_E4M3, BLOCK_M, BLOCK_N, BLOCK_K, IS_EVEN, IS_WIDE,
        )  # fmt: skip
        store_rows(y, rows, has_row, y_stride, outputs, has_output, sums, factor + of_expert * N)


@triton.jit
def find_rows(ends, block, num_experts, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of the block-th block of rows, the block's first row, the expert's end; 0, 0, 0: it has no expert."""
    e = tl.arange(0, BLOCK_E)
    end = tl.load(ends + e, mask=e < num_experts, other=0)
    start = tl.load(ends + e - 1, mask=(e > 0) & (e < num_experts), other=0)
    blocks = (end - start + BLOCK_M - 1) // BLOCK_M
    until = tl.cumsum(blocks, 0)
    is_it = (until > block) & (until - blocks <= block)
    first = start + (block - until + blocks) * BLOCK_M
    # exactly one expert, or none, is it
    return tl.sum(tl.where(is_it, e, 0)), tl.sum(tl.where(is_it, first, 0)), tl.sum(tl.where(is_it, end, 0))


@triton.jit
def combine(
    y,  # [P, N], sorted by expert
    places,  # [P] int64
    weights,  # [T, k] float32
    out,  # [T, N]
    N,
    y_stride,
    weights_stride,
    out_stride,
    NUM_CHOSEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[t] = sum_j weights[t, j] y[place of (t, j)], in ascending order of j; a program has columns of a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_N,), tl.float32)
    for j in tl.static_range(NUM_CHOSEN):
        place = tl.load(places + token * NUM_CHOSEN + j)
        said = tl.load(y + place * y_stride + column, mask=column < N, other=0.0)
        sums += tl.load(weights + token * weights_stride + j) * said.to(tl.float32)
    tl.store(out + token * out_stride + column, sums.to(out.dtype.element_ty), mask=column < N)


@triton.jit
def route(
    scores,  # [T, E] float32
    experts,  # [T, k] int64
    weights,  # [T, k] float32
    num_experts,
    scores_stride,
    NUM_CHOSEN: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The k likeliest experts of a token, the lower of equal ones first, and their shares; NaN ranks last."""
    token, e, j = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    score = tl.load(scores + token * scores_stride + e, mask=e < num_experts, other=float("-inf"))
    rank = tl.where(score == score, score, float("-inf"))
    power = tl.exp(score - tl.max(rank, 0))
    is_left = e < num_experts
    chosen, powers = tl.zeros((BLOCK_K,), tl.int32), tl.zeros((BLOCK_K,), tl.float32)
    for i in range(NUM_CHOSEN):
        best = tl.max(tl.where(is_left, rank, float("-inf")), 0)
        expert = tl.min(tl.where(is_left & (rank == best), e, BLOCK_E), 0)
        is_left = is_left & (e != expert)
        chosen = tl.where(j == i, expert, chosen)
        powers = tl.where(j == i, tl.sum(tl.where(e == expert, power, 0.0), 0), powers)
    total = tl.sum(power, 0)
    if RENORMALISE:
        total = tl.where(total == total, tl.sum(powers, 0), total)  # NaN of any expert is NaN for all
    to = token * NUM_CHOSEN + j
    tl.store(experts + to, chosen.to(tl.int64), mask=j < NUM_CHOSEN)
    tl.store(weights + to, powers / total, mask=j < NUM_CHOSEN)
