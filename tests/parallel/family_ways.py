"""Ways to guess tokens and to undo states, for every family: chains, trees, n-grams, draft models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.families import FAMILIES
from tests.heads import write_head
from tests.parallel.even_variants import QUARTERS

HEAD = {"speculative_num_steps": 3, "speculative_eagle_topk": 1}
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2}
WAYS: dict[str, dict[str, Any]] = {
    "chain": HEAD,
    "draft-model": {"speculative_algorithm": "draft-model", **HEAD},
    "n-gram": {"speculative_algorithm": "ngram", **TREE},
    "tree": TREE,
}
STATES = "records", "snapshots"
Case = tuple[str, str, str]  # family, way, how states are undone
ALL: list[Case] = [(family, way, state) for family in QUARTERS for way in WAYS for state in STATES]
# In a usual run every family has one way on two ranks, and every way a family on four. On two ranks every way has both
# kinds of states.
IS_FULL = os.environ.get("SPECMAMBA_TEST_FULL") == "1"


def chosen(shift: int, num_ways: int) -> list[Case]:
    """Some of all cases: ways and states take turns from family to family."""
    ways, found = list(WAYS), list[Case]()
    for number, family in enumerate(QUARTERS):
        for turn in range(num_ways):
            way = ways[(number + shift + 2 * turn) % len(ways)]
            found.append((family, way, STATES[(number // len(ways) + turn) % 2]))
    return found


def flags_of(root: Path, family: str, way: str, state: str) -> dict[str, Any]:
    """The flags of a way, for the checkpoint ``root / family``; a model drafts for itself, so drafts are accepted.

    Families without an MTP head of their own get an EAGLE-3 head beside it.
    """
    return {"speculative_state": state, **WAYS[way], **_draft_of(root, family, way)}


def _draft_of(root: Path, family: str, way: str) -> dict[str, Any]:
    if way == "draft-model":
        return {"speculative_draft_model_path": str(root / family)}
    if way == "n-gram":
        return {}
    if FAMILIES[family].HAS_MTP:
        return {"speculative_algorithm": "mtp"}
    head = root / f"{family}-head"
    if not head.exists():
        write_head(head, root / family, "eagle3", 0)
    return {"speculative_algorithm": "eagle3", "speculative_draft_model_path": str(head)}
