"""Draft-tree bookkeeping, one node at a time: the specification of this op.

Nodes stand in topological order: parents[b, i] < i, and node 0 is the root with parent -1. Any other node with
parent -1 is a *padding node*: it fills a row up to N, is its own only ancestor and is never accepted.

Sources: token trees and their verification, arXiv 2305.09781, section 4. See README.md.
Parents are trusted: a parent that is not smaller than its node is not detected here.
"""

import torch
from torch import Tensor


def ancestors(parents: Tensor) -> Tensor:
    """Inclusive ancestor mask: parents [B, N] int64 -> bool [B, N, N], True where j is i or an ancestor of i."""
    batch, nodes = parents.shape
    mask = torch.zeros(batch, nodes, nodes, dtype=torch.bool, device=parents.device)
    for b in range(batch):
        for i in range(nodes):
            j = i
            while j >= 0:
                mask[b, i, j] = True
                j = int(parents[b, j])
    return mask


def depth(ancestors: Tensor) -> Tensor:
    """Steps below the root: ancestors [B, N, N] bool -> [B, N] int64; 0 for the root and for padding nodes."""
    batch, nodes, _ = ancestors.shape
    out = torch.zeros(batch, nodes, dtype=torch.int64, device=ancestors.device)
    for b in range(batch):
        for i in range(nodes):
            out[b, i] = sum(bool(seen) for seen in ancestors[b, i]) - 1
    return out


def conv_index(parents: Tensor, width: int) -> Tensor:
    """The last ``width`` inputs on every node's path: parents [B, N] int64 -> [B, N, W] int64, oldest first.

    The last entry is the node itself. Entries >= 0 are nodes; past the root the walk goes on into the inputs
    before the tree: -1 is the newest of them, -2 the one before. A padding node walks like a root.
    """
    batch, nodes = parents.shape
    index = torch.zeros(batch, nodes, width, dtype=torch.int64, device=parents.device)
    for b in range(batch):
        for i in range(nodes):
            position = i
            for w in reversed(range(width)):
                index[b, i, w] = position
                position = int(parents[b, position]) if position >= 0 else position - 1
    return index


def accepted_path(
    tokens: Tensor, parents: Tensor, ancestors: Tensor, target_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The path from the root to the deepest node whose tokens the target agrees with.

    tokens, parents, target_tokens [B, N] int64 (target_tokens[b, i]: the target's choice *after* node i),
    ancestors [B, N, N] bool. The root is accepted; node i > 0 is accepted when its parent is and
    tokens[i] == target_tokens[parent]; padding nodes never are. Of equally deep nodes the lowest index wins.

    Returns path [B, N] int64 (node indices from the root, the last one repeated), num_accepted [B] int64 (the
    root not counted), path_tokens [B, N+1] int64 (the accepted tokens, then the bonus token, repeated) and
    bonus [B] int64 (the target's choice after the last accepted node).
    """
    batch, nodes = tokens.shape
    path = torch.zeros(batch, nodes, dtype=torch.int64, device=tokens.device)
    num_accepted = torch.zeros(batch, dtype=torch.int64, device=tokens.device)
    path_tokens = torch.zeros(batch, nodes + 1, dtype=torch.int64, device=tokens.device)
    bonus = torch.zeros(batch, dtype=torch.int64, device=tokens.device)
    for b in range(batch):
        depth_of = {0: 0}  # accepted nodes only
        for i in range(1, nodes):
            parent = int(parents[b, i])
            if parent in depth_of and tokens[b, i] == target_tokens[b, parent]:
                depth_of[i] = depth_of[parent] + 1
        last = min(depth_of, key=lambda node: (-depth_of[node], node))
        # Topological order makes the ancestors, read in index order, the path itself.
        nodes_of_path = [i for i in range(nodes) if bool(ancestors[b, last, i])]
        chosen = [int(tokens[b, i]) for i in nodes_of_path[1:]]
        bonus[b] = target_tokens[b, last]
        num_accepted[b] = len(chosen)
        path[b] = torch.tensor(nodes_of_path + [last] * (nodes - len(nodes_of_path)))
        path_tokens[b] = torch.tensor(chosen + [int(bonus[b])] * (nodes + 1 - len(chosen)))
    return path, num_accepted, path_tokens, bonus


def commit_moves(path: Tensor, num_accepted: Tensor, node_offset: int, num_pending: Tensor) -> tuple[Tensor, Tensor]:
    """Which entry of a row's records goes where when its path is accepted.

    path [B, N] and num_accepted [B] int64 as from ``accepted_path``; the records of the nodes stand from entry
    node_offset on, those that are pending already are the first num_pending [B] int64.

    Returns source and target [B, N] int64: step s of the path goes from node_offset + path[b, s] to
    num_pending[b] + s. The steps behind the last accepted one repeat the move of step 0, so that every move can be
    made: a move that is made twice is made.
    """
    source, target = torch.zeros_like(path), torch.zeros_like(path)
    for b in range(path.shape[0]):
        for step in range(path.shape[1]):
            taken = step if step <= int(num_accepted[b]) else 0
            source[b, step] = node_offset + int(path[b, taken])
            target[b, step] = int(num_pending[b]) + taken
    return source, target


def kv_moves(path: Tensor, num_accepted: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Which KV slot goes where when a path is accepted.

    path [B, N] and num_accepted [B] int64 as from ``accepted_path``; slots [B, N] int64 of the nodes, in order.

    Returns source and target [B, N] int64: step s of the path goes from slots[b, path[b, s]] to slots[b, s]. The
    steps behind the last accepted one move slot 0, which is padding, onto itself.
    """
    source, target = torch.zeros_like(path), torch.zeros_like(path)
    for b in range(path.shape[0]):
        for step in range(int(num_accepted[b]) + 1):
            source[b, step] = slots[b, path[b, step]]
            target[b, step] = slots[b, step]
    return source, target
