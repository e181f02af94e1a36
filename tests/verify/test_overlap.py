"""Steps that are read after the host has gone on: the same texts, and nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest

from specmamba.engine.engine import Engine
from tests.deferred import deferred, random_delays
from tests.verify.test_captured_steps import BUCKET, DIRECT, DRAFTS, answer_all, assert_same_answers, new_llm

CASES = ("greedy", 1), ("greedy", 3), ("filtered and penalized", 3), ("both rules", 3), ("biased and listed", 3)

REPLAYED: dict[str, Any] = {"cuda_graph_max_bs": BUCKET}


def assert_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_used_tokens, stats.state_used_slots) == (0, 0, 0, 0)
    assert not engine.has_unfinished_requests


@pytest.mark.fast_cases("chain", "tree")
@pytest.mark.parametrize("drafts", sorted(DRAFTS))
def test_texts_are_those_of_direct_steps(drafts: str) -> None:
    """With every kind of drafts, whatever the device's delays."""
    with (
        new_llm(drafts, **DIRECT) as plain,
        new_llm(drafts, **REPLAYED) as llm,
        deferred(llm, random_delays(1)) as replay,
    ):
        for case in CASES:
            for _ in range(2):  # the first step of a kind is not deferred
                assert_same_answers(case, answer_all(llm, *case), answer_all(plain, *case), plain)
        assert (replay.num_deferred > 20) == (drafts not in ("ngram", "draft model"))
        assert_idle(llm.engine)
