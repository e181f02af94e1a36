"""How far drafts are from what the target says, and the gradient of that, a slice of positions at a time.

One tensor of logits of a whole step has a number for every position and every token of the vocabulary: gigabytes with
150,000 tokens, and autograd would keep several. But the gradient of the cross entropy by the logits is known without
it, softmax times the target's mass less the target's distribution. So it is multiplied on to what is small while its
slice is there, and nothing of that size outlives the slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

STEP_WEIGHT = 0.8  # of a draft's loss, against that of the draft before it (EAGLE's training programs)
SLICE_NUMBERS = 1 << 24  # of one tensor of logits
TENSORS_AT_ONCE = 3  # of that size


@dataclass(frozen=True)
class Judgement:
    """Of S drafts in a row."""

    loss: Tensor  # [] float32, their weighted mean, in nats
    agreements: Tensor  # [S] float32, the share of entries whose likeliest token is the target's
    gradients: list[Tensor]  # S of [B, L, H], of the loss by the states


def slice_length(vocab_size: int) -> int:
    """Positions of one slice."""
    return max(1, SLICE_NUMBERS // vocab_size)


@torch.no_grad()
def judge(states: Sequence[Tensor], hidden: Tensor, weight: Tensor, output: Tensor, ids: Tensor | None) -> Judgement:
    """Cross entropy of every draft against the target's distribution, and how often the likeliest tokens agree.

    What the target gives to tokens that are never drafted counts for nothing: the rest is a position's weight.

    Args:
        states: S of [B, L, H], see ``Eagle3Head.states``; of step s (from 0) the first s entries do not count.
        hidden: [B, L, H] float32, the target's where the entries stand.
        weight: [D, H], the head's output matrix; its gradient is set.
        output: [V, H], the target's.
        ids: [D] int64, the tokens that are drafted; None: all.
    """
    batch, length, _ = hidden.shape
    num_steps, rows = len(states), hidden.flatten(0, 1)
    position = torch.arange(length, device=hidden.device).repeat(batch)
    importance = torch.tensor([STEP_WEIGHT**step for step in range(num_steps)], device=hidden.device)
    importance = importance / importance.sum()
    weight.grad = torch.zeros_like(weight)
    gradients = [torch.empty_like(x) for x in states]
    losses, agreements = (torch.zeros(num_steps, device=hidden.device) for _ in range(2))
    for start in range(0, len(rows), slice_length(len(output))):
        part = slice(start, start + slice_length(len(output)))
        target, likeliest = _of_target(rows[part], output, ids)
        for step, x in enumerate(states):
            counted = (position[part] >= step) / (batch * (length - step))
            of_draft, drafted, gradient = _of_draft(x.flatten(0, 1)[part], weight, target)
            agrees = (drafted if ids is None else ids[drafted]) == likeliest
            losses[step] += of_draft @ counted
            agreements[step] += agrees.float() @ counted
            gradient *= (counted * importance[step])[:, None]
            torch.mm(gradient, weight, out=gradients[step].view(len(rows), -1)[part])
            weight.grad.addmm_(gradient.T, x.flatten(0, 1)[part])
            del gradient
        del target
    return Judgement(losses @ importance, agreements, gradients)


def _of_target(hidden: Tensor, output: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """The target's probabilities of what is drafted [n, D], and its likeliest tokens [n]."""
    target = F.linear(hidden, output).softmax(-1)
    return target if ids is None else target[:, ids], target.argmax(-1)


def _of_draft(states: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The cross entropy [n], the likeliest drafts [n], and the gradient of the former by the logits [n, D]."""
    said = F.linear(states, weight).log_softmax(-1)
    entropy = -(target * said).sum(-1)
    likeliest = said.argmax(-1)
    return entropy, likeliest, said.exp_().mul_(target.sum(-1, keepdim=True)).sub_(target)
