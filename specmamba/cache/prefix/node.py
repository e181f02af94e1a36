"""The nodes of the prefix cache's tree, the way a text takes through them, and what match and insert answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from specmamba.cache.page_allocator import Pages

Tokens = NDArray[np.int64]
TokenSlots = NDArray[np.int64]
MissReason = Literal["never_stored", "evicted", "page_grid", "salt"]
MISS_REASONS: tuple[MissReason, ...] = get_args(MissReason)

NOTHING: NDArray[np.int64] = np.empty(0, dtype=np.int64)
NOTHING.flags.writeable = False
MAX_EVICTED_CHILDREN = 256


@dataclass(eq=False, slots=True, repr=False)
class Node:
    """An edge of the tree and the place where it ends; two nodes are the same only if they are one object.

    Its KV covers positions start..end-1, its state (if it has one) stands at ``end`` exactly.
    """

    parent: Node | None  # None: a root, or no part of the tree any more
    key: Tokens  # [end - start], tokens of the edge; empty for roots only
    slots: TokenSlots  # [end - start], where their KV lies
    pages: Pages  # the pages of these slots, each once: the node is a holder of them
    start: int
    end: int
    children: dict[int, Node] = field(default_factory=dict)  # by the first token of their edge
    state_slot: int | None = None  # None: a tombstone, or a root
    users: int = 0  # KV locks that were taken at this very node
    kv_locks: int = 0  # of this node and of all below
    state_locks: int = 0
    last_access: int = 0  # on the cache's clock, which counts accesses
    state_access: int = 0
    hits: int = 0  # requests whose match ended here
    evicted: dict[int, None] = field(default_factory=dict)  # first tokens of children that were evicted, oldest first
    lost_state: bool = False  # it had a state, and that was evicted

    def __repr__(self) -> str:
        state = "tombstone" if self.state_slot is None else f"state {self.state_slot}"
        return f"<{type(self).__name__} [{self.start}:{self.end}) {state}>"

    @property
    def is_useless(self) -> bool:
        """Whether this is a leaf that nobody locks and nobody can go on from; roots never are."""
        return self.end > 0 and not (self.children or self.kv_locks) and self.state_slot is None

    def remember_evicted(self, first_token: int) -> None:
        """A child with this first token was evicted: a later miss there will say so."""
        self.evicted[first_token] = None
        if len(self.evicted) > MAX_EVICTED_CHILDREN:
            del self.evicted[next(iter(self.evicted))]

    def path(self) -> Iterator[Node]:
        """This node, its parent, and so on up to the root, which is the last."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(eq=False, slots=True, repr=False)
class Root(Node):
    """Where the texts of one salt begin: no tokens, no state, never evicted while anything hangs on it."""

    extra_key: str | None = None


def new_root(extra_key: str | None) -> Root:
    """A root without children."""
    return Root(None, NOTHING, NOTHING, NOTHING, 0, 0, extra_key=extra_key)


@dataclass(frozen=True, slots=True)
class Match:
    """What the cache has of a text."""

    node: Node  # the deepest with a state whose whole path the text follows; the salt's root where there is none
    slots: TokenSlots  # [length], token slots of the first tokens
    kv_length: int  # tokens whose KV is there, where the text leaves the tree, be it inside an edge; >= length
    miss: MissReason | None  # why the match is not longer; None: it is the whole text

    @property
    def length(self) -> int:
        """Tokens after which there is a state to go on from."""
        return self.node.end


@dataclass(frozen=True, slots=True)
class Insertion:
    """What became of an insertion."""

    node: Node  # ends where the inserted tokens end
    slots: TokenSlots  # the tree's own slots of these tokens: not the caller's where the tree had them already
    takes_state: bool  # whether the offered state is the tree's now; if not, its slot is still the caller's to free


@dataclass(frozen=True, slots=True)
class Way:
    """How far a text follows the tree."""

    start: Node
    nodes: list[Node]  # followed to their ends, from the top; without ``start``
    partial: Node | None  # followed for ``partial_length`` tokens, at least one and not to its end
    partial_length: int

    @property
    def last(self) -> Node:
        """The deepest node that was followed to its end."""
        return self.nodes[-1] if self.nodes else self.start

    @property
    def end(self) -> int:
        """The position at which the text leaves the tree, or ends."""
        return self.last.end + self.partial_length

    @property
    def deepest_state(self) -> Node:
        """The deepest node that was followed to its end and has a state; the start where there is none."""
        return next((node for node in reversed(self.nodes) if node.state_slot is not None), self.start)


def follow(start: Node, tokens: Tokens) -> Way:
    """Walk down from ``start`` along ``tokens`` [n], which are those after ``start.end``. Edges are compared whole."""
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


def common_length(a: Tokens, b: Tokens) -> int:
    """How many first tokens two texts share; neither is empty."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


def slots_between(above: Node, node: Node) -> TokenSlots:
    """The token slots of positions above.end..node.end-1, for a node at or below ``above``; a copy."""
    parts: list[TokenSlots] = []
    while node is not above:
        parts.append(node.slots)
        assert node.parent is not None
        node = node.parent
    return np.concatenate(parts[::-1]) if parts else NOTHING.copy()
