"""Many pairs are sorted by counting, in Triton: three launches, none of whose programs waits for another.

A pair's place in a stable sort by expert is the number of pairs of lower experts, of its own expert in blocks before
its own, and of its own expert before it in its block. See README.md.
"""

import triton
import triton.language as tl

from specmamba.kernels.moe.triton_kernels import copy_row


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs(
    experts,  # [P] int64, of all pairs
    counts,  # [blocks, E] int32
    num_pairs,
    num_experts,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """How many of BLOCK_P neighbouring pairs each expert has; a program has one block of pairs."""
    block, e = tl.program_id(0), tl.arange(0, BLOCK_E)
    pair = block * BLOCK_P + tl.arange(0, BLOCK_P)
    expert = load_experts(experts + pair, pair < num_pairs, num_experts)
    of_block = counts + block.to(tl.int64) * num_experts
    tl.store(of_block + e, tl.histogram(expert, BLOCK_E, mask=pair < num_pairs), mask=e < num_experts)


@triton.jit(do_not_specialize=["num_blocks"])
def sum_counts(
    counts,  # [blocks, E] int32
    before,  # [blocks, E] int32
    totals,  # [E] int32
    num_blocks,
    num_experts,
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """An expert's pairs in the blocks before each, and in all of them; a program has EXPERTS neighbouring experts."""
    e = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        at = block.to(tl.int64)[:, None] * num_experts + e[None, :]
        is_there = (block < num_blocks)[:, None] & (e < num_experts)[None, :]
        count = tl.load(counts + at, mask=is_there, other=0)
        tl.store(before + at, total[None, :] + tl.cumsum(count, 0) - count, mask=is_there)
        total += tl.sum(count, 0)
    tl.store(totals + e, total, mask=e < num_experts)


@triton.jit(do_not_specialize=["num_pairs"])
def place_pairs(
    x,  # [T, K]
    experts,  # [P] int64, of all pairs
    before,  # [blocks, E] int32
    totals,  # [E] int32
    rows,  # [P, K]
    places,  # [P] int64
    ends,  # [E] int32
    num_pairs,
    num_chosen,
    num_experts,
    width,
    x_stride,
    rows_stride,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A program copies the row of one pair to its place; those after the last pair sum up to one expert's end each."""
    program, e = tl.program_id(0), tl.arange(0, BLOCK_E)
    total = tl.load(totals + e, mask=e < num_experts, other=0)
    if program < num_pairs:
        expert = load_experts(experts + program, True, num_experts)
        block = program // BLOCK_P
        other = block * BLOCK_P + tl.arange(0, BLOCK_P)
        is_before = other < program
        is_same = is_before & (load_experts(experts + other, is_before, num_experts) == expert)
        place = tl.sum(tl.where(e < expert, total, 0)) + tl.sum(is_same.to(tl.int32))
        place += tl.load(before + block.to(tl.int64) * num_experts + expert)
        tl.store(places + program, place.to(tl.int64))
        copy_row(x, rows, program // num_chosen, place, width, x_stride, rows_stride, BLOCK_K)
    else:
        expert = program - num_pairs
        tl.store(ends + expert, tl.sum(tl.where(e <= expert, total, 0)))


@triton.jit
def load_experts(at, is_pair, num_experts):
    """Experts of pairs, int32. What is none is taken for the nearest: places stay among the rows whatever is stored."""
    expert = tl.load(at, mask=is_pair, other=0)
    return tl.minimum(tl.maximum(expert, 0), num_experts - 1).to(tl.int32)
