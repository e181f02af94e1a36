"""Whatever drafts and whatever keeps the states, every family has the greedy text of plain decoding, in float32, where
requests are preempted and prefixes evicted and computed again. ``test_families_parity`` has more kinds, and room.
"""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from specmamba import LLM, SamplingParams
from tests.blocks import write_block_head
from tests.blocks.test_block_drafts import preempted
from tests.exactness import assert_same_greedy_texts
from tests.families import FAMILIES
from tests.models.test_families_parity import NUM_TOKENS, PROMPTS, TREE, Family, family

__all__ = ["family"]  # a fixture

DRAFTERS = ("block", "draft-model", "suffix", "tree")
STATES = ("records", "snapshots")
IS_FULL = os.environ.get("SPECMAMBA_TEST_FULL") == "1"
# every family with every drafter, on one or the other
CASES = [
    (name, drafter, state)
    for (i, name), (j, drafter), (k, state) in product(*map(enumerate, (sorted(FAMILIES), DRAFTERS, STATES)))
    if IS_FULL or k == (i + j) % len(STATES)
]
TIGHT: dict[str, Any] = {"context_length": 64, "max_total_tokens": 80, "max_running_requests": 3}


def flags_of(family: Family, drafter: str, folder: Path) -> dict[str, Any]:
    """Trees of each, with a random block head for the family."""
    if drafter == "tree":
        return family.flags(drafter)
    if drafter == "draft-model":
        return family.flags(drafter) | TREE
    if drafter == "suffix":
        return {"speculative_algorithm": "suffix"}
    with family.plain() as llm:
        reads = llm.engine.model.num_layers - 2, 0
    head = write_block_head(folder / "block", family.folder, seed=4, reads=reads)
    return TREE | {"speculative_draft_model_path": str(head.folder)}


@pytest.mark.fast_cases(
    "kimi-linear-suffix", "lfm2-block-snapshots", "mamba1-draft-model-records", "olmo-hybrid-tree-snapshots"
)
@pytest.mark.parametrize(("family", "drafter", "state"), CASES, indirect=["family"])
def test_preempted_and_evicted(family: Family, drafter: str, state: str, tmp_path: Path) -> None:
    flags = flags_of(family, drafter, tmp_path) | {"speculative_state": state, "speculative_adaptive": "off"}
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(model=str(family.folder), dtype="float32", max_mamba_cache_size=5, **flags, **TIGHT) as llm:
        family.teach(llm, tmp_path)
        for _ in range(2):
            family.check(llm.generate(PROMPTS, params))
        texts = preempted(llm.engine, [params] * len(PROMPTS))
        assert_same_greedy_texts(texts, family.texts, PROMPTS, family.plain)
        stats = llm.engine.stats()
        assert stats.num_preemptions >= 3
        assert stats.prefix_cache.evicted_tokens + stats.prefix_cache.evicted_states > 0
        assert stats.spec.num_accepted_tokens > 0
        assert (stats.kv_used_tokens, stats.state_used_slots) == (0, 0)
        llm.engine.cache_manager.cache.check()
