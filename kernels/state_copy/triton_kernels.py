"""Row moves in Triton. See README.md."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["moves"])
def compact_kernel(
    buffer,  # [layers, rows, R, size]
    rows,  # [B]
    source,  # [B, J] contiguous
    target,  # [B, J] contiguous
    moves,
    size,
    layer_stride,
    row_stride,
    entry_stride,
    BLOCK_J: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Read a block of elements of all moved entries of one layer and row, then write it."""
    batch, layer = tl.program_id(1), tl.program_id(2)
    move, element = tl.arange(0, BLOCK_J), tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    source += batch * moves
    target += batch * moves
    from_entry = tl.load(source + move, mask=move < moves, other=0)
    to_entry = tl.load(target + move, mask=move < moves, other=0)
    # moves that change nothing, and the first one over again: most of them all
    is_first_again = (move > 0) & (from_entry == tl.load(source)) & (to_entry == tl.load(target))
    is_made = (move < moves) & (from_entry != to_entry) & (is_first_again == 0)
    if tl.max(is_made.to(tl.int32), 0) > 0:
        buffer += layer.to(tl.int64) * layer_stride + tl.load(rows + batch) * row_stride
        mask = is_made[:, None] & (element < size)[None, :]
        values = tl.load(buffer + from_entry[:, None] * entry_stride + element[None, :], mask=mask)
        tl.debug_barrier()  # another thread may write what this one reads
        tl.store(buffer + to_entry[:, None] * entry_stride + element[None, :], values, mask=mask)
