"""Whatever drafts, if anything, and whatever keeps the states, every family has the greedy text of plain decoding with
room, in float32, behind prefixes that were evicted and for requests that are preempted. ``test_families_parity`` has
other ways, and room.

One engine serves the drafts of a kind, one after the other. CI runs a part, ``SPECMAMBA_TEST_FULL=1`` every family with
every kind on both state backends.
"""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from specmamba import LLM, SamplingParams
from tests.families import FAMILIES
from tests.models.test_families_parity import NUM_TOKENS, PROMPTS, TREE, Family, answer, family

__all__ = ["family"]  # a fixture

CHAIN: dict[str, Any] = {"speculative_num_steps": 3}
# by kind: what the engine starts with as test_families_parity calls it, and flags of its drafts
KINDS: dict[str, tuple[str, tuple[dict[str, Any], ...]]] = {
    "head": ("tree", (TREE, CHAIN)),
    "block": ("block", (TREE, CHAIN)),
    "draft-model": ("draft-model", (TREE, CHAIN)),
    "text": ("suffix", ({"speculative_algorithm": "suffix"}, {"speculative_algorithm": "ngram"})),
    "plain": ("plain", ({},)),
}
STATES = ("records", "snapshots")
IS_FULL = os.environ.get("SPECMAMBA_TEST_FULL") == "1"
CASES = [
    (name, kind, state)
    for (i, name), (j, kind), (k, state) in product(*map(enumerate, (sorted(FAMILIES), KINDS, STATES)))
    if IS_FULL or k == (i + j) % len(STATES)
]
# less than two of the prompts with their answers, and states for few places of them
TIGHT: dict[str, Any] = {
    "context_length": 64,
    "max_total_tokens": 80,
    "max_running_requests": 3,
    "max_mamba_cache_size": 5,
}
TIMES = 2  # that each request is preempted


@pytest.mark.fast_cases("kimi-linear-text", "lfm2-block", "mamba1-draft-model", "olmo-hybrid-head")
@pytest.mark.usefixtures("no_headroom")
@pytest.mark.parametrize(("family", "kind", "state"), CASES, indirect=["family"])
def test_evicted_and_preempted(family: Family, kind: str, state: str, tmp_path: Path) -> None:
    start, drafts = KINDS[kind]
    flags = family.flags(start) | drafts[0] | {"speculative_state": state, "speculative_adaptive": "off"}
    with LLM(model=str(family.folder), dtype="float32", **flags, **TIGHT) as llm:
        for number, draft in enumerate(drafts):
            if number:
                llm.flush_cache()
                llm.workbench.use_drafts(**draft)
            before = accepted_by(llm)
            family.teach(llm, tmp_path)
            check_evicted(family, llm)
            check_preempted(family, llm)
            assert (accepted_by(llm) > before) == (kind != "plain")
            stats = llm.engine.stats()
            assert (stats.kv_used_tokens, stats.state_used_slots) == (0, 0)
            llm.engine.cache_manager.cache.check()


def accepted_by(llm: LLM) -> int:
    return llm.engine.stats().spec.num_accepted_tokens


def check_evicted(family: Family, llm: LLM) -> None:
    """A prefix whose KV and states other requests took, and one whose states alone are gone, are computed again."""
    cold, hit = answer(llm, PROMPTS[0]), answer(llm, PROMPTS[0])
    assert cold.num_cached_tokens == 0 < hit.num_cached_tokens
    before = llm.engine.stats().prefix_cache
    others = [answer(llm, prompt) for prompt in PROMPTS[1:]]
    after = llm.engine.stats().prefix_cache
    assert after.evicted_tokens > before.evicted_tokens
    assert after.evicted_states > before.evicted_states
    again, whole = answer(llm, PROMPTS[0]), answer(llm, PROMPTS[0])
    assert again.num_cached_tokens < hit.num_cached_tokens == whole.num_cached_tokens
    cache, states = llm.engine.cache_manager.cache, llm.engine.pools.states
    assert cache.evict_states(states.num_free + cache.num_evictable_states)
    stateless = answer(llm, PROMPTS[0])
    assert stateless.num_cached_tokens == 0
    family.check([cold, *others])
    for output in (hit, again, whole, stateless):
        family.check([output])


def check_preempted(family: Family, llm: LLM) -> None:
    """All prompts at once; each request loses its place ``TIMES`` times, whenever it has got tokens in it."""
    engine, before = llm.engine, llm.engine.stats().num_preemptions
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    texts: dict[str, list[int]] = {str(number): [] for number in range(len(PROMPTS))}
    times = dict.fromkeys(texts, 0)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), tuple(prompt), params)
    while engine.has_unfinished_requests:
        deltas = engine.step()
        for delta in deltas:
            texts[delta.request_id] += delta.token_ids
        grown = {delta.request_id for delta in deltas if delta.token_ids}
        for request in [one for one in engine.scheduler.verifying if one.request_id in grown]:
            if times[request.request_id] < TIMES:
                times[request.request_id] += 1
                with torch.inference_mode():
                    engine.preempt(request)
    assert set(times.values()) == {TIMES}
    assert engine.stats().num_preemptions - before >= sum(times.values())
    family.check_texts([tuple(text) for text in texts.values()])
