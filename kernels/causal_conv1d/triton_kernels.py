"""Causal depthwise convolution in Triton. See README.md, "On a GPU", and ``triton_ops.py`` for the shapes."""

import triton
import triton.language as tl

from specmamba.kernels.rowwise.triton_kernels import silu


@triton.jit
def _bias_tile(bias, channels, is_channel, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Initial value of the sums, the bias or 0: [ROWS, CHANNELS] float32."""
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    if bias is not None:
        total += tl.load(bias + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def _gated(x, gate, at, mask, dtype: tl.constexpr):
    """Elements x of the inputs, times those of the gate at the same places if there is one, rounded to ``dtype``."""
    if gate is not None:
        x = x.to(tl.float32) * tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    return x.to(dtype)


@triton.jit
def _output(total, gate, at, mask):
    """The sums times the gate, or SiLU of the sums where there is none."""
    if gate is None:
        y = silu(total)
    else:
        y = total * tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def _move_window(source, source_stride, begin, target, target_stride, channels, is_channel, WIDTH: tl.constexpr):
    """Copy the WIDTH - 1 entries from ``begin`` on to the first ones of ``target``, oldest first.

    Both may be the same memory: no entry is read after it was overwritten, as targets never stand behind sources, and
    as no thread begins a step before all have read what the steps before it move. What was read before is over, too.
    """
    for j in tl.static_range(WIDTH - 1):
        x = tl.load(source + tl.cast(begin + j, tl.int64) * source_stride + channels, mask=is_channel)
        tl.store(
            target + tl.cast(j, tl.int64) * target_stride + channels, x.to(target.dtype.element_ty), mask=is_channel
        )
        tl.debug_barrier()


@triton.jit(do_not_specialize=["num_nodes", "node_offset", "index_stride_b"])
def tree_in_place_kernel(
    inputs,  # [B, N, C]
    in_gate,  # the same, or None
    gate,  # the same, or None
    conv_inputs,  # [rows, W - 1 + R, C]
    windows,  # [slots, W - 1, C]; None where folds is
    rows,  # [B]
    slots,  # [B]
    index,  # [B, N, W], taps side by side
    num_pending,  # [B] or None
    folds,  # [B] or None
    weight,  # [C, W]
    bias,  # [C] or None
    y,  # [B, N, C] contiguous
    num_nodes,
    num_channels,
    node_offset,
    inputs_stride_b,
    inputs_stride_n,
    row_stride,
    entry_stride,
    slot_stride,
    window_stride,
    index_stride_b,
    index_stride_n,
    weight_stride_c,
    weight_stride_w,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Convolve the nodes of trees over stored windows, and leave their inputs, gated if they are, as records."""
    b = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channels < num_channels
    slot = tl.load(slots + b).to(tl.int64)
    num_read = tl.where(slot == 0, 0, num_nodes)
    row = conv_inputs + tl.load(rows + b).to(tl.int64) * row_stride
    of_row = b.to(tl.int64) * inputs_stride_b
    inputs += of_row
    if gate is not None:
        in_gate += of_row
        gate += of_row
    index += b.to(tl.int64) * index_stride_b
    y += b.to(tl.int64) * num_nodes * num_channels
    first = WIDTH - 1 + node_offset  # entries from here on are nodes of this launch

    for start in range(0, num_nodes, BLOCK_N):
        nodes = start + tl.arange(0, BLOCK_N)
        is_node = nodes < num_nodes
        mask = is_node[:, None] & is_channel[None, :]
        is_read = mask & (nodes < num_read)[:, None]
        total = _bias_tile(bias, channels, is_channel, BLOCK_N, BLOCK_C)
        for w in tl.static_range(WIDTH):
            entry = tl.load(index + nodes * index_stride_n + w, mask=is_node, other=0)
            at = entry[:, None] * entry_stride + channels[None, :]
            old = tl.load(row + at, mask=is_read & (entry < first)[:, None], other=0.0).to(tl.float32)
            at = (entry - first)[:, None] * inputs_stride_n + channels[None, :]
            is_new = is_read & (entry >= first)[:, None]
            new = tl.load(inputs + at, mask=is_new, other=0.0)
            new = _gated(new, in_gate, at, is_new, conv_inputs.dtype.element_ty)
            taken = old + new.to(tl.float32)  # one of them is 0
            tap = tl.load(weight + channels * weight_stride_c + w * weight_stride_w, mask=is_channel, other=0.0)
            total += taken * tap.to(tl.float32)[None, :]
        of_nodes = nodes[:, None] * inputs_stride_n + channels[None, :]
        out = tl.where(is_read, _output(total, gate, of_nodes, is_read), 0.0)
        tl.store(y + nodes[:, None] * num_channels + channels[None, :], out, mask=mask)
        own = tl.load(inputs + of_nodes, mask=is_read, other=0.0)
        own = _gated(own, in_gate, of_nodes, is_read, conv_inputs.dtype.element_ty)
        at = (first + nodes).to(tl.int64)[:, None] * entry_stride + channels[None, :]
        tl.store(row + at, own, mask=is_read)

    if folds is not None:
        begin = node_offset
        if num_pending is not None:
            begin = tl.load(num_pending + b)
        if tl.load(folds + b) & (slot != 0):
            _move_window(
                row, entry_stride, begin, windows + slot * slot_stride, window_stride, channels, is_channel, WIDTH
            )
            _move_window(row, entry_stride, begin, row, entry_stride, channels, is_channel, WIDTH)


@triton.jit(do_not_specialize=["num_nodes", "index_stride_b"])
def tree_snapshots_kernel(
    x,  # [B, N, C]
    in_gate,  # the same, or None
    gate,  # the same, or None
    window,  # [B, W - 1, C]
    index,  # [B, N, W], taps side by side
    weight,  # [C, W]
    bias,  # [C] or None
    y,  # [B, N, C] contiguous
    windows,  # [B, N, W - 1, C] contiguous
    num_nodes,
    num_channels,
    x_stride_b,
    x_stride_n,
    window_stride_b,
    window_stride_w,
    index_stride_b,
    index_stride_n,
    weight_stride_c,
    weight_stride_w,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Convolve the nodes of trees, and leave the window after every node."""
    b = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    nodes = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_channel, is_node = channels < num_channels, nodes < num_nodes
    mask = is_node[:, None] & is_channel[None, :]
    x += b * x_stride_b
    if gate is not None:
        in_gate += b * x_stride_b
        gate += b * x_stride_b
    window += b * window_stride_b
    total = _bias_tile(bias, channels, is_channel, BLOCK_N, BLOCK_C)
    for w in tl.static_range(WIDTH):
        at = index + b * index_stride_b + nodes * index_stride_n + w
        entry = tl.load(at, mask=is_node, other=0)
        is_new, is_old = (entry >= WIDTH - 1)[:, None], (entry < WIDTH - 1)[:, None]
        at = entry[:, None] * window_stride_w + channels[None, :]
        old = tl.load(window + at, mask=mask & is_old, other=0.0).to(x.dtype.element_ty)
        at = (entry - (WIDTH - 1))[:, None] * x_stride_n + channels[None, :]
        new = tl.load(x + at, mask=mask & is_new, other=0.0)
        taken = tl.where(is_new, _gated(new, in_gate, at, mask & is_new, x.dtype.element_ty), old)
        tap = tl.load(weight + channels * weight_stride_c + w * weight_stride_w, mask=is_channel, other=0.0)
        total += taken.to(tl.float32) * tap.to(tl.float32)[None, :]
        if w > 0:
            at = ((b * num_nodes + nodes) * (WIDTH - 1) + w - 1)[:, None] * num_channels + channels[None, :]
            tl.store(windows + at, taken, mask=mask)
    out = _output(total, gate, nodes[:, None] * x_stride_n + channels[None, :], mask)
    tl.store(y + (b * num_nodes + nodes)[:, None] * num_channels + channels[None, :], out, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def extend_kernel(
    x,  # [B, L, C]
    in_gate,  # the same, or None
    gate,  # the same, or None
    windows,  # [slots, W - 1, C]
    slots,  # [B]
    lengths,  # [B]
    weight,  # [C, W]
    bias,  # [C] or None
    y,  # [B, L, C] contiguous
    num_tokens,
    num_channels,
    x_stride_b,
    x_stride_t,
    slot_stride,
    window_stride,
    weight_stride_c,
    weight_stride_w,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Convolve runs of tokens and advance their windows in place."""
    b = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    channels = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channels < num_channels
    slot = tl.load(slots + b).to(tl.int64)
    length = tl.where(slot == 0, 0, tl.load(lengths + b))
    is_real = (tokens < length)[:, None] & is_channel[None, :]
    x += b * x_stride_b
    if gate is not None:
        in_gate += b * x_stride_b
        gate += b * x_stride_b
    windows += slot * slot_stride
    total = _bias_tile(bias, channels, is_channel, BLOCK_T, BLOCK_C)
    for w in tl.static_range(WIDTH):
        source = tokens + (w - (WIDTH - 1))  # below 0: in the window
        is_old, is_new = (source < 0)[:, None], (source >= 0)[:, None]
        at = (source + (WIDTH - 1))[:, None] * window_stride + channels[None, :]
        old = tl.load(windows + at, mask=is_real & is_old, other=0.0).to(x.dtype.element_ty)
        at = source.to(tl.int64)[:, None] * x_stride_t + channels[None, :]
        new = tl.load(x + at, mask=is_real & is_new, other=0.0)
        taken = tl.where(is_old, old, _gated(new, in_gate, at, is_real & is_new, x.dtype.element_ty))
        tap = tl.load(weight + channels * weight_stride_c + w * weight_stride_w, mask=is_channel, other=0.0)
        total += taken.to(tl.float32) * tap.to(tl.float32)[None, :]
    at = (b * num_tokens + tokens)[:, None] * num_channels + channels[None, :]
    is_stored = (tokens < num_tokens)[:, None] & is_channel[None, :]
    out = _output(total, gate, tokens.to(tl.int64)[:, None] * x_stride_t + channels[None, :], is_real)
    tl.store(y + at, tl.where(is_real, out, 0.0), mask=is_stored)


@triton.jit
def shift_windows_kernel(
    x,  # [B, L, C]
    in_gate,  # the same, or None
    windows,  # [slots, W - 1, C]
    slots,  # [B]
    lengths,  # [B]
    num_channels,
    x_stride_b,
    x_stride_t,
    slot_stride,
    window_stride,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write the new windows, after the sums: the last W - 1 inputs of (window, the row's tokens without padding)."""
    b = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channels < num_channels
    slot, length = tl.load(slots + b).to(tl.int64), tl.load(lengths + b).to(tl.int64)
    if (slot != 0) & (length > 0):
        x += b * x_stride_b
        if in_gate is not None:
            in_gate += b * x_stride_b
        windows += slot * slot_stride
        for j in tl.static_range(WIDTH - 1):  # upwards: no entry is read after it was overwritten
            source = j + length - (WIDTH - 1)
            num_old = tl.where(source < 0, num_channels, 0)  # below 0: an entry of the old window, in all channels
            is_old, is_new = channels < num_old, is_channel & (channels >= num_old)
            old = tl.load(windows + (j + length) * window_stride + channels, mask=is_old, other=0.0)
            at = source * x_stride_t + channels
            new = tl.load(x + at, mask=is_new, other=0.0)
            moved = tl.where(is_old, old, _gated(new, in_gate, at, is_new, windows.dtype.element_ty))
            tl.store(windows + j * window_stride + channels, moved, mask=is_channel)
            tl.debug_barrier()  # a later step overwrites what another thread may still have to read in this one
