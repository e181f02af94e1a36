"""Whatever drafts and whatever keeps the states, alone or in a batch, cold or behind a cached prefix: every family's
greedy text is that of plain decoding, in float32. ``test_families_short_of_memory`` evicts and preempts.

What keeps states and what drafts know nothing of each other's family: CI runs every family, every drafter
at least twice and every state, ``SPECMAMBA_TEST_FULL=1`` all three together.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from specmamba import LLM, RequestOutput, SamplingParams
from specmamba.cuda_graphs import EagerReplay, NativeReplay
from tests.blocks import write_block_head
from tests.decisions import decide_at_random, without_measurement
from tests.exactness import assert_same_greedy_texts
from tests.families import FAMILIES
from tests.heads import write_head
from tests.noise import add_noise
from tests.taught import teach

PATTERN = [7, 21, 90, 33, 64, 21, 5]
PROMPTS = [PATTERN * 4, [11, 42, 3], PATTERN * 2 + [100] + PATTERN]
NUM_TOKENS = 24
MEMORY: dict[str, Any] = {"context_length": 96, "max_total_tokens": 2048, "max_running_requests": 4}
TREE: dict[str, Any] = {"speculative_num_steps": 3, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 7}
NOISE = 0.01  # of a draft model's weights: it guesses right mostly, and not always
DRAFTERS = ("plain", "chain", "tree", "ngram", "draft-model", "adaptive", "block", "suffix", "draft-model tree")
# "replayed": three requests in a bucket of four, on inputs that stay, with the shapes that a captured step has
STATES = ("records", "snapshots", "records replayed")
IS_FULL = os.environ.get("SPECMAMBA_TEST_FULL") == "1"
# every pair of the three
CASES = [
    (family, drafter, state)
    for (i, family), (j, drafter), (k, state) in product(*map(enumerate, (FAMILIES, DRAFTERS, STATES)))
    if IS_FULL or k == (i + j) % len(STATES)
]


@dataclass(frozen=True)
class Family:
    """A tiny checkpoint, drafts for it, and the texts that plain decoding makes of the prompts."""

    folder: Path
    has_mtp: bool
    eagle: Path
    eagle3: Path
    block: Path
    draft_model: Path
    texts: tuple[tuple[int, ...], ...]

    def plain(self) -> LLM:
        return LLM(model=str(self.folder), speculative_algorithm="none", disable_radix_cache=True, **MEMORY)

    def check(self, outputs: list[RequestOutput]) -> None:
        """Fail unless the answers to the first prompts are those of plain decoding."""
        self.check_texts([output.token_ids for output in outputs])

    def check_texts(self, got: list[tuple[int, ...]]) -> None:
        """The same for texts alone."""
        assert_same_greedy_texts(got, self.texts[: len(got)], PROMPTS[: len(got)], self.plain)

    def flags(self, drafter: str) -> dict[str, Any]:
        if drafter == "plain":
            return {"speculative_algorithm": "none"}
        if drafter in ("ngram", "suffix"):
            return {"speculative_algorithm": drafter}
        if drafter == "block":
            return {"speculative_algorithm": "dflash", "speculative_draft_model_path": str(self.block), **TREE}
        if drafter.startswith("draft-model"):
            of_model = {"speculative_algorithm": "draft-model", "speculative_draft_model_path": str(self.draft_model)}
            return of_model | (TREE if drafter.endswith("tree") else {})
        shape = TREE if drafter == "tree" else {"speculative_num_steps": 3}
        if drafter == "adaptive":  # with decisions at random
            shape = {"speculative_adaptive": "auto"}
        if self.has_mtp:
            return {"speculative_algorithm": "mtp", **shape}
        algorithm, head = ("eagle3", self.eagle3) if drafter == "tree" else ("eagle", self.eagle)
        return {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(head), **shape}

    def teach(self, llm: LLM, folder: Path) -> None:
        """Let random heads and texts guess from the texts to come: what is never accepted proves little."""
        whole = [prompt + list(text) for prompt, text in zip(PROMPTS, self.texts, strict=True)]
        teach(llm.engine, whole, folder)


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    module, folder = FAMILIES[request.param], tmp_path_factory.mktemp(request.param)
    module.build(folder / "target", seed=3)
    add_noise(folder / "target", folder / "draft", NOISE)
    heads = (
        write_head(folder / name, folder / "target", style, seed=5).folder
        for name, style in (("eagle", "eagle"), ("eagle3", "eagle3-last"))
    )
    with LLM(model=str(folder / "target"), speculative_algorithm="none", disable_radix_cache=True, **MEMORY) as llm:
        num_layers = llm.engine.model.num_layers
        texts = tuple(answer(llm, prompt).token_ids for prompt in PROMPTS)
    assert all(len(set(text)) > 4 for text in texts)  # a text that says one thing only proves little
    block = write_block_head(folder / "block", folder / "target", seed=4, reads=(num_layers - 2, 0)).folder
    eagle, eagle3 = heads
    return Family(folder / "target", module.HAS_MTP, eagle, eagle3, block, folder / "draft", texts)


def answer(llm: LLM, prompt: list[int]) -> RequestOutput:
    return llm.generate(prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))[0]


@pytest.mark.fast_cases(21)  # every family, every drafter twice, every state
@pytest.mark.parametrize(("family", "drafter", "state"), CASES, indirect=["family"])
def test_text_is_that_of_plain_decoding(
    family: Family, drafter: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_measurement(monkeypatch)
    backend, _, replayed = state.partition(" ")
    flags = (
        family.flags(drafter)
        | {"speculative_state": backend}
        | ({"cuda_graph_max_bs": 4} if replayed else {"disable_cuda_graph": True})
    )
    with LLM(model=str(family.folder), **flags, **MEMORY) as llm:
        family.teach(llm, tmp_path)
        if drafter == "adaptive":
            decide_at_random(llm, seed=4)
        graphs = llm.engine.runner.graph_runner
        if graphs is not None and isinstance(graphs.replay, EagerReplay):  # without native code nothing is captured
            graphs.replay = EagerReplay(has_fixed_shapes=True)
        cold, hit = answer(llm, PROMPTS[0]), answer(llm, PROMPTS[0])
        assert cold.num_cached_tokens == 0 < hit.num_cached_tokens
        family.check([cold])
        family.check([hit])
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        for _ in ("two of them cold", "all of them cached"):
            family.check(llm.generate(PROMPTS, params))
        llm.flush_cache()
        outputs = llm.generate(PROMPTS, params)
        family.check(outputs)
        if drafter != "plain":
            check_variety(outputs, 1 if drafter == "adaptive" else 2)
        if graphs is not None and isinstance(graphs.replay, NativeReplay):
            assert graphs.replay.tapes  # the steps were replayed


@pytest.mark.fast_cases("qwen3-next", "qwen3.5-moe", "granite-hybrid")
@pytest.mark.usefixtures("needs_native")
@pytest.mark.parametrize("name", FAMILIES)
def test_all_steps_are_captured(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In bfloat16, plain and as chains, alone and in a batch: what was run twice is replayed whole, by native code."""
    FAMILIES[name].build(tmp_path, seed=3)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    chain: dict[str, Any] = {"speculative_algorithm": "ngram", "speculative_num_steps": 3}
    flags = chain | MEMORY | {"speculative_adaptive": "off", "disable_radix_cache": True}
    with LLM(model=str(tmp_path), dtype="bfloat16", **flags) as llm:
        assert llm.engine.runner.graph_runner is not None
        replay = llm.engine.runner.graph_runner.replay
        assert isinstance(replay, NativeReplay)
        for drafts in ({"speculative_algorithm": "none"}, chain):
            llm.workbench.use_drafts(**drafts)
            for prompts in (PROMPTS[:1], PROMPTS):
                for _ in range(3):
                    num_unreplayed, seconds = replay.num_unreplayed, replay.seconds
                    llm.generate(prompts, params)
                assert replay.num_unreplayed == num_unreplayed
                assert replay.seconds > seconds
        assert {name for tape in replay.tapes.values() for name in tape.python_calls} == set()
    assert "operator by operator" not in caplog.text


def check_variety(outputs: list[RequestOutput], deepest: int) -> None:
    """Some drafts were rejected at once, some accepted, some as deep as ``deepest``."""
    by_depth = [0] * 16
    for output in outputs:
        for depth, count in enumerate(output.spec.accepted_histogram):
            by_depth[depth] += count
    assert by_depth[0]
    assert by_depth[1]
    assert sum(by_depth[deepest:])
