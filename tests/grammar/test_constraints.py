"""What requests refuse of drafts: nodes go before the verify, the others keep their places in the tree."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from specmamba.core import DraftTree
from specmamba.draft.drafter import chain_shape, tree_shape
from specmamba.engine.request import Request
from specmamba.engine.stepping.constraints import Constraints, restrict
from specmamba.errors import GrammarError
from specmamba.grammar import GrammarFollower, GrammarMatcher, TreeMask
from specmamba.grammar.follower import MAX_OWNERS, MEMORY_SECONDS, WaitShares
from specmamba.grammar.mask_maker import MaskJob
from specmamba.sampling_params import SamplingParams, SpeculationParams
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
        monkeypatch.setattr(f"specmamba.engine.stepping.constraints.{name}", 5.0)
    monkeypatch.setattr("specmamba.grammar.follower.WAIT_SHARE", 1e9)


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
            assert self.gate.wait(60)
        allowed = [True]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            assert 0 <= parent < len(allowed)
            allowed.append(allowed[parent] and token not in self.refused)
        bits = np.array([[100 + token, 7] for token in tokens], dtype=np.int32)
        return TreeMask(bits, np.array(allowed))


def request(
    matcher: Refuses | None = None, speculative: bool | SpeculationParams = True, owner: str | None = None
) -> Request:
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


@pytest.mark.parametrize("wants_none", [False, SpeculationParams(max_depth=0)], ids=["false", "max_depth 0"])
def test_a_request_may_want_no_drafts(tree: DraftTree, wants_none: bool | SpeculationParams) -> None:
    made = run(tree, request(speculative=wants_none), request())
    assert made.shape.parents.tolist() == [[-1] * 5, PARENTS[1][:5]]  # a node that no row needs is not verified
    assert made.allowed_tokens is None
    lone_tree = DraftTree(tree.tokens[:1], tree_shape(tree.shape.parents[:1], 2))
    alone = run(lone_tree, request(Refuses(), speculative=wants_none))
    assert alone.tokens.tolist() == [[10]]
    assert alone.shape.is_chain
    assert alone.allowed_tokens is not None
    assert alone.allowed_tokens.tolist() == [[[100, 7]]]


def test_a_request_that_chooses_its_rule_keeps_its_tree(tree: DraftTree) -> None:
    chooses = request(speculative=SpeculationParams(accept="target"))
    made = run(tree, chooses, request(speculative=SpeculationParams()))
    assert made.tokens.tolist() == [TOKENS[0], [*TOKENS[1][:5], 20]]  # padding repeats the root
    assert made.shape.parents.tolist() == PARENTS


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
        monkeypatch.setattr(f"specmamba.engine.stepping.constraints.{name}", 0.02)
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
    monkeypatch.setattr("specmamba.engine.stepping.constraints.MAX_DRAWN_SECONDS", 0.1)
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
    monkeypatch.setattr(CONSTRAINTS, "can_begin", lambda follower: False)
    drawn = DraftTree(tree.tokens, tree.shape, torch.rand(2, 6, 40))
    constrained = request(Refuses())
    made = run(drawn, constrained, request())
    assert made.shape.parents.tolist() == [[-1] * 5, PARENTS[1][:5]]
    assert constrained.follower is not None
    assert constrained.follower.error is None


def test_a_drawn_tree_that_cannot_begin_is_left_out(tree: DraftTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specmamba.engine.stepping.constraints.MAX_DRAWN_SECONDS", 0.1)
    drawn = DraftTree(tree.tokens, tree.shape, torch.rand(2, 6, 40))
    late = [Refuses(gate=threading.Event()) for _ in range(2)]
    busy = [request(matcher, owner="drawn") for matcher in late]
    settle(*busy)
    for one in busy:
        assert one.follower is not None
        one.follower.begin_tree([1, 2], [-1, 0], None, is_urgent=True)
    follower = cast(GrammarFollower, busy[0].follower)
    wait_until(lambda: not CONSTRAINTS.can_begin(follower))
    monkeypatch.setattr(CONSTRAINTS, "can_begin", lambda follower: True)  # the threads were taken after the look
    blocked = request(Refuses(), owner="drawn")
    assert blocked.follower is not None
    blocked.follower.root = TreeMask(np.array([[120, 7]], np.int32), np.array([True]))
    made = restrict([blocked, request()], drawn, CONSTRAINTS)
    assert made.shape.parents.tolist()[0] == [-1] * 5
    assert blocked.follower.error is None
    assert blocked.follower.is_settled
    assert blocked.follower.is_quick
    for matcher in late:
        assert matcher.gate is not None
        matcher.gate.set()


def test_a_request_that_waited_behind_others_stays_a_quick_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specmamba.engine.stepping.constraints.ROOT_SECONDS", 0.02)
    gate, first, second = threading.Event(), Refuses(), Refuses()
    monkeypatch.setattr(first, "advance", lambda tokens: gate.wait(60))
    slow, queued = request(first, owner="queue"), request(second, owner="queue")
    assert slow.follower is not None
    assert queued.follower is not None
    wait_until(lambda: CONSTRAINTS.ready([slow, queued], is_idle=False) == [] and not slow.follower.is_quick)
    assert queued.follower.job is not None
    assert queued.follower.job.began is None
    assert queued.follower.is_quick
    gate.set()
    settle(slow, queued)


def test_a_job_that_never_begins_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specmamba.engine.stepping.constraints.ROOT_SECONDS", 0.02)
    monkeypatch.setattr("specmamba.grammar.follower.MAX_QUEUE_SECONDS", 0.05)
    gate, first = threading.Event(), Refuses()
    monkeypatch.setattr(first, "advance", lambda tokens: gate.wait(60))
    slow, queued = request(first, owner="stuck"), request(Refuses(), owner="stuck")
    wait_until(lambda: CONSTRAINTS.ready([slow, queued], is_idle=False) == [queued])
    assert queued.follower is not None
    assert queued.follower.error is not None
    assert queued.follower.error.code == "grammar_failed"
    assert "waited 0.05 s behind slow ones" in str(queued.follower.error)
    queued.follower.close()
    gate.set()
    settle(slow)


def test_steps_wait_for_a_share_of_the_time_for_one_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specmamba.grammar.follower.WAIT_SHARE", 0.25)
    shares = WaitShares()
    for step in range(200):  # 4 s, of which steps wait 90%
        shares.add("a", 0.018, 0.02 * step)
    shares.add("b", 0.2, 4.0)
    assert shares.is_spent("a", 4.0)
    assert not shares.is_spent("b", 4.0)
    assert not shares.is_spent("c", 4.0)
    assert not shares.is_spent("a", 4.0 + 2 * MEMORY_SECONDS)
    for step in range(500):  # 10%
        shares.add("d", 0.002, 0.02 * step)
    assert not shares.is_spent("d", 10.0)


def test_few_owners_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specmamba.grammar.follower.WAIT_SHARE", 0.25)
    shares = WaitShares()
    for index in range(MAX_OWNERS + 5):
        shares.add(str(index), MEMORY_SECONDS, 1.0)
    assert len(shares._shares) == MAX_OWNERS
    assert not shares.is_spent("4", 1.0)
    assert shares.is_spent("5", 1.0)


def test_an_owner_that_used_up_its_share_is_not_waited_for(tree: DraftTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specmamba.grammar.follower.WAIT_SHARE", 0.25)
    made, gate, matcher = Constraints(32 * WORDS), threading.Event(), Refuses()
    monkeypatch.setattr(matcher, "advance", lambda tokens: gate.wait(60))
    heavy = request()
    heavy.follower = GrammarFollower(cast(GrammarMatcher, matcher), made._maker, "heavy")
    made._shares.add("heavy", 10.0, time.monotonic())
    awaited: list[int] = []
    wait = made._maker.wait

    def seen(jobs: Collection[MaskJob], seconds: float, **more: Any) -> None:
        awaited.append(len(jobs))
        wait(jobs, min(seconds, 0.05), **more)

    monkeypatch.setattr(made._maker, "wait", seen)
    free = request()
    assert made.ready([heavy, free], is_idle=False) == [free]
    assert awaited == [0]
    assert heavy.follower.is_quick
    assert heavy.follower.job is not None
    assert heavy.follower.job.is_suspect  # quick jobs of others do not wait for it
    assert made.ready([heavy], is_idle=True) == []
    assert awaited == [0, 1, 1]  # alone, it is waited for
    gate.set()
    wait_until(lambda: made.ready([heavy, free], is_idle=False) == [heavy, free])
    pair = restrict([heavy, free], tree, made)
    assert pair.shape.parents.tolist()[0] == [-1] * 5  # no drafts: the step would wait for their masks
    made.close()


def test_waits_are_charged_to_their_owner_when_others_wait_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specmamba.grammar.follower.WAIT_SHARE", 0.25)
    monkeypatch.setattr("specmamba.engine.stepping.constraints.ROOT_SECONDS", 0.05)
    made, gate, matcher = Constraints(32 * WORDS), threading.Event(), Refuses()
    monkeypatch.setattr(matcher, "advance", lambda tokens: gate.wait(60))
    slow = request()
    slow.follower = GrammarFollower(cast(GrammarMatcher, matcher), made._maker, "slow")
    assert made.ready([slow], is_idle=True) == []
    assert not made._shares._shares
    slow.follower.is_quick = True
    made.ready([slow, request()], is_idle=False)
    share, _ = made._shares._shares["slow"]
    assert share >= 0.05 / MEMORY_SECONDS * 0.9
    gate.set()
    made.close()
