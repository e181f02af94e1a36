"""Drafts after a hit in any tier are those of a cold run, with every kind of draft: what is drafted, not only the text.

A head that has lost its context still gives the right text. So all drafts of a run are compared, token for token: cold,
from the pools, from host memory, from disk, from disk after a restart, of a prefix in pieces, and preempted in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from specmamba import LLM, SamplingParams
from specmamba.core import OutputDelta
from tests.blocks import write_block_head
from tests.cache.test_prefix_exact import check_pools
from tests.heads import write_head
from tests.noise import add_noise
from tests.tiny import write_tiny_checkpoint

Tokens = tuple[int, ...]
NUM_TOKENS = 14
# a text that begins again, for those who copy from it
BEGINNING: Tokens = tuple((7 * i * i + 3 * i + 11) % 129 + 1 for i in range(52))
PROMPT = BEGINNING + BEGINNING[:34]

# the files of a draft, written to a folder beside the target
HEADS: dict[str, Callable[[Path, Path], object]] = {
    "eagle": lambda folder, target: write_head(folder, target, "eagle", 3),
    "eagle3": lambda folder, target: write_head(folder, target, "eagle3", 4),
    "eagle3-narrow": lambda folder, target: write_head(folder, target, "eagle3-narrow", 5),
    "dflash": lambda folder, target: write_block_head(folder, target, 6),
    "draft-model": lambda folder, target: add_noise(target, folder, 0.03),
}
SHAPE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
FLAGS: dict[str, dict[str, Any]] = {
    "mtp": {"speculative_algorithm": "mtp", **SHAPE},
    "eagle": {"speculative_algorithm": "eagle", **SHAPE},
    "eagle3": {"speculative_algorithm": "eagle3", **SHAPE},
    "eagle3-narrow": {"speculative_algorithm": "eagle3", "speculative_num_steps": 3},
    "dflash": {"speculative_algorithm": "dflash"},
    "draft-model": {"speculative_algorithm": "draft-model", "speculative_num_steps": 3},
    "ngram": {"speculative_algorithm": "ngram", "speculative_num_steps": 3},
    # what it has of other requests is not a cached prefix, so it copies from a request's own text alone
    "suffix": {"speculative_algorithm": "suffix", "speculative_suffix_shared_mib": 0},
}
# each kind meets both ways to keep states, and both sizes of pages
CASES = [
    (kind, state, (1, 16)[(number + other) % 2])
    for number, kind in enumerate(sorted(FLAGS))
    for other, state in enumerate(("records", "snapshots"))
]


@dataclass(frozen=True)
class Run:
    """One answer, and all that was drafted for it."""

    tokens: Tokens
    drafts: list[list[int]]
    num_cached: int
    spec: Any


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_tiny_checkpoint(folder / "target", seed=11)
    for kind, write in HEADS.items():
        write(folder / kind, folder / "target")
    return folder


def new_llm(files: Path, kind: str, **flags: Any) -> LLM:
    settings: dict[str, Any] = {
        "model": str(files / "target"),
        "dtype": "float32",
        "device": "cpu",
        "context_length": 120,
        "max_running_requests": 2,
        "max_mamba_cache_size": 32,
        "chunked_prefill_size": 32,
        "speculative_adaptive": "off",
        "disable_cuda_graph": True,  # a replay does not call what records the drafts
    }
    path = {"speculative_draft_model_path": str(files / kind)} if kind in HEADS else {}
    return LLM(**{**settings, **path, **FLAGS[kind], **flags})


def run(llm: LLM, prompt: Tokens = PROMPT, between: Callable[[int], object] = lambda step: None) -> Run:
    """Answer a prompt; ``between`` is called after each step that has given tokens, with their number."""
    engine, drafts, deltas = llm.engine, list[list[int]](), list[OutputDelta]()
    drafter = engine.runner.drafter
    propose = drafter.propose

    def recorded(*given: Any) -> Any:
        tree = propose(*given)
        drafts.append(tree.tokens[0].tolist())
        return tree

    with patch.object(drafter, "propose", recorded):
        engine.add_request("r", prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
        steps = 0
        while engine.has_unfinished_requests:
            given = engine.step()
            deltas += given
            if given and engine.has_unfinished_requests:
                steps += 1
                between(steps)
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    return Run(tokens, drafts, deltas[0].num_cached_tokens, deltas[-1].spec)


def only_below(llm: LLM) -> None:
    """Leave the prefixes on disk alone."""
    tiers = llm.engine.cache_manager.tiers
    assert tiers is not None
    assert tiers.drain()
    llm.engine.flush_cache()


def runs_of(files: Path, kind: str, flags: dict[str, Any]) -> Iterator[tuple[str, Run, int]]:
    """Answers by where their prefix is, with the tokens that are expected from there."""
    whole = len(PROMPT) - 1
    with new_llm(files, kind, **flags) as llm:
        yield "nowhere", run(llm), 0
        yield "pools", run(llm), whole
        llm.engine.cache_manager.cache.evict_states(32)
        yield "host", run(llm), whole
        only_below(llm)
        yield "disk", run(llm), whole
        only_below(llm)
        run(llm, PROMPT[:50])
        yield "pieces", run(llm), whole
        stats = llm.engine.stats()
        assert stats.host is not None
        assert stats.disk is not None
        assert stats.host.hits >= 1
        assert stats.disk.hits >= 3
        check_pools(llm)
    with new_llm(files, kind, **flags) as llm:

        def preempt(step: int) -> None:
            if step % 2 and llm.engine.scheduler.verifying:
                llm.engine.preempt(llm.engine.scheduler.verifying[0])
                only_below(llm)

        yield "restart, preempted again and again", run(llm, between=preempt), whole
        stats = llm.engine.stats()
        assert stats.disk is not None
        assert stats.num_preemptions >= 2
        assert stats.disk.hits >= 3
        check_pools(llm)


@pytest.mark.fast_cases("eagle3-snapshots", "draft-model-records")
@pytest.mark.parametrize(("kind", "state", "page_size"), CASES)
def test_drafts_from_every_tier(kind: str, state: str, page_size: int, files: Path, tmp_path: Path) -> None:
    common = {"speculative_state": state, "page_size": page_size}
    with new_llm(files, kind, disable_radix_cache=True, **common) as llm:
        cold = run(llm)
    assert any(len(draft) > 1 for draft in cold.drafts)
    flags = {"hicache_storage_dir": tmp_path / "prefixes", "hicache_size": 0.01}
    for place, found, num_cached in runs_of(files, kind, common | flags):
        assert (place, found.tokens, found.num_cached) == (place, cold.tokens, num_cached)
        assert (place, found.spec) == (place, cold.spec)
        assert (place, found.drafts) == (place, cold.drafts)
