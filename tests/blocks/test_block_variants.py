"""DSpark and DFlash2 heads, windows and causal blocks: what is computed, what is drafted, and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specmamba import LLM
from specmamba.config import EngineConfig
from specmamba.core import Batch, DraftTree
from specmamba.draft.blocks import BlockDrafter
from specmamba.draft.candidates import Candidates
from specmamba.engine.engine import Engine
from specmamba.engine.model_report import model_info
from specmamba.errors import CheckpointError, UnsupportedModelError
from tests.blocks import BLOCK, RANK, VARIANTS, BlockFiles, BlockReference, save_block_head, write_block_head
from tests.blocks.test_dflash import FIXED, TREE, Checker, open_engine, record, refused
from tests.models.test_model_exact import accept_at_random, assert_close, random_prompts, run
from tests.tiny import write_tiny_checkpoint

CHAIN: dict[str, Any] = FIXED
COMB: dict[str, Any] = {"speculative_adaptive": "auto", "speculative_num_steps": 4, "speculative_eagle_topk": 3}
LINKED = [name for name, variant in VARIANTS.items() if variant.links]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", seed=11)


# ---- what they compute -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", sorted(VARIANTS.keys() - {"dflash"}))
def test_blocks_equal_the_formula(variant: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The marginals, in ragged batches, behind chunks of prompts and a cached prefix; windows are short."""
    head = write_block_head(tmp_path, target, seed=3, variant=variant)
    engine, checker = open_engine(target, head, chunked_prefill_size=11, **CHAIN), Checker(target, head)
    accept_at_random(monkeypatch, torch.Generator().manual_seed(1))
    said, prompts = record(engine, monkeypatch), random_prompts((1, 26, 2, 9), seed=3)
    texts = run(engine, prompts, (14, 9, 12, 10))
    assert max(len(block.known) for block in said["r1"]) > 25
    checker.check(said, texts)
    said.clear()
    texts = run(engine, [texts["r1"][:30] + prompts[3]], [10])
    assert engine.stats().prefix_cache.hit_tokens >= 20
    checker.check(said, texts)
    engine.close()


@dataclass(frozen=True)
class Drafted:
    """One block and what was drafted from it, for one request."""

    root: int
    hidden: Tensor  # [D, H]
    marginals: Tensor  # [D, V]
    paths: dict[tuple[int, ...], float]  # tokens from the root down to each node; candidates have a log probability


class Watcher:
    """Keeps blocks and drafts of an engine."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        drafter = engine.runner.drafter
        assert isinstance(drafter, BlockDrafter)
        self.seen: list[Drafted] = []
        run_block, head = drafter._run, drafter.head

        def watched(batch: Batch, num_steps: int) -> Tensor:
            self._hidden = run_block(batch, num_steps)
            return self._hidden

        def keep(batch: Batch, paths: list[dict[tuple[int, ...], float]]) -> None:
            marginals = head.logits(self._hidden)
            for i, of_row in enumerate(paths):
                if batch.rows[i : i + 1]:
                    root = int(batch.root_tokens[i])
                    self.seen.append(Drafted(root, self._hidden[i].clone(), marginals[i].clone(), of_row))

        def of_tree(name: str) -> None:
            made = getattr(drafter, name)

            def drafted(batch: Batch, *args: Any) -> DraftTree:
                tree: DraftTree = made(batch, *args)
                keep(batch, [dict.fromkeys(paths_of(tree, i), 0.0) for i in range(batch.size)])
                return tree

            monkeypatch.setattr(drafter, name, drafted)

        for name in ("propose", "propose_chain"):
            of_tree(name)
        offer = drafter.offer

        def offered(batch: Batch, num_steps: int) -> Candidates:
            found = offer(batch, num_steps)
            keep(batch, [offers_of(found, i) for i in range(batch.size)])
            return found

        monkeypatch.setattr(drafter, "_run", watched)
        monkeypatch.setattr(drafter, "offer", offered)


def paths_of(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    parents, tokens = tree.shape.parents[row].tolist(), tree.tokens[row].tolist()
    for parent, token in zip(parents[1:], tokens[1:], strict=True):
        assert parent >= 0
        paths.append((*paths[parent], token))
    return paths[1:]


def offers_of(found: Candidates, row: int) -> dict[tuple[int, ...], float]:
    paths, logps = [()], dict[tuple[int, ...], float]()
    columns = found.tokens[row].tolist(), found.parents[row].tolist(), found.logp[row].tolist()
    for token, parent, logp in zip(*columns, strict=True):
        paths.append((*paths[parent], token))
        logps[paths[-1]] = logp
    return logps


class Enumeration:
    """All paths of a block with their probabilities, from the formula."""

    def __init__(self, reference: BlockReference, drafted: Drafted, topk: int) -> None:
        self.values: dict[tuple[int, ...], float] = {}  # log probabilities of whole paths
        self._reference, self._drafted, self._topk = reference, drafted, topk
        self._add((), drafted.root, 0.0, torch.zeros(RANK, dtype=torch.float64))

    def _add(self, path: tuple[int, ...], token: int, value: float, state: Tensor) -> None:
        depth, of = len(path), self._drafted
        if depth == len(of.marginals):
            return
        logits, state = self._reference.behind(of.marginals[depth], of.hidden[depth], token, state)
        likeliest = logits.log_softmax(-1).topk(self._topk)
        for child, logp in zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True):
            self.values[*path, child] = value + logp
            self._add((*path, child), child, value + logp, state)


def watch(
    target: Path, head: BlockFiles, monkeypatch: pytest.MonkeyPatch, **flags: Any
) -> tuple[list[Drafted], BlockReference]:
    engine = open_engine(target, head, **flags)
    watcher = Watcher(engine, monkeypatch)
    accept_at_random(monkeypatch, torch.Generator().manual_seed(5))
    run(engine, random_prompts((3, 12), seed=8), (12, 9))
    engine.close()
    assert len(watcher.seen) > 5
    none = torch.zeros(1, 1)
    return watcher.seen, BlockReference(head, none, none)


@pytest.mark.parametrize("variant", LINKED)
def test_chains_choose_by_the_token_above(
    variant: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = write_block_head(tmp_path, target, seed=3, variant=variant)
    seen, reference = watch(target, head, monkeypatch, **CHAIN)
    differing = 0
    for drafted in seen:
        (longest,) = [path for path in drafted.paths if len(path) == len(drafted.marginals)]
        assert longest in Enumeration(reference, drafted, 1).values
        differing += longest != tuple(drafted.marginals.argmax(-1).tolist())
    assert differing > len(seen) // 2


@pytest.mark.parametrize("variant", LINKED)
def test_trees_are_the_best_ones(variant: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the likeliest nodes among all that there are, by the probability of their paths."""
    head = write_block_head(tmp_path, target, seed=3, variant=variant)
    seen, reference = watch(target, head, monkeypatch, **TREE)
    for drafted in seen:
        values = Enumeration(reference, drafted, 3).values
        assert len(values) == 3 + 9 + 27 + 81
        best = sorted(values.values(), reverse=True)[:8]
        assert len(drafted.paths) == 8
        assert_close(torch.tensor(sorted((values[path] for path in drafted.paths), reverse=True)), torch.tensor(best))


def test_a_wide_tree(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many nodes and few children, more nodes of a depth are expanded than a node has children."""
    head = write_block_head(tmp_path, target, seed=4, variant="dspark")
    shape = {"speculative_num_steps": 5, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 18}
    seen, reference = watch(target, head, monkeypatch, **FIXED, **shape)
    widths = set[int]()
    for drafted in seen:
        values = Enumeration(reference, drafted, 2).values
        best = sorted(values.values(), reverse=True)[:17]
        assert_close(torch.tensor(sorted((values[path] for path in drafted.paths), reverse=True)), torch.tensor(best))
        above = {path[:-1] for path in drafted.paths}
        widths |= {sum(len(path) == depth for path in above) for depth in range(1, 5)}
    assert max(widths) > 2


@pytest.mark.parametrize("variant", ["dflash2", "dspark-apart", "dspark-rnn", "dspark-without"])
def test_offers_for_sizes_that_follow_the_load(
    variant: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The children of the likeliest chain, with the head's own probabilities, or with those of its confidence head."""
    head = write_block_head(tmp_path, target, seed=3, variant=variant)
    engine = open_engine(target, head, **COMB | {"speculative_num_steps": 4})
    watcher, drafter = Watcher(engine, monkeypatch), engine.runner.drafter
    accept_at_random(monkeypatch, torch.Generator().manual_seed(5))
    assert isinstance(drafter, BlockDrafter)
    run(engine, random_prompts((3, 12), seed=8), (24, 24))
    engine.close()
    none = torch.zeros(1, 1)
    offers = [drafted for drafted in watcher.seen if any(drafted.paths.values())]
    assert offers
    reference, confidences = BlockReference(head, none, none), list[float]()
    for drafted in offers:
        values = Enumeration(reference, drafted, 3).values
        for path, logp in drafted.paths.items():
            above, by_value = path[:-1], [other for other in values if other[:-1] == path[:-1]]
            best = max(by_value, key=values.__getitem__)
            of_head = {other: values[other] - (values[above] if above else 0.0) for other in by_value}
            accepts = reference.accepts(drafted.hidden[len(above)], above[-1] if above else drafted.root)
            expected = of_head[path]
            if accepts is not None:
                confidences.append(accepts)
                share = (1 - accepts) * math.exp(of_head[path]) / (1 - math.exp(of_head[best]))
                expected = math.log(accepts if path == best else min(share, accepts))
            assert abs(expected - logp) < 2e-3
            assert above == () or above == max(
                (other for other in values if len(other) == len(above) and other[:-1] == above[:-1]),
                key=values.__getitem__,
            )
    if confidences:  # of both kinds, and of what shares the rest
        assert min(confidences) < 0.3 < 0.7 < max(confidences)


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_copies_of_the_targets_matrices(target: Path, tmp_path: Path) -> None:
    """A head may store the target's embedding and output head, which are not read; others are refused."""
    head = write_block_head(tmp_path, target, seed=0, variant="dspark")
    stored = load_file(target / "model.safetensors")
    names = {"embed_tokens.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
    copies = {name: stored.get(of, stored["model.embed_tokens.weight"]).clone() for name, of in names.items()}

    def num_parameters() -> int:
        path = str(head.folder)
        with LLM(model=str(target), dtype="float32", device="cpu", speculative_draft_model_path=path) as llm:
            return llm.engine.model.num_parameters

    alone = num_parameters()
    save_block_head(replace(head, tensors=head.tensors | copies))
    assert num_parameters() == alone
    for name in names:
        save_block_head(replace(head, tensors=head.tensors | copies | {name: 2 * copies[name]}))
        refused(target, head, UnsupportedModelError, f"does not have the {name} of its draft head")


def test_what_a_head_is_said_to_be(target: Path, tmp_path: Path) -> None:
    words = {
        "dflash": "DFlash",
        "dspark-gated": "DSpark, a gated Markov head of rank 5, with a confidence head",
        "dspark-without": "DSpark without a Markov head, with a confidence head",
        "dflash2": "DFlash2, 7 candidates by a selector of rank 5",
    }
    for variant, expected in words.items():
        head = write_block_head(tmp_path / variant, target, seed=0, variant=variant)
        given: dict[str, Any] = {
            "model": str(target),
            "device": "cpu",
            "speculative_draft_model_path": str(head.folder),
        }
        draft = model_info(EngineConfig(**given))["draft"]
        assert (draft["kind"], draft["variant"]) == ("dflash", expected)
        assert draft["parameters"] == sum(x.numel() for x in head.tensors.values())
        assert draft["layers"] == {"attention": 2, "mlp": 2}


@pytest.mark.parametrize(
    ("variant", "changes", "kind", "sentence"),
    [
        ("dspark", {"architectures": ["DFlashDraftModel"]}, UnsupportedModelError, "neither its architecture nor"),
        ("dspark", {"markov_head_type": "ngram"}, UnsupportedModelError, "markov_head_type 'ngram' is not supported"),
        ("dspark", {"markov_rank": None}, CheckpointError, "markov_rank should be a whole number, but is None"),
        ("dspark", {"markov_rank": 4}, CheckpointError, "markov_w1.weight"),
        ("dspark", {"block_size": 0}, CheckpointError, "block_size 0: a block drafts a token at least"),
        ("dspark", {"draft_vocab_size": 100}, UnsupportedModelError, "drafts 100 tokens by a map of its own"),
        ("dspark", {"speculators_model_type": "dflash2"}, UnsupportedModelError, "speculators_model_type 'dflash2'"),
        ("dspark", {"shift_label": False}, UnsupportedModelError, "shift_label False is not supported in DSpark"),
        ("dflash", {"shift_label": True}, UnsupportedModelError, "shift_label True is not supported in DFlash"),
        (
            "dspark",
            {"dspark_bonus_anchor": True, "sample_from_anchor": True},
            CheckpointError,
            "dspark_bonus_anchor True contradicts sample_from_anchor True",
        ),
        ("dspark-without", {"confidence_head_with_markov": True}, CheckpointError, "but there is no Markov head"),
        ("dspark", {"confidence_head_with_markov": False}, CheckpointError, "confidence_head.proj.weight"),
        ("dflash2", {"selector_top_k": 1000}, CheckpointError, "selector_top_k 1000 is more than the 131 tokens"),
        ("dflash2", {"conv_group_size": 7}, CheckpointError, "conv_group_size 7 does not divide hidden_size 36"),
        ("dflash2", {"conv_kernel_size": 3}, CheckpointError, "base_kernel"),
        ("dflash2", {"sliding_window": 4}, UnsupportedModelError, "sliding_window 4 is less than a block of 6"),
        ("dflash2", {"use_sliding_window": False}, CheckpointError, "sliding_window should be a number of tokens"),
        ("dflash2", {"output_multiplier": 0.5}, UnsupportedModelError, "output_multiplier 0.5 is not supported"),
        ("dflash2", {"layer_types": ["full_attention"]}, CheckpointError, "layer_types"),
    ],
)
def test_settings_that_are_refused(
    variant: str, changes: dict[str, Any], kind: type[Exception], sentence: str, target: Path, tmp_path: Path
) -> None:
    head = write_block_head(tmp_path, target, seed=0, variant=variant)
    nested = head.config["dflash_config"]
    inside = {name: value for name, value in changes.items() if name in nested}
    outside = {name: value for name, value in changes.items() if name not in inside}
    save_block_head(head, dflash_config=nested | inside, **outside)
    refused(target, head, kind, sentence)


@pytest.mark.parametrize(
    ("changes", "kind", "sentence"),
    [
        ({"sample_from_anchor": None}, CheckpointError, "sample_from_anchor should be true or false, but is None"),
        ({"markov_rank": None}, CheckpointError, "markov_w1.weight"),  # 256, of the config class
        ({"markov_head_type": "ngram"}, UnsupportedModelError, "markov_head_type 'ngram' is not supported"),
        ({"confidence_head_with_markov": False}, CheckpointError, "confidence_head.proj.weight"),
        ({"block_size": 0}, CheckpointError, "block_size 0: a block drafts a token at least"),
        ({"draft_vocab_size": 50}, UnsupportedModelError, "drafts 50 tokens by a map of its own"),
        ({"projector_type": "domino"}, UnsupportedModelError, "projector_type 'domino' is not supported"),
        ({"shift_label": False}, UnsupportedModelError, "shift_label False is not supported in DSpark"),
    ],
)
def test_dspark_of_speculators_that_is_refused(
    changes: dict[str, Any], kind: type[Exception], sentence: str, target: Path, tmp_path: Path
) -> None:
    head = write_block_head(tmp_path, target, seed=0, variant="speculators-dspark")
    given = (head.variant.speculators or {}) | changes
    save_block_head(replace(head, variant=replace(head.variant, speculators=given)))
    refused(target, head, kind, sentence)


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("dspark", "markov_head.markov_w2.weight"),
        ("dspark-gated", "markov_head.gate_proj.bias"),
        ("dspark-rnn", "markov_head.joint_proj.weight"),
        ("dflash2", "candidate_selector.successor_codebook"),
        ("dflash2", "layers.1.mlp_conv.kernel_projection.weight"),
    ],
)
def test_tensors_that_lack(variant: str, name: str, target: Path, tmp_path: Path) -> None:
    head = write_block_head(tmp_path, target, seed=0, variant=variant)
    save_block_head(replace(head, tensors={key: x for key, x in head.tensors.items() if key != name}))
    refused(target, head, CheckpointError, f"lacks the tensor {name}")


@pytest.mark.parametrize(
    ("variant", "expected"), [("dspark", BLOCK), ("dspark-apart", BLOCK - 1), ("dflash2", BLOCK - 1)]
)
def test_a_whole_block(variant: str, expected: int, target: Path, tmp_path: Path) -> None:
    """A DSpark head drafts as many tokens as its block has places."""
    head = write_block_head(tmp_path, target, seed=0, variant=variant)
    path: dict[str, Any] = {"speculative_draft_model_path": str(head.folder)}
    with LLM(model=str(target), dtype="float32", device="cpu", context_length=64, **path, **FIXED) as llm:
        assert llm.engine.draft_plan.num_steps == expected
    words = f"drafts of {expected + 1} steps: the DFlash head was made for blocks of {expected + 1} tokens"
    refused(target, head, Exception, words, speculative_num_steps=expected + 1)
