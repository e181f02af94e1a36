"""The nodes of the prefix cache's radix tree, the walk of a text through them, and the results of match and insert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from specmamba.cache.kv_pool import Pages

Tokens = NDArray[np.int64]
TokenSlots = NDArray[np.int64]
MissReason = Literal["never_stored", "evicted", "page_grid", "salt"]
MISS_REASONS: tuple[MissReason, ...] = get_args(MissReason)

NOTHING: NDArray[np.int64] = np.empty(0, dtype=np.int64)
NOTHING.flags.writeable = False
MAX_EVICTED_CHILDREN = 256


@dataclass(eq=False, slots=True, repr=False)
class Node:
    """An edge of the tree and its lower end. Nodes are compared by identity.

    The KV covers positions start..end-1; the recurrent state, if the node has one, is the one after ``end`` tokens.
    """

    parent: Node | None  # None: a root, or a node that was removed from the tree
    key: Tokens  # [end - start], tokens of the edge; empty for roots only
    slots: TokenSlots  # [end - start], token slots of their KV
    pages: Pages  # the pages of these slots without repeats; the node is a holder of them
    start: int
    end: int
    children: dict[int, Node] = field(default_factory=dict)  # by the first token of their edge
    state_slot: int | None = None  # None: a tombstone, or a root
    users: int = 0  # KV locks taken at this node itself
    kv_locks: int = 0  # KV locks taken at this node and at all nodes below it
    state_locks: int = 0
    last_access: int = 0  # value of the cache's clock, which counts accesses
    state_access: int = 0
    hits: int = 0  # requests whose match ended at this node
    evicted: dict[int, None] = field(default_factory=dict)  # first tokens of evicted children, oldest first
    lost_state: bool = False  # the node had a state that was evicted or given away
    is_spare: bool = False  # its state was left where texts may part, and no request has gone on from it yet

    def __repr__(self) -> str:
        state = "tombstone" if self.state_slot is None else f"state {self.state_slot}"
        return f"<{type(self).__name__} [{self.start}:{self.end}) {state}>"

    @property
    def is_useless(self) -> bool:
        """Whether this is an unlocked leaf without a state, from which no request can continue. False for roots."""
        return self.end > 0 and not (self.children or self.kv_locks) and self.state_slot is None

    def remember_evicted(self, first_token: int) -> None:
        """Record that a child with this first token was evicted, so that a later miss there reports it."""
        self.evicted[first_token] = None
        if len(self.evicted) > MAX_EVICTED_CHILDREN:
            del self.evicted[next(iter(self.evicted))]

    def path(self) -> Iterator[Node]:
        """Iterate over this node, its parent and so on; the root comes last."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(eq=False, slots=True, repr=False)
class Root(Node):
    """Start of all texts of one salt of one tenant.

    It has no tokens and no state, and is kept while it has children or locks.
    """

    extra_key: str | None = None
    tenant: str | None = None


def text_of(node: Node) -> tuple[Tokens, Root]:
    """Return the tokens from the root to the end of a node, and the root."""
    path = list(node.path())
    root = path[-1]
    assert isinstance(root, Root)
    return np.concatenate([each.key for each in path[::-1]]), root


def new_root(extra_key: str | None, tenant: str | None = None) -> Root:
    """Return a root without children."""
    return Root(None, NOTHING, NOTHING, NOTHING, 0, 0, extra_key=extra_key, tenant=tenant)


@dataclass(frozen=True, slots=True)
class Match:
    """The part of a text that the cache holds."""

    node: Node  # the deepest node with a state on the text's path; the salt's root if no node there has one
    slots: TokenSlots  # [length], token slots of the first tokens
    kv_length: int  # tokens whose KV is cached: up to where the text leaves the tree, also inside an edge; >= length
    miss: MissReason | None  # why the match is not longer; None: it covers the whole text

    @property
    def length(self) -> int:
        """Tokens that need not be computed again: there is a state after them."""
        return self.node.end


@dataclass(frozen=True, slots=True)
class Insertion:
    """The result of an insertion."""

    node: Node  # ends where the inserted tokens end
    slots: TokenSlots  # the tree's slots of these tokens; they differ from the caller's where the tree had the tokens
    takes_state: bool  # the tree owns the offered state now; False: the caller must free its slot


@dataclass(frozen=True, slots=True)
class Way:
    """The path of a text in the tree."""

    start: Node
    nodes: list[Node]  # nodes whose whole edge the text follows, from the top; without ``start``
    partial: Node | None  # the next node, of whose edge the text shares only the first ``partial_length`` >= 1 tokens
    partial_length: int

    @property
    def last(self) -> Node:
        """The deepest node whose whole edge the text follows."""
        return self.nodes[-1] if self.nodes else self.start

    @property
    def end(self) -> int:
        """The position where the text leaves the tree or ends."""
        return self.last.end + self.partial_length

    @property
    def deepest_state(self) -> Node:
        """The deepest node with a state among ``nodes``; the start if none has one."""
        return next((node for node in reversed(self.nodes) if node.state_slot is not None), self.start)


def follow(start: Node, tokens: Tokens) -> Way:
    """Walk down from ``start`` along ``tokens`` [n], the tokens from position ``start.end`` on."""
    nodes: list[Node] = []
    node, position = start, 0
    while position < len(tokens):
        child = node.children.get(int(tokens[position]))
        if child is None:
            break
        length = common_length(child.key, tokens[position:])
        if length < len(child.key):
            return Way(start, nodes, child, length)
        nodes.append(child)
        node, position = child, position + length
    return Way(start, nodes, None, 0)


def has_state(start: Node, tokens: Tokens) -> bool:
    """Whether a node below ``start`` on the path of ``tokens`` [n] has a state. The walk ends at the first one."""
    node, position = start, 0
    while position < len(tokens):
        child = node.children.get(int(tokens[position]))
        if child is None or common_length(child.key, tokens[position:]) < len(child.key):
            return False
        if child.state_slot is not None:
            return True
        node, position = child, position + len(child.key)
    return False


def common_length(a: Tokens, b: Tokens) -> int:
    """Length of the common prefix of two texts that are not empty."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


def slots_between(above: Node, node: Node) -> TokenSlots:
    """Copy the token slots of positions above.end..node.end-1, for a node at or below ``above``."""
    parts: list[TokenSlots] = []
    while node is not above:
        parts.append(node.slots)
        assert node.parent is not None
        node = node.parent
    return np.concatenate(parts[::-1]) if parts else NOTHING.copy()
