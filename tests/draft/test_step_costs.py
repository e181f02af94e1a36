"""Times of steps: predictions between measured points, ratios that follow the clock, and files that may be wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specmamba.draft.sizing.cost_file import MAX_BYTES, find_costs, read_costs, write_costs
from specmamba.draft.sizing.costs import StepCosts, StepTimes
from specmamba.errors import ConfigError

ENGINE = {"model": "abc", "threads": "2"}


def costs() -> StepCosts:
    one = StepTimes({1: 0.1, 3: 0.3}, {1: 1.0, 2: 1.2, 8: 2.4}, {1: 1.2, 3: 1.6})
    four = StepTimes({1: 0.4, 3: 0.6}, {4: 2.0, 8: 3.0, 32: 9.0}, {1: 3.0, 3: 5.0})
    return StepCosts({1: one, 4: four}, {1: 0.01, 5: 0.03}, {1: 0.01, 3: 0.02})


def test_predictions_meet_the_measured_points_and_lie_on_lines_between_them() -> None:
    [(base, seconds)] = costs().totals(1, 0, 0, 8)
    np.testing.assert_allclose(base[1:], [1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4])
    np.testing.assert_array_equal(base, seconds)
    assert math.isinf(base[0])
    of_four, _ = costs().totals(4, 3, 100, 40)[2]
    assert of_four[4] == pytest.approx(2.0 + 0.5 + 100 * 0.01)
    assert of_four[8] == pytest.approx(3.0 + 0.5 + 100 * 0.015)  # two nodes of every request see the keys
    assert of_four[40] == pytest.approx(9.0 + 8 * 0.25 + 0.5 + 100 * 0.055)  # beyond the last point: its slope
    [(of_two, _)] = costs().totals(2, 0, 0, 8)
    assert of_two[8] == pytest.approx(2.4 * 2 / 3 + 3.0 / 3)


def test_whole_chains_have_times_of_their_own() -> None:
    base, seconds = costs().chains(4, 100, 4)
    np.testing.assert_allclose(base[1:], [3.0 + 1.5, 4.0 + 2.0, 5.0 + 2.5, 6.0 + 3.0])
    np.testing.assert_array_equal(base, seconds)
    unknown = StepCosts({1: StepTimes({1: 0.1}, {1: 1.0})})
    assert np.isinf(unknown.chains(1, 0, 3)).all()


def test_a_slower_machine_is_followed_within_bounds() -> None:
    known = costs()
    for _ in range(200):
        known.observe(1, 4, True, 1.8, 1.8 * 1.5)
    assert known.ratio(1, 4, True) == pytest.approx(1.5, rel=0.01)
    assert known.ratio(1, 6, True) == pytest.approx(1.5, rel=0.05)  # another number of nodes of the same kind
    assert known.ratio(1, 1, False) == pytest.approx(1.5, rel=0.05)  # steps that are not made
    for _ in range(2000):
        known.observe(1, 4, True, 1.8, 1000.0)
    assert known.ratio(1, 4, True) == pytest.approx(64.0)
    for _ in range(2000):
        known.observe(1, 4, True, 1.8, 1e-9)
    assert known.ratio(1, 4, True) == pytest.approx(1 / 64)


def test_a_kind_is_at_most_twice_what_the_measurement_says_of_it() -> None:
    known = costs()
    for _ in range(60):
        known.observe(1, 1, False, 1.0, 1.0, 8)
        known.observe(1, 4, True, 1.8, 1.8 * 8, 8)
    assert known.ratio(1, 4, True) / known.ratio(1, 1, False) <= 4.0  # one twice as slow, the other twice as fast
    assert 0.5 <= known.ratio(2, 2, False) / math.exp(known.ratios.speed) <= 2.0


def test_times_of_a_busy_machine_are_corrected_kind_by_kind() -> None:
    """Plain steps take a quarter of what was measured, those with drafts a third: the ratio of both is followed."""
    known = costs()
    for _ in range(40):
        known.observe(1, 1, False, 1.0, 0.25, 8)
        known.observe(1, 4, True, 1.8, 0.6, 8)
    assert known.ratio(1, 1, False) == pytest.approx(1 / 4, rel=0.05)
    assert known.ratio(1, 4, True) == pytest.approx(1 / 3, rel=0.05)


def test_a_difference_between_kinds_is_found_though_the_machine_drifts() -> None:
    """Drafts take 1.5 of what was measured, plain steps what was measured; the machine's speed walks up and down."""
    known, rng, speed = costs(), np.random.default_rng(2), 0.0
    for _ in range(60):
        for kind, base, factor, num_nodes in ((False, 1.0, 1.0, 1), (True, 1.8, 1.5, 4)):
            for _ in range(int(rng.integers(1, 30))):
                speed = 0.98 * speed + 0.02 * rng.normal()
                known.observe(1, num_nodes, kind, base, base * factor * math.exp(speed + 0.05 * rng.normal()), 8)
    assert known.ratio(1, 4, True) / known.ratio(1, 1, False) == pytest.approx(1.5, rel=0.08)


def test_drafts_that_take_longer_than_predicted_say_nothing_about_plain_steps() -> None:
    """They may be thought to pay because of a wrong prediction: plain steps must not be thought slower with them."""
    known = costs()
    for _ in range(20):
        known.observe(1, 1, False, 1.0, 1.0, 48)
    for num_steps in (10, 4, 4, 16, 16):
        known.observe(1, 4, True, 1.8, 1.8 * 1.5, num_steps)
        assert known.ratio(1, 1, False) == pytest.approx(1.0, abs=0.04)
        assert known.ratio(1, 4, True) == pytest.approx(1.5, abs=0.06)


def test_a_machine_that_slows_down_moves_no_factor_of_a_kind() -> None:
    known = costs()
    for _ in range(10):
        known.observe(1, 1, False, 1.0, 1.0, 8)
        known.observe(1, 4, True, 1.8, 2.7, 8)
    before = known.ratio(1, 4, True) / known.ratio(1, 1, False)
    for _ in range(40):
        known.observe(1, 4, True, 1.8, 2.7 * 1.3)
    assert known.ratio(1, 4, True) == pytest.approx(1.5 * 1.3, rel=0.05)
    assert known.ratio(1, 4, True) / known.ratio(1, 1, False) == pytest.approx(before, rel=0.03)


def test_one_slow_step_moves_a_ratio_little() -> None:
    known = costs()
    for _ in range(20):
        known.observe(1, 4, True, 1.8, 1.8)
    known.observe(1, 4, True, 1.8, 1.8 * 100)
    assert 1.0 < known.ratio(1, 4, True) < 1.05


@pytest.mark.parametrize("seconds", [-1.0, 0.0, math.nan, math.inf])
def test_a_clock_that_jumps_is_ignored(seconds: float) -> None:
    known = costs()
    for _ in range(15):
        known.observe(1, 4, True, 1.8, seconds)
    assert known.ratio(1, 4, True) == 1.0


def test_a_file_keeps_the_times_of_several_engines(tmp_path: Path) -> None:
    path, other = tmp_path / "folder" / "costs.json", {"model": "other", "threads": "2"}
    assert find_costs(read_costs(path), ENGINE) is None
    write_costs(path, read_costs(path), ENGINE, costs())
    write_costs(path, read_costs(path), other, StepCosts({1: StepTimes({1: 1.0}, {1: 2.0})}))
    write_costs(path, read_costs(path), ENGINE, costs())
    found = find_costs(read_costs(path), ENGINE)
    assert found is not None
    assert found == costs()
    assert len(read_costs(path).entries) == 2
    assert find_costs(read_costs(path), {"model": "third"}) is None
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]


def entry(**changes: Any) -> dict[str, Any]:
    times = {"draft_seconds": {"1": 0.1}, "verify_seconds": {"1": 1.0}} | changes
    return {"version": 1, "entries": [{"engine": ENGINE, "times": {"1": times}}]}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        (json.dumps(entry(verify_seconds={"1": -1.0})), "greater than 0"),
        (json.dumps(entry(verify_seconds={})), "at least 1 item"),
        (json.dumps(entry(verify_seconds={"0": 1.0})), "greater than or equal to 1"),
        (json.dumps(entry(draft_seconds={"1": 1e9})), "less than 3600"),
        (json.dumps(entry()).replace("0.1", "NaN"), "finite|valid"),
        (json.dumps(entry(more=1)), "not permitted"),
        (json.dumps(entry() | {"version": 2}), "less than or equal to 1"),
        (json.dumps({"entries": [{"engine": ENGINE}]}), "required"),
        (" " * (MAX_BYTES + 1), "larger than"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text, "utf8")
    with pytest.raises(ConfigError, match=problem) as refused:
        read_costs(path)
    assert str(refused.value).startswith(f"--speculative-costs: {path}")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_costs(tmp_path / "file" / "costs.json", read_costs(tmp_path / "none"), ENGINE, costs())
