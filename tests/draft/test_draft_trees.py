"""Draft trees from an MTP head: which nodes are kept, and that every node is drafted from its own path."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specmamba.config import DEMO_MODEL, EngineConfig
from specmamba.core import Batch, DraftTree
from specmamba.draft.draft_plan import DraftPlan
from specmamba.draft.heads import MTPDrafter
from specmamba.draft.heads.children import ChildPicker, grow_chain
from specmamba.draft.heads.tree_growth import StaticLayout, grow_dynamic_tree, grow_static_tree
from specmamba.engine.engine import Engine
from specmamba.sampling_params import AcceptRule, SamplingBatch, SamplingParams
from specmamba.trees import StaticTree

VOCABULARY, NUM_STATES = 11, 509
CPU = torch.device("cpu")
NodePath = tuple[int, ...]  # tokens below a root


class FakeHead:
    """A head whose hidden state is a number, and whose logits are a row of a random table."""

    def __init__(self, seed: int) -> None:
        self.table = torch.randn(NUM_STATES, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2

    def forward(self, tokens: Tensor, hidden: Tensor, context: object) -> Tensor:
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[..., 0].long()]


def next_state(state: int, token: int) -> int:
    return (state * 31 + token * 7 + 3) % NUM_STATES


class _FakeRunner:
    """Checks its arguments: each node sees the root, its own path and itself, and nothing else."""

    def __init__(self, head: FakeHead, roots: list[int]) -> None:
        self.head = head
        self._entries: list[list[tuple[NodePath, int]]] = [[((), root)] for root in roots]  # paths and states, by row

    def descend(
        self, batch: Batch, tokens: Tensor, hidden: Tensor, depth: int, ancestors: Tensor | None, first_entry: int
    ) -> Tensor:
        out = torch.zeros_like(hidden)
        for row, entries in enumerate(self._entries):
            assert first_entry == len(entries)
            added = []
            for node, token in enumerate(tokens[row].tolist()):
                seen = entries
                if ancestors is not None:
                    seen = [entries[e] for e in range(first_entry) if ancestors[row, node, e]]
                    assert ancestors[row, node, first_entry:].nonzero().tolist() == [[node]]
                path, state = seen[-1]
                assert [p for p, _ in seen] == [path[:i] for i in range(depth)]
                assert hidden[row, node, 0] == state
                added.append(((*path, token), next_state(state, token)))
                out[row, node, 0] = added[-1][1]
            entries.extend(added)
        return out


FakeRunner: Any = _FakeRunner  # stands in for a HeadRunner


def batch_of(roots: list[int], rule: AcceptRule = "target", **sampling: Any) -> Batch:
    size = len(roots)
    params = [SamplingParams(**({"temperature": 0.0} | sampling))] * size
    return Batch(
        rows=tuple(range(1, size + 1)),
        row_index=torch.arange(1, size + 1),
        root_tokens=torch.tensor(roots) % VOCABULARY,
        root_positions=torch.arange(size) + 5,
        max_root_position=size + 4,
        sampling=SamplingBatch.of(params, list(range(size)), CPU, [rule] * size),
    )


def paths_of(tree: DraftTree, row: int) -> list[NodePath]:
    """Paths of a row's nodes, in the order of the nodes; padding is left out."""
    parents, tokens = tree.shape.parents[row].tolist(), tree.tokens[row].tolist()
    paths: list[NodePath] = []
    for node, parent in enumerate(parents):
        paths.append(() if parent < 0 else (*paths[parent], tokens[node]))
    return [path for node, path in enumerate(paths) if node == 0 or parents[node] >= 0]


def log_probs(head: FakeHead, state: int) -> list[float]:
    values: list[float] = head.table[state].log_softmax(-1).tolist()
    return values


def best_paths(head: FakeHead, root: int, num_steps: int, topk: int, num_nodes: int) -> set[NodePath]:
    """EAGLE-2 in plain Python: expand the best ``topk`` of every step, then take the best of all candidates."""
    frontier: list[tuple[float, NodePath, int]] = [(0.0, (), root)]
    seen: list[tuple[float, NodePath]] = []
    for _ in range(num_steps):
        children: list[Any] = []
        for value, path, state in frontier:
            logp = log_probs(head, state)
            likeliest = sorted(range(VOCABULARY), key=lambda t: -logp[t])[:topk]
            children.extend((value + logp[token], (*path, token), next_state(state, token)) for token in likeliest)
        seen.extend((value, path) for value, path, _ in children)
        frontier = sorted(children, reverse=True)[:topk]
    return {(), *(path for _, path in sorted(seen, reverse=True)[: num_nodes - 1])}


@pytest.mark.parametrize(
    ("num_steps", "topk", "num_nodes"), [(1, 3, 4), (1, 4, 3), (2, 2, 7), (3, 3, 8), (4, 4, 8), (5, 8, 16), (5, 8, 32)]
)
def test_a_dynamic_tree_has_the_best_nodes(num_steps: int, topk: int, num_nodes: int) -> None:
    for seed in range(5):
        head, roots = FakeHead(seed), [7 + seed, 100, 333]
        plan = DraftPlan("mtp", num_steps, topk, num_nodes, 99)
        hidden = torch.tensor(roots, dtype=torch.float32)[:, None, None]
        tree = grow_dynamic_tree(FakeRunner(head, roots), ChildPicker(False), plan, batch_of(roots), hidden)
        assert tree.draft_probs is None
        for row, root in enumerate(roots):
            paths = paths_of(tree, row)
            assert len(paths) == len(set(paths)) == num_nodes
            assert set(paths) == best_paths(head, root, num_steps, topk, num_nodes)
            assert tree.shape.depth[row].tolist() == [len(path) for path in paths]
            children = [sum(p[:-1] == path for p in paths if p) for path in paths]
            assert max(children) <= tree.shape.max_children
            for path in paths:  # siblings are tried the likeliest first
                tokens = [p[-1] for p in paths if p and p[:-1] == path]
                state = root
                for token in path:
                    state = next_state(state, token)
                logp = log_probs(head, state)
                assert tokens == sorted(tokens, key=lambda t: -logp[t])


TREES = [
    StaticTree(parents=(-1, 0, 0, 1, 1, 2, 3), ranks=(0, 0, 1, 0, 1, 0, 0)),
    StaticTree(parents=(-1, 0, 0, 0, 2, 2, 4, 6), ranks=(0, 4, 2, 0, 3, 1, 0, 2)),  # not in order of ranks
    StaticTree(parents=(-1, 0, 1, 2), ranks=(0, 0, 0, 0)),
    StaticTree(parents=(-1, 0, 1, 2), ranks=(0, 1, 0, 2)),
    StaticTree(parents=(-1, 0), ranks=(0, 5)),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: str(tree.parents))
def test_a_static_tree_has_the_tokens_of_its_ranks(tree: StaticTree) -> None:
    head, roots = FakeHead(3), [5, 77]
    hidden = torch.tensor(roots, dtype=torch.float32)[:, None, None]
    layout = StaticLayout.of(tree, False, CPU)
    drafted = grow_static_tree(FakeRunner(head, roots), ChildPicker(False), layout, batch_of(roots), hidden)
    assert drafted.shape.parents.tolist() == [list(tree.parents)] * 2
    assert drafted.shape.is_chain == (tree.parents == (-1, 0, 1, 2) or tree.num_nodes == 2)
    for row, root in enumerate(roots):
        states = [root]
        for node in range(1, tree.num_nodes):
            parent = states[tree.parents[node]]
            logp = log_probs(head, parent)
            token = sorted(range(VOCABULARY), key=lambda t: -logp[t])[tree.ranks[node]]
            assert drafted.tokens[row, node] == token
            states.append(next_state(parent, token))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("is_static", [False, True])
def test_drawn_trees_carry_what_they_were_drawn_from(is_static: bool, seed: int) -> None:
    """They hold only tokens that can be drawn: a filter may leave fewer tokens than a node has children."""
    head, roots = FakeHead(seed), [5, 77, 201]
    hidden = torch.tensor(roots, dtype=torch.float32)[:, None, None]
    batch = batch_of(roots, "rejection", temperature=0.7, top_p=0.6)
    runner, picker = FakeRunner(head, roots), ChildPicker(True)
    if is_static:
        tree = grow_static_tree(runner, picker, StaticLayout.of(TREES[1], True, CPU), batch, hidden)
    else:
        tree = grow_dynamic_tree(runner, picker, DraftPlan("mtp", 3, 4, 12, 99, True), batch, hidden)
    assert tree.draft_probs is not None
    num_padding = 0
    for row, root in enumerate(roots):
        parents, tokens = tree.shape.parents[row].tolist(), tree.tokens[row].tolist()
        states = {0: root}
        for node, parent in enumerate(parents[1:], start=1):
            if parent < 0:
                num_padding += 1
                continue
            states[node] = next_state(states[parent], tokens[node])
            expected = nucleus((head.table[states[parent]] / 0.7).softmax(-1), 0.6)
            torch.testing.assert_close(tree.draft_probs[row, parent], expected)
            assert expected[tokens[node]] > 0
        edges = [(p, t) for p, t in zip(parents, tokens, strict=True) if p >= 0]
        assert len(edges) == len(set(edges))
    assert num_padding > 0


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_head_that_overflows_leaves_the_roots_where_they_are(wrong: float, draws: bool) -> None:
    head, roots = FakeHead(0), [5, 77]
    head.table[::2] = wrong
    head.table[::3, 4] = wrong
    hidden = torch.tensor(roots, dtype=torch.float32)[:, None, None]
    batch = batch_of(roots, "rejection", temperature=0.9)
    plan = DraftPlan("mtp", 3, 4, 12, 99, draws)
    tree = grow_dynamic_tree(FakeRunner(head, roots), ChildPicker(draws), plan, batch, hidden)
    assert tree.tokens[:, 0].tolist() == batch.root_tokens.tolist()
    assert (tree.shape.parents[:, 1:] < torch.arange(1, 12)).all()
    assert tree.draft_probs is None or tree.draft_probs.isfinite().all()
    assert tree.tokens.min() >= 0
    assert tree.tokens.max() < VOCABULARY


def test_filters_do_not_thin_the_trees_of_greedy_rows() -> None:
    """Children are drawn for the other row; the greedy one still gets the likeliest."""
    head, roots = FakeHead(1), [5, 77]
    hidden = torch.tensor(roots, dtype=torch.float32)[:, None, None]
    params = [
        SamplingParams(temperature=0.0, top_p=0.1, top_k=1, min_p=0.9),
        SamplingParams(temperature=1.0, top_p=0.9),
    ]
    batch = replace(batch_of(roots), sampling=SamplingBatch.of(params, [0, 1], CPU, ["target", "rejection"]))
    tree = grow_dynamic_tree(
        FakeRunner(head, roots), ChildPicker(True), DraftPlan("mtp", 3, 3, 8, 99, True), batch, hidden
    )
    assert tree.draft_probs is not None
    assert set(paths_of(tree, 0)) == best_paths(head, roots[0], 3, 3, 8)


IN_NODE_ORDER = StaticTree(parents=TREES[1].parents, ranks=(0, 0, 1, 2, 0, 1, 0, 0))


def grown(
    kind: str, roots: list[int], batch: Batch, draws: bool = True, static_tree: StaticTree = TREES[1]
) -> DraftTree:
    """A tree of each kind: dynamic, static (with gaps in its ranks), a chain."""
    head, picker = FakeHead(4), ChildPicker(draws)
    runner, hidden = FakeRunner(head, roots), torch.tensor(roots, dtype=torch.float32)[:, None, None]
    if kind == "dynamic":
        return grow_dynamic_tree(runner, picker, DraftPlan("mtp", 3, 4, 12, 99, draws), batch, hidden)
    if kind == "static":
        layout = StaticLayout.of(static_tree, picker.draws_for(batch), CPU)
        return grow_static_tree(runner, picker, layout, batch, hidden)

    def descend(token: Tensor, hidden: Tensor, depth: int) -> Tensor:
        below: Tensor = runner.descend(batch, token, hidden, depth, None, depth)
        return below

    return grow_chain(picker, batch, 4, hidden, head.logits, descend)


@pytest.mark.parametrize("kind", ["dynamic", "static", "chain"])
def test_each_row_is_drafted_as_its_own_rule_says(kind: str) -> None:
    """Drawn where it is decided under rejection, as among rows of that rule; else the likeliest tokens, whatever its
    temperature and filters. Where children are drawn, those of a static tree have the ranks of their order."""
    roots = [5, 77, 201, 33]
    ruled: list[AcceptRule] = ["rejection", "target", "rejection", "target"]
    settings: dict[str, Any] = {"temperature": 0.7, "top_p": 0.6}
    batch = batch_of(roots, **settings)
    params = [SamplingParams(**settings)] * 4
    mixed = replace(batch, sampling=SamplingBatch.of(params, [0, 1, 2, 3], CPU, ruled))
    tree, drawn = grown(kind, roots, mixed), grown(kind, roots, batch_of(roots, "rejection", **settings))
    assert tree.draft_probs is not None
    assert drawn.draft_probs is not None
    for row in (0, 2):
        assert paths_of(tree, row) == paths_of(drawn, row)
        is_parent = tree.shape.parents[row, 1:].clamp(min=0).unique()
        assert torch.equal(tree.draft_probs[row, is_parent], drawn.draft_probs[row, is_parent])
    likeliest = grown(kind, roots, batch_of(roots), static_tree=IN_NODE_ORDER)
    assert likeliest.draft_probs is None
    for row in (1, 3):
        assert set(paths_of(tree, row)) == set(paths_of(likeliest, row))


def test_no_draft_is_drawn_for_a_batch_under_target() -> None:
    """Nor by a drafter that cannot draw, for any batch."""
    roots = [5, 77]
    settings: dict[str, Any] = {"temperature": 0.7, "top_p": 0.6}
    for draws, rule in ((True, "target"), (False, "rejection"), (False, "target")):
        batch = batch_of(roots, cast(AcceptRule, rule), **settings)
        assert not ChildPicker(draws).draws_for(batch)
        tree = grown("dynamic", roots, batch, draws)
        assert tree.draft_probs is None
        assert paths_of(tree, 0) == paths_of(grown("dynamic", roots, batch_of(roots)), 0)
    assert ChildPicker(True).draws_for(batch_of(roots, "rejection", **settings))
    assert not ChildPicker(True).draws_for(batch_of(roots, "rejection", temperature=0.0))


def nucleus(probs: Tensor, mass: float) -> Tensor:
    kept, total = torch.zeros_like(probs), 0.0
    for token in probs.argsort(descending=True).tolist():
        kept[token] = probs[token]
        total += float(probs[token])
        if total >= mass:
            break
    return kept / kept.sum()


def demo_engine(**flags: Any) -> Engine:
    return Engine(EngineConfig(dtype="float32", device="cpu", context_length=256, max_total_tokens=2048, **flags))


@pytest.mark.parametrize("page_size", [1, 16])
def test_every_node_of_a_real_tree_is_drafted_from_its_own_path(page_size: int, tmp_path: Path) -> None:
    """The children of any node are the likeliest tokens when the head is walked down to it as a chain."""
    engine = demo_engine(
        speculative_num_steps=4, speculative_eagle_topk=3, speculative_num_draft_tokens=14, page_size=page_size
    )
    lines = (DEMO_MODEL / "prompts.jsonl").read_text("utf8").splitlines()
    params = SamplingParams(max_tokens=100, temperature=0.8, seed=1, ignore_eos=True)
    for i, line in enumerate(lines[:3]):
        engine.add_request(str(i), engine.tokenizer.encode(json.loads(line)["prompt"]), params)
    for _ in range(6):
        engine.step()
    requests = sorted(engine.scheduler.verifying, key=lambda request: request.held_row)
    drafter = engine.runner.drafter
    assert isinstance(drafter, MTPDrafter)
    with torch.inference_mode():
        rows = tuple(request.held_row for request in requests)
        pending_tokens, _ = engine.runner._prepared(requests, rows, None, True, drafter, len(rows))
        batch = engine.runner._whole_batch(requests, pending_tokens)
        tree = drafter.propose(batch)
        parents = tree.shape.parents[:, :].tolist()
        for row in range(len(requests)):
            for path in [p for p in paths_of(tree, row) if len(p) < 4]:
                hidden = drafter.catch_up(batch)
                for depth, token in enumerate(path, start=1):
                    chosen = torch.full((len(requests), 1), token)
                    hidden = drafter.descend(batch, chosen, hidden, depth, None, depth)
                ranked = drafter.head.logits(hidden)[row, 0].argsort(descending=True).tolist()
                children = [p[-1] for p in paths_of(tree, row) if p and p[:-1] == path]
                assert children == ranked[: len(children)]
        assert any(parents[0] != other for other in parents[1:])  # shapes follow the context
    engine.close()
