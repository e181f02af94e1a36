"""Texts of two and four ranks with guessed tokens, of every family, with every way to guess and to undo.

Prefixes are cached, and requests are preempted. Families without an MTP head of their own get an EAGLE-3 head. Heads
and n-grams are taught the texts, so that some guesses are accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from specmamba.cuda_graphs import NativeReplay
from tests.families import FAMILIES
from tests.parallel.even_variants import build_quarters
from tests.parallel.family_ways import ALL, IS_FULL, STATES, WAYS, Case, chosen, flags_of
from tests.parallel.jobs import Job, job, prompts, run_job
from tests.parallel.test_tensor_parallel import CROWDED, Results

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_processes")]

# each group starts ranks of its own, so that tests do not do the same twice where several processes share them
NUM_GROUPS = 4 if IS_FULL else 1
ON_TWO = ALL if IS_FULL else chosen(0, 1)
ON_FOUR = ALL if IS_FULL else chosen(1, 1)[::5]
SHORT, LONG, TEXTS = prompts(60, (10, 11), seed=2), {"max_tokens": 45}, prompts(60, (30, 25, 20), seed=1)


def jobs(root: Path, cases: Collection[Case]) -> list[Job]:
    """Prompts whose prefixes are cached, and requests that are preempted; drafts are taught the texts to come."""
    found, texts = [], dict[str, list[list[int]]]()
    for family in sorted({family for family, _, _ in cases}):
        build_quarters(root / family, family)
        texts[family] = whole_texts(root / family)
    for family, way, state in cases:
        name, flags = "-".join((family, way, state)), flags_of(root, family, way, state)
        taught: dict[str, Any] = {"params": LONG, "taught": texts[family]}
        found.append(job(f"{name}-again", root / family, TEXTS, repeat=True, **taught | flags))
        found.append(job(f"{name}-crowded", root / family, SHORT, **taught | flags | CROWDED))
    return found


def whole_texts(folder: Path) -> list[list[int]]:
    """All prompts, with what plain decoding in one process makes of them."""
    asked = [*TEXTS, *SHORT]
    answers = run_job(job("plain", folder, asked, params=LONG))["answers"]
    return [prompt + answer["tokens"] for prompt, answer in zip(asked, answers, strict=True)]


def another_model(root: Path) -> Job:
    """A model of Mamba1 layers that drafts for one with latents."""
    build_quarters(root / "falcon-mamba-draft", "falcon-mamba")
    build_quarters(root / "kimi-linear-target", "kimi-linear")
    draft: dict[str, Any] = {"speculative_algorithm": "draft-model"}
    draft["speculative_draft_model_path"] = str(root / "falcon-mamba-draft")
    return job("another-model", root / "kimi-linear-target", TEXTS, **draft)


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_texts_of_two_ranks(group: int, tmp_path: Path) -> None:
    check(tmp_path, ON_TWO[group::NUM_GROUPS], 2)


@pytest.mark.parametrize("group", range(NUM_GROUPS if IS_FULL else 1))
def test_texts_of_four_ranks(group: int, tmp_path: Path) -> None:
    check(tmp_path, ON_FOUR[group::NUM_GROUPS] if IS_FULL else ON_FOUR, 4)


def test_a_draft_model_of_another_family(tmp_path: Path) -> None:
    Results(tmp_path / "ranks", [another_model(tmp_path)], 2).check("another-model")


def test_usual_runs_have_every_way_and_every_family() -> None:
    """And on two ranks every way with both kinds of states."""
    on_two = chosen(0, 1)
    assert {(way, state) for _, way, state in on_two} == {(way, state) for way in WAYS for state in STATES}
    assert {family for family, _, _ in on_two} == FAMILIES.keys()
    assert {way for _, way, _ in chosen(1, 1)[::5]} == WAYS.keys()


def check(root: Path, cases: Sequence[Case], num_ranks: int) -> None:
    """Check some cases."""
    results = Results(root / "ranks", jobs(root, cases), num_ranks)
    for case in cases:
        check_case(*case, results)


def check_case(family: str, way: str, state: str, results: Results) -> None:
    """Texts are those of one process, with cached prefixes and where requests are preempted.

    Drafts are accepted as often, and as many steps are captured.
    """
    name = "-".join((family, way, state))
    again, crowded = (results.check(f"{name}-{kind}") for kind in ("again", "crowded"))
    alone = {kind: results.alone[f"{name}-{kind}"] for kind in ("again", "crowded")}
    assert [answer["num_cached"] for answer in again["answers"][3:]] == [29, 24, 19], name
    accepted = [answer["num_accepted"] for answer in again["answers"]]
    assert accepted == [answer["num_accepted"] for answer in alone["again"]["answers"]], name
    assert sum(accepted[:3]) > 0, name
    assert sum(accepted[3:]) > 0, name
    assert crowded["num_preemptions"] == alone["crowded"]["num_preemptions"] > 0, name
    assert again["num_tapes"] == alone["again"]["num_tapes"], name
    assert again["num_tapes"] > 0 or not NativeReplay.is_available(), name
