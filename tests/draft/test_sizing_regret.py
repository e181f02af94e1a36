"""What the sizing of drafts loses against the best fixed size, on a simulated engine: its clock is counted.

Times of steps differ from the predicted ones by a factor of each kind, with noise. A text has a probability with which
first children are accepted; stretches of it are easier and harder than others, and the drafter's own probabilities say
little of that. Fixed sizes are plain steps and chains, whose speed is what is expected of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from specmamba.draft.candidates import Candidates
from specmamba.draft.sizing import present_times
from specmamba.draft.sizing import sizer as sizer_module
from specmamba.draft.sizing.costs import StepCosts, StepTimes
from specmamba.draft.sizing.earlier import EarlierRequests
from specmamba.draft.sizing.expected_tokens import MOST_EXPECTED, STEPS_TO_FORGET, WEIGHT_OF_OWN, Brought
from specmamba.draft.sizing.rounds import Bounds, Round, SizedBatch
from specmamba.draft.sizing.schedule import ROUND
from specmamba.draft.sizing.sizer import FIRST_DRAFTS, DraftSizer
from specmamba.kernels.draft_sizing import LENGTH, SAMPLED, Floats, TreeArrays
from tests.pairwise import IS_FULL

D, K, NODES, TOKENS = 4, 3, 8, 192
FADING, OF_NODE = 0.94, 1.2  # of a stretch by step, and how much nodes differ beside that
# milliseconds on the demo, 2 cores with AVX512-BF16: drafts, verifies, chains
MS: dict[int, tuple[dict[int, float], ...]] = {
    1: ({1: 0.168, 4: 0.337}, {1: 0.775, 2: 0.798, 8: 1.092}, {1: 0.942, 2: 1.082, 3: 1.191, 4: 1.34}),
    4: ({1: 0.182, 4: 0.586}, {4: 0.843, 8: 1.029, 32: 1.9}, {1: 1.23, 2: 1.478, 3: 1.836, 4: 2.44}),
    16: ({1: 0.958, 4: 2.516}, {16: 1.703, 32: 2.518, 128: 6.73}, {1: 3.219, 2: 5.837, 3: 7.525, 4: 8.918}),
}
DEPTHS = np.repeat(np.arange(1, D + 1), K)
PARENTS = np.where(DEPTHS == 1, 0, 1 + K * (DEPTHS - 2))


class Load:
    """Batches of requests on one sizer."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng, self.now = np.random.default_rng(seed), 0.0
        times = {n: StepTimes(*({k: v * 1e-3 for k, v in curve.items()} for curve in ms)) for n, ms in MS.items()}
        self.true, self.wrong = (
            StepCosts(times),
            {kind: math.exp(0.08 * self.rng.normal()) for kind in range(-D, D + 1)},
        )
        bounds = Bounds(D, NODES, DEPTHS, np.tile(np.arange(K), D), 1)
        self.sizer = DraftSizer(
            bounds, TreeArrays.empty(16, NODES), StepCosts(times), lambda n: range(1, n * NODES + 1)
        )
        monkeypatch.setattr(sizer_module, "time", self)
        monkeypatch.setattr(present_times, "time", self)
        self.tokens = self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.now

    def step_seconds(self, size: int, depth: int, is_chain: bool, num_nodes: int) -> float:
        """The mean of such steps."""
        if is_chain:
            return float(self.true.chains(size, 0, D)[0][depth]) * self.wrong[-depth]
        return float(self.true.totals(size, D, 0, size * NODES)[depth][0][num_nodes]) * self.wrong[depth]

    def best_fixed(self, size: int, chance: float) -> tuple[float, float]:
        """Tokens per second of the best fixed size, and of plain steps."""
        rng = np.random.default_rng(0)
        z = rng.normal(size=(4000, 1)) + OF_NODE * rng.normal(size=(4000, D)) + math.log(chance / (1 - chance))
        lengths = 1 + np.cumsum(np.concatenate([[0.0], np.cumprod(1 / (1 + np.exp(-z)), 1).mean(0)]))
        rates = [size * lengths[d] / self.step_seconds(size, d, d > 0, size) for d in range(D + 1)]
        return max(rates), rates[0]

    def run(self, size: int, chance: float) -> None:
        """Run new requests until one of them has all of its tokens."""
        rows, got = tuple(range(1, size + 1)), np.zeros(size, np.int64)
        batch, stretch = self.begin(*rows), self.rng.normal(size=size)
        while got.max() < TOKENS:
            stretch = FADING * stretch + math.sqrt(1 - FADING**2) * self.rng.normal(size=size)
            z = math.log(chance / (1 - chance)) + stretch[:, None] + OF_NODE * self.rng.normal(size=(size, D))
            accepted = self.step(batch, rows, 1 / (1 + np.exp(-z)))
            got += 1 + accepted
            self.tokens += size + accepted.sum()

    def begin(self, *rows: int) -> SizedBatch:
        """Start requests."""
        for row in rows:
            self.sizer.begin(row, SAMPLED, self.rng.integers(0, 1000, 50).tolist())
        return SizedBatch(np.array(rows), np.full(len(rows), SAMPLED), np.full(len(rows), D), lambda: 0)

    def draft(self, batch: SizedBatch, chance: float) -> Round:
        """Make a step without stretches; returns the round that it is of."""
        self.step(batch, tuple(batch.rows.tolist()), np.full((len(batch.rows), D), chance))
        assert self.sizer._round is not None
        return self.sizer._round

    def step(self, batch: SizedBatch, rows: tuple[int, ...], p: Floats) -> np.ndarray:
        """Make a step; returns the accepted nodes of each row."""
        sizer, number = self.sizer, len(rows)
        size = sizer.again(rows) or sizer.plan(batch, rows, lambda: [False] * number)
        u, depth = self.rng.random(p.shape), size.depth
        ranks = np.select([u < p, u < p + 0.2 * (1 - p), u < p + 0.3 * (1 - p)], [0, 1, 2], 9)
        accepted = np.minimum((ranks == 0).cumprod(1).sum(1), depth)
        counted, num_nodes = accepted.tolist() if size.is_chain else None, number
        drafted = np.arange(number) if size.drafted is None else np.flatnonzero(size.drafted)
        if depth and (size.learns or not size.is_chain):
            counted, num_nodes = None, sizer.choose(self.candidates(p[drafted], depth), number).num_nodes
            paths = np.zeros((number, NODES + 1), np.int64)
            found = [self.path(ranks[row], depth, row) for row in range(number)]
            for row, path in enumerate(found):
                paths[row, 1 : len(path) + 1] = path
            if not size.is_chain:
                accepted = np.array([len(path) if row in drafted else 0 for row, path in enumerate(found)])
            sizer.learn(paths, accepted)
        seconds = self.step_seconds(number, depth, size.is_chain, num_nodes)
        measured = seconds * math.exp(0.08 * self.rng.normal()) * (5.0 if self.rng.random() < 0.003 else 1.0)
        self.seconds, self.now = self.seconds + seconds, self.now + measured
        decided = [self.rng.integers(0, 1000, 1 + count).tolist() for count in accepted.tolist()]
        sizer.observe(decided, counted, measured)
        return accepted

    def path(self, ranks: np.ndarray, depth: int, row: int) -> list[int]:
        """The nodes of a row's chosen tree that are accepted."""
        trees, path = self.sizer.trees, []
        chosen = trees.candidates[row, : trees.num_nodes[row]].tolist()
        for level, rank in enumerate(ranks[:depth].tolist()):
            if rank >= K or 1 + level * K + rank not in chosen:
                break
            path.append(chosen.index(1 + level * K + rank))
            if rank:
                break
        return path

    def candidates(self, p: Floats, depth: int) -> Candidates:
        """What a drafter offers that is too sure of itself."""
        z = 1.5 * np.log(p / (1 - p)) + 2.5 * self.rng.normal(size=p.shape)
        q = (1 / (1 + np.exp(-z)))[:, :depth, None]
        logp = np.log(np.concatenate([q, 0.2 * (1 - q), 0.1 * (1 - q)], 2).reshape(len(p), -1) + 1e-9)
        tokens, parents = torch.zeros(logp.shape, dtype=torch.int64), np.tile(PARENTS[: depth * K], (len(p), 1))
        columns = tokens, torch.from_numpy(parents), torch.from_numpy(logp.astype(np.float32))
        return Candidates(*columns, DEPTHS[: depth * K], np.tile(np.arange(K), depth))


def over_best(load: Load, texts: Sequence[tuple[int, float]]) -> float:
    """Tokens per second over those of the best fixed size of each of these batches."""
    load.tokens = load.seconds = 0.0
    best = 0.0
    for size, chance in texts:
        before = load.tokens
        load.run(size, chance)
        best += (load.tokens - before) / load.best_fixed(size, chance)[0]
    return best / load.seconds


FAST = [(1, 0.6), (4, 0.1)]
CHANCES = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.95)
# every third of all in a usual run, so that each size and each chance is there
CELLS = [
    (size, chance)
    for i, size in enumerate(MS)
    for j, chance in enumerate(CHANCES)
    if IS_FULL or (i + j) % 3 == 0 or (size, chance) in FAST
]


@pytest.mark.parametrize(
    ("size", "chance"), [cell if cell in FAST else pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS]
)
def test_hardly_slower_than_the_best_fixed_size(size: int, chance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(size, monkeypatch)
    for _ in range(40):
        load.run(size, chance)
    assert over_best(load, [(size, chance)] * 40) > 0.95
    assert load.tokens / load.seconds > 0.98 * load.best_fixed(size, chance)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("texts", "in_a_row", "seed", "least"),
    [
        ([(1, 0.95), (1, 0.1)], 3, 5, 0.9),
        ([(1, 0.8), (16, 0.8)], 3, 5, 0.9),
        ([(4, 0.9), (4, 0.1)], 3, 3, 0.92),
        ([(4, 0.9), (4, 0.1)], 1, 3, 0.92),
        ([(4, 0.9), (4, 0.1)], 3, 1, 0.92),
    ],
)
def test_hardly_slower_where_texts_and_requests_change(
    texts: list[tuple[int, float]], in_a_row: int, seed: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the best fixed size of each of them, which changes with the requests, or after three batches."""
    load, turns = Load(seed, monkeypatch), [text for text in texts for _ in range(in_a_row)]
    for text in turns * 8:
        load.run(*text)
    assert over_best(load, turns * 8) > least


def test_new_requests_are_taken_to_be_like_earlier_ones_however_much_was_drafted_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = Load(1, monkeypatch).sizer.expected.state
    earlier = EarlierRequests(state)
    for number in range(2 * LENGTH):  # half of them have one kept draft, the others many
        earlier.begin(1, SAMPLED, 0)
        state.next_of_row[1] = 1 if number % 2 else 5 * LENGTH
        state.values_of_row[1] = number % 2
    earlier.begin(1, SAMPLED, 0)
    assert state.values_of_row[1, :, 0].mean() == 0.5
    state.next_of_row[1] = 3
    earlier.begin(1, SAMPLED, 3)  # it has none of its own
    assert state.values_of_row[1, :, 0].mean() == 0.5


def test_own_drafts_of_new_requests_soon_say_more_than_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(1, monkeypatch)
    state = load.sizer.expected.state
    load.begin(1, 2, 3)
    state.values_of_row[1:4] = 0.0
    state.values_of_row[1, :4] = 1.0
    state.next_of_row[1:4] = 4, 0, LENGTH
    load.sizer.expected._emphasize(np.array([1, 2, 3]))
    assert state.values_of_row[1, :, 0].sum() == 4 * WEIGHT_OF_OWN
    assert not state.values_of_row[2:4].any()
    state.values_of_row[1, 4:] = 0.0
    load.sizer.expected._emphasize(np.array([1]))
    assert state.values_of_row[1, :, 0].sum() == 4  # of one request a few drafts say too little


def test_nothing_is_drafted_for_a_step_while_requests_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(1, monkeypatch)
    one, schedule = load.begin(1), load.sizer.schedule
    for _ in range(FIRST_DRAFTS + ROUND):
        load.draft(one, 0.05)
    schedule.depth, schedule.is_chain = 0, False
    monkeypatch.setattr(schedule, "restart", lambda *_: setattr(schedule, "depth", 4))
    assert not load.draft(load.begin(1, 2), 0.05).size.depth
    assert not load.draft(load.begin(1, 2, 3), 0.05).size.depth
    batch = SizedBatch(np.array([1, 2, 3]), np.full(3, SAMPLED), np.full(3, D), lambda: 0)
    assert load.draft(batch, 0.05).size.depth


def test_what_is_known_of_a_request_fades_while_nothing_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(1, monkeypatch)
    sizer, batch = load.sizer, SizedBatch(np.array([1, 2]), np.full(2, SAMPLED), np.full(2, D), lambda: 0)
    for row in (1, 2):
        sizer.begin(row, SAMPLED, [])
    sizer.expected.state.values_of_mode[SAMPLED], sizer.expected.state.values_of_row[1:3] = 0.5, 0.01
    assert not sizer.expected.fade(batch)
    sizer.expected._num_off = 3 * STEPS_TO_FORGET
    assert sizer.expected.fade(batch)
    assert (sizer.expected.state.values_of_row[1:3] == 0.5).any(2).sum(1).tolist() == [3, 3]
    sizer.expected._num_off = 10_000
    assert sizer.expected.fade(batch)
    assert (sizer.expected.state.values_of_row[1:3] == 0.5).all()
    assert not sizer.expected.fade(batch)


@pytest.mark.parametrize("size", [1, 4])
def test_first_drafts_correct_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was expected of them."""
    load = Load(1, monkeypatch)
    batch = load.begin(*range(1, size + 1))
    while load.sizer._num_drafts[SAMPLED] < FIRST_DRAFTS:
        load.draft(batch, 0.7)
    for _ in range(ROUND):  # of the last of these drafts, and the first step after them
        load.draft(batch, 0.7)
    assert (load.sizer.expected.corrections(size).ratios == 1.0).all()
    for _ in range(100):
        load.draft(batch, 0.7)
    assert (load.sizer.expected.corrections(size).ratios != 1.0).any()


def test_a_try_corrects_nothing_where_what_was_known_has_faded(monkeypatch: pytest.MonkeyPatch) -> None:
    load, num_tries = Load(1, monkeypatch), 0
    sizer, batch = load.sizer, load.begin(1)
    for _ in range(60):
        load.draft(batch, 0.8)
    assert sizer.schedule.depth
    while sizer.expected._num_forgotten < LENGTH:
        load.draft(batch, 0.05)
    assert (sizer.expected.corrections(1).ratios != 1.0).any()
    while num_tries < 3:
        is_faded = sizer.expected._num_forgotten > 0
        now = tried = load.draft(batch, 0.05)
        before = sizer.expected.corrections(1).ratios
        if now.size.depth and not now.size.is_probe and is_faded:
            while now is tried:
                now = load.draft(batch, 0.05)
            num_tries += 1
            assert (sizer.expected.corrections(1).ratios == before).all()


def test_another_request_in_a_row_is_not_compared_with_what_was_expected_of_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = Load(1, monkeypatch)
    sizer, batch = load.sizer, load.begin(1, 2)
    for _ in range(600):
        load.draft(batch, 0.8)
    while sizer.figures.num_steps - sizer._age > 2:  # so that the next round begins without another look
        load.draft(batch, 0.8)
    sizer.begin(2, SAMPLED, [])
    before, last, is_known, num_steps = sizer.expected.corrections(2).ratios, sizer._round, False, 0
    while not is_known:  # until a round began with enough drafts of its own
        now = load.draft(batch, 0.8)
        assert (sizer.expected.corrections(2).ratios == before).all()
        has_enough = sizer.expected.state.next_of_row[1:3].min() >= LENGTH  # chains' drafts are kept when a round ends
        last, is_known, num_steps = now, has_enough and now is not last, num_steps + 1
    assert LENGTH <= num_steps < 10 * LENGTH
    for _ in range(200):
        load.draft(batch, 0.8)
    assert (sizer.expected.corrections(2).ratios != before).any()


def test_what_options_bring_corrects_what_is_expected_of_them() -> None:
    found = Brought(D)
    assert (found.ratios == 1.0).all()
    for _ in range(2000):
        found.add(D + 1 + 2, 1.2, 1.0)
    ratios = found.ratios
    assert ratios[D + 1 + 2] == pytest.approx(1.2, abs=0.01)
    np.testing.assert_allclose(ratios[D + 1 + 3], 1.2, atol=0.01)  # other chains, of which nothing was seen
    assert (ratios[: D + 1] == 1.0).all()
    for _ in range(20_000):
        found.add(D + 1 + 2, 0.8, 1.0)
    assert found.ratios[D + 1 + 2] == pytest.approx(0.8, abs=0.02)
    assert found._expected.max() <= MOST_EXPECTED
