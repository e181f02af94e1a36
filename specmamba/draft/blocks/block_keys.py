"""Which keys the tokens of a block see: the context before its root, or a window of it, and the block itself."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.cache.access import tree_keys
from specmamba.cache.request_table import RequestTable
from specmamba.core import Batch
from specmamba.kernels.paged_attention import AttentionMetadata
from specmamba.models.base import KeyView


def keys_of_block(view: KeyView, table: RequestTable, batch: Batch, length: int) -> AttentionMetadata:
    """The keys of blocks of ``length`` tokens on the roots of a batch; no window is shorter than a block."""
    sees = torch.ones(length, length, dtype=torch.bool, device=batch.root_positions.device)
    sees = sees.tril() if view.is_causal else sees
    if view.window is None:
        seen = sees.expand(batch.size, -1, -1).contiguous()
        return tree_keys(table, batch, seen, batch.max_root_position + length)
    return _keys_in_window(view.window, sees, table, batch, length)


def _keys_in_window(window: int, sees: Tensor, table: RequestTable, batch: Batch, length: int) -> AttentionMetadata:
    """Attention has no windows, but does not care for the order of keys: rows of a table of its own have them.

    With a window of W tokens and a block of L, all tokens of the block see the last W - L positions before the root, as
    far as there are some: these come first in a row. The L - 1 positions before those are seen by some tokens of the
    block, as those of the block itself may be: both are entries of a tree behind them, with a mask.
    """
    root, device = batch.root_positions[:, None], batch.root_positions.device
    num_common, num_partial = root.clamp(max=window - length), length - 1
    num_keys = window - length + num_partial + length
    entry = torch.arange(num_keys, device=device) - num_common  # below 0: seen by all
    oldest = root - window + 1
    position = torch.where(
        entry < 0, root + entry, torch.where(entry < num_partial, oldest, root - num_partial) + entry
    )
    slots = table.slots_at(batch.row_index, position.clamp(min=0).minimum(root + num_partial))
    offset = torch.arange(num_partial, device=device)
    in_window = offset >= torch.arange(length, device=device)[:, None]
    partial = in_window & (oldest + offset >= 0)[:, None]
    row = torch.arange(1, batch.size + 1, device=device)
    return AttentionMetadata(
        torch.cat([torch.zeros_like(slots[:1]), slots]),  # row 0 is padding
        torch.where(batch.row_index > 0, row, 0),
        (num_common - 1).expand(-1, length),
        num_keys,
        roots=num_common[:, 0],
        seen=torch.cat([partial, sees.expand(batch.size, -1, -1)], 2),
    )
