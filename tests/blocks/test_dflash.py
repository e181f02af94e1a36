"""DFlash heads: what a block computes wherever its context comes from, and which folders are refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from specmamba import LLM, SamplingParams
from specmamba.config import EngineConfig
from specmamba.core import Batch
from specmamba.draft.blocks import BlockDrafter
from specmamba.draft.draft_plan import plan_drafts
from specmamba.draft.sizing.rounds import NOTHING, DraftSize, SizedBatch
from specmamba.engine.engine import Engine
from specmamba.errors import CheckpointError, ConfigError, UnsupportedModelError
from tests.blocks import BLOCK, READS, BlockFiles, BlockReference, save_block_head, write_block_head
from tests.decisions import without_measurement
from tests.heads import write_head
from tests.models.test_model_exact import accept_at_random, assert_close, new_engine, random_prompts, run
from tests.tiny import write_tiny_checkpoint

AUTO: dict[str, Any] = {"speculative_adaptive": "auto"}
FIXED: dict[str, Any] = {"speculative_adaptive": "off"}
TREE: dict[str, Any] = FIXED | {
    "speculative_num_steps": 4,
    "speculative_eagle_topk": 3,
    "speculative_num_draft_tokens": 9,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", seed=11)


@pytest.fixture(scope="module")
def head(target: Path) -> BlockFiles:
    return write_block_head(target.parent / "head", target, seed=3)


@dataclass(frozen=True)
class Said:
    """The logits of one block."""

    known: list[int]  # the last is the root
    logits: Tensor  # [steps, V]


def record(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Said]]:
    """Every block that the engine's drafter runs from now on, by request id."""
    drafter = engine.runner.drafter
    assert isinstance(drafter, BlockDrafter)
    run_block, said = drafter._run, dict[str, list[Said]]()

    def recorded(batch: Batch, num_steps: int) -> Tensor:
        hidden = run_block(batch, num_steps)
        logits = drafter.head.logits(hidden)
        requests = {request.held_row: request for request in engine.scheduler.verifying}
        for i, row in enumerate(batch.rows):
            request = requests[row]
            known = request.known_tokens(0, request.num_tokens)
            said.setdefault(request.request_id, []).append(Said(known, logits[i].clone()))
        return hidden

    monkeypatch.setattr(drafter, "_run", recorded)
    return said


class Checker:
    """Compares recorded blocks with the formula on the features of transformers' model."""

    def __init__(self, target: Path, head: BlockFiles) -> None:
        self._model = Qwen3_5ForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        weights = self._model.model.embed_tokens.weight, self._model.lm_head.weight
        self._reference = BlockReference(head, *(weight.detach() for weight in weights))

    @torch.no_grad()
    def check(self, said: dict[str, list[Said]], texts: dict[str, list[int]]) -> None:
        for request, blocks in said.items():
            states = self._model.model(
                torch.tensor([texts[request]]), use_cache=False, output_hidden_states=True
            ).hidden_states
            features = torch.cat([states[layer + 1][0] for layer in READS], -1)  # behind layer i
            for block in blocks:
                assert block.known == texts[request][: len(block.known)]
                before = features[: len(block.known) - 1]
                expected = self._reference(before, block.known[-1], len(block.logits))
                is_drafted = expected > -torch.inf
                assert torch.equal(block.logits > -torch.inf, is_drafted)
                assert_close(block.logits[is_drafted].double(), expected[is_drafted])


def open_engine(target: Path, head: BlockFiles, num_steps: int = BLOCK - 1, **flags: Any) -> Engine:
    path = {"speculative_algorithm": "auto", "speculative_draft_model_path": str(head.folder)}
    return new_engine(target, num_steps, **path, **flags)


# ---- what they compute -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [FIXED, TREE], ids=["chain", "tree"])
def test_blocks_equal_the_formula(
    flags: dict[str, Any], target: Path, head: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ragged batches, with accepted paths of any length, behind chunks of prompts and behind a cached prefix."""
    engine, checker = open_engine(target, head, chunked_prefill_size=11, **flags), Checker(target, head)
    assert engine.describe()["speculative_algorithm"] == "dflash"
    accept_at_random(monkeypatch, torch.Generator().manual_seed(1))
    said, prompts = record(engine, monkeypatch), random_prompts((1, 26, 2, 9), seed=3)
    texts = run(engine, prompts, (14, 9, 12, 10))
    gains = {len(b.known) - len(a.known) for blocks in said.values() for a, b in pairwise(blocks)}
    assert len(gains) >= 3
    checker.check(said, texts)
    said.clear()
    texts = run(engine, [texts["r1"][:30] + prompts[3]], [10])
    assert engine.stats().prefix_cache.hit_tokens >= 20
    checker.check(said, texts)
    engine.close()


def test_requests_that_are_preempted(target: Path, head: BlockFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, checker = open_engine(target, head, **TREE), Checker(target, head)
    accept_at_random(monkeypatch, torch.Generator().manual_seed(2))
    said, step, num_steps = record(engine, monkeypatch), engine.step, 0

    def preempting() -> Any:
        nonlocal num_steps
        deltas, running = step(), engine.scheduler.verifying
        num_steps += 1
        if running and num_steps % 3:
            with torch.inference_mode():
                engine.preempt(running[num_steps % len(running)])
        return deltas

    monkeypatch.setattr(engine, "step", preempting)
    texts = run(engine, random_prompts((5, 13), seed=6), (16, 16))
    assert engine.stats().num_preemptions >= 3
    checker.check(said, texts)
    engine.close()


def test_steps_that_are_skipped(target: Path, head: BlockFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that comes back knows the context of the steps that it had no part in, of the newest ones at least."""
    without_measurement(monkeypatch)
    engine, checker = open_engine(target, head, speculative_adaptive="auto"), Checker(target, head)
    accept_at_random(monkeypatch, torch.Generator().manual_seed(4))
    said, sizer = record(engine, monkeypatch), engine.runner.sizer
    assert sizer is not None
    some = np.array([True, False])
    sizes = [DraftSize(3), *[NOTHING] * 5, DraftSize(2, drafted=some), *[NOTHING] * 3, DraftSize(4, is_chain=True)]
    left = iter(sizes * 20)

    def planned(batch: SizedBatch) -> tuple[DraftSize, int]:
        sizer._predict(batch)
        size = next(left)
        return (size if len(batch.rows) == 2 or size.drafted is None else NOTHING), 1

    monkeypatch.setattr(sizer, "_planned", planned)
    texts = run(engine, random_prompts((5, 13), seed=6), (40, 40))
    assert {len(block.logits) for blocks in said.values() for block in blocks} == {2, 3, 4}
    checker.check(said, texts)
    engine.close()


def test_captured_steps_leave_the_same_keys_and_values(target: Path, head: BlockFiles) -> None:
    def entries(**flags: Any) -> tuple[list[int], Tensor]:
        engine = open_engine(target, head, **TREE, **flags)
        drafter = engine.runner.drafter
        assert isinstance(drafter, BlockDrafter)
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        engine.add_request("0", tuple(random_prompts((9,), seed=1)[0]), params)
        tokens = [token for _ in range(24) for delta in engine.step() for token in delta.token_ids]
        request, pool = engine.scheduler.verifying[0], drafter._own_kv
        slots = engine.pools.table.slots_at(torch.tensor([request.held_row]), torch.arange(request.root_position)[None])
        found = torch.stack([layer[slots[0]] for layer in (*pool.k, *pool.v)])
        engine.close()
        return tokens, found

    texts, expected = entries(disable_cuda_graph=True)
    captured, found = entries(cuda_graph_max_bs=4)
    assert captured == texts
    assert expected.abs().sum((0, 2, 3)).min() > 0
    assert_close(found, expected)


# ---- folders ---------------------------------------------------------------------------------------------------------


def refused(
    target: Path, head: BlockFiles, kind: type[Exception] | tuple[type[Exception], ...], sentence: str, **flags: Any
) -> None:
    with pytest.raises(kind, match=sentence):
        LLM(model=str(target), dtype="float32", device="cpu", speculative_draft_model_path=str(head.folder), **flags)


def test_settings_that_do_not_fit(target: Path, tmp_path: Path) -> None:
    head = write_block_head(tmp_path, target, seed=0)

    def refuse(kind: type[Exception], sentence: str, **changes: Any) -> None:
        nested = {"mask_token_id": 130, "target_layer_ids": list(READS)} | changes
        save_block_head(head, dflash_config={name: value for name, value in nested.items() if value is not None})
        refused(target, head, kind, sentence)

    refuse(
        UnsupportedModelError,
        r"target_layer_ids \[3, 9\]: the head can read behind layers 0 to 2",
        target_layer_ids=[3, 9],
    )
    refuse(CheckpointError, "target_layer_ids should be a list of numbers of layers", target_layer_ids=["1"])
    refuse(CheckpointError, "target_layer_ids should be a list of numbers of layers", target_layer_ids=None)
    refuse(ConfigError, "reads 72 numbers per token, but 1 layers of the target give 36", target_layer_ids=[1])
    refuse(CheckpointError, "block_size 1: a block has a root and a mask at least", block_size=1)
    refuse(CheckpointError, "block_size 0: a block has a root and a mask at least", block_size=0)
    refuse(CheckpointError, "block_size should be a whole number, but is 'x'", block_size="x")
    refuse(ConfigError, "mask_token_id 131 is not in the target's vocabulary of 131 tokens", mask_token_id=131)
    refuse(ConfigError, "mask_token_id -1 is not in the target's vocabulary of 131 tokens", mask_token_id=-1)
    refuse(CheckpointError, "mask_token_id should be a whole number, but is None", mask_token_id=None)
    refuse(UnsupportedModelError, "projector_type 'domino' is not supported", projector_type="domino")
    save_block_head(head, dflash_config=3)
    refused(target, head, CheckpointError, "dflash_config should be an object, but is a int")


def test_heads_of_other_targets(target: Path, tmp_path: Path) -> None:
    vocabulary = write_tiny_checkpoint(tmp_path / "vocabulary", seed=0, vocab_size=97)
    width = write_tiny_checkpoint(tmp_path / "width", seed=0, hidden_size=30)
    head = write_block_head(tmp_path / "a", vocabulary, seed=0)
    refused(target, head, ConfigError, "the head's vocabulary has 97 tokens, the target's 131")
    head = write_block_head(tmp_path / "b", width, seed=0)
    refused(target, head, ConfigError, "the head's hidden size is 30, the target's 36")


def test_tensors_that_lack_or_are_too_many(target: Path, tmp_path: Path) -> None:
    head = write_block_head(tmp_path, target, seed=0)
    for name in ("hidden_norm.weight", "layers.1.self_attn.k_norm.weight", "norm.weight"):
        save_block_head(replace(head, tensors={key: x for key, x in head.tensors.items() if key != name}))
        refused(target, head, CheckpointError, f"lacks the tensor {name}")
    for name, words in {
        "markov_head.markov_w1.weight": "it is not known where its blocks predict their first token",
        "candidate_selector.successor_codebook": "selector_rank should be a whole number, but is None",
        "layers.0.attention_conv.base_kernel": "conv_kernel_size should be a whole number, but is None",
        "d2t": r"d2t is \[3\] of type F32 in .* should be \[131\] of integers",
        "layers.0.hidden_norm.weight": "tensors that the model in its config.json does not have",
        "lm_head.weight": "does not have the lm_head.weight of its draft head",
    }.items():
        save_block_head(replace(head, tensors=head.tensors | {name: torch.ones(3)}))
        refused(target, head, (CheckpointError, UnsupportedModelError), words)


def test_kinds_of_heads_are_not_mixed_up(target: Path, head: BlockFiles, tmp_path: Path) -> None:
    refused(
        target, head, ConfigError, "holds a draft of the kind dflash: choose dflash", speculative_algorithm="eagle3"
    )
    other = write_head(tmp_path, target, "eagle3", seed=0)
    with pytest.raises(ConfigError, match="holds a draft of the kind eagle3: choose eagle3 or auto"):
        LLM(model=str(target), speculative_algorithm="dflash", speculative_draft_model_path=str(other.folder))
    with pytest.raises(UnsupportedModelError, match="DFlashDraftModel is a draft head and no model"):
        LLM(model=str(head.folder))
    (both := tmp_path / "both").mkdir()
    mixed, nested = write_block_head(both, target, seed=0), {"mask_token_id": 130, "target_layer_ids": list(READS)}
    save_block_head(mixed, dflash_config=nested, architectures=["LlamaForCausalLMEagle3"])
    refused(target, mixed, UnsupportedModelError, "mixes kinds of heads: it is a LlamaForCausalLMEagle3 with")
    save_block_head(mixed, dflash_config=nested, dspark_config={"mask_token_id": 5})
    refused(target, mixed, CheckpointError, "dflash_config and dspark_config differ in mask_token_id")


@pytest.mark.parametrize(
    ("block_size", "given", "expected"),
    [
        (16, FIXED, (15, 1, 16, 16)),  # a whole block
        (16, AUTO, (7, 3, 12, 12)),
        (3, AUTO, (2, 3, 7, 7)),  # no more nodes than the sizes are chosen among
        (2, AUTO, (1, 3, 4, 4)),
        (16, FIXED | {"speculative_num_steps": 4}, (4, 1, 5, 5)),
        (16, TREE, (4, 3, 9, 9)),
        (
            16,
            FIXED | {"speculative_num_steps": 9, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4},
            (9, 2, 4, 10),
        ),
        (100, FIXED, (63, 1, 64, 64)),
    ],
)
def test_the_shape_of_drafts(block_size: int, given: dict[str, Any], expected: tuple[int, int, int, int]) -> None:
    plan = plan_drafts(EngineConfig(**given), "dflash", 4096, block_size)
    assert (plan.num_steps, plan.topk, plan.max_nodes, plan.num_lookahead_slots) == expected
    assert (plan.algorithm, plan.draws_drafts, plan.width) == ("dflash", True, 1)


def test_shapes_that_a_block_does_not_have(target: Path, head: BlockFiles, tmp_path: Path) -> None:
    words = "drafts of 6 steps: the DFlash head was made for blocks of 6 tokens .* set speculative_num_steps 5"
    refused(target, head, ConfigError, words, speculative_num_steps=6)
    (tmp_path / "tree.json").write_text('{"trees": [{"parents": [-1, 0], "ranks": [0, 0]}]}')
    words = "names a DFlash head, which drafts chains and dynamic trees: drop"
    refused(target, head, ConfigError, words, speculative_tree=tmp_path / "tree.json")


def test_sizes(target: Path, head: BlockFiles) -> None:
    def model(**flags: Any) -> Any:
        with LLM(model=str(target), dtype="float32", device="cpu", context_length=64, **flags) as llm:
            return llm.engine.model

    path = {"speculative_draft_model_path": str(head.folder)}
    bare, with_head = model(speculative_algorithm="none"), model(**path, **FIXED)
    count = sum(tensor.numel() for tensor in head.tensors.values())
    assert with_head.num_parameters - bare.num_parameters == count
    assert with_head.cache_shape.num_kv_layers - bare.cache_shape.num_kv_layers == 2
    assert with_head.cache_shape.draft_features == 0  # a cached prefix has nothing for it but keys and values
