"""Draft trees in Triton: one program a tree, one lane a node. See README.md."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["nodes", "parents_stride"])
def ancestors_kernel(parents, mask, nodes, parents_stride, BLOCK_N: tl.constexpr):
    """Walk up from all nodes at once; the ancestors of a node are the bits of an integer."""
    tree = tl.program_id(0)
    row, column = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_N)
    node = tl.where(row < nodes, row, -1)
    seen = tl.zeros([BLOCK_N], tl.int64)
    while tl.max(node, 0) >= 0:
        bit = tl.full([BLOCK_N], 1, tl.int64) << tl.maximum(node, 0).to(tl.int64)
        seen |= tl.where(node >= 0, bit, 0)
        node = parent_of(parents + tree * parents_stride, node)
    is_ancestor = (seen[:, None] >> column[None, :].to(tl.int64)) & 1
    inside = (row[:, None] < nodes) & (column[None, :] < nodes)
    tl.store(mask + (tree * nodes + row[:, None]) * nodes + column[None, :], is_ancestor.to(tl.int1), mask=inside)


@triton.jit
def parent_of(parents, node):
    """The parents of nodes (int32; -1: none). One that is not smaller than its node counts as none: walks end."""
    parent = tl.load(parents + node, mask=node >= 0, other=-1)
    return tl.where((parent >= 0) & (parent < node), parent, -1).to(tl.int32)


@triton.jit(do_not_specialize=["nodes", "tree_stride", "row_stride"])
def depth_kernel(mask, depths, nodes, tree_stride, row_stride, BLOCK_N: tl.constexpr):
    """Count the ancestors of every node."""
    tree = tl.program_id(0)
    row = tl.arange(0, BLOCK_N)
    is_ancestor = load_mask(mask + tree * tree_stride, nodes, row_stride, BLOCK_N)
    tl.store(depths + tree * nodes + row, (tl.sum(is_ancestor, 1) - 1).to(tl.int64), mask=row < nodes)


@triton.jit
def load_mask(mask, nodes, row_stride, BLOCK_N: tl.constexpr):
    """A tree's ancestor mask [BLOCK_N, BLOCK_N] int32; 0 outside the tree."""
    row, column = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_N)[None, :]
    return tl.load(mask + row * row_stride + column, mask=(row < nodes) & (column < nodes), other=0).to(tl.int32)


@triton.jit(do_not_specialize=["nodes", "parents_stride"])
def conv_index_kernel(parents, index, nodes, width, parents_stride, BLOCK_N: tl.constexpr):
    """Walk up from all nodes at once, and on into the inputs before the root."""
    tree = tl.program_id(0)
    row = tl.arange(0, BLOCK_N)
    position = tl.where(row < nodes, row, -1)
    for step in range(width):
        entry = index + (tree * nodes + row) * width + (width - 1 - step)
        tl.store(entry, position.to(tl.int64), mask=row < nodes)
        position = tl.where(position >= 0, parent_of(parents + tree * parents_stride, position), position - 1)


@triton.jit(
    do_not_specialize=["nodes", "tokens_stride", "parents_stride", "tree_stride", "row_stride", "targets_stride"]
)
def accepted_path_kernel(
    tokens, parents, mask, targets, path, num_accepted, path_tokens, bonus, nodes, tokens_stride, parents_stride,
    tree_stride, row_stride, targets_stride, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Find the deepest accepted node, and write its ancestors down at their depths."""
    tree = tl.program_id(0)
    tokens, targets = tokens + tree * tokens_stride, targets + tree * targets_stride
    mask += tree * tree_stride
    row, column = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_N)
    parent = parent_of(parents + tree * parents_stride, tl.where(column < nodes, column, -1))
    choice = tl.load(targets + parent, mask=parent >= 0, other=0)
    token = tl.load(tokens + column, mask=column < nodes, other=0)
    disagrees = ((parent < 0) | (token != choice)) & (column > 0)

    is_ancestor = load_mask(mask, nodes, row_stride, BLOCK_N)
    length = tl.sum(is_ancestor, 1)
    is_accepted = (tl.sum(is_ancestor * disagrees[None, :].to(tl.int32), 1) == 0) & (row < nodes)
    # of the deepest nodes the first: the root is one of them at least
    best = tl.max(tl.where(is_accepted, length * BLOCK_N + (BLOCK_N - 1 - row), 0), 0)
    leaf, steps = BLOCK_N - 1 - best % BLOCK_N, best // BLOCK_N

    is_on_path = tl.load(mask + leaf * row_stride + row, mask=row < nodes, other=0).to(tl.int1)
    tl.store(path + tree * nodes + length - 1, row.to(tl.int64), mask=is_on_path)
    last = tl.full([BLOCK_N], 0, tl.int64) + leaf
    tl.store(path + tree * nodes + row, last, mask=(row >= steps) & (row < nodes))

    draft = tl.load(tokens + row, mask=is_on_path, other=0)
    path_tokens += tree * (nodes + 1)
    tl.store(path_tokens + length - 2, draft, mask=is_on_path & (row > 0))
    gained = tl.load(targets + leaf)
    tl.store(path_tokens + row, tl.zeros([BLOCK_N], tl.int64) + gained, mask=(row >= steps - 1) & (row < nodes))
    tl.store(path_tokens + nodes, gained)
    tl.store(num_accepted + tree, (steps - 1).to(tl.int64))
    tl.store(bonus + tree, gained)


@triton.jit(do_not_specialize=["nodes", "node_offset", "path_stride"])
def commit_moves_kernel(
    path, num_accepted, num_pending, source, target, nodes, node_offset, path_stride, BLOCK_N: tl.constexpr
):
    """Entries of records; steps that are not taken repeat the first."""
    tree = tl.program_id(0)
    step = tl.arange(0, BLOCK_N)
    taken = tl.where(step <= tl.load(num_accepted + tree), step, 0)
    node = tl.load(path + tree * path_stride + taken, mask=step < nodes, other=0)
    tl.store(source + tree * nodes + step, node_offset + node, mask=step < nodes)
    tl.store(target + tree * nodes + step, tl.load(num_pending + tree) + taken, mask=step < nodes)


@triton.jit(do_not_specialize=["nodes", "path_stride", "slots_stride"])
def kv_moves_kernel(path, num_accepted, slots, source, target, nodes, path_stride, slots_stride, BLOCK_N: tl.constexpr):
    """KV slots; steps that are not taken move slot 0 onto itself."""
    tree = tl.program_id(0)
    slots += tree * slots_stride
    step = tl.arange(0, BLOCK_N)
    is_taken = (step <= tl.load(num_accepted + tree)) & (step < nodes)
    node = tl.load(path + tree * path_stride + step, mask=is_taken, other=0)
    tl.store(source + tree * nodes + step, tl.load(slots + node, mask=is_taken, other=0), mask=step < nodes)
    tl.store(target + tree * nodes + step, tl.load(slots + step, mask=is_taken, other=0), mask=step < nodes)
