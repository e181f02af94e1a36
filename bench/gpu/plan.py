"""The parts of ``specmamba bench gpu`` in order of importance, and which of them fit the time.

The time of a part is a guess until a part of the same kind was measured, and then the longest that was measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["records", "snapshots"]
BATCHES = (1, 8, 32)
LARGE_BATCHES = (64,)
DEMO = "demo"
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Shape:
    """The shape of a draft: steps, topk and nodes, as in published tables."""

    num_steps: int
    topk: int
    num_nodes: int

    @property
    def name(self) -> str:
        return f"({self.num_steps},{self.topk},{self.num_nodes})" if self.num_steps else "plain"

    @property
    def flags(self) -> dict[str, Any]:
        """Flags of the engine."""
        if not self.num_steps:
            return {"speculative_algorithm": "none"}
        return {
            "speculative_algorithm": "mtp",
            "speculative_num_steps": self.num_steps,
            "speculative_eagle_topk": self.topk,
            "speculative_num_draft_tokens": self.num_nodes,
        }


PLAIN, CHAIN, TREE = Shape(0, 1, 1), Shape(3, 1, 4), Shape(4, 4, 8)


@dataclass(frozen=True)
class Block:
    """The rows of one engine, which is started once and runs one batch size after the other."""

    model: str
    shape: Shape
    batches: tuple[int, ...]
    graphs: bool = True
    state: State = "records"

    @property
    def name(self) -> str:
        graphs = "graphs" if self.graphs else "eager"
        return f"{self.model} {self.shape.name} {graphs} {self.state}"


def full_plan() -> list[Block]:
    """The rows of a GPU, most important first."""
    small, large = "qwen3.5-4b", "qwen3.5-9b"
    shapes = PLAIN, CHAIN, TREE
    found = [Block(small, shape, BATCHES) for shape in shapes]
    found += [Block(small, PLAIN, BATCHES, graphs=False)]
    found += [Block(small, shape, BATCHES, state="snapshots") for shape in (TREE, CHAIN)]
    found += [Block(large, shape, BATCHES) for shape in shapes]
    for model in (small, large):
        found += [Block(model, shape, LARGE_BATCHES) for shape in shapes]
        found += [Block(model, shape, BATCHES, graphs=False) for shape in shapes if (model, shape) != (small, PLAIN)]
    return found + [Block(large, shape, BATCHES, state="snapshots") for shape in (TREE, CHAIN)]


def dry_plan() -> list[Block]:
    """A few rows of everything, on the demo."""
    return [
        Block(DEMO, PLAIN, (1, 2)),
        Block(DEMO, CHAIN, (1, 2)),
        Block(DEMO, TREE, (2,)),
        Block(DEMO, PLAIN, (1,), graphs=False),
        Block(DEMO, CHAIN, (1,), state="snapshots"),
    ]


GUESSES_S = {
    "small trees": 30.0,
    "tests": 120.0,
    "sanitizer": 60.0,
    "operators": 150.0,
    "texts": 45.0,
    "write qwen3.5-4b": 60.0,
    "write qwen3.5-9b": 120.0,
    "start demo": 3.0,
    "start qwen3.5-4b": 12.0,
    "start qwen3.5-9b": 20.0,
    "row": 4.0,
}


@dataclass
class Budget:
    """The time of a run, and estimates by kind of work: ``GUESSES_S`` until they are measured."""

    limit_s: float
    now: Callable[[], float] = time.monotonic
    _measured: dict[str, float] = field(default_factory=dict)
    _began: float = field(default=0.0)

    def __post_init__(self) -> None:
        self._began = self.now()

    @property
    def left_s(self) -> float:
        return self.limit_s - (self.now() - self._began)

    def estimate(self, kind: str, count: int = 1) -> float:
        """Estimated seconds of ``count`` parts of this kind."""
        return count * self._measured.get(kind, GUESSES_S[kind])

    def has_measured(self, kind: str, seconds: float) -> None:
        """Note how long a part took; the longest time counts."""
        self._measured[kind] = max(seconds, self._measured.get(kind, 0.0))

    def fits(self, estimate_s: float) -> bool:
        """Whether a part of this length fits the time that is left."""
        return estimate_s <= self.left_s

    def block_estimate(self, block: Block) -> float:
        """Estimated seconds to start an engine and run its rows."""
        return self.estimate(f"start {block.model}") + self.estimate("row", len(block.batches))
