"""Static draft trees and the file they are kept in: written by ``specmamba tune tree`` or by hand."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specmamba.config import MAX_DRAFT_TOKENS
from specmamba.errors import ConfigError

MAX_RANK = 63


class StaticTree(BaseModel):
    """A topology by (depth, rank): node i is the ``ranks[i]``-th likeliest child (0 first) of node ``parents[i]``.

    Node 0 is the root, with parent -1 and rank 0. A tree of the root alone drafts nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parents: tuple[int, ...]
    ranks: tuple[Annotated[int, Field(ge=0, le=MAX_RANK)], ...]
    max_batch_size: Annotated[int | None, Field(ge=1, description="for batches up to this size; none: any")] = None

    @model_validator(mode="after")
    def _is_a_tree(self) -> StaticTree:
        parents, ranks = self.parents, self.ranks
        if len(parents) != len(ranks):
            raise ValueError(f"{len(parents)} parents, but {len(ranks)} ranks: every node needs both")
        if not parents or parents[0] != -1 or ranks[0] != 0:
            raise ValueError("node 0 is the root: its parent must be -1 and its rank 0")
        if len(parents) > MAX_DRAFT_TOKENS:
            raise ValueError(f"{len(parents)} nodes are too many: at most {MAX_DRAFT_TOKENS}, root included")
        seen: dict[tuple[int, int], int] = {}
        for node, edge in enumerate(zip(parents[1:], ranks[1:], strict=True), start=1):
            if edge[0] < 0:
                raise ValueError(f"node {node} has parent {edge[0]}: only node 0 is a root")
            if edge[0] >= node:
                why = "itself" if edge[0] == node else "a later node, or there is a cycle"
                raise ValueError(
                    f"the parent of node {node} is {edge[0]}: {why}; list every parent before its children"
                )
            if edge in seen:
                raise ValueError(f"nodes {seen[edge]} and {node} are both child {edge[1]} of node {edge[0]}")
            seen[edge] = node
        return self

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def is_greedy_chain(self) -> bool:
        """Whether every node is the likeliest child of the one before it, which needs no tree to draft."""
        return self.parents == tuple(range(-1, self.num_nodes - 1)) and not any(self.ranks)

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; 0 for the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)


class TreeFile(BaseModel):
    """Trees by batch size, the smallest first; batches above the largest use the last tree."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["specmamba-tree/1"] = "specmamba-tree/1"
    trees: Annotated[tuple[StaticTree, ...], Field(min_length=1)]
    note: str = ""  # where the trees come from

    @model_validator(mode="after")
    def _sizes_rise(self) -> TreeFile:
        sizes = [tree.max_batch_size for tree in self.trees]
        if any(size is None for size in sizes[:-1]):
            raise ValueError("only the last tree may be without max_batch_size: those after it would never be used")
        known = [size for size in sizes if size is not None]
        if any(later <= earlier for earlier, later in pairwise(known)):
            raise ValueError(f"max_batch_size must rise from tree to tree, not {known}")
        return self

    @property
    def max_nodes(self) -> int:
        return max(tree.num_nodes for tree in self.trees)

    def for_batch(self, batch_size: int) -> StaticTree:
        """The tree for a batch of this size."""
        fits = (tree for tree in self.trees if tree.max_batch_size is None or tree.max_batch_size >= batch_size)
        return next(fits, self.trees[-1])


def read_tree_file(path: Path) -> TreeFile:
    """Read and check a tree file.

    Raises:
        ConfigError: it cannot be read, or what is in it is no tree; the message says which node is wrong.
    """
    try:
        return TreeFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--speculative-tree: {path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        problem = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"--speculative-tree: {path}: {where + ': ' if where else ''}{problem}") from None
