"""Drawing of children and choosing behind them in Triton. See README.md, "On a GPU".

A program has one row of V tokens: its weights are read in chunks of BLOCK, and the masses of all blocks of 512
tokens stay in registers, [CHUNKS, PARTS]. What was taken off a row is computed again wherever the row is read.
"""

import triton
import triton.language as tl

from specmamba.kernels.sampling.triton_kernels import first_beyond

DRAWN_BLOCK: tl.constexpr = tl.constexpr(512)  # tokens whose mass is summed up in float32
LEAST: tl.constexpr = tl.constexpr(2.0**-110)  # less counts as no mass: no float32 may overflow when it is divided by


@triton.jit
def number_at(numbers, index, entry):
    """Entry ``entry`` of a vector with these indices."""
    return tl.sum(tl.where(index == entry, numbers, 0), 0)


@triton.jit
def load_residual(probs, drafts, ids, size, scales, children, index, rounds, removed, HAS_DRAFTS: tl.constexpr):
    """Weights of tokens behind so many refusals, and what the next child was drawn from, without removed children."""
    weight = tl.load(probs + ids, mask=ids < size, other=0.0)
    draft = weight
    if HAS_DRAFTS:
        draft = tl.load(drafts + ids, mask=ids < size, other=0.0)
        for i in range(rounds):
            weight = tl.maximum(weight - number_at(scales, index, i) * draft, 0.0)
    for i in range(removed):
        is_child = ids == number_at(children, index, i)
        weight, draft = tl.where(is_child, 0.0, weight), tl.where(is_child, 0.0, draft)
    return weight, draft


@triton.jit
def sum_blocks(
    probs, drafts, size, scales, children, index, rounds, removed,
    HAS_DRAFTS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Masses of a row's blocks [CHUNKS, PARTS] float32; of all of them and of the drafts, float64."""
    chunk = tl.arange(0, CHUNKS)
    masses = tl.zeros([CHUNKS, BLOCK // DRAWN_BLOCK], tl.float32)
    of_drafts = tl.zeros([1], tl.float64)
    for i in range(tl.cdiv(size, BLOCK)):
        ids = i * BLOCK + tl.arange(0, BLOCK)
        weight, draft = load_residual(
            probs, drafts, ids, size, scales, children, index, rounds, removed, HAS_DRAFTS
        )  # fmt: skip
        own = tl.sum(tl.reshape(weight, [BLOCK // DRAWN_BLOCK, DRAWN_BLOCK]), 1)
        masses = tl.where(chunk[:, None] == i, own[None, :], masses)
        if HAS_DRAFTS:
            of_drafts += tl.sum(draft.to(tl.float64), 0)
    total = tl.sum(tl.sum(masses.to(tl.float64), 1), 0)
    return masses, total, tl.sum(of_drafts, 0)


@triton.jit
def draw_token(
    masses, uniform, probs, drafts, size, scales, children, index, rounds, removed,
    HAS_DRAFTS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Invert the cumulative distribution in float64: the block, then the token in it."""
    COUNT: tl.constexpr = CHUNKS * (BLOCK // DRAWN_BLOCK)
    mass = tl.reshape(masses, [COUNT]).to(tl.float64)
    threshold = uniform.to(tl.float64) * tl.sum(mass, 0)
    block, blocks = first_beyond(mass, threshold, COUNT), tl.arange(0, COUNT)
    whole = number_at(mass, blocks, block)
    before = tl.sum(tl.where(blocks < block, mass, 0.0), 0)
    fraction = (threshold - before) / tl.where(whole > 0, whole, 1.0)
    ids = block * DRAWN_BLOCK + tl.arange(0, DRAWN_BLOCK)
    weight, _ = load_residual(probs, drafts, ids, size, scales, children, index, rounds, removed, HAS_DRAFTS)
    inside = weight.to(tl.float64)
    token = block * DRAWN_BLOCK + first_beyond(inside, fraction * tl.sum(inside, 0), DRAWN_BLOCK)
    return tl.minimum(token, size - 1)


@triton.jit(do_not_specialize=["num_draws"])
def children_kernel(
    probs, uniforms, tokens, is_drawn, size, stride, num_draws,
    BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Draw ``num_draws`` tokens of a row, each without those before it."""
    row, index = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    probs += row * stride
    scales, children = tl.zeros([BLOCK_K], tl.float32), tl.zeros([BLOCK_K], tl.int32)
    masses, _, _ = sum_blocks(probs, probs, size, scales, children, index, 0, 0, False, BLOCK, CHUNKS)
    block = tl.arange(0, CHUNKS)[:, None] * (BLOCK // DRAWN_BLOCK) + tl.arange(0, BLOCK // DRAWN_BLOCK)[None, :]
    for i in range(num_draws):
        at = row * num_draws + i
        total = tl.sum(tl.sum(masses.to(tl.float64), 1), 0)
        token = draw_token(
            masses, tl.load(uniforms + at), probs, probs, size, scales, children, index, 0, i, False, BLOCK, CHUNKS
        )  # fmt: skip
        tl.store(tokens + at, token.to(tl.int64))
        tl.store(is_drawn + at, total.to(tl.float32) > LEAST)
        children = tl.where(index == i, token, children)
        ids = token // DRAWN_BLOCK * DRAWN_BLOCK + tl.arange(0, DRAWN_BLOCK)
        left, _rest = load_residual(probs, probs, ids, size, scales, children, index, 0, i + 1, False)
        masses = tl.where(block == token // DRAWN_BLOCK, tl.sum(left, 0), masses)


@triton.jit(do_not_specialize=["nodes", "max_children"])
def residual_kernel(
    probs, tokens, parents, drafts, accept_uniforms, choice_uniforms, choices, nodes, size, stride, draft_stride,
    max_children, HAS_DRAFTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """The choice behind one node: an accepted child's token, or one of what their refusals left."""
    row, index, node = tl.program_id(0), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    first = row // nodes * nodes
    probs += row.to(tl.int64) * stride
    drafts += row.to(tl.int64) * draft_stride
    parent = tl.load(parents + first + node, mask=node < nodes, other=-1)
    is_child = (node < nodes) & (parent == row - first)
    count = tl.minimum(tl.sum(is_child.to(tl.int32), 0), max_children)
    scales, children = tl.zeros([BLOCK_K], tl.float32), tl.zeros([BLOCK_K], tl.int32)
    masses, total, of_drafts = sum_blocks(
        probs, drafts, size, scales, children, index, 0, 0, HAS_DRAFTS, BLOCK, CHUNKS
    )  # fmt: skip
    choice, tried, child = -1, 0, -1
    while (tried < count) & (choice < 0):
        child = tl.min(tl.where(is_child & (node > child), node, BLOCK_N), 0)
        token = tl.load(tokens + first + child).to(tl.int32)
        mass = total.to(tl.float32)
        at, _ = load_residual(probs, drafts, token, size, scales, children, index, tried, 0, HAS_DRAFTS)
        density, scale = tl.cast(1.0, tl.float64), tl.cast(0.0, tl.float32)
        if HAS_DRAFTS:
            own, of_all = tl.load(drafts + token), of_drafts.to(tl.float32)
            was_drawn = (own > 0) & (of_all > LEAST)
            of_all = tl.where(was_drawn, of_all, 1.0)
            density = tl.where(was_drawn, own.to(tl.float64) / of_all, 1.0)
            scale = tl.where(was_drawn, tl.div_rn(mass, of_all), 0.0)
        uniform = tl.load(accept_uniforms + first + child).to(tl.float64)
        choice = tl.where(uniform * density * mass < at, token, choice)
        scales, children = tl.where(index == tried, scale, scales), tl.where(index == tried, token, children)
        tried += 1
        if choice < 0:
            masses, total, of_drafts = sum_blocks(
                probs, drafts, size, scales, children, index, tried, tried, HAS_DRAFTS, BLOCK, CHUNKS
            )  # fmt: skip
    if choice < 0:
        rounds, removed = tried, tried
        if (total == 0) & (tried > 0):  # rounding, or chosen children, can empty a residual: the row without children
            rounds = 0
            masses, total, of_drafts = sum_blocks(
                probs, drafts, size, scales, children, index, rounds, removed, HAS_DRAFTS, BLOCK, CHUNKS
            )  # fmt: skip
        if (total == 0) & (tried > 0):  # they have all of it
            removed = 0
            masses, total, of_drafts = sum_blocks(
                probs, drafts, size, scales, children, index, rounds, removed, HAS_DRAFTS, BLOCK, CHUNKS
            )  # fmt: skip
        uniform = tl.load(choice_uniforms + row)
        choice = draw_token(
            masses, uniform, probs, drafts, size, scales, children, index, rounds, removed, HAS_DRAFTS, BLOCK, CHUNKS
        )  # fmt: skip
    tl.store(choices + row, tl.cast(choice, tl.int64))
