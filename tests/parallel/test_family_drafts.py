"""Texts of two and four ranks with guessed tokens, of families that are divided in ways of their own.

Channels of a selective scan, whose inputs are sums over all ranks; decays by key channel; latents that all ranks have.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from specmamba.cuda_graphs import NativeReplay
from tests.heads import write_head
from tests.parallel.even_variants import build_variant
from tests.parallel.jobs import Job, job, prompts
from tests.parallel.test_tensor_parallel import CROWDED, Results

pytestmark = pytest.mark.slow

VARIANTS = {
    "bailing-hybrid": "even-default",
    "falcon-mamba": "default",
    "jamba": "even-default",
    "kimi-linear": "even-default",
    "mamba1": "default",
}
NGRAM = {"speculative_algorithm": "ngram", "speculative_num_steps": 3}
WAYS: dict[str, dict[str, Any]] = {
    "chain": NGRAM | {"speculative_eagle_topk": 1},
    "plain": {"speculative_algorithm": "none"},
    "snapshots": NGRAM | {"speculative_eagle_topk": 2, "speculative_state": "snapshots"},
    "tree": NGRAM | {"speculative_eagle_topk": 2},
}
# Half of all cases, in which every family and every way is; a full run has the others too.
IS_FULL = os.environ.get("SPECMAMBA_TEST_FULL") == "1"
ON_TWO = [
    (family, way) for i, family in enumerate(VARIANTS) for j, way in enumerate(WAYS) if IS_FULL or (i + j) % 2 == 0
]
ON_FOUR = [(family, "chain") for family in VARIANTS if IS_FULL or family in ("jamba", "kimi-linear")]
SHORT, LONG, TEXTS = prompts(60, (10, 11), seed=2), {"max_tokens": 45}, prompts(60, (30, 25, 20), seed=1)


def jobs(root: Path, cases: Collection[tuple[str, str]]) -> list[Job]:
    """Prompts whose prefixes are cached, and requests that are preempted."""
    found = []
    for family in sorted({family for family, _ in cases}):
        build_variant(root / family, family, VARIANTS[family])
    for family, way in cases:
        name, flags = f"{family}-{way}", WAYS[way]
        found.append(job(f"{name}-again", root / family, TEXTS, repeat=True, params=LONG, **flags))
        found.append(job(f"{name}-crowded", root / family, SHORT, params=LONG, **flags | CROWDED))
    return found


def separate_drafts(root: Path) -> list[Job]:
    """A model of Mamba1 layers that drafts for one with latents, and a head for one of Mamba1 layers."""
    head = write_head(root / "head", root / "jamba", "eagle3", 0).folder
    chosen = ("draft-model", "kimi-linear", root / "falcon-mamba"), ("eagle3", "jamba", head)
    return [
        job(name, root / target, TEXTS, speculative_algorithm=name, speculative_draft_model_path=str(draft))
        for name, target, draft in chosen
    ]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("two")
    return Results(root / "ranks", [*jobs(root, ON_TWO), *separate_drafts(root)], 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("four")
    return Results(root / "ranks", jobs(root, ON_FOUR), 4)


@pytest.mark.parametrize(("family", "way"), ON_TWO)
def test_texts_of_two_ranks(family: str, way: str, two: Results) -> None:
    check(family, way, two)


@pytest.mark.parametrize(("family", "way"), ON_FOUR)
def test_texts_of_four_ranks(family: str, way: str, four: Results) -> None:
    check(family, way, four)


@pytest.mark.parametrize("name", ["draft-model", "eagle3"])
def test_separate_drafts(name: str, two: Results) -> None:
    two.check(name)


def check(family: str, way: str, results: Results) -> None:
    """Texts are those of one process, with cached prefixes and where requests are preempted.

    Drafts are accepted as often, and as many steps are captured.
    """
    again, crowded = (results.check(f"{family}-{way}-{kind}") for kind in ("again", "crowded"))
    alone = {kind: results.alone[f"{family}-{way}-{kind}"] for kind in ("again", "crowded")}
    assert [answer["num_cached"] for answer in again["answers"][3:]] == [29, 24, 19]
    accepted = [answer["num_accepted"] for answer in again["answers"]]
    assert accepted == [answer["num_accepted"] for answer in alone["again"]["answers"]]
    assert (sum(accepted) > 0) == (way != "plain")
    assert crowded["num_preemptions"] == alone["crowded"]["num_preemptions"] > 0
    assert again["num_tapes"] == alone["again"]["num_tapes"]
    assert again["num_tapes"] > 0 or not NativeReplay.is_available()
