"""Drawing drafts and accepting them by their probabilities, in vectorised PyTorch. See README.md."""

import torch
from torch import Tensor

from specmamba.kernels.sampling.torch_ops import blocks_of, draw, draw_from_blocks

LEAST_MASS = 2.0**-110  # less counts as none: no float32 may overflow when it is divided by a mass


def draw_children(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw several different tokens from each distribution, one after the other.

    Each draw inverts the cumulative distribution of what the draws before it left.

    Args:
        probs: [B, F, V] float32, need not be normalised.
        uniforms: [B, F, k] float32 in [0, 1).

    Returns:
        tokens [B, F, k] int64, and is_drawn [B, F, k] bool: False where no mass was left; the token is then any index.
    """
    blocks = blocks_of(probs.clone())
    masses = blocks.sum(-1)
    tokens, is_drawn = [], []
    for uniform in uniforms.unbind(-1):
        is_drawn.append(masses.sum(-1) > LEAST_MASS)
        token = draw_from_blocks(blocks, masses, uniform)[..., None]
        blocks.flatten(-2).scatter_(-1, token, 0)
        block = token // blocks.shape[-1]
        left = blocks.gather(-2, block[..., None].expand(*block.shape, blocks.shape[-1]))
        masses.scatter_(-1, block, left.sum(-1))
        tokens.append(token.squeeze(-1))
    return torch.stack(tokens, -1).clamp_(max=probs.shape[-1] - 1), torch.stack(is_drawn, -1)


def residual_choice(
    probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    draft_probs: Tensor | None,
    max_children: int,
    accept_uniforms: Tensor,
    choice_uniforms: Tensor,
) -> Tensor:
    """Choose a token after every node: an accepted child's where there is one, else one that no child has.

    Multi-round speculative sampling (arXiv 2302.01318, algorithm 2; for several children arXiv 2305.09781, section
    4.3; drawn without replacement, arXiv 2402.14160): each choice is distributed as ``probs``, provided that the
    uniforms are independent of each other and of the drafts.

    Args:
        probs: [B, N, V] float32, the target's distribution after each node.
        tokens, parents: [B, N] int64; siblings have different tokens and are tried in order of nodes. A node other
            than the first with parent -1 is nobody's child.
        draft_probs: [B, N, V] float32, what the children of each node were drawn from, without replacement; rows of
            nodes without children are not looked at. A child without mass in what the children before it left was
            chosen, not drawn; without draft_probs all were.
        max_children: no node has more. (Those beyond would not be tried; the choices' distribution is right all the
            same.)
        accept_uniforms: [B, N] float32, of the node that is tried.
        choice_uniforms: [B, N] float32, of the node after which is chosen; used where no child is accepted.

    Returns:
        [B, N] int64.
    """
    if parents.shape[1] == 1:
        return draw(probs, choice_uniforms)
    children = _children(parents, min(max_children, parents.shape[1] - 1))
    residual, q = probs.clone(), None
    if draft_probs is not None:
        q = draft_probs.where((children >= 0).any(-1, keepdim=True), 0)
    mass = residual.sum(-1)
    choice = torch.full_like(tokens, -1)
    for child in children.unbind(-1):
        exists, child = child >= 0, child.clamp(min=0)
        token, uniform = tokens.gather(1, child), accept_uniforms.gather(1, child).double()
        if q is None:
            accepts = uniform * mass < _at(residual, token)
        else:
            q_token, q_mass = _at(q, token), q.sum(-1)
            is_drawn = exists & (q_token > 0) & (q_mass > LEAST_MASS)
            density = torch.where(is_drawn, q_token.double() / q_mass, 1)
            accepts = uniform * density * mass < _at(residual, token)
            scale = torch.where(is_drawn, mass / q_mass, 0)  # the residual stays as it is, without normalisation
            residual.addcmul_(q, scale[..., None], value=-1).clamp_(min=0)
            _remove(q, token, exists)
        choice = torch.where(exists & accepts & (choice < 0), token, choice)
        _remove(residual, token, exists)
        mass = residual.sum(-1)
    if q is not None:  # rounding can empty a residual: then probs without the children
        residual.addcmul_(probs, (mass == 0)[..., None])
        for child in children.unbind(-1):
            _remove(residual, tokens.gather(1, child.clamp(min=0)), child >= 0)
    return torch.where(choice >= 0, choice, _draw_or_else(residual, probs, choice_uniforms))


def sibling_rank(parents: Tensor) -> Tensor:
    """How many children of the same parent come before each node; [B, N] int64 from parents [B, N]."""
    return (parents[:, :, None] == parents[:, None]).tril(-1).sum(-1)


def _children(parents: Tensor, max_children: int) -> Tensor:
    """The children of every node, in order; [B, N, max_children] int64, -1 where there are fewer."""
    batch, num_nodes = parents.shape
    rank = sibling_rank(parents)
    nowhere = num_nodes * max_children
    entry = torch.where((parents >= 0) & (rank < max_children), parents * max_children + rank, nowhere)
    nodes = torch.arange(num_nodes, device=parents.device).expand_as(parents)
    table = parents.new_full((batch, nowhere + 1), -1).scatter_(1, entry, nodes)
    return table[:, :-1].reshape(batch, num_nodes, max_children)


def _at(weights: Tensor, token: Tensor) -> Tensor:
    return weights.gather(-1, token[..., None]).squeeze(-1)


def _remove(weights: Tensor, token: Tensor, exists: Tensor) -> None:
    """Take the mass of a token [B, N] out of weights [B, N, V], in place, where it exists."""
    weights.scatter_(-1, token[..., None], torch.where(exists, 0, _at(weights, token))[..., None])


def _draw_or_else(weights: Tensor, others: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from weights [B, N, V], or from others where weights are empty."""
    blocks = blocks_of(weights)
    masses = blocks.sum(-1)
    token = draw_from_blocks(blocks, masses, uniforms)
    return torch.where((masses > 0).any(-1), token, draw(others, uniforms)).clamp_(max=weights.shape[-1] - 1)
