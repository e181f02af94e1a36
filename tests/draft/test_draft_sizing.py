"""The sizing of drafts: native code decides as the reference, and the reference as README.md says."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from specmamba.kernels.draft_sizing import (
    DRAWN,
    GREEDY,
    LENGTH,
    NUM_MODES,
    Drafted,
    Ints,
    Offer,
    SizerState,
    Times,
    TreeArrays,
    begin,
    native_ops,
    reference,
)

DEPTH, RANKS, MAX_NODES, ROWS = 4, 3, 8, 12
needs_native = pytest.mark.skipif(native_ops.code() is None, reason="needs native code")
FORMS = [reference, pytest.param(native_ops, marks=needs_native)]


def new_state(width: int = 1) -> SizerState:
    sizes = [RANKS * (width if depth else 1) for depth in range(DEPTH)]
    depths = np.array([depth for depth, size in enumerate(sizes, 1) for _ in range(size)])
    ranks = np.array([i % RANKS for size in sizes for i in range(size)])
    state = SizerState(depths, ranks, width, MAX_NODES, ROWS + 1)
    for row in range(1, ROWS + 1):
        begin(state, row, row % NUM_MODES)
    return state


def new_drafted(state: SizerState) -> Drafted:
    return Drafted(ROWS, len(state.depths), TreeArrays.empty(ROWS, MAX_NODES))


def random_offer(rng: np.random.Generator, state: SizerState, size: int, **changes: Any) -> tuple[Offer, Drafted]:
    """Candidates of ``size`` rows of a batch that has one row more."""
    depth = int(rng.integers(1, DEPTH + 1))
    depths, ranks = (x[state.depths <= depth] for x in (state.depths, state.ranks))
    count = len(depths)
    parents = np.zeros((size, count), np.int64)
    for i, c in product(range(size), range(count)):
        if depths[c] > 1:  # some node of the level above
            parents[i, c] = (
                1 + rng.choice(np.flatnonzero(depths == depths[c] - 1))
                if state.width > 1
                else 1 + int(np.flatnonzero(depths == depths[c] - 1)[0])
            )
    logp = np.log(rng.random((size, count), np.float32))
    logp[rng.random((size, count)) < 0.05] = -np.inf
    batch = size + 1
    seconds = np.concatenate([np.full(batch, np.inf), 1 + np.cumsum(rng.random(batch * MAX_NODES) * 0.3)])
    tokens = rng.integers(0, 50, (size, count))
    given = {"nodes_per_row": 0} | changes
    offer = Offer(tokens, parents, logp, depths, ranks, batch, batch + 1, depth, seconds, **given)
    drafted = new_drafted(state)
    drafted.places[:size] = rng.permutation(batch)[:size]
    drafted.rows[:size] = 1 + rng.permutation(ROWS)[:size]
    drafted.modes[:size] = drafted.rows[:size] % NUM_MODES
    drafted.max_depths[:size] = rng.integers(1, DEPTH + 1, size)
    return offer, drafted


def decided_of(rng: np.random.Generator, offer: Offer, drafted: Drafted) -> tuple[Ints, Ints]:
    """A path of every row along chosen nodes, behind its root, and how many are accepted."""
    paths = []
    for b in range(offer.batch_size):
        path, node = [0], 0
        while rng.random() < 0.7:
            children = [n for n in range(1, drafted.trees.num_nodes[b]) if drafted.trees.parents[b, n] == node]
            if not children:
                break
            node = int(rng.choice(children))
            path.append(node)
        paths.append(path)
    width = 1 + max(map(len, paths))
    return np.array([[*path, *[-1] * (width - len(path))] for path in paths]), np.array(
        [len(path) - 1 for path in paths]
    )


def copies_of(drafted: Drafted) -> Drafted:
    trees = TreeArrays.empty(*drafted.trees.tokens.shape)
    copy = Drafted(drafted.max_rows, drafted.num_candidates, trees)
    for name in ("rows", "modes", "max_depths", "places"):
        getattr(copy, name)[:] = getattr(drafted, name)
    return copy


def assert_alike(a: object, b: object, names: list[str]) -> None:
    for name in names:
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-9, atol=1e-12, err_msg=name)


STATE = ["weights", "offsets", "counts", "of_row", "bins", "odds", "values_of_mode", "values_of_row", "threshold"]
DECIDED = ["kept", "p", "logits"]


@needs_native
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("nodes_per_row", [0, 3])
def test_native_code_decides_and_learns_as_the_reference(width: int, nodes_per_row: int) -> None:
    rng = np.random.default_rng(width * 10 + nodes_per_row)
    states = new_state(width), new_state(width)
    for _ in range(60):
        offer, drafted = random_offer(rng, states[0], int(rng.integers(1, 9)), nodes_per_row=nodes_per_row)
        other = copies_of(drafted)
        found = reference.choose(states[0], drafted, offer), native_ops.choose(states[1], other, offer)
        assert found[0][:3] == found[1][:3]
        assert math.isclose(found[0].expected_tokens, found[1].expected_tokens, rel_tol=1e-9)
        assert_alike(drafted, other, DECIDED)
        assert_alike(drafted.trees, other.trees, ["tokens", "parents", "candidates", "num_nodes"])
        width, places = found[0].width + int(rng.integers(0, 2)), found[0].num_nodes + int(rng.integers(0, 3))
        for form, trees in zip((reference, native_ops), (drafted.trees, other.trees), strict=True):
            form.pack(trees, offer.padded_size, min(width, MAX_NODES), places)
        assert_alike(drafted.trees, other.trees, ["places", "nodes", "firsts"])
        decided = decided_of(rng, offer, drafted)
        offer.tokens[:], offer.parents[:] = -5, 1 << 40  # the verify has used this memory for something else
        native_ops.learn(states[1], other, offer, *decided)
        reference.learn(states[0], drafted, offer, *decided)
        assert_alike(*states, STATE)
        rows, bounds = np.arange(1, 6), rng.integers(0, DEPTH + 1, 5)
        seconds = np.stack(
            [1 + np.cumsum(rng.random(5 * MAX_NODES + 1)) * 0.1 + depth * 0.1 for depth in range(DEPTH + 1)]
        )
        of_chain = np.array([int(np.flatnonzero(states[0].depths == depth)[0]) for depth in range(1, DEPTH)])
        chains = np.array([np.inf, *(1 + rng.random(DEPTH - 1)), np.inf])
        rates = [
            form.look(state, rows, bounds, (3, 4), Times(seconds, of_chain, chains))
            for form, state in zip((reference, native_ops), states, strict=True)
        ]
        np.testing.assert_allclose(rates[0], rates[1], rtol=1e-9)
        assert (rates[0] > 0).tolist() == [True] * (DEPTH + 1) + [False] + [True] * (DEPTH - 1) + [False]


@pytest.mark.parametrize("form", FORMS)
def test_a_chain_is_judged_by_the_mean_of_all_kept_drafts(form: Any) -> None:
    state = new_state()
    values = np.linspace(0.1, 0.8, LENGTH)[:, None] ** state.depths
    state.values_of_row[2] = values
    times = Times(
        np.ones((DEPTH + 1, MAX_NODES + 1)), np.array([0, RANKS]), np.array([np.inf, 2.0, 4.0, np.inf, np.inf])
    )
    rates = form.look(state, np.array([2]), np.array([DEPTH]), (0, 1), times)
    first, second = values[:, [0, RANKS]].mean(0)
    np.testing.assert_allclose(rates[DEPTH + 1 :], [0, (1 + first) / 2, (1 + first + second) / 4, 0, 0])


@pytest.mark.parametrize("form", FORMS)
def test_the_number_of_nodes_is_the_global_maximum(form: Any) -> None:
    """Times that rise in steps have several local maxima: all numbers of nodes are tried by hand."""
    rng = np.random.default_rng(5)
    for _ in range(40):
        state = new_state()
        offer, drafted = random_offer(rng, state, 4)
        drafted.modes[:], drafted.places[:4] = GREEDY, np.arange(4)
        stairs = 1 + np.floor(np.arange(len(offer.seconds)) / rng.integers(2, 7)) * rng.random()
        offer = replace(offer, batch_size=4, padded_size=4, seconds=stairs)
        total, *_, expected = form.choose(state, drafted, offer)
        values = reference.path_values(drafted.p[:4, : offer.tokens.shape[1]], offer.parents, offer.depth)
        best = -np.sort(-reference.capped(values, MAX_NODES), axis=None)
        rates = [(4 + best[:k].sum()) / stairs[4 + k] for k in range((best > 0).sum() + 1) if 4 + k < len(stairs)]
        assert math.isclose(expected / stairs[total], max(rates), rel_tol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_trees_have_the_parent_of_every_node_and_no_more_nodes_than_allowed(form: Any) -> None:
    rng = np.random.default_rng(6)
    state = new_state(3)
    for _ in range(30):
        offer, drafted = random_offer(rng, state, 6)
        form.choose(state, drafted, offer)
        for i in range(6):
            b, kept = drafted.places[i], np.flatnonzero(drafted.kept[i, : offer.tokens.shape[1]])
            assert drafted.trees.num_nodes[b] == len(kept) + 1 <= MAX_NODES
            numbers = {0: 0} | {int(c) + 1: n for n, c in enumerate(kept, 1)}
            for n, c in enumerate(kept, 1):
                assert drafted.trees.parents[b, n] == numbers[int(offer.parents[i, c])]
                assert drafted.trees.tokens[b, n] == offer.tokens[i, c]
            assert (drafted.trees.parents[b, len(kept) + 1 :] == -1).all()


@pytest.mark.parametrize("form", FORMS)
def test_whether_a_drawn_node_is_kept_depends_on_nothing_below_it(form: Any) -> None:
    """Other tokens at a node of a drawn row mean other distributions below it: these may not decide about the node."""
    rng = np.random.default_rng(7)
    for _ in range(40):
        state = new_state()
        state.threshold[0] = 0.3
        offer, drafted = random_offer(rng, state, 3)
        drafted.modes[:] = DRAWN
        other, logp = copies_of(drafted), offer.logp.copy()
        logp[:, offer.depths > 1] = np.log(rng.random((3, (offer.depths > 1).sum()), np.float32))
        parts = (offer.depths, offer.ranks, offer.batch_size, offer.padded_size, offer.depth, offer.seconds)
        form.choose(state, drafted, offer)
        state.threshold[0] = 0.3
        form.choose(state, other, Offer(offer.tokens, offer.parents, logp, *parts))
        first = offer.depths == 1
        np.testing.assert_array_equal(drafted.kept[:3, : len(first)][:, first], other.kept[:3, : len(first)][:, first])


@pytest.mark.parametrize("form", FORMS)
def test_the_calibration_finds_the_rate_of_acceptance(form: Any) -> None:
    """Nodes of two kinds, accepted half and twice as often as the drafter thinks: the error falls below 3 %."""
    rng = np.random.default_rng(8)
    state = new_state()
    depths, ranks = state.depths[:1], state.ranks[:1]
    drafted = new_drafted(state)
    drafted.rows[0], drafted.max_depths[0] = 1, DEPTH
    for _ in range(4000):
        q = rng.choice([0.2, 0.8])
        offer = Offer(
            np.array([[7]]), np.array([[0]]), np.log(np.array([[q]], np.float32)), depths, ranks, 1, 1, 1, np.ones(9), 2
        )
        form.choose(state, drafted, offer)
        form.learn(state, drafted, offer, np.array([[0, 1]]), np.array([int(rng.random() < (0.1 if q < 0.5 else 0.4))]))
    assert reference.calibration_error(state) < 0.05
    assert abs(state.weights[0]) <= reference.LARGEST_WEIGHT


@pytest.mark.parametrize("form", FORMS)
def test_nodes_that_were_not_verified_count_as_nothing(form: Any) -> None:
    state = new_state()
    rng = np.random.default_rng(9)
    offer, drafted = random_offer(rng, state, 2, nodes_per_row=1)
    form.choose(state, drafted, offer)
    before = state.counts.copy(), state.of_row.copy()
    form.learn(state, drafted, offer, np.ones((3, 1), np.int64), np.zeros(3, np.int64))
    np.testing.assert_array_equal(before[0], state.counts)
    np.testing.assert_array_equal(before[1], state.of_row)


@pytest.mark.parametrize("form", FORMS)
def test_numbers_stay_bounded_over_many_steps(form: Any) -> None:
    """10,000 steps of refused and accepted nodes in turns, with impossible and certain drafts among them."""
    state = new_state()
    drafted = new_drafted(state)
    drafted.rows[0], drafted.max_depths[0] = 1, DEPTH
    logp = np.array([[0.0]], np.float32), np.array([[-80.0]], np.float32), np.array([[np.nan]], np.float32)
    for step in range(10_000):
        offer = Offer(
            np.array([[7]]), np.array([[0]]), logp[step % 3], state.depths[:1], state.ranks[:1], 1, 1, 1, np.ones(9), 2
        )
        form.choose(state, drafted, offer)
        form.learn(state, drafted, offer, np.array([[0, 1]]), np.array([step // 1000 % 2]))
    for name in STATE:
        assert np.isfinite(getattr(state, name)).all(), name
    assert np.abs(state.of_row).max() <= reference.LARGEST_OF_ROW
    assert np.abs(state.offsets).max() <= reference.LARGEST_OFFSET


@needs_native
def test_native_code_refuses_shapes_that_do_not_fit() -> None:
    state = new_state()
    offer, drafted = random_offer(np.random.default_rng(10), state, 2)
    wrong = Offer(
        offer.tokens, offer.parents[:1], offer.logp, offer.depths, offer.ranks, 3, 3, offer.depth, offer.seconds
    )
    with pytest.raises(ValueError, match="differ in shape"):
        native_ops.choose(state, drafted, wrong)
    small = Drafted(1, len(state.depths), TreeArrays.empty(1, MAX_NODES))
    with pytest.raises(ValueError, match="too many rows"):
        native_ops.choose(state, small, offer)
