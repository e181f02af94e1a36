"""MTP heads of several modules: every node of every draft against the formula for the whole text, evaluated without any
cache; behind chunks, ragged batches and cached prefixes. And greedy text is what it is without drafts.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specmamba import LLM, SamplingParams
from specmamba.bench.demo.checkpoint import read_checkpoint
from specmamba.config import DEMO_MODEL
from specmamba.core import Batch, DraftTree
from specmamba.draft.heads import MTPDrafter
from specmamba.draft.heads.descent import DraftEntries
from specmamba.engine.engine import Engine
from specmamba.errors import CheckpointError
from tests.exactness import run_directly
from tests.families import nemotron_h, qwen3_5_moe, qwen3_next
from tests.families.qwen import lively, write
from tests.models.test_model_exact import accept_at_random, new_engine, random_prompts

TOLERANCE = 1e-4  # of a probability

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"speculative_num_steps": 3, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 7},
    "deep-tree": {"speculative_num_steps": 5, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 8},
    "static": {"speculative_num_steps": None},
    "static-or-nothing": {"speculative_num_steps": None},
}
STATIC_TREE = {"parents": [-1, 0, 0, 1, 1, 3, 5, 2], "ranks": [0, 0, 1, 0, 1, 0, 0, 0]}
TREES = {
    "static": [STATIC_TREE],
    # larger batches draft nothing, and what is decided there is caught up with by a later draft
    "static-or-nothing": [STATIC_TREE | {"max_batch_size": 2}, {"parents": [-1], "ranks": [0]}],
}


class Parts(Protocol):
    """A head's formula: transformers' layers, float64, no cache."""

    @property
    def num_modules(self) -> int: ...

    def target(self, tokens: list[int]) -> Tensor:
        """The target's states behind each token, [T, H]."""

    def module(self, module: int, tokens: list[int], hidden: Tensor, first: int) -> Tensor:
        """One module over entries that stand from position ``first`` on and see each other, [T, H]."""

    def logits(self, state: Tensor) -> Tensor:
        """[H] -> [V]."""


@dataclass(frozen=True)
class QwenParts:
    """Of the Qwen families."""

    text: Any
    lm_head: Any
    head: Any  # ``layers`` are the modules, all else is in common

    @property
    def num_modules(self) -> int:
        return len(self.head.layers)

    def target(self, tokens: list[int]) -> Tensor:
        states: Tensor = self.text(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return states

    def module(self, module: int, tokens: list[int], hidden: Tensor, first: int) -> Tensor:
        head, embedded = self.head, self.text.embed_tokens(torch.tensor([tokens]))
        positions = torch.arange(first, first + len(tokens))
        rotary = self.text.rotary_emb(embedded, positions[None] if self.is_moe else positions.expand(3, 1, -1))
        x = head.fc(torch.cat([head.pre_fc_norm_embedding(embedded), head.pre_fc_norm_hidden(hidden[None])], -1))
        x = head.layers[module](x, position_embeddings=rotary, attention_mask=None, position_ids=None)
        normed: Tensor = head.norm(x)[0]
        return normed

    @property
    def is_moe(self) -> bool:
        return hasattr(self.text.config, "num_experts")

    def logits(self, state: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(state)
        return logits


@dataclass(frozen=True)
class NemotronParts:
    """Of Nemotron-H."""

    model: Any
    heads: list[Any]

    @property
    def num_modules(self) -> int:
        return len(self.heads)

    def target(self, tokens: list[int]) -> Tensor:
        states: Tensor = self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return states

    def module(self, module: int, tokens: list[int], hidden: Tensor, first: int) -> Tensor:
        given: Tensor = self.heads[module](self.model.model.embeddings(torch.tensor([tokens])), hidden[None])[0]
        return given

    def logits(self, state: Tensor) -> Tensor:
        logits: Tensor = self.model.lm_head(state)
        return logits


class Formula:
    """The outputs of every module for one text and for drafts after it."""

    def __init__(self, parts: Parts, text: list[int]) -> None:
        """Known text: module d's entry t takes token t and what the module before it (the target) gave at t - 1.

        Its entries begin at position d + 1. Those below, where some state before them is missing, see each other only.
        """
        self.parts, self.text = parts, text
        self.before, self.known = [], []  # of each module, [T, H]: the states its entries take and give
        given = parts.target(text)
        for module in range(parts.num_modules):
            before = torch.cat([torch.zeros_like(given[:1]), given[:-1]])
            first = min(module + 1, len(text))
            given = parts.module(module, text[:first], before[:first], 0)
            if first < len(text):
                given = torch.cat([given, parts.module(module, text[first:], before[first:], first)])
            self.before.append(before)
            self.known.append(given)
        self._draft_state = cache(self._compute_draft_state)

    def logits(self, root: int, path: tuple[int, ...]) -> Tensor:
        """Return the logits after the last token of a path below the token at position ``root``."""
        return self.parts.logits(self._draft_state(len(path) % self.parts.num_modules, root, path))

    def _compute_draft_state(self, module: int, root: int, path: tuple[int, ...]) -> Tensor:
        """Module 0 takes the last module's states in place of the target's."""
        if not path:
            return self.known[module][root]
        above = (module - 1) % self.parts.num_modules
        hidden = torch.stack([self._draft_state(above, root, path[:i]) for i in range(len(path))])
        first = module + 1
        if root + len(path) < first:  # no entry of this module: it sees itself alone
            return self.parts.module(module, [path[-1]], hidden[-1:], root + len(path))[0]
        num_skipped = max(0, first - root - 1)
        tokens = [*self.text[first : root + 1], *path[num_skipped:]]
        taken = torch.cat([self.before[module][first : root + 1], hidden[num_skipped:]])
        return self.parts.module(module, tokens, taken, first)[-1]


@dataclass(frozen=True)
class Draft:
    """One tree of one request."""

    known: list[int]
    tokens: list[int]
    parents: list[int]
    probs: Tensor  # [N, V]; of nodes that have children

    def path(self, node: int) -> tuple[int, ...]:
        return (*self.path(self.parents[node]), self.tokens[node]) if node else ()


def record_drafts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    drafter = engine.runner.drafter
    assert isinstance(drafter, MTPDrafter)
    run_directly(monkeypatch)
    propose, drafts = drafter.propose, []

    def recorded(batch: Batch) -> DraftTree:
        tree = propose(batch)
        if tree.shape.num_nodes == 1:
            return tree
        assert tree.draft_probs is not None
        requests = {request.held_row: request for request in engine.scheduler.verifying}
        for i, row in enumerate(batch.rows):
            known = requests[row].known_tokens(0, requests[row].num_tokens)
            parents = tree.shape.parents[i].tolist()
            drafts.append(Draft(known, tree.tokens[i].tolist(), parents, tree.draft_probs[i].clone()))
        return tree

    monkeypatch.setattr(drafter, "propose", recorded)
    return drafts


@torch.no_grad()
def check_drafts(drafts: Sequence[Draft], parts: Parts) -> None:
    """The distribution at every node that has children is the formula's."""
    assert drafts
    texts: dict[tuple[int, ...], Formula] = {}
    for draft in sorted(drafts, key=lambda draft: -len(draft.known)):
        known = tuple(draft.known)
        formula = next((texts[text] for text in texts if text[: len(known)] == known), None)
        if formula is None:
            formula = texts[known] = Formula(parts, draft.known)
        for node in {parent for parent in draft.parents if parent >= 0}:
            expected = formula.logits(len(known) - 1, draft.path(node)).softmax(-1).float()
            difference = float((draft.probs[node] - expected).abs().max())
            assert difference < TOLERANCE, f"{difference:.1e} at {draft.path(node)} behind {len(known)} tokens"


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def write_qwen(folder: Path, family: Any, num_modules: int) -> QwenParts:
    model = family.build(folder)
    head = copy.deepcopy(family.mtp_head())
    head.layers.extend(copy.deepcopy(head.layers[0]) for _ in range(num_modules - 1))
    lively(head, 77)
    write(folder, model, head, fused=False, fused_mtp=False)
    change_config(folder, {"mtp_num_hidden_layers": num_modules} if family is qwen3_5_moe else {})
    return QwenParts(model.model.double(), model.lm_head.double(), head.double())


def write_nemotron(folder: Path, variant: str, num_modules: int) -> NemotronParts:
    """The layers of a module follow those of the module before it."""
    model = nemotron_h.build(folder, variant)
    heads = [nemotron_h.make(variant, seed)[1] for seed in range(num_modules)]
    tensors = load_file(folder / "model.safetensors")
    for module, head in enumerate(heads):
        for name, tensor in head.tensors().items():
            _, _, layer, rest = name.split(".", 3)
            tensors[f"mtp.layers.{module * len(head.layers) + int(layer)}.{rest}"] = tensor.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, {"num_nextn_predict_layers": num_modules})
    return NemotronParts(model.double(), [head.double() for head in heads])


def write_demo(folder: Path, num_modules: int) -> QwenParts:
    """Write the demo with several copies of its one module, which was trained for such use."""
    shutil.copytree(DEMO_MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.startswith("mtp.layers.0.")]:
        for module in range(1, num_modules):
            tensors[name.replace("layers.0.", f"layers.{module}.")] = tensors[name].clone()
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, {"mtp_num_hidden_layers": num_modules})
    demo = read_checkpoint(DEMO_MODEL)
    demo.mtp.layers.extend(demo.mtp.layers[0] for _ in range(num_modules - 1))
    return QwenParts(demo.target.model.double(), demo.target.lm_head.double(), demo.mtp.double())


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text("utf8"))
    file.unlink()
    file.write_text(json.dumps(config | changes), "utf8")


def flags_of(shape: str, num_modules: int, folder: Path) -> dict[str, Any]:
    """Drafts are drawn, so that trees carry the distributions that they were drawn from."""
    flags = SHAPES[shape] | {"speculative_accept": "rejection"}
    if shape in TREES:
        file = folder / "tree.json"
        file.write_text(json.dumps({"trees": TREES[shape]}), "utf8")
        flags["speculative_tree"] = str(file)
    return {"speculative_num_steps": num_modules + 2} | flags


CHECKPOINTS: dict[str, Callable[[Path, int], Parts]] = {
    "qwen3.5-moe": lambda folder, count: write_qwen(folder, qwen3_5_moe, count),
    "qwen3-next": lambda folder, count: write_qwen(folder, qwen3_next, count),
    "nemotron": lambda folder, count: write_nemotron(folder, "default", count),
    "nemotron-two-kv-layers": lambda folder, count: write_nemotron(folder, "grouped-routing", count),
    "nemotron-no-kv": lambda folder, count: write_nemotron(folder, "tied", count),
}
CASES = [
    ("qwen3.5-moe", 2, "chain"),
    ("qwen3.5-moe", 3, "chain"),
    ("qwen3.5-moe", 2, "tree"),
    ("qwen3.5-moe", 3, "deep-tree"),
    ("qwen3.5-moe", 2, "static"),
    ("qwen3-next", 3, "tree"),
    ("qwen3-next", 2, "deep-tree"),
    ("nemotron", 2, "deep-tree"),
    ("nemotron", 3, "static"),
    ("nemotron-two-kv-layers", 2, "chain"),
    ("nemotron-no-kv", 2, "tree"),
]


def sample(
    engine: Engine, prompts: Sequence[list[int]], counts: Sequence[int], name: str = "r"
) -> tuple[list[list[int]], list[int]]:
    """Answer all prompts at temperature 1; their texts, and how many of their tokens were cached."""
    texts = {f"{name}{i}": list(prompt) for i, prompt in enumerate(prompts)}
    for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        params = SamplingParams(max_tokens=count, temperature=1.0, seed=i, ignore_eos=True)
        engine.add_request(f"{name}{i}", tuple(prompt), params)
    cached = dict.fromkeys(texts, 0)
    while engine.has_unfinished_requests:
        for delta in engine.step():
            assert delta.error is None
            texts[delta.request_id] += delta.token_ids
            cached[delta.request_id] = delta.num_cached_tokens
    stats = engine.stats()
    assert (stats.kv_used_tokens, stats.state_used_slots) == (0, 0)
    return list(texts.values()), list(cached.values())


# ---- drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize(("name", "num_modules", "shape"), CASES)
def test_drafts(name: str, num_modules: int, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = CHECKPOINTS[name](tmp_path, num_modules)
    accept_at_random(monkeypatch, torch.Generator().manual_seed(num_modules))
    # chunks of 9: whole prompts, padded chunks of several prompts, and chunks that start inside a prompt
    engine = new_engine(tmp_path, 1, chunked_prefill_size=9, **flags_of(shape, num_modules, tmp_path))
    head, cache_shape = engine.model.draft_head, engine.model.cache_shape
    assert head is not None
    assert head.num_modules == num_modules
    assert cache_shape.draft_features == num_modules * head.width
    drafts = record_drafts(engine, monkeypatch)
    sample(engine, random_prompts((1, 26, 2, 3, 4, 9), seed=8), (12, 9, 14, 11, 8, 10))
    check_drafts(drafts, parts)
    depths = {
        len(draft.path(node)) for draft in drafts for node in range(len(draft.tokens)) if draft.parents[node] >= 0
    }
    assert max(depths) >= min(num_modules + 1, 3)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("name", "num_modules", "shape"),
    [("qwen3.5-moe", 3, "chain"), ("nemotron", 2, "deep-tree"), ("qwen3-next", 2, "static-or-nothing")],
)
def test_drafts_behind_cached_prefixes(
    name: str, num_modules: int, shape: str, page_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are left at ends of chunks and texts, and at every fifth token: inside of the path that a step accepts."""
    parts = CHECKPOINTS[name](tmp_path, num_modules)
    accept_at_random(monkeypatch, torch.Generator().manual_seed(num_modules))
    engine = new_engine(
        tmp_path,
        1,
        chunked_prefill_size=16,
        page_size=page_size,
        max_mamba_cache_size=64,
        mamba_radix_cache_strategy="extra_buffer",
        mamba_track_interval=5,
        **flags_of(shape, num_modules, tmp_path),
    )
    drafts = record_drafts(engine, monkeypatch)
    prompts = random_prompts((37, 5, 20, 4), seed=3)
    texts, cached = sample(engine, prompts, (19, 8, 4, 17))
    assert cached == [0, 0, 0, 0]
    check_drafts(drafts, parts)
    drafts.clear()
    text, other = texts[0], texts[3]
    turns = [prompts[0], text[:43], [*text[:48], 7, 8, 9], [*text[:34], 3, 4], [*text, 5], [*other[:10], 1]]
    for turn, num_cached in zip(turns, (36, 42, 47, 32, 55, 9), strict=True):
        assert sample(engine, [turn], [6])[1] == [num_cached]
    check_drafts(drafts, parts)
    engine.flush_cache()
    assert sample(engine, turns[1:4], (6, 6, 6))[1][0] == 0
    check_drafts(drafts, parts)


def test_fewer_steps_than_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that no draft reaches are not run."""
    parts = CHECKPOINTS["qwen3.5-moe"](tmp_path, 3)
    engine = new_engine(tmp_path, 2, chunked_prefill_size=9, speculative_accept="rejection")
    drafts = record_drafts(engine, monkeypatch)
    head = engine.model.draft_head
    assert head is not None
    forward, ran = head.forward, set()

    def counted(*args: Any) -> Tensor:
        ran.add(args[3])
        return forward(*args)

    monkeypatch.setattr(head, "forward", counted)
    prompts = random_prompts((20, 3), seed=1)
    sample(engine, prompts, (9, 9))
    assert sample(engine, prompts, (5, 5), "again")[1] == [19, 2]
    check_drafts(drafts, parts)
    assert ran == {0, 1}


def test_entries_of_a_tree() -> None:
    """Parents and masks follow from the ancestors; positions before a module's first key are not seen."""
    entries = DraftEntries.of_roots(torch.tensor([[5], [6]]))
    first = torch.tensor([[True, True, False], [True, False, True]]).expand(2, -1, -1)
    second = torch.tensor([[1, 0, 1, 1, 0], [1, 0, 1, 0, 1]], dtype=torch.bool).expand(2, -1, -1)
    entries = entries.grow(torch.ones(2, 2, dtype=torch.int64), first).grow(torch.ones(2, 2, dtype=torch.int64), second)
    assert entries.levels == (0, 1, 3)
    assert entries.depth.tolist() == [0, 1, 1, 2, 2]
    assert entries.parents.tolist() == [[0, 0, 0, 2, 2]] * 2
    seen = entries.seen(3, torch.tensor([1, 4]), first_key=3)
    of_rows = [[row.nonzero().flatten().tolist() for row in of_batch] for of_batch in seen]
    assert of_rows == [[[3], [4]], [[0, 2, 3], [0, 2, 4]]]


# ---- texts -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, QwenParts]]:
    folders = {count: tmp_path_factory.mktemp("demo") / str(count) for count in (2, 3)}
    return {count: (folder, write_demo(folder, count)) for count, folder in folders.items()}


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    lines = (DEMO_MODEL / "prompts.jsonl").read_text("utf8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:4]]


@pytest.fixture(scope="module")
def plain_texts(prompts: list[str]) -> list[tuple[int, ...]]:
    with LLM(dtype="float32", device="cpu", context_length=512, speculative_algorithm="none") as llm:
        return [output.token_ids for output in llm.generate(prompts, greedy())]


def greedy() -> SamplingParams:
    return SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("num_modules", "shape"), [(2, "chain"), (3, "chain"), (3, "tree"), (2, "static")])
def test_greedy_text_is_the_plain_text(
    num_modules: int,
    shape: str,
    demos: dict[int, tuple[Path, QwenParts]],
    prompts: list[str],
    plain_texts: list[tuple[int, ...]],
    tmp_path: Path,
) -> None:
    """Alone, together and behind cached prefixes; many drafts are accepted."""
    flags = flags_of(shape, num_modules, tmp_path) | {"speculative_accept": "target", "chunked_prefill_size": 32}
    with LLM(model=str(demos[num_modules][0]), dtype="float32", device="cpu", context_length=512, **flags) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, greedy())
            assert [output.token_ids for output in outputs] == plain_texts
        assert all(output.num_cached_tokens == len(output.prompt_token_ids) - 1 for output in outputs)
        assert llm.generate(prompts[0], greedy())[0].token_ids == plain_texts[0]
        assert sum(output.spec.accept_length for output in outputs) / len(outputs) > 1.8


def test_drafts_of_the_demo(
    demos: dict[int, tuple[Path, QwenParts]], prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense layers, and drafts that are accepted because they are right."""
    folder, parts = demos[3]
    flags = {"speculative_accept": "rejection", "speculative_num_steps": 5}
    engine = new_engine(folder, 1, **flags)
    drafts = record_drafts(engine, monkeypatch)
    sample(engine, [list(engine.tokenizer.encode(prompt)) for prompt in prompts[:2]], (10, 10))
    check_drafts(drafts, parts)


# ---- checkpoints that lack a part ------------------------------------------------------------------------------------


def test_a_module_is_missing(tmp_path: Path) -> None:
    """The config counts modules that are not there; Nemotron's counts fewer than there are."""
    write_qwen(tmp_path / "qwen", qwen3_5_moe, 2)
    change_config(tmp_path / "qwen", {"mtp_num_hidden_layers": 3})
    with pytest.raises(CheckpointError, match=r"lacks the tensor mtp\.layers\.2\."):
        new_engine(tmp_path / "qwen", 1)
    write_nemotron(tmp_path / "nemotron", "default", 2)
    change_config(tmp_path / "nemotron", {"num_nextn_predict_layers": 1})
    with pytest.raises(CheckpointError, match=r"does not have: 'mtp\.layers\.2\."):
        new_engine(tmp_path / "nemotron", 1)
