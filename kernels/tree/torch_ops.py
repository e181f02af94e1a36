"""Draft trees in vectorised PyTorch: no loop over requests or nodes. See README.md."""

import torch
from torch import Tensor


def ancestors(parents: Tensor) -> Tensor:
    """Repeated squaring of the parent relation."""
    num_nodes = parents.shape[1]
    nodes = torch.arange(num_nodes, device=parents.device)
    reach = (parents[..., None] == nodes) | (nodes[:, None] == nodes)
    for _ in range((num_nodes - 1).bit_length()):
        steps = reach.float()
        reach = (steps @ steps) > 0
    return reach


def depth(ancestors: Tensor) -> Tensor:
    """The number of ancestors."""
    return ancestors.sum(-1) - 1


def conv_index(parents: Tensor, width: int) -> Tensor:
    """One gather of parents per input."""
    slot = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    slots = [slot]
    for _ in range(width - 1):
        slot = torch.where(slot >= 0, parents.gather(1, slot.clamp(min=0)), slot - 1)
        slots.append(slot)
    return torch.stack(slots[::-1], -1)


def accepted_path(
    tokens: Tensor, parents: Tensor, ancestors: Tensor, target_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The longest path without a disagreement, by masks."""
    num_nodes = tokens.shape[1]
    if num_nodes == 1:
        zeros = torch.zeros_like(tokens)
        return zeros, torch.zeros_like(tokens[:, 0]), target_tokens.expand(-1, 2), target_tokens[:, 0]
    nodes = torch.arange(num_nodes, device=tokens.device)
    agrees = (tokens == target_tokens.gather(1, parents.clamp(min=0))) & (parents >= 0)
    agrees = agrees | (nodes == 0)
    is_accepted = ~(ancestors & ~agrees[:, None]).any(-1)
    path_length = ancestors.sum(-1)
    # the deepest accepted node; of several, the first
    leaf = (torch.where(is_accepted, path_length, 0) * num_nodes - nodes).argmax(-1, keepdim=True)
    on_path = ancestors.gather(1, leaf[..., None].expand(-1, 1, num_nodes)).squeeze(1)
    path = torch.where(on_path, nodes, num_nodes).sort(-1).values  # parents come before children
    path = torch.where(path == num_nodes, leaf, path)
    num_accepted = path_length.gather(1, leaf).squeeze(1) - 1
    bonus = target_tokens.gather(1, leaf)
    drafts = torch.where(nodes[1:] <= num_accepted[:, None], tokens.gather(1, path[:, 1:]), bonus)
    return path, num_accepted, torch.cat([drafts, bonus, bonus], 1), bonus.squeeze(1)


def commit_moves(path: Tensor, num_accepted: Tensor, node_offset: int, num_pending: Tensor) -> tuple[Tensor, Tensor]:
    """Moves of all steps, those behind the accepted path redirected."""
    steps = torch.arange(path.shape[1], device=path.device)
    taken = torch.where(steps <= num_accepted[:, None], steps, 0)
    return node_offset + path.gather(1, taken), num_pending[:, None] + taken


def kv_moves(path: Tensor, num_accepted: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Moves of all steps, those behind the accepted path redirected."""
    steps = torch.arange(path.shape[1], device=path.device)
    is_accepted = steps <= num_accepted[:, None]
    return torch.where(is_accepted, slots.gather(1, path), 0), torch.where(is_accepted, slots, 0)
