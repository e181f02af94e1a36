"""The training of a DFlash head: the loss of the blocks behind random anchors of each window."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specmamba.train.block_head import BlockHead, write_block_head
from specmamba.train.trainer import STEP_WEIGHT, DraftLoss, DraftTrainer, of_draft, of_target, slice_length

TOKENS_OF_ANCHOR = 4  # of a window: one token of so many is an anchor in a step


def num_anchors(length: int, block_size: int) -> int:
    """Anchors of one step in windows of ``length`` tokens: roots with a token before them and a block behind them."""
    return max(1, min(length - block_size, length // TOKENS_OF_ANCHOR))


@torch.no_grad()
def block_loss(states: Tensor, hidden: Tensor, output: Tensor) -> DraftLoss:
    """Compute the cross entropy of blocks against the target's distributions, its gradient, and the agreement.

    Args:
        states: [B, A, S, H] of ``BlockHead.states``.
        hidden: [B, A, S, H] float32, the target's in front of the tokens that are predicted.
        output: [V, H], the target's.

    Returns:
        ``gradients`` has one tensor [B, A, S, H].
    """
    num_steps = states.shape[2]
    rows, of_rows = states.flatten(0, 2), hidden.flatten(0, 2)
    steps = torch.arange(num_steps, device=states.device)
    importance = STEP_WEIGHT**steps
    share = (importance / importance.sum()).repeat(len(rows) // num_steps) * num_steps / len(rows)
    step = steps.repeat(len(rows) // num_steps)
    loss, agreements = torch.zeros((), device=states.device), torch.zeros(num_steps, device=states.device)
    gradient = torch.empty_like(rows)
    for start in range(0, len(rows), slice_length(len(output))):
        part = slice(start, start + slice_length(len(output)))
        target, likeliest = of_target(of_rows[part], output, None)
        entropy, drafted, by_logits = of_draft(rows[part], output, target)
        loss += entropy @ share[part]
        agreements.index_add_(0, step[part], (drafted == likeliest).float() * num_steps / len(rows))
        by_logits *= share[part, None]
        torch.mm(by_logits, output, out=gradient[part])
        del target, by_logits
    return DraftLoss(loss, agreements, [gradient.view_as(states)])


class BlockTrainer(DraftTrainer):
    """A run that trains a DFlash head."""

    head: BlockHead

    def write(self, folder: Path, layers: tuple[int, ...], max_positions: int) -> None:
        """Write the head."""
        write_block_head(folder, self.head, layers, max_positions)

    def _run_head(self, chosen: Tensor) -> tuple[Sequence[Tensor], DraftLoss]:
        """Run blocks behind random anchors of the chosen windows, and judge them."""
        tokens, features, hidden = self._windows_on_device(chosen)
        block, length = self.head.shape.block_size, tokens.shape[1]
        order = torch.randperm(length - block, generator=self._order)[: num_anchors(length, block)]
        anchors = (1 + order.sort().values).to(tokens.device)
        states = self.head.states(tokens, features.float(), anchors, self._embedding)
        before = anchors[:, None] + torch.arange(block - 1, device=tokens.device)
        return [states], block_loss(states, hidden[:, before].float(), self._output)
