"""Draft trees for tests: named shapes and random ones, always topologically ordered with node 0 as the root."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from specmamba.core import TreeShape
from specmamba.draft.drafter import chain_shape, tree_shape

SHAPES = ("chain", "star", "binary", "bushy", "padded")


def random_parents(shape: str, nodes: int, rng: random.Random) -> list[int]:
    """Parents of one tree: ``bushy`` draws each parent uniformly, ``padded`` ends in nodes without a parent."""
    if shape == "chain":
        return [i - 1 for i in range(nodes)]
    if shape == "star":
        return [-1] + [0] * (nodes - 1)
    if shape == "binary":
        return [-1] + [(i - 1) // 2 for i in range(1, nodes)]
    if shape == "bushy":
        return [-1] + [rng.randrange(i) for i in range(1, nodes)]
    if shape == "padded":
        real = rng.randint(1, nodes)
        return [-1] + [rng.randrange(i) if i < real else -1 for i in range(1, nodes)]
    raise ValueError(f"unknown tree shape {shape!r}")


def batch_of_parents(shapes: tuple[str, ...], nodes: int, seed: int) -> Tensor:
    """One tree per entry of ``shapes`` -> parents [B, N] int64."""
    rng = random.Random(seed)
    return torch.tensor([random_parents(shape, nodes, rng) for shape in shapes], dtype=torch.int64)


def path_to(parents: list[int], node: int) -> list[int]:
    """Node indices from the root to ``node``."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def mask_of(parents: Tensor) -> Tensor:
    """Inclusive ancestor mask [B, N, N] bool, by walking up; independent of the op under test."""
    mask = torch.zeros(*parents.shape, parents.shape[1], dtype=torch.bool)
    for b, row in enumerate(parents.tolist()):
        for i in range(len(row)):
            mask[b, i, path_to(row, i)] = True
    return mask


def shape_of(parents: Sequence[list[int]]) -> TreeShape:
    """The shape of a batch of trees, as a drafter declares it: chains are declared as chains."""
    tensor = torch.tensor(list(parents))
    if all(tree == list(range(-1, len(tree) - 1)) for tree in parents):
        return chain_shape(len(parents), tensor.shape[1], torch.device("cpu"))
    return tree_shape(tensor, tensor.shape[1])


def real_nodes(parents: list[int]) -> list[int]:
    """The nodes of one tree that are no padding."""
    return [0, *(i for i in range(1, len(parents)) if parents[i] >= 0)]
