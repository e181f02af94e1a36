"""Drawing without replacement and multi-round residual sampling: against the reference, and exactly in distribution."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels.sampling import (
    draw_children,
    native_ops,
    reference,
    residual_choice,
    sibling_rank,
    torch_ops,
)
from specmamba.kernels.tree import accepted_path
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of
from tests.pairwise import pairwise

NEARLY_ONE = 1 - 2.0**-24  # the largest uniform there is
Rule = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def each_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs with each form of both operators."""
    ops = native_ops if form == "native" else torch_ops
    for name in ("draw_children", "residual_choice"):
        monkeypatch.setattr(sys.modules[__name__], name, getattr(ops, name))


def random_probs(*shape: int, seed: int, sharpness: float = 2.0) -> Tensor:
    """Distributions [*shape] with impossible tokens among the others."""
    logits = sharpness * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    logits[..., 1::7] = -torch.inf
    return logits.softmax(-1)


def uniforms(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def sibling_tokens(parents: Tensor, q: Tensor, seed: int) -> Tensor:
    """Tokens [B, N] drawn from the parents' rows of q without replacement; chosen where q has nothing left."""
    rng, vocabulary = random.Random(seed), q.shape[-1]
    tokens = torch.zeros_like(parents)
    for b, row in enumerate(parents.tolist()):
        for parent in range(len(row)):
            taken: set[int] = set()
            for child in (node for node, of in enumerate(row) if of == parent):
                weights = [0.0 if t in taken else w for t, w in enumerate(q[b, parent].tolist())]
                free = [t for t in range(vocabulary) if t not in taken]
                token = rng.choices(range(vocabulary), weights)[0] if sum(weights) else rng.choice(free)
                taken.add(token)
                tokens[b, child] = token
    return tokens


# --- draws without replacement


@pytest.mark.parametrize(("vocabulary", "draws"), [(1, 1), (5, 5), (50, 4), (512, 3), (1300, 6)])
def test_draw_children_matches_reference(vocabulary: int, draws: int) -> None:
    probs = random_probs(3, 4, vocabulary, seed=vocabulary)
    probs[0, 0] = probs[0, 0] * 3  # need not be normalised
    before, u = probs.clone(), uniforms(3, 4, draws, seed=draws)
    tokens, is_drawn = draw_children(probs, u)
    want_tokens, want_drawn = reference.draw_children(probs, u)
    assert tokens.dtype == torch.int64
    assert torch.equal(is_drawn, want_drawn)
    assert torch.equal(tokens[is_drawn], want_tokens[is_drawn])
    assert torch.equal(probs, before)
    for row, drawn in zip(tokens.view(-1, draws).tolist(), is_drawn.view(-1, draws).tolist(), strict=True):
        kept = list(itertools.compress(row, drawn))
        assert len(set(kept)) == len(kept)


@pytest.mark.parametrize("vocabulary", [5, 700])
@pytest.mark.parametrize("uniform", [0.0, NEARLY_ONE])
def test_draw_children_stops_when_no_mass_is_left(vocabulary: int, uniform: float) -> None:
    probs = torch.zeros(1, 4, vocabulary)
    probs[0, 0, -2] = 1.0
    probs[0, 1, [0, 3]] = torch.tensor([1.0, 1e-30])  # little, but mass
    probs[0, 3, [0, 3]] = torch.tensor([1.0, 1e-40])  # too little to divide by
    tokens, is_drawn = draw_children(probs, torch.full((1, 4, 3), uniform))
    assert is_drawn.tolist() == [[[True, False, False], [True, True, False], [False] * 3, [True, False, False]]]
    assert tokens[0, 0, 0] == vocabulary - 2
    assert sorted(tokens[0, 1, :2].tolist()) == [0, 3]
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary


def test_draws_have_the_distribution_of_draws_without_replacement() -> None:
    """Exact: cut the unit square of two uniforms where the two tokens change, and add up the areas."""
    q = torch.tensor([0.5, 0.125, 0.0, 0.375])
    grid = (torch.arange(280) + 0.5) / 280  # every place where a token changes is a multiple of 1 / 280
    u = torch.cartesian_prod(grid, grid)[None]
    tokens, is_drawn = draw_children(q.expand(1, len(u[0]), 4), u)
    assert bool(is_drawn.all())
    area = torch.zeros(4, 4).index_put((tokens[0, :, 0], tokens[0, :, 1]), torch.tensor(1.0), accumulate=True) / 280**2
    want = q[:, None] * q / (1 - q[:, None])
    torch.testing.assert_close(area, want.fill_diagonal_(0), atol=1e-6, rtol=0)


# --- the rule, node by node


@pairwise(
    pytest.mark.parametrize("sharpness", [1.0, 6.0]),
    pytest.mark.parametrize("kind", ["drawn", "chosen", "both"]),
    pytest.mark.parametrize(("nodes", "vocabulary"), [(1, 7), (2, 30), (7, 12), (12, 12), (9, 600)]),
)
def test_residual_choice_matches_reference(nodes: int, vocabulary: int, kind: str, sharpness: float) -> None:
    """Random p, q and trees; in ``both``, q runs out of tokens before the children do."""
    batch, shapes = 4 * len(SHAPES), SHAPES * 4
    parents = batch_of_parents(shapes, nodes, seed=nodes)
    p = random_probs(batch, nodes, vocabulary, seed=1, sharpness=sharpness)
    q = random_probs(batch, nodes, vocabulary, seed=2, sharpness=sharpness)
    p = (p + q) / 2
    if kind == "both":
        q[..., 4:] = 0
    tokens = sibling_tokens(parents, q, seed=3)
    is_leaf = ~(parents[:, None] == torch.arange(nodes)[:, None]).any(-1)
    draft_probs = None if kind == "chosen" else q.masked_fill(is_leaf[..., None], torch.nan)  # never read
    u = uniforms(2, batch, nodes, seed=4)
    inputs = [p, tokens, parents, u] if draft_probs is None else [p, tokens, parents, u, draft_probs]
    before = [x.clone() for x in inputs]
    for max_children in (nodes, nodes + 5):
        choice = residual_choice(p, tokens, parents, draft_probs, max_children, *u)
        assert choice.dtype == torch.int64
        assert torch.equal(choice, reference.residual_choice(p, tokens, parents, draft_probs, max_children, *u))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(inputs, before, strict=True))
    # children were accepted and all were refused, both often
    if nodes > 2 and (kind == "drawn" or vocabulary < 100):
        agrees = (choice.gather(1, parents.clamp(min=0)) == tokens) & (parents >= 0)
        assert 0.1 < agrees.sum() / (~is_leaf).sum() < 0.97


def test_a_tight_bound_on_children_is_enough() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 1, 1, -1, -1]])
    p, q = random_probs(1, 8, 9, seed=5), random_probs(1, 8, 9, seed=6)
    tokens, u = sibling_tokens(parents, q, seed=7), uniforms(2, 1, 8, seed=8)
    results = [residual_choice(p, tokens, parents, q, bound, *u) for bound in (3, 4, 20)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_sibling_rank() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 0, 1], [-1, 0, 1, 2, 3, 4]])
    assert sibling_rank(parents)[:, 1:].tolist() == [[0, 1, 0, 2, 1], [0] * 5]


# --- exact distributions: the rule is a black box, and its probabilities are found by bisection over its uniforms


def star(p: Tensor, q: Tensor | None, tokens: Tensor) -> tuple[Any, ...]:
    """Arguments of a rule for stars: tokens [B, k] behind one root -> probs, tokens, parents, draft_probs."""
    batch, k = tokens.shape
    parents = torch.tensor([-1] + [0] * k).expand(batch, -1)
    drafts = None if q is None else q.expand(batch, k + 1, -1)
    return p.expand(batch, k + 1, -1), torch.cat([torch.zeros(batch, 1, dtype=torch.int64), tokens], 1), parents, drafts


def bisect(is_below: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
    """Where a step function of a uniform changes from true to false, [*shape] float64 in [0, 1]."""
    low, high = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
    for _ in range(40):
        middle = (low + high) / 2
        below = is_below(middle)
        low, high = middle.where(below, low), high.where(below, middle)
    return high


def output_distribution(rule: Rule, p: Tensor, q: Tensor | None, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What comes out behind the root, for each row of drafts tokens [B, k].

    Returns [B, V], and the probability [B] that it is a draft; float64.
    """
    batch, k = tokens.shape
    vocabulary = p.shape[-1]
    arguments = star(p, q, tokens)

    def choice(tries: Tensor, last: Tensor) -> Tensor:
        wide = torch.cat([torch.zeros(batch, 1, dtype=torch.float64), tries], 1)
        return rule(*arguments, k, wide, last[:, None].expand(-1, k + 1))[:, 0]

    refuse_all = torch.full((batch, k), NEARLY_ONE, dtype=torch.float64)
    result, none_yet = torch.zeros(batch, vocabulary, dtype=torch.float64), torch.ones(batch, dtype=torch.float64)
    for j in range(k):

        def accepts(u: Tensor, j: int = j) -> Tensor:
            return choice(refuse_all.index_copy(1, torch.tensor([j]), u[:, None]), u) == tokens[:, j]

        chance = bisect(accepts, (batch,))
        chance = torch.where(chance >= NEARLY_ONE, 1, chance).where(chance > 1e-9, 0)
        result.scatter_add_(1, tokens[:, j : j + 1], (none_yet * chance)[:, None])
        none_yet = none_yet * (1 - chance)
    is_draft = 1 - none_yet

    def is_at_most(token: int, u: Tensor) -> Tensor:
        return choice(refuse_all, u) <= token

    ends = [bisect(partial(is_at_most, t), (batch,)) for t in range(vocabulary)]
    edges = torch.stack([torch.zeros(batch, dtype=torch.float64), *ends], 1)
    return result + none_yet[:, None] * edges.diff(dim=1), is_draft


def ordered_draws(q: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """All sequences of k different tokens that q can give, [B, k], and their probabilities [B]."""
    rows, chances = [], []
    for row in itertools.permutations(range(len(q)), k):
        chance, left = 1.0, float(q.double().sum())
        for token in row:
            chance *= float(q[token]) / left if q[token] > 0 else 0.0
            left -= float(q[token])
        if chance > 0:
            rows.append(row)
            chances.append(chance)
    return torch.tensor(rows), torch.tensor(chances, dtype=torch.float64)


def error_of(rule: Rule, p: Tensor, q: Tensor, k: int) -> float:
    """How far what comes out is from p: the sum over all draws of P(draw) P(output | draw), and its distance."""
    tokens, chances = ordered_draws(q, k)
    outputs, _ = output_distribution(rule, p, q, tokens)
    return float((chances @ outputs - p.double()).abs().max())


PAIRS = {
    "random": (random_probs(5, seed=10, sharpness=1.0), random_probs(5, seed=11, sharpness=1.0)),
    "sharp": (random_probs(5, seed=12, sharpness=3.0), random_probs(5, seed=13, sharpness=3.0)),
    "equal": (torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.1, 0.2, 0.3, 0.4])),
    "far apart": (torch.tensor([0.05, 0.05, 0.2, 0.7]), torch.tensor([0.6, 0.3, 0.05, 0.05])),
    "disjoint": (torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.2, 0.3, 0.5])),
    "greedy": (torch.tensor([0.0, 0.0, 1.0, 0.0]), torch.tensor([0.4, 0.3, 0.2, 0.1])),
}


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_output_is_distributed_as_the_target_says(pair: str, k: int) -> None:
    assert error_of(residual_choice, *PAIRS[pair], k) < 1e-6


@pytest.mark.parametrize("pair", PAIRS)
def test_drafts_that_were_chosen_are_lossless_one_by_one(pair: str) -> None:
    """A chosen draft is a point mass, so nothing has to be averaged: every choice of drafts gives p."""
    p, q = PAIRS[pair]
    tokens, _ = ordered_draws(q, 2)
    outputs, is_draft = output_distribution(residual_choice, p, None, tokens)
    torch.testing.assert_close(outputs, p.double().expand_as(outputs), atol=1e-6, rtol=0)
    torch.testing.assert_close(is_draft, p.double()[tokens].sum(1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_chain_is_accepted_as_often_as_theory_says(pair: str) -> None:
    """arXiv 2211.17192, section 3.1: the sum of min(p, q)."""
    p, q = PAIRS[pair]
    tokens, chances = ordered_draws(q, 1)
    _, is_draft = output_distribution(residual_choice, p, q, tokens)
    assert float(chances @ is_draft) == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-6)


def without_residual(probs: Tensor, tokens: Tensor, *rest: object) -> Tensor:
    """Wrong: when all drafts are refused, the target's distribution is sampled as if there had been none."""
    choice = residual_choice(probs, tokens, *rest)
    is_draft = (choice[:, :1] == tokens[:, 1:]).any(1, keepdim=True)
    lone = [torch.zeros_like(tokens), torch.full_like(tokens, -1)]
    return torch.where(is_draft, choice, residual_choice(probs, *lone, *rest[1:]))


def with_replacement(
    probs: Tensor, tokens: Tensor, parents: Tensor, q: Tensor, _: int, tries: Tensor, last: Tensor
) -> Tensor:
    """Wrong: the second of two drafts is judged by q as it was before the first was drawn."""
    first = residual_choice(probs[:, :2], tokens[:, :2], parents[:, :2], q[:, :2], 1, tries[:, :2], last[:, :2])
    refused = (probs - q).clamp(min=0)
    refused = torch.where(refused.sum(-1, keepdim=True) > 0, refused, probs)
    late = tokens[:, [0, 2]], parents[:, :2], q[:, :2], 1, tries[:, [0, 2]], last[:, :2]
    second = residual_choice(refused[:, :2], *late)
    return torch.where(first[:, :1] == tokens[:, 1:2], first, second)


def with_another_draft(probs: Tensor, tokens: Tensor, parents: Tensor, q: Tensor, *rest: object) -> Tensor:
    """Wrong: the drafts are judged by a distribution that they were not drawn from."""
    return residual_choice(probs, tokens, parents, q.sqrt(), *rest)


@pytest.mark.parametrize("wrong", [without_residual, with_replacement, with_another_draft])
def test_a_wrong_rule_is_found_out(wrong: Rule) -> None:
    """The test above has teeth."""
    assert error_of(wrong, *PAIRS["far apart"], 2) > 1e-3


def test_drafts_tried_in_another_order_than_drawn_are_found_out() -> None:
    p, q = PAIRS["far apart"]
    tokens, chances = ordered_draws(q, 2)
    outputs, _ = output_distribution(residual_choice, p, q, tokens.flip(1))
    assert (chances @ outputs - p).abs().max() > 1e-3


# --- edges


def test_greedy_rows_are_exact() -> None:
    """All mass on one token: it comes out, whatever was drafted, whatever the random numbers."""
    batch, nodes, vocabulary = 40, 6, 8
    parents = batch_of_parents(SHAPES * 8, nodes, seed=20)
    best = torch.randint(vocabulary, (batch, nodes), generator=torch.Generator().manual_seed(21))
    p = torch.nn.functional.one_hot(best, vocabulary).float()
    for sharpness in (1.0, 5.0, 60.0):
        q = random_probs(batch, nodes, vocabulary, seed=22, sharpness=sharpness)
        tokens = sibling_tokens(parents, q, seed=23)
        ends = [torch.full((2, batch, nodes), end) for end in (0.0, NEARLY_ONE)]
        for u in (uniforms(2, batch, nodes, seed=24), *ends):
            for draft_probs in (q, None):
                assert torch.equal(residual_choice(p, tokens, parents, draft_probs, nodes, *u), best)


def test_a_residual_that_rounding_emptied() -> None:
    """q rounds to one on the target's only token and yet drew another: p without the children, or else p."""
    p, q = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.0, 1e-30, 1e-31])
    for tokens in ([1, 2], [1, 0], [2, 0], [0, 1]):
        arguments = star(p, q, torch.tensor([tokens]))
        for uniform in (0.0, 0.5, NEARLY_ONE):
            u = torch.full((2, 1, 3), uniform)
            assert residual_choice(*arguments, 2, *u)[0, 0] == 0
            assert reference.residual_choice(*arguments, 2, *u)[0, 0] == 0


@pytest.mark.parametrize("left", [1e-20, 1e-32, 1e-36, 1e-42])
def test_a_draft_from_next_to_nothing(left: float) -> None:
    """The second draft comes from what the first left, however little that is; dividing by it must not overflow."""
    p, q = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([1.0, left, left, 2 * left])
    tokens = torch.tensor([[0, 1], [0, 2], [0, 3]])
    chances = torch.tensor([0.25, 0.25, 0.5]).double()
    outputs, _ = output_distribution(residual_choice, p, q, tokens)
    assert (chances @ outputs - p).abs().max() < 1e-6


def test_an_empty_residual_is_no_reason_to_repeat_a_refused_draft() -> None:
    """Next to 1, the little mass of the refused draft is lost in rounding, and the residual with it."""
    arguments = star(torch.tensor([1.0, 1e-9]), torch.tensor([1.0, 1e-8]), torch.tensor([[1]]))
    half, end = torch.tensor([[[0.5] * 2], [[1 - 2e-10] * 2]], dtype=torch.float64)
    assert residual_choice(*arguments, 1, half, end)[0, 0] == 0
    assert residual_choice(arguments[0], torch.tensor([[0, 0]]), *arguments[2:], 1, half * 0, end)[0, 0] == 0
    lone = torch.full((1, 2), -1)
    assert residual_choice(*arguments[:2], lone, None, 1, half, end)[0, 0] == 1  # which p alone would have said


def test_what_the_target_never_says_never_comes_out() -> None:
    p, q = torch.tensor([0.75, 0.25, 0.0]), torch.tensor([0.75, 0.25, 1e-30])
    arguments = star(p, q, torch.tensor([[2]]))
    refused = torch.zeros(1, 2)  # even by the smallest number: the target never says 2
    for uniform, token in ((0.0, 0), (0.7, 0), (0.8, 1), (NEARLY_ONE, 1)):
        assert residual_choice(*arguments, 1, refused, torch.full((1, 2), uniform))[0, 0] == token


@pytest.mark.parametrize("kind", ["drawn", "chosen"])
@pytest.mark.parametrize("sharpness", [0.5, 4.0])
def test_a_refused_token_never_comes_out(kind: str, sharpness: float) -> None:
    """So a path that follows the choices follows the accepted children and no other."""
    batch, k, vocabulary = 300, 3, 6
    p = random_probs(batch, 1, vocabulary, seed=30, sharpness=sharpness).expand(-1, k + 1, -1)
    q = random_probs(batch, 1, vocabulary, seed=31, sharpness=sharpness).expand(-1, k + 1, -1)
    parents = torch.tensor([-1] + [0] * k).expand(batch, -1)
    tokens = sibling_tokens(parents, q, seed=32)
    draft_probs = q if kind == "drawn" else None
    tries, num_refused, accepted = uniforms(batch, k + 1, seed=33), 0, []
    for uniform in (0.0, 0.3, 0.6, NEARLY_ONE):
        last = torch.full((batch, k + 1), uniform)
        choice = residual_choice(p, tokens, parents, draft_probs, k, tries, last)
        mask = mask_of(parents)
        _, num_accepted, path_tokens, _ = accepted_path(tokens, parents, mask, choice)
        assert torch.equal(path_tokens[:, 0], choice[:, 0])
        for b in (num_accepted == 0).nonzero().flatten().tolist():
            assert int(choice[b, 0]) not in tokens[b, 1:].tolist()
            num_refused += 1
        accepted.append(num_accepted)
    assert all(torch.equal(other, accepted[0]) for other in accepted)  # the number for the draw decides no acceptance
    assert 100 < num_refused < 1100


def test_logits_that_are_no_numbers_still_give_an_index() -> None:
    parents = torch.tensor([[-1, 0, 0]])
    p, q = torch.full((1, 3, 600), torch.nan), random_probs(1, 3, 600, seed=40)
    for draft_probs in (q, None):
        choice = residual_choice(p, torch.tensor([[0, 1, 2]]), parents, draft_probs, 2, *torch.zeros(2, 1, 3))
        assert 0 <= int(choice.min()) <= int(choice.max()) < 600
    tokens, is_drawn = draw_children(p, torch.zeros(1, 3, 2))
    assert not bool(is_drawn.any())
    assert int(tokens.max()) < 600
