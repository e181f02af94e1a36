"""Logits against transformers, in float32: what extend and verify compute through the engine's own pools, and the MTP
head against its formula evaluated without any cache.

The engine runs as it always does, but for two parts. A probe in the drafter's place proposes the trees of a test and
keeps what the engine shows every drafter; and acceptance follows random choices, so that trees are accepted to any
depth and along any branch, whatever the random model thinks of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

from specmamba.bench.demo.checkpoint import read_checkpoint
from specmamba.bench.demo.model import DemoModel
from specmamba.config import DEMO_MODEL, EngineConfig
from specmamba.core import Batch, DraftTree, PrefillChunk, Verdict
from specmamba.draft.drafter import Drafter, chain_shape, tree_shape
from specmamba.draft.heads import MTPDrafter
from specmamba.engine.engine import Engine
from specmamba.errors import ConfigError
from specmamba.kernels import tree as tree_ops
from specmamba.models.base import DraftHead
from specmamba.sampling_params import SamplingParams
from tests.exactness import run_directly
from tests.families import qwen3_5
from tests.pairwise import pairwise
from tests.tiny import FULL, LINEAR, VISION, mtp_tensors, randomize, tiny_config, write_config, write_tiny_checkpoint

TOLERANCE = 1e-4  # largest difference, relative to the largest logit

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "attention-first": qwen3_5.VARIANTS["attention-first"],
    "tied": {
        "vocab_size": 203,
        "hidden_size": 42,
        "num_key_value_heads": 6,
        "head_dim": 16,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 5,
        "linear_key_head_dim": 18,
        "linear_value_head_dim": 11,  # with 6, transformers itself is 1.9e-4 from its own float64 result
        "tie_word_embeddings": True,
    },
    # an odd number of rotated components: the last pair reaches into the part that is not rotated
    "odd-rotary": {"head_dim": 20, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 2, "rms_norm_eps": 1e-5},
}
MODELS = ["demo", *CONFIGURATIONS]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    random = {
        name: write_tiny_checkpoint(folder / name, seed, **overrides)
        for seed, (name, overrides) in enumerate(CONFIGURATIONS.items())
    }
    return {"demo": DEMO_MODEL, **random}


@pytest.fixture(scope="session")
def references(checkpoints: dict[str, Path]) -> dict[str, DemoModel]:
    """transformers' model and, beside it, an MTP head made of transformers' layers."""
    return {name: read_checkpoint(folder) for name, folder in checkpoints.items()}


# ---- the harness -----------------------------------------------------------------------------------------------------


@dataclass
class Round:
    """One verify of one request, as the engine showed it to the drafter."""

    known: list[int]  # all decided tokens; the last is the root
    tokens: Tensor  # [N]
    parents: Tensor  # [N]
    logits: Tensor  # [N, V]
    num_pending: int
    num_accepted: int = -1
    path: tuple[int, ...] = ()


@dataclass
class Record:
    """What one run left, by request id."""

    extended: dict[str, list[tuple[int, Tensor]]] = field(default_factory=dict)  # start and logits [L, V] of each run
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    padded_chunks: int = 0
    ragged_batches: int = 0  # verifies whose rows had different numbers of pending records
    scattered_batches: int = 0  # verifies whose rows were not consecutive


Propose = Callable[[Batch, int], DraftTree]


class Probe(Drafter):
    """Proposes what a test wants and keeps what every drafter is shown."""

    def __init__(self, engine: Engine, max_nodes: int, propose: Propose) -> None:
        self.max_nodes = max_nodes
        self.record = Record()
        self._engine, self._propose = engine, propose
        self._open: list[Round] = []

    def extend(self, chunk: PrefillChunk, hidden: Tensor) -> None:
        self.record.padded_chunks += chunk.is_padded
        names = {request.held_row: request.request_id for request in self._engine.scheduler.extending}
        logits = self._engine.model.target.logits(hidden)
        for i, row in enumerate(chunk.rows):
            run = int(chunk.positions[i, 0]), logits[i, : int(chunk.lengths[i])].clone()
            self.record.extended.setdefault(names[row], []).append(run)

    def propose(self, batch: Batch) -> DraftTree:
        tree = self._propose(batch, self.max_nodes)
        requests = {request.held_row: request for request in self._engine.scheduler.verifying}
        records: Any = self._engine.pools.state_buffers
        pending = [records._num_pending[row] for row in batch.rows]
        self.record.ragged_batches += len(set(pending)) > 1
        self.record.scattered_batches += batch.rows[-1] - batch.rows[0] + 1 != len(batch.rows)
        self._open = []
        for i, row in enumerate(batch.rows):
            request = requests[row]
            known = request.known_tokens(0, request.num_tokens)
            assert known[-1] == int(tree.tokens[i, 0])
            opened = Round(known, tree.tokens[i], tree.shape.parents[i], torch.empty(0), pending[i])
            self.record.rounds.setdefault(request.request_id, []).append(opened)
            self._open.append(opened)
        return tree

    def observe(self, batch: Batch, verdict: Verdict, hidden: Tensor) -> None:
        logits, accepted = self._engine.model.target.logits(hidden), verdict.num_accepted.tolist()
        for i, opened in enumerate(self._open):
            opened.logits, opened.num_accepted = logits[i].clone(), accepted[i]
            opened.path = tuple(verdict.path[i, : accepted[i] + 1].tolist())


def random_tree(generator: torch.Generator) -> Propose:
    """Bushy trees: any parents, rows with fewer nodes than others, sometimes siblings with one token."""

    def propose(batch: Batch, max_nodes: int) -> DraftTree:
        size = len(batch.rows)
        parents = torch.full((size, max_nodes), -1)
        tokens = torch.randint(1, 97, (size, max_nodes), generator=generator)
        tokens[:, 0] = batch.root_tokens
        for b in range(size):
            num_nodes = int(torch.randint(1, max_nodes + 1, (), generator=generator)) if b % 3 == 2 else max_nodes
            for i in range(1, num_nodes):
                oldest = int(torch.randint(0, 2, (), generator=generator)) * max(0, i - 3)  # wide and deep ones
                parents[b, i] = torch.randint(oldest, i, (), generator=generator)
        return DraftTree(tokens, tree_shape(parents, parents.shape[1]))

    return propose


def random_chain(generator: torch.Generator) -> Propose:
    def propose(batch: Batch, max_nodes: int) -> DraftTree:
        size = len(batch.rows)
        drafts = torch.randint(1, 97, (size, max_nodes - 1), generator=generator)
        tokens = torch.cat([batch.root_tokens[:, None], drafts], 1)
        return DraftTree(tokens, chain_shape(size, max_nodes, tokens.device))

    return propose


def accept_at_random(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    """Let the target choose at random, mostly a child's token where there is one; the rest of acceptance is real."""

    def accept(tree: DraftTree, logits: Tensor, *args: object, **rule: object) -> Verdict:
        parents = tree.shape.parents
        choice = torch.randint(1, 97, parents.shape, generator=generator)
        for b, i in (parents >= 0).nonzero().tolist():
            if torch.rand((), generator=generator) < 0.7:
                choice[b, parents[b, i]] = tree.tokens[b, i]
        path = tree_ops.accepted_path(tree.tokens, parents, tree.shape.ancestors, choice)
        return Verdict(*path, is_finite=torch.ones(len(choice), dtype=torch.bool))

    run_directly(monkeypatch)
    monkeypatch.setattr("specmamba.verify.step.accept", accept)


def new_engine(folder: Path, num_steps: int, **flags: Any) -> Engine:
    return Engine(
        EngineConfig(
            model=str(folder),
            dtype="float32",
            device="cpu",
            context_length=256,
            **dict[str, Any](speculative_algorithm="mtp", speculative_num_steps=num_steps) | flags,
        )
    )


def with_probe(engine: Engine, max_nodes: int, propose: Propose) -> Probe:
    probe = Probe(engine, max_nodes, propose)
    engine.runner.drafter = probe
    return probe


def run(engine: Engine, prompts: Sequence[list[int]], max_tokens: Sequence[int]) -> dict[str, list[int]]:
    """Answer all prompts; the tokens of every request, prompt included."""
    texts = {f"r{i}": list(prompt) for i, prompt in enumerate(prompts)}
    for (name, prompt), count in zip(texts.items(), max_tokens, strict=True):
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        engine.add_request(name, tuple(prompt), params)
    while engine.has_unfinished_requests:
        for delta in engine.step():
            texts[delta.request_id] += delta.token_ids
    stats = engine.stats()
    assert (stats.kv_used_tokens, stats.state_used_slots) == (0, 0)
    return texts


def random_prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 97, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def reference_logits(model: Qwen3_5ForCausalLM, sequences: Sequence[list[int]]) -> list[Tensor]:
    """Logits [T, V] of each sequence. They are padded behind their ends, where a causal model does not look."""
    longest = max(map(len, sequences))
    padded = torch.tensor([s + [0] * (longest - len(s)) for s in sequences])
    logits = model(padded, use_cache=False).logits
    return [row[: len(s)] for row, s in zip(logits, sequences, strict=True)]


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    difference = float((got - expected).abs().max() / expected.abs().max())
    assert difference < TOLERANCE, f"relative difference {difference:.2e}"


def check_extends(record: Record, texts: dict[str, list[int]], model: Qwen3_5ForCausalLM) -> None:
    """Every run of known tokens gave the logits that transformers gives for the whole text at once."""
    for name, runs in record.extended.items():
        assert [start for start, _ in runs] == [sum(len(x) for _, x in runs[:i]) for i in range(len(runs))]
        logits = torch.cat([x for _, x in runs])
        assert_close(logits, reference_logits(model, [texts[name][: len(logits)]])[0])


def check_rounds(record: Record, model: Qwen3_5ForCausalLM) -> None:
    """Every node of every tree gave the logits that transformers gives at the end of the node's own path."""
    for rounds in record.rounds.values():
        paths = [node_path(r, leaf) for r in rounds for leaf in leaves(r)]
        expected = iter(reference_logits(model, paths))
        for r in rounds:
            for leaf in leaves(r):
                nodes = node_indices(r, leaf)
                assert_close(r.logits[nodes], next(expected)[-len(nodes) :])


def leaves(r: Round) -> list[int]:
    """Real nodes without children; a node that is padding has parent -1 as the root has."""
    inner = set(r.parents.tolist())
    return [i for i in range(len(r.tokens)) if i not in inner and (i == 0 or r.parents[i] >= 0)]


def node_indices(r: Round, node: int) -> list[int]:
    nodes = [node]
    while nodes[-1] != 0:
        nodes.append(int(r.parents[nodes[-1]]))
    return nodes[::-1]


def node_path(r: Round, node: int) -> list[int]:
    return r.known + [int(r.tokens[i]) for i in node_indices(r, node)[1:]]


# ---- the target ------------------------------------------------------------------------------------------------------


class TestTarget:
    LENGTHS = (19, 1, 42, 2, 3, 29)
    NEW_TOKENS = (40, 31, 18, 44, 25, 36)  # rows in the middle of the batch end first

    @pytest.mark.fast_cases(8)
    @pytest.mark.parametrize("chunk_size", [512, 64, 13, 7, 1])
    @pytest.mark.parametrize("name", MODELS)
    def test_extend(
        self, name: str, chunk_size: int, checkpoints: dict[str, Path], references: dict[str, DemoModel]
    ) -> None:
        lengths = (150, 2, 3, 4, 2, 67, 66)  # 150: three chunks of the operator too
        engine = new_engine(checkpoints[name], 1, chunked_prefill_size=chunk_size)
        probe = with_probe(engine, 2, random_chain(torch.Generator().manual_seed(0)))
        texts = run(engine, random_prompts(lengths, seed=1), [1] * len(lengths))
        assert sorted(sum(len(x) for _, x in runs) for runs in probe.record.extended.values()) == sorted(
            length - 1 for length in lengths
        )
        assert bool(probe.record.padded_chunks) == (chunk_size > 1)
        check_extends(probe.record, texts, references[name].target)

    @pytest.mark.fast_cases("-tied", "-odd-rotary")
    @pairwise(
        pytest.mark.parametrize("page_size", [1, 16]),
        pytest.mark.parametrize("num_nodes", [1, 2, 6]),
        pytest.mark.parametrize("name", MODELS),
    )
    def test_verify_chains(
        self,
        name: str,
        num_nodes: int,
        page_size: int,
        checkpoints: dict[str, Path],
        references: dict[str, DemoModel],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        generator = torch.Generator().manual_seed(num_nodes)
        accept_at_random(monkeypatch, generator)
        engine = new_engine(checkpoints[name], max(1, num_nodes - 1), page_size=page_size, chunked_prefill_size=11)
        probe = with_probe(engine, num_nodes, random_chain(generator))
        texts = run(engine, random_prompts(self.LENGTHS, seed=2), self.NEW_TOKENS)
        check_extends(probe.record, texts, references[name].target)
        check_rounds(probe.record, references[name].target)
        self.check_that_it_was_worth_it(probe.record, num_nodes)

    @pytest.mark.fast_cases("-tied", "-odd-rotary")
    @pairwise(
        pytest.mark.parametrize("page_size", [1, 16]),
        pytest.mark.parametrize("num_nodes", [5, 12]),
        pytest.mark.parametrize("name", MODELS),
    )
    def test_verify_trees(
        self,
        name: str,
        num_nodes: int,
        page_size: int,
        checkpoints: dict[str, Path],
        references: dict[str, DemoModel],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        generator = torch.Generator().manual_seed(num_nodes)
        accept_at_random(monkeypatch, generator)
        engine = new_engine(checkpoints[name], num_nodes - 1, page_size=page_size, chunked_prefill_size=11)
        probe = with_probe(engine, num_nodes, random_tree(generator))
        texts = run(engine, random_prompts(self.LENGTHS, seed=3), self.NEW_TOKENS)
        check_extends(probe.record, texts, references[name].target)
        check_rounds(probe.record, references[name].target)
        self.check_that_it_was_worth_it(probe.record, num_nodes)
        rounds = [r for of_request in probe.record.rounds.values() for r in of_request]
        assert any(r.path != tuple(range(len(r.path))) for r in rounds), "no accepted path had to be moved"
        assert any(list(r.parents).count(-1) > 1 for r in rounds), "no tree was smaller than the others"

    @pytest.mark.fast_cases(1)
    @pytest.mark.parametrize("name", ["grouped", "tied"])
    def test_every_number_of_pending_records(
        self,
        name: str,
        checkpoints: dict[str, Path],
        references: dict[str, DemoModel],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        accept_at_random(monkeypatch, generator)
        engine = new_engine(checkpoints[name], 3)
        probe = with_probe(engine, 4, random_tree(generator))
        run(engine, random_prompts((3, 8, 5, 1), seed=4), [110, 90, 100, 80])
        rounds = [r for of_request in probe.record.rounds.values() for r in of_request]
        records: Any = engine.pools.state_buffers
        assert {r.num_pending for r in rounds} == set(range(records.capacity + 1))
        check_rounds(probe.record, references[name].target)

    @pytest.mark.parametrize("layer_types", [[LINEAR, LINEAR], [FULL, FULL]], ids=["no-attention", "no-state"])
    def test_layers_of_one_kind(self, layer_types: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = write_tiny_checkpoint(tmp_path / "model", 7, with_mtp=layer_types[0] == FULL, layer_types=layer_types)
        generator = torch.Generator().manual_seed(7)
        accept_at_random(monkeypatch, generator)
        engine = new_engine(folder, 0, speculative_algorithm="none", speculative_num_steps=None)
        probe = with_probe(engine, 1, random_chain(generator))
        texts = run(engine, random_prompts((5, 1, 9), seed=7), [21, 30, 25])
        model = Qwen3_5ForCausalLM.from_pretrained(folder).eval()
        check_extends(probe.record, texts, model)
        check_rounds(probe.record, model)

    @staticmethod
    def check_that_it_was_worth_it(record: Record, num_nodes: int) -> None:
        """The run met folds, ragged and scattered batches, and drafts that were accepted to different depths."""
        rounds = [r for of_request in record.rounds.values() for r in of_request]
        assert record.ragged_batches
        assert record.scattered_batches
        fills = [[r.num_pending for r in of_request] for of_request in record.rounds.values()]
        assert any(fill != sorted(fill) for fill in fills), "no checkpoint was advanced"
        assert {r.num_accepted for r in rounds} >= set(range(min(num_nodes, 4)))


# ---- the MTP head ----------------------------------------------------------------------------------------------------


@dataclass
class Draft:
    """One draft of one request: what was known, and what the head said at each step."""

    known: list[int]
    tokens: list[int]  # without the root
    logits: Tensor  # [steps, V]
    num_tokens: int  # entries that were made again from the target's hidden states, the root's included


def logits_along(
    known: list[int],
    hidden: Tensor,
    drafted: list[int],
    enter: Callable[[list[int], Tensor, int], Tensor],
    head: Callable[[Tensor], Tensor],
) -> Tensor:
    """The logits [steps, V] of an MTP head along a draft, every step from the formula for the whole text.

    Entry t is made of the token at t and the state at t - 1: the target's up to the root, the head's own behind it.
    There is no entry for the first token, but where it is the root: then its state is zeros.

    Args:
        known: tokens up to the root.
        hidden: [T, H], the target's states behind them.
        drafted: tokens behind the root.
        enter: the head's last state [1, H] of entries with these tokens and states, from a position on.
        head: [1, H] -> [1, V].
    """
    logits = []
    tokens, states, first = known[1:], hidden[: len(known) - 1], 1
    if len(known) == 1:
        tokens, states, first = known, torch.zeros_like(hidden[:1]), 0
    for token in drafted:
        out = enter(tokens, states, first)
        logits.append(head(out)[0])
        if first == 0:
            tokens, states, first = [], states[:0], 1
        tokens, states = [*tokens, token], torch.cat([states, out])
    return torch.stack(logits)


def check_draft(draft: Draft, text: list[int], expected: Tensor) -> None:
    """Compare a draft with the logits [steps, V] that it should have had, which choose the same tokens.

    But for ties that the tolerance cannot tell apart.
    """
    assert draft.known == text[: len(draft.known)]
    assert_close(draft.logits, expected)
    best, chosen = expected.amax(-1), expected.gather(1, torch.tensor(draft.tokens)[:, None])[:, 0]
    assert bool((best - chosen <= 2 * TOLERANCE * expected.abs().max()).all())


class RecordingHead:
    """The engine's head; keeps its logits."""

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        self.forward, self.combine = head.forward, head.combine
        self.said: list[Tensor] = []

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._head.logits(hidden)
        self.said.append(logits[:, 0].clone())
        return logits


def record_drafts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Draft]]:
    """Every draft that the engine's own drafter makes from now on, by request id."""
    drafter = engine.runner.drafter
    assert isinstance(drafter, MTPDrafter)
    run_directly(monkeypatch)
    head = RecordingHead(drafter.head)
    monkeypatch.setattr(drafter, "head", head)
    real_propose = drafter.propose
    drafts: dict[str, list[Draft]] = {}

    def propose(batch: Batch) -> DraftTree:
        head.said.clear()
        num_tokens = [drafter.pending.num_tokens[row] for row in batch.rows]
        tree = real_propose(batch)
        requests = {request.held_row: request for request in engine.scheduler.verifying}
        for i, row in enumerate(batch.rows):
            request = requests[row]
            known = request.known_tokens(0, request.num_tokens)
            said = torch.stack([logits[i] for logits in head.said])
            draft = Draft(known, tree.tokens[i, 1:].tolist(), said, num_tokens[i])
            drafts.setdefault(request.request_id, []).append(draft)
        return tree

    monkeypatch.setattr(drafter, "propose", propose)
    return drafts


@torch.no_grad()
def reference_draft(model: DemoModel, known: list[int], target_hidden: Tensor, drafted: list[int]) -> Tensor:
    """As ``logits_along``. Where the first token is the root, nothing else can be asked than its own entry."""
    text = model.target.model

    def enter(tokens: list[int], states: Tensor, first: int) -> Tensor:
        positions = torch.arange(first, first + len(tokens)).expand(3, 1, -1)
        embedded = text.embed_tokens(torch.tensor([tokens]))
        out: Tensor = model.mtp(embedded, states[None], text.rotary_emb(embedded, positions))[0, -1:]
        return out

    return logits_along(known, target_hidden, drafted, enter, model.logits)


@torch.no_grad()
def check_drafts(drafts: dict[str, list[Draft]], texts: dict[str, list[int]], model: DemoModel) -> None:
    for name, of_request in drafts.items():
        text = torch.tensor([texts[name]])
        target_hidden = model.target.model(text, use_cache=False).last_hidden_state[0]
        for draft in of_request:
            check_draft(draft, texts[name], reference_draft(model, draft.known, target_hidden, draft.tokens))
            assert draft.logits.argmax(-1).tolist() == draft.tokens


class TestMTPHead:
    LENGTHS = (1, 26, 2, 3, 45, 4, 9)
    NEW_TOKENS = (26, 14, 33, 21, 12, 30, 24)

    @pytest.mark.fast_cases(5)
    @pairwise(
        pytest.mark.parametrize("page_size", [1, 16]),
        pytest.mark.parametrize("num_steps", [1, 3, 5]),
        pytest.mark.parametrize("name", MODELS),
    )
    def test_drafts(
        self,
        name: str,
        num_steps: int,
        page_size: int,
        checkpoints: dict[str, Path],
        references: dict[str, DemoModel],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        accept_at_random(monkeypatch, torch.Generator().manual_seed(num_steps))
        # chunks of 9: whole prompts, padded chunks of several prompts, and chunks that start inside a prompt
        engine = new_engine(checkpoints[name], num_steps, page_size=page_size, chunked_prefill_size=9)
        drafts = record_drafts(engine, monkeypatch)
        texts = run(engine, random_prompts(self.LENGTHS, seed=8), self.NEW_TOKENS)
        check_drafts(drafts, texts, references[name])
        assert {d.num_tokens for of_request in drafts.values() for d in of_request} == set(range(1, num_steps + 2))

    @pytest.mark.parametrize("chunk_size", [512, 7])
    def test_drafts_behind_real_acceptance(
        self,
        chunk_size: int,
        checkpoints: dict[str, Path],
        references: dict[str, DemoModel],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        engine = new_engine(checkpoints["demo"], 3, chunked_prefill_size=chunk_size)
        drafts = record_drafts(engine, monkeypatch)
        texts = run(engine, random_prompts(self.LENGTHS, seed=9), self.NEW_TOKENS)
        check_drafts(drafts, texts, references["demo"])

    def test_a_request_in_a_used_row(
        self, checkpoints: dict[str, Path], references: dict[str, DemoModel], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        accept_at_random(monkeypatch, torch.Generator().manual_seed(3))
        engine = new_engine(checkpoints["grouped"], 3, max_running_requests=2, chunked_prefill_size=9)
        drafts = record_drafts(engine, monkeypatch)
        # one-token prompts come late: their only entry must not see what the row's last request left
        texts = run(engine, random_prompts((9, 4, 26, 1, 3, 1, 2), seed=10), self.NEW_TOKENS)
        check_drafts(drafts, texts, references["grouped"])


# ---- checkpoints -----------------------------------------------------------------------------------------------------


class TestCheckpoints:
    def test_conditional_generation(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As transformers writes it: language model beside a vision tower, in shards; the MTP head in one more."""
        text = tiny_config()
        vision = VISION | {"out_hidden_size": text.hidden_size}
        config = Qwen3_5Config(text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=False)
        generator = torch.Generator().manual_seed(11)
        model = Qwen3_5ForConditionalGeneration(config).eval()
        randomize(model, generator)
        model.save_pretrained(tmp_path, max_shard_size="60KB")
        write_config(tmp_path, config, "Qwen3_5ForConditionalGeneration")
        mtp = mtp_tensors(text, generator)
        save_file(mtp, tmp_path / "model-mtp.safetensors", {"format": "pt"})
        index_file = tmp_path / "model.safetensors.index.json"
        index = json.loads(index_file.read_text("utf8"))
        assert len(set(index["weight_map"].values())) > 2
        assert any(name.startswith("model.language_model.") for name in index["weight_map"])
        assert any(name.startswith("model.visual.") for name in index["weight_map"])
        index["weight_map"] |= dict.fromkeys(mtp, "model-mtp.safetensors")
        index_file.write_text(json.dumps(index), "utf8")

        prompts, counts = random_prompts((30, 1, 12), seed=12), [12, 9, 15]
        engine = new_engine(tmp_path, 3)
        assert engine.model.architecture == "Qwen3_5ForConditionalGeneration"
        probe = with_probe(engine, 4, random_chain(generator))
        run(engine, prompts, counts)
        with torch.no_grad():
            for name, runs in probe.record.extended.items():
                prompt = torch.tensor([prompts[int(name[1:])]])
                assert_close(torch.cat([x for _, x in runs]), model(prompt, use_cache=False).logits[0, :-1])
            for r in (r for of_request in probe.record.rounds.values() for r in of_request):
                path = torch.tensor([node_path(r, 3)])
                assert_close(r.logits, model(path, use_cache=False).logits[0, -4:])

        # the same tensors as a text model, for the head
        text_folder = tmp_path / "text"
        text_folder.mkdir()
        renamed = {name.replace("model.language_model.", "model."): t for name, t in model.state_dict().items()}
        kept = {name: t for name, t in renamed.items() if not name.startswith("model.visual.")} | mtp
        save_file(kept, text_folder / "model.safetensors", {"format": "pt"})
        write_config(text_folder, text, "Qwen3_5ForCausalLM")
        engine = new_engine(tmp_path, 3)
        drafts = record_drafts(engine, monkeypatch)
        texts = run(engine, prompts, counts)
        check_drafts(drafts, texts, read_checkpoint(text_folder))

    def test_no_mtp_head(self, tmp_path: Path) -> None:
        folder = write_tiny_checkpoint(tmp_path, 13, with_mtp=False)
        for algorithm in ("mtp", "NEXTN"):
            with pytest.raises(ConfigError, match=r"speculative-algorithm mtp.*no MTP head"):
                new_engine(folder, 3, speculative_algorithm=algorithm, speculative_num_steps=None)
        with pytest.raises(ConfigError, match="no MTP head"):
            new_engine(folder, 3, speculative_algorithm="auto")
        engine = new_engine(folder, 3, speculative_algorithm="auto", speculative_num_steps=None)
        assert engine.describe()["speculative_algorithm"] == "none"

    def test_an_mtp_head_that_is_not_wanted(self, checkpoints: dict[str, Path]) -> None:
        engine = new_engine(checkpoints["grouped"], 3, speculative_algorithm="none", speculative_num_steps=None)
        assert engine.model.draft_head is None
        assert engine.model.cache_shape.num_kv_layers == 1
