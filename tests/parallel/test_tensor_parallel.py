"""Models that several processes share, against one process: logits of every family, and texts with every drafter.

The ranks make the same calls by themselves (``rank_program``), one group of processes for all jobs of a fixture. How
rank 0 tells them what to do is in ``test_ranks.py``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specmamba.cuda_graphs import NativeReplay
from specmamba.errors import ConfigError
from specmamba.quantize import QuantizeConfig, quantize_checkpoint
from tests.blocks import write_block_head
from tests.families import FAMILIES
from tests.heads import write_head
from tests.parallel.even_variants import GROUPED, QUARTERS, build_quarters, build_variant, variants
from tests.parallel.jobs import Job, job, prompts, run_job
from tests.tiny import WHOLE_BLOCKS, write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("forked_processes")

IS_FULL = os.environ.get("SPECMAMBA_TEST_FULL") == "1"

ROOT = Path(__file__).parents[2]
BLOCK_HEADS = "dflash", "dflash2", "dspark-gated"
TIMEOUT_S = 600
TOLERANCE = 2e-5  # of log probabilities, of logits up to 30; relative to those beyond 1
# mamba1: a tied variant differs by 3.1e-5; one process without native code from one with it by 1.6e-5
LOOSE = {"mamba1": 1e-4, "olmo-hybrid": 3e-4, "qwen3.5-moe": 1e-4, "qwen3-next": 1e-4}
OF_LOGITS = 1e-5  # of the largest of them, where rounding is not carried on
# Steps of the delta rule up to 2 turn states around, so rounding grows: one process without native code, which sums in
# another order, differs from one with it by 3.2e-5 of the largest logit.
CARRIED_ON = {"olmo-hybrid-default": 5e-5, "olmo-hybrid-quarters": 5e-5}
LISTED = {"logprobs": 20, "prompt_logprobs": 20, "max_tokens": 6}
# All recurrences, experts, and what is divided in a way of its own; all other variants are in the slow tier.
FAST = {
    "granite-hybrid": ("no-attention",),  # a norm over all channels of all ranks
    "jamba": ("even-default",),  # sums inside of a layer, in front of norms
    "kimi-linear": ("even-latent-queries",),  # latents that all ranks have, decays by channel
    "olmo-hybrid": ("rotated",),  # norms over all heads; one key head for two ranks
    "qwen3.5": ("default",),
    "qwen3.5-moe": ("default",),
}
TEXTS = prompts(60, (9, 21))
DRAFTS: dict[str, dict[str, Any]] = {
    "chain": {"speculative_algorithm": "mtp", "speculative_num_steps": 3},
    "tree": {"speculative_algorithm": "mtp", "speculative_num_steps": 3, "speculative_eagle_topk": 2},
    "n-gram": {"speculative_algorithm": "ngram", "speculative_num_steps": 3, "speculative_eagle_topk": 2},
    "snapshots": {"speculative_algorithm": "mtp", "speculative_eagle_topk": 2, "speculative_state": "snapshots"},
}
FAST_DRAFTS = ("tree",)
# Variants with experts of all other families that have some.
EXPERTS = {
    "bailing-hybrid": "even-default",
    "granite-hybrid": "default",
    "jamba": "even-default",
    "kimi-linear": "even-default",
    "lfm2-moe": "default",
    "nemotron-h": "default",
    "qwen3-next": "default",
}
# Two requests begin together and grow to 55 tokens each, and there is no room for both.
CROWDED: dict[str, Any] = {"context_length": 64, "max_total_tokens": 80, "max_mamba_cache_size": 8}


class Results:
    """What one process and several ranks gave for the same jobs."""

    def __init__(self, folder: Path, jobs: Sequence[Job], size: int) -> None:
        self.jobs, self.size = {each["name"]: each for each in jobs}, size
        folder.mkdir()
        (folder / "jobs.json").write_text(json.dumps(jobs))
        command = [sys.executable, "-m", "tests.parallel.rank_program"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen([*command, str(rank), str(size), str(folder)], cwd=ROOT, env=environment)
            for rank in range(size)
        ]
        try:
            self.alone = {each["name"]: _run_alone(each) for each in jobs}
            assert [process.wait(TIMEOUT_S) for process in running] == [0] * size
        finally:
            for process in running:
                process.kill()
        ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]
        self.shared, self.others = ranks[0], ranks[1:]

    def check(self, name: str, tolerance: float = TOLERANCE) -> dict[str, Any]:
        """Compare one job: on the ranks with each other, and with one process. Gives what the ranks gave."""
        alone, shared = self.alone[name], self.shared[name]
        assert "error" not in shared, shared
        assert all(other[name] == shared for other in self.others), f"{name}: the ranks differ"
        near_logits(alone["prompt_logits"], shared["prompt_logits"], CARRIED_ON.get(name, OF_LOGITS))
        for own, got in zip(alone["answers"], shared["answers"], strict=True):
            assert got["tokens"] == own["tokens"], name
            assert len(got["logprobs"]) == len(own["logprobs"]), name
            for expected, listed in zip(own["logprobs"], got["logprobs"], strict=True):
                known = dict(expected)
                near = [
                    abs(value - known[token]) / max(1.0, -known[token]) for token, value in listed if token in known
                ]
                assert len(near) >= len(known) - 1  # the last two may be nearly as likely
                assert max(near) < tolerance
        return dict(shared)


def near_logits(alone: Sequence[Any], shared: Sequence[Any], tolerance: float) -> None:
    """Compare the logits of all positions of prompts."""
    assert len(alone) == len(shared)
    pairs = [(torch.tensor(own), torch.tensor(got)) for own, got in zip(alone, shared, strict=True)]
    largest = max((float(own.abs().max()) for own, _ in pairs), default=0.0)
    assert max((float((own - got).abs().max()) for own, got in pairs), default=0.0) <= tolerance * largest


def _run_alone(each: Job) -> dict[str, Any]:
    try:
        return run_job(each)
    except ConfigError as error:
        return {"error": str(error)}


def family_jobs(root: Path, chosen: Mapping[str, Sequence[str]]) -> list[Job]:
    jobs = []
    for family, names in chosen.items():
        for variant in names:
            folder = root / f"{family}-{variant}"
            build_variant(folder, family, variant)
            jobs.append(job(folder.name, folder, TEXTS, params=LISTED))
    return jobs


def draft_jobs(folder: Path, names: Iterable[str]) -> list[Job]:
    texts, short = prompts(60, (30, 25, 20), seed=1), prompts(60, (10, 11), seed=2)
    jobs = []
    for name in names:
        flags = DRAFTS[name]
        jobs.append(job(f"{name}-again", folder, texts, repeat=True, params={"max_tokens": 20}, **flags))
        jobs.append(job(f"{name}-crowded", folder, short, params={"max_tokens": 45}, **flags | CROWDED))
        drawn = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "max_tokens": 20}
        jobs.append(job(f"{name}-drawn", folder, texts, params=drawn, **flags))
    return jobs


def separate_drafts(root: Path, target: Path) -> list[Job]:
    """An EAGLE-3 head with a vocabulary of its own, block heads, and a model of another family."""
    head = write_head(root / "eagle3", target, "eagle3", 0).folder
    blocks = {name: write_block_head(root / name, target, 0, variant=name).folder for name in BLOCK_HEADS}
    FAMILIES["mamba2"].build(root / "small", "biased-tied")
    paths = {"eagle3": head, **blocks, "draft-model": root / "small"}
    kinds = dict.fromkeys(blocks, "dflash")
    return [
        job(name, target, TEXTS, speculative_algorithm=kinds.get(name, name), speculative_draft_model_path=str(path))
        for name, path in paths.items()
    ]


def quantized_jobs(root: Path) -> list[Job]:
    """Codes in groups of 32 inputs: two parts of 128 channels end where groups do, those of 96 do not."""
    jobs = []
    for name, inner in (("int4", 128), ("int4-uneven", 96)):
        write_tiny_checkpoint(root / f"dense-{name}", 0, **WHOLE_BLOCKS | {"intermediate_size": inner})
        out = root / name
        quantize_checkpoint(QuantizeConfig(model=str(root / f"dense-{name}"), out=out, group_size=32))
        jobs.append(job(name, out, TEXTS, params=LISTED, speculative_algorithm="none"))
    return jobs


def expert_jobs(root: Path, chosen: Mapping[str, str]) -> list[Job]:
    """With whole experts on ranks, and drafts where the family has a head; of 7 experts one rank has 4."""
    jobs = []
    for family, variant in chosen.items():
        folder = root / f"experts-{family}"
        build_variant(folder, family, variant)
        jobs.append(job(folder.name, folder, TEXTS, params=LISTED, ep_size=2, speculative_algorithm="auto"))
    return jobs


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("two")
    tiny = write_tiny_checkpoint(root / "tiny", 0)
    own = draft_jobs(tiny, FAST_DRAFTS)
    experts = expert_jobs(root, {"qwen3.5-moe": "default"})
    return Results(root / "ranks", [*family_jobs(root, FAST), *own, *quantized_jobs(root), *experts], 2)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Other variants of all families, and drafters. Half of the variants, at least one of each; a full run has all."""
    root = tmp_path_factory.mktemp("more")
    tiny = write_tiny_checkpoint(root / "tiny", 0)
    nth = 1 if IS_FULL else 2
    others = {family: sorted({*variants(family)} - {*FAST.get(family, ())})[::nth] for family in FAMILIES}
    drafts = [*draft_jobs(tiny, DRAFTS.keys() - FAST_DRAFTS), *separate_drafts(root, tiny)]
    return Results(root / "ranks", [*family_jobs(root, others), *drafts, *expert_jobs(root, EXPERTS)], 2)


@pytest.mark.parametrize("name", [f"{family}-{variant}" for family, names in FAST.items() for variant in names])
def test_two_ranks_compute_what_one_process_does(two: Results, name: str) -> None:
    loose = max((value for family, value in LOOSE.items() if name.startswith(family)), default=TOLERANCE)
    two.check(name, loose)


@pytest.mark.fast_cases(*FAST_DRAFTS)
@pytest.mark.parametrize("name", DRAFTS)
def test_texts_with_drafts_are_the_same(name: str, request: pytest.FixtureRequest) -> None:
    """With cached prefixes, where requests are preempted, and drawn ones; drafts are accepted as often.

    Steps are captured on all ranks where one process captures them, the exchanges included.
    """
    two: Results = request.getfixturevalue("two" if name in FAST_DRAFTS else "more")
    again, crowded = two.check(f"{name}-again"), two.check(f"{name}-crowded")
    assert [answer["num_cached"] for answer in again["answers"][3:]] == [29, 24, 19]
    accepted = [answer["num_accepted"] for answer in two.alone[f"{name}-again"]["answers"]]
    assert [answer["num_accepted"] for answer in again["answers"]] == accepted
    drawn = two.check(f"{name}-drawn")
    assert all(found["num_tapes"] >= 2 for found in (again, crowded, drawn)) or not NativeReplay.is_available()
    assert again["num_tapes"] == two.alone[f"{name}-again"]["num_tapes"]
    assert crowded["num_preemptions"] == two.alone[f"{name}-crowded"]["num_preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft-model", "eagle3", *BLOCK_HEADS])
def test_separate_drafts_are_divided_too(more: Results, name: str) -> None:
    shared = more.check(name)
    assert sum(heads for _, heads in shared["kv"]) < sum(heads for _, heads in more.alone[name]["kv"])


def test_codes_of_a_checkpoint_are_divided(two: Results) -> None:
    two.check("int4", 1e-3)  # products round inputs to the same codes, and sums in another order
    assert "a scale for every 32 inputs" in two.shared["int4-uneven"]["error"]


@pytest.mark.fast_cases("qwen3.5-moe")
@pytest.mark.parametrize("family", ["qwen3.5-moe", *EXPERTS])
def test_whole_experts_on_ranks(family: str, request: pytest.FixtureRequest) -> None:
    """Texts and drafts are those of one process; steps are captured."""
    results: Results = request.getfixturevalue("more" if family in EXPERTS else "two")
    shared, alone = results.check(f"experts-{family}", LOOSE.get(family, TOLERANCE)), results.alone[f"experts-{family}"]
    assert shared["num_tapes"] == alone["num_tapes"]
    accepted = [[answer["num_accepted"] for answer in of["answers"]] for of in (shared, alone)]
    assert accepted[0] == accepted[1]


@pytest.mark.slow
def test_other_variants_of_every_family(more: Results) -> None:
    assert {family for family in FAMILIES for name in more.jobs if name.startswith(f"{family}-")} == FAMILIES.keys()
    refused, divided = check_variants(more)
    assert len(refused) < len(divided)


@pytest.mark.slow
@pytest.mark.skipif(not IS_FULL, reason="SPECMAMBA_TEST_FULL=1 runs all variants on four ranks")
def test_every_variant_on_four_ranks(tmp_path: Path) -> None:
    """Most tiny variants have three or six heads; each family is divided in ``test_four_ranks``."""
    every = {family: variants(family) for family in FAMILIES}
    _, divided = check_variants(Results(tmp_path / "ranks", family_jobs(tmp_path, every), 4))
    assert {"bailing-hybrid-even-default", "jamba-even-default", "kimi-linear-even-default"} <= divided


def check_variants(results: Results) -> tuple[set[str], set[str]]:
    """Names of variants that are refused by name on all ranks, and of those that can be divided."""
    names = {name for name in results.jobs if name.startswith(tuple(FAMILIES))}
    refused = {name for name in names if "error" in results.shared[name]}
    for name in names - refused:
        loose = max((value for family, value in LOOSE.items() if name.startswith(family)), default=TOLERANCE)
        results.check(name, loose)
    reasons = [of[name]["error"] for name in refused for of in (results.shared, *results.others)]
    assert all(re.search(f"cannot be divided among ({results.size} )?ranks", reason) for reason in reasons)
    return refused, names - refused


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    """More ranks than key heads and groups of states: both are repeated, and norms of groups cross ranks."""
    tiny = write_tiny_checkpoint(tmp_path / "tiny", 0, **GROUPED)
    jobs = [job("tiny", tiny, TEXTS, params=LISTED, speculative_algorithm="mtp", speculative_eagle_topk=2)]
    for family in QUARTERS:
        build_quarters(tmp_path / f"{family}-quarters", family)
        jobs.append(job(f"{family}-quarters", tmp_path / f"{family}-quarters", TEXTS, params=LISTED))
    results = Results(tmp_path / "ranks", jobs, 4)
    shared = results.check("tiny", 1e-4)
    assert [heads for _, heads in shared["kv"]] == [1]
    for family in QUARTERS:
        results.check(f"{family}-quarters", LOOSE.get(family, TOLERANCE))
