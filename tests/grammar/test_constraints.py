"""What requests refuse of drafts: nodes go before the verify, the others keep their places in the tree."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from specmamba.core import DraftTree
from specmamba.draft.drafter import chain_shape, tree_shape
from specmamba.engine.constraints import Constraints, restrict
from specmamba.engine.request import Request
from specmamba.errors import GrammarError
from specmamba.grammar import GrammarFollower, GrammarMatcher, TreeMask
from specmamba.sampling_params import SamplingParams
from tests.fake_engine import wait_until

CPU = torch.device("cpu")
WORDS = 2


@pytest.fixture(scope="module", autouse=True)
def constraints() -> Iterator[Constraints]:
    yield CONSTRAINTS
    CONSTRAINTS.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROOT_SECONDS", "TREE_SECONDS", "MAX_TREE_SECONDS"):
        monkeypatch.setattr(f"specmamba.engine.constraints.{name}", 5.0)


CONSTRAINTS = Constraints(32 * WORDS)


@dataclass
class Refuses:
    """A grammar that refuses some tokens wherever they stand. Masks of trees wait for ``gate``."""

    refused: tuple[int, ...] = ()
    fails_in_trees: bool = False
    seconds_per_node: float = 0.0
    gate: threading.Event | None = None
    output: list[int] = field(default_factory=list)

    def advance(self, tokens: Sequence[int]) -> None:
        self.output += tokens

    def mask(self, tokens: Sequence[int], parents: Sequence[int], seconds: float | None = None) -> TreeMask:
        if len(tokens) > 1 and self.fails_in_trees:
            raise GrammarError("nothing may follow")
        if len(tokens) > 1 and self.gate is not None:
            assert self.gate.wait(10)
        allowed = [True]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            assert 0 <= parent < len(allowed)
            allowed.append(allowed[parent] and token not in self.refused)
        bits = np.array([[100 + token, 7] for token in tokens], dtype=np.int32)
        return TreeMask(bits, np.array(allowed))


def request(matcher: Refuses | None = None, speculative: bool = True, owner: str | None = None) -> Request:
    params = SamplingParams(speculative=speculative)
    follower = None if matcher is None else GrammarFollower(cast(GrammarMatcher, matcher), CONSTRAINTS._maker, owner)
    return cast(Request, SimpleNamespace(params=params, follower=follower))


def settle(*requests: Request) -> None:
    wait_until(lambda: len(CONSTRAINTS.ready(requests, is_idle=False)) == len(requests))


def run(tree: DraftTree, *requests: Request) -> DraftTree:
    settle(*requests)
    return restrict(requests, tree, CONSTRAINTS)


TOKENS = [[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]]
PARENTS = [[-1, 0, 0, 1, 2, 3], [-1, 0, 1, 1, 0, -1]]


@pytest.fixture
def tree() -> DraftTree:
    return DraftTree(torch.tensor(TOKENS), tree_shape(torch.tensor(PARENTS), 2))


def test_requests_without_a_grammar_keep_their_trees(tree: DraftTree) -> None:
    made = run(tree, request(), request(Refuses()))
    assert made.tokens.tolist() == [TOKENS[0], [*TOKENS[1][:5], 20]]
    assert made.shape.parents.tolist() == PARENTS
    assert made.allowed_tokens is not None
    assert made.allowed_tokens[0].tolist() == [[-1, -1]] * 6
    assert made.allowed_tokens[1].tolist() == [[120 + i, 7] for i in range(5)] + [[-1, -1]]


def test_refused_nodes_go_with_all_below_them(tree: DraftTree) -> None:
    made = run(tree, request(Refuses((11,))), request(Refuses((22, 24))))
    assert made.tokens.tolist() == [[10, 12, 14], [20, 21, 23]]
    assert made.shape.parents.tolist() == [[-1, 0, 1], [-1, 0, 1]]
    assert made.shape.is_chain  # both rows have become one
    assert made.allowed_tokens is not None
    assert made.allowed_tokens.tolist() == [[[110, 7], [112, 7], [114, 7]], [[120, 7], [121, 7], [123, 7]]]


def test_rows_of_different_sizes_are_padded(tree: DraftTree) -> None:
    made = run(tree, request(Refuses((12, 13))), request(Refuses((22,))))
    assert made.tokens.tolist() == [[10, 11, 10, 10], [20, 21, 23, 24]]
    assert made.shape.parents.tolist() == [[-1, 0, -1, -1], [-1, 0, 1, 0]]
    assert not made.shape.is_chain
    assert made.shape.max_children == 2


def test_a_request_may_want_no_drafts(tree: DraftTree) -> None:
    made = run(tree, request(speculative=False), request())
    assert made.shape.parents.tolist() == [[-1] * 5, PARENTS[1][:5]]  # a node that no row needs is not verified
    assert made.allowed_tokens is None
    alone = run(
        DraftTree(tree.tokens[:1], tree_shape(tree.shape.parents[:1], 2)), request(Refuses(), speculative=False)
    )
    assert alone.tokens.tolist() == [[10]]
    assert alone.shape.is_chain
    assert alone.allowed_tokens is not None
    assert alone.allowed_tokens.tolist() == [[[100, 7]]]


def test_a_chain_that_is_cut_stays_a_chain() -> None:
    chain = DraftTree(torch.tensor([[1, 2, 3, 4]]), chain_shape(1, 4, CPU))
    made = run(chain, request(Refuses((3,))))
    assert made.tokens.tolist() == [[1, 2]]
    assert made.shape.is_chain
    whole = run(chain, request(Refuses((9,))))
    assert whole.tokens is chain.tokens


def test_drawn_drafts_are_masked_and_not_pruned(tree: DraftTree) -> None:
    probs = torch.rand(2, 6, 40)
    drawn = DraftTree(tree.tokens, tree.shape, probs)
    made = run(drawn, request(Refuses((11,))), request())
    assert made.tokens.tolist()[0] == TOKENS[0]
    assert made.shape.parents.tolist() == PARENTS
    assert made.draft_probs is not None
    assert torch.equal(made.draft_probs[0], probs[0])
    assert made.allowed_tokens is not None
    assert made.allowed_tokens[0].tolist() == [[110 + i, 7] for i in range(6)]
    without = run(drawn, request(speculative=False), request())
    assert without.shape.parents[0].tolist() == [-1] * 5
    assert without.draft_probs is not None
    assert torch.equal(without.draft_probs[1, :5], probs[1, :5])


def test_drawn_drafts_of_a_slow_grammar_are_left_out_together(tree: DraftTree) -> None:
    drawn = DraftTree(tree.tokens, tree.shape, torch.rand(2, 6, 40))
    made = run(drawn, request(Refuses((11,), seconds_per_node=5.0)), request(Refuses()))
    assert made.shape.parents.tolist() == [[-1] * 5, PARENTS[1][:5]]
    assert made.allowed_tokens is not None
    assert made.allowed_tokens[0].tolist() == [[100, 7], *[[-1, -1]] * 4]


def test_a_grammar_that_fails_in_a_tree_concerns_its_request_alone(tree: DraftTree) -> None:
    failing, other = request(Refuses(fails_in_trees=True)), request(Refuses((22,)))
    made = run(tree, failing, other)
    assert failing.follower is not None
    assert other.follower is not None
    assert str(failing.follower.error) == "nothing may follow"
    assert other.follower.error is None
    assert made.tokens.tolist()[1] == [20, 21, 23, 24]
    assert made.shape.parents.tolist()[0] == [-1, -1, -1, -1]


def test_a_request_whose_tree_is_late_keeps_its_root_and_sits_out_until_the_mask_is_made(
    tree: DraftTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ROOT_SECONDS", "TREE_SECONDS"):
        monkeypatch.setattr(f"specmamba.engine.constraints.{name}", 0.02)
    late = Refuses(gate=threading.Event())
    slow, quick, free = request(late, owner="a"), request(Refuses((12,)), owner="b"), request()
    made = run(DraftTree(tree.tokens, tree_shape(tree.shape.parents, 2)), slow, free)
    assert made.shape.parents.tolist() == [[-1] * 5, PARENTS[1][:5]]
    assert made.allowed_tokens is not None
    assert made.allowed_tokens[0, 0].tolist() == [100, 7]
    assert slow.follower is not None
    slow.follower.advance([5, 6])
    wait_until(lambda: CONSTRAINTS.ready([slow, quick, free], is_idle=False) == [quick, free])
    assert CONSTRAINTS.ready([slow], is_idle=True) == []
    assert late.output == []
    assert late.gate is not None
    late.gate.set()
    wait_until(lambda: CONSTRAINTS.ready([slow], is_idle=False) == [slow])
    assert late.output == [5, 6]
    assert slow.follower.error is None


def test_a_request_whose_drawn_tree_takes_too_long_fails(tree: DraftTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specmamba.engine.constraints.MAX_DRAWN_SECONDS", 0.1)
    drawn = DraftTree(tree.tokens, tree.shape, torch.rand(2, 6, 40))
    late = Refuses(gate=threading.Event())
    slow = request(late)
    made = run(drawn, slow, request())
    assert made.shape.parents.tolist() == [[-1] * 5, PARENTS[1][:5]]
    assert slow.follower is not None
    assert slow.follower.error is not None
    assert slow.follower.error.code == "grammar_too_complex"
    assert late.gate is not None
    late.gate.set()


def test_without_a_free_thread_drawn_drafts_are_left_out(tree: DraftTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONSTRAINTS, "can_begin", lambda: False)
    drawn = DraftTree(tree.tokens, tree.shape, torch.rand(2, 6, 40))
    constrained = request(Refuses())
    made = run(drawn, constrained, request())
    assert made.shape.parents.tolist() == [[-1] * 5, PARENTS[1][:5]]
    assert constrained.follower is not None
    assert constrained.follower.error is None
