"""The training of a block head: the loss of the blocks behind random anchors of each window."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specmamba.train.block_head import BlockHead, write_block_head
from specmamba.train.trainer import (
    STEP_WEIGHT,
    DraftLoss,
    DraftTrainer,
    likeliest_of,
    of_draft,
    of_target,
    slice_length,
)

TOKENS_OF_ANCHOR = 4  # of a window: one token of so many is an anchor in a step


def num_anchors(length: int, block_size: int) -> int:
    """Anchors of one step in windows of ``length`` tokens: roots with a token before them and a block behind them."""
    return max(1, min(length - block_size, length // TOKENS_OF_ANCHOR))


@torch.no_grad()
def block_loss(
    states: Tensor, hidden: Tensor, output: Tensor, latents: Tensor | None = None, links: Tensor | None = None
) -> DraftLoss:
    """Compute the cross entropy of blocks against the target's distributions, its gradient, and the agreement.

    Args:
        states: [B, A, S, H] of ``BlockHead.states``.
        hidden: [B, A, S, H] float32, the target's in front of the tokens that are predicted.
        output: [V, H], the target's.
        latents: [B, A, S, R], rows of a Markov head's first matrix for the tokens above those that are predicted.
        links: [V, R], its second matrix; the gradient is set.

    Returns:
        ``gradients`` has one tensor [B, A, S, H], and one [B, A, S, R] where there are latents.
    """
    num_steps = states.shape[2]
    rows, of_rows = states.flatten(0, 2), hidden.flatten(0, 2)
    above = None if latents is None else latents.flatten(0, 2)
    steps = torch.arange(num_steps, device=states.device)
    importance = STEP_WEIGHT**steps
    share = (importance / importance.sum()).repeat(len(rows) // num_steps) * num_steps / len(rows)
    step = steps.repeat(len(rows) // num_steps)
    loss, agreements = torch.zeros((), device=states.device), torch.zeros(num_steps, device=states.device)
    gradient, of_latents = torch.empty_like(rows), None if above is None else torch.empty_like(above)
    if links is not None:
        links.grad = torch.zeros_like(links)
    for start in range(0, len(rows), slice_length(len(output))):
        part = slice(start, start + slice_length(len(output)))
        target, likeliest = of_target(of_rows[part], output, None)
        added = None if above is None or links is None else F.linear(above[part], links)
        entropy, drafted, by_logits = of_draft(rows[part], output, target, added)
        del added
        loss += entropy @ share[part]
        agreements.index_add_(0, step[part], (drafted == likeliest).float() * num_steps / len(rows))
        by_logits *= share[part, None]
        torch.mm(by_logits, output, out=gradient[part])
        if above is not None and links is not None and of_latents is not None:
            assert links.grad is not None
            torch.mm(by_logits, links, out=of_latents[part])
            links.grad.addmm_(by_logits.T, above[part])
        del target, by_logits
    gradients = [gradient.view_as(states)]
    if latents is not None and of_latents is not None:
        gradients.append(of_latents.view_as(latents))
    return DraftLoss(loss, agreements, gradients)


class BlockTrainer(DraftTrainer):
    """A run that trains a block head. Links between tokens are learnt from the text's own tokens above each draft."""

    head: BlockHead

    def write(self, folder: Path, layers: tuple[int, ...], max_positions: int) -> None:
        """Write the head."""
        write_block_head(folder, self.head, layers, max_positions)

    def _run_head(self, chosen: Tensor) -> tuple[Sequence[Tensor], DraftLoss]:
        """Run blocks behind random anchors of the chosen windows, and judge them."""
        tokens, features, hidden = self._windows_on_device(chosen)
        drafts, length = self.head.shape.num_drafts, tokens.shape[1]
        order = torch.randperm(length - drafts - 1, generator=self._order)[: num_anchors(length, drafts + 1)]
        anchors = (1 + order.sort().values).to(tokens.device)
        states = self.head.states(tokens, features.float(), anchors, self._embedding)
        before = anchors[:, None] + torch.arange(drafts, device=tokens.device)
        of_target, links = hidden[:, before].float(), self.head.markov_head
        if links is None:
            return [states], block_loss(states, of_target, self._output)
        latents = links.markov_w1(tokens[:, before])
        return [states, latents], block_loss(states, of_target, self._output, latents, links.markov_w2.weight)

    def _hits(self, chosen: Tensor) -> Tensor:
        """Which drafts of blocks behind every root are the text's tokens, in the chosen held-out window: [A, S]."""
        tokens, features, _ = self._windows_on_device(chosen, self._held_out)
        drafts, links = self.head.shape.num_drafts, self.head.markov_head
        anchors = torch.arange(1, tokens.shape[1] - drafts, device=tokens.device)
        states = self.head.states(tokens, features.float(), anchors, self._embedding)
        before = anchors[:, None] + torch.arange(drafts, device=tokens.device)
        rows = states[0].flatten(0, 1)
        if links is None:
            drafted = likeliest_of(rows, self._output)
        else:
            latents = links.markov_w1(tokens[0, before]).flatten(0, 1)
            drafted = likeliest_of(rows, self._output, latents, links.markov_w2.weight)
        return drafted.view(before.shape) == tokens[0, before + 1]
