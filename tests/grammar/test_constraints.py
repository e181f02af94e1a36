"""What requests refuse of drafts: nodes go before the verify, the others keep their places in the tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple, cast

import numpy as np
import pytest
import torch

from specmamba.core import DraftTree
from specmamba.draft.drafter import chain_shape, tree_shape
from specmamba.engine.constraints import restrict
from specmamba.engine.request import Request
from specmamba.errors import GrammarError
from specmamba.grammar import TreeMask
from specmamba.sampling_params import SamplingParams

CPU = torch.device("cpu")
WORDS = 2


@dataclass
class Refuses:
    """A grammar that refuses some tokens wherever they stand."""

    refused: tuple[int, ...] = ()
    is_at_its_end: bool = False
    seconds_per_node: float = 0.0

    def mask(self, tokens: Sequence[int], parents: Sequence[int], seconds: float | None = None) -> TreeMask:
        if self.is_at_its_end:
            raise GrammarError("nothing may follow")
        allowed = [True]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            assert 0 <= parent < len(allowed)
            allowed.append(allowed[parent] and token not in self.refused)
        bits = np.array([[100 + token, 7] for token in tokens], dtype=np.int32)
        return TreeMask(bits, np.array(allowed))


def request(matcher: Refuses | None = None, speculative: bool = True) -> Request:
    params = SamplingParams(speculative=speculative)
    return cast(Request, SimpleNamespace(params=params, matcher=matcher))


class Restricted(NamedTuple):
    tree: DraftTree
    errors: dict[int, str]


def run(tree: DraftTree, *requests: Request) -> Restricted:
    return Restricted(*restrict(requests, tree))


TOKENS = [[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]]
PARENTS = [[-1, 0, 0, 1, 2, 3], [-1, 0, 1, 1, 0, -1]]


@pytest.fixture
def tree() -> DraftTree:
    return DraftTree(torch.tensor(TOKENS), tree_shape(torch.tensor(PARENTS), 2))


def test_requests_without_a_grammar_keep_their_trees(tree: DraftTree) -> None:
    made = run(tree, request(), request(Refuses()))
    assert made.tree.tokens.tolist() == [TOKENS[0], [*TOKENS[1][:5], 20]]
    assert made.tree.shape.parents.tolist() == PARENTS
    assert made.tree.allowed_tokens is not None
    assert made.tree.allowed_tokens[0].tolist() == [[-1, -1]] * 6
    assert made.tree.allowed_tokens[1].tolist() == [[120 + i, 7] for i in range(5)] + [[-1, -1]]


def test_refused_nodes_go_with_all_below_them(tree: DraftTree) -> None:
    made = run(tree, request(Refuses((11,))), request(Refuses((22, 24))))
    assert made.tree.tokens.tolist() == [[10, 12, 14], [20, 21, 23]]
    assert made.tree.shape.parents.tolist() == [[-1, 0, 1], [-1, 0, 1]]
    assert made.tree.shape.is_chain  # both rows have become one
    assert made.tree.allowed_tokens is not None
    assert made.tree.allowed_tokens.tolist() == [[[110, 7], [112, 7], [114, 7]], [[120, 7], [121, 7], [123, 7]]]
    assert not made.errors


def test_rows_of_different_sizes_are_padded(tree: DraftTree) -> None:
    made = run(tree, request(Refuses((12, 13))), request(Refuses((22,))))
    assert made.tree.tokens.tolist() == [[10, 11, 10, 10], [20, 21, 23, 24]]
    assert made.tree.shape.parents.tolist() == [[-1, 0, -1, -1], [-1, 0, 1, 0]]
    assert not made.tree.shape.is_chain
    assert made.tree.shape.max_children == 2


def test_a_request_may_want_no_drafts(tree: DraftTree) -> None:
    made = run(tree, request(speculative=False), request())
    assert made.tree.shape.parents.tolist() == [[-1] * 5, PARENTS[1][:5]]  # a node that no row needs is not verified
    assert made.tree.allowed_tokens is None
    alone = run(
        DraftTree(tree.tokens[:1], tree_shape(tree.shape.parents[:1], 2)), request(Refuses(), speculative=False)
    )
    assert alone.tree.tokens.tolist() == [[10]]
    assert alone.tree.shape.is_chain
    assert alone.tree.allowed_tokens is not None
    assert alone.tree.allowed_tokens.tolist() == [[[110, 7]]]


def test_a_chain_that_is_cut_stays_a_chain() -> None:
    chain = DraftTree(torch.tensor([[1, 2, 3, 4]]), chain_shape(1, 4, CPU))
    made = run(chain, request(Refuses((3,))))
    assert made.tree.tokens.tolist() == [[1, 2]]
    assert made.tree.shape.is_chain
    whole = run(chain, request(Refuses((9,))))
    assert whole.tree.tokens is chain.tokens


def test_drawn_drafts_are_masked_and_not_pruned(tree: DraftTree) -> None:
    probs = torch.rand(2, 6, 40)
    drawn = DraftTree(tree.tokens, tree.shape, probs)
    made = run(drawn, request(Refuses((11,))), request())
    assert made.tree.tokens.tolist()[0] == TOKENS[0]
    assert made.tree.shape.parents.tolist() == PARENTS
    assert made.tree.draft_probs is not None
    assert torch.equal(made.tree.draft_probs[0], probs[0])
    assert made.tree.allowed_tokens is not None
    assert made.tree.allowed_tokens[0].tolist() == [[110 + i, 7] for i in range(6)]
    without = run(drawn, request(speculative=False), request())
    assert without.tree.shape.parents[0].tolist() == [-1] * 5
    assert without.tree.draft_probs is not None
    assert torch.equal(without.tree.draft_probs[1, :5], probs[1, :5])


def test_drawn_drafts_of_a_slow_grammar_are_left_out_together(tree: DraftTree) -> None:
    drawn = DraftTree(tree.tokens, tree.shape, torch.rand(2, 6, 40))
    made = run(drawn, request(Refuses((11,), seconds_per_node=1.0)), request(Refuses()))
    assert made.tree.shape.parents.tolist() == [[-1] * 5, PARENTS[1][:5]]
    assert made.tree.allowed_tokens is not None
    assert made.tree.allowed_tokens[0].tolist() == [[110, 7], *[[-1, -1]] * 4]


def test_the_end_of_a_grammar_concerns_its_request_alone(tree: DraftTree) -> None:
    made = run(tree, request(Refuses(is_at_its_end=True)), request(Refuses((22,))))
    assert made.errors == {0: "nothing may follow"}
    assert made.tree.tokens.tolist()[1] == [20, 21, 23, 24]
    assert made.tree.shape.parents.tolist()[0] == [-1, -1, -1, -1]
