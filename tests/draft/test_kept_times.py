"""Times of steps in the cache file: used, or measured again if the machine was busy when they were measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specmamba import LLM, SamplingParams
from specmamba.draft.sizing.cost_file import CostFile, read_costs, write_costs
from specmamba.draft.sizing.costs import StepCosts, StepTimes
from specmamba.engine import cost_measurement

FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "max_running_requests": 2,
    "context_length": 256,
    "speculative_adaptive": "auto",
}


def times(plain: float) -> StepCosts:
    return StepCosts({1: StepTimes({1: 1e-4, 4: 2e-4}, {1: plain, 8: 2 * plain}, {1: plain, 4: plain})})


@pytest.mark.parametrize(
    ("plain", "is_given", "is_measured"), [(100.0, False, True), (1e-8, False, False), (100.0, True, False)]
)
def test_times_of_a_busy_machine_are_measured_again(
    plain: float, is_given: bool, is_measured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept: 100 seconds for a plain step, or 10 ns; a file that the user names is believed."""
    file = tmp_path / "times.json"
    monkeypatch.setattr(cost_measurement, "_cache_file", lambda: file)
    monkeypatch.setattr(cost_measurement, "measure_costs", lambda _: times(1e-3))
    with LLM(**FLAGS) as llm:
        write_costs(file, CostFile(), cost_measurement.engine_key(llm.engine), times(plain))
    with LLM(**FLAGS, speculative_costs=file if is_given else None) as llm:
        sizer, stats = llm.engine.runner.sizer, llm.engine.stats()
        assert sizer is not None
        assert sizer.times.costs.times[1].verifies[1] == (1e-3 if is_measured else plain)
        assert (stats.num_running, stats.kv_used_tokens) == (0, 0)  # what was timed has left nothing
    [kept] = read_costs(file).entries
    assert kept.costs().times[1].verifies[1] == pytest.approx(1e-3 if is_measured else plain)


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_first_request_behind_measurements_has_its_own_settings(
    is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that were timed at the start had the same place in the order of arrival, and were greedy."""
    file = tmp_path / "times.json"
    monkeypatch.setattr(cost_measurement, "_cache_file", lambda: file)
    params = SamplingParams(max_tokens=16, temperature=1.5, seed=3, ignore_eos=True)
    for _ in range(1 + is_kept):
        with LLM(**FLAGS) as llm:
            first, second = (llm.generate("def add(a, b):", params)[0].token_ids for _ in range(2))
            greedy = llm.generate("def add(a, b):", SamplingParams(max_tokens=16, ignore_eos=True))[0].token_ids
            assert first == second != greedy


@pytest.mark.parametrize("is_slow", [False, True])
def test_fewer_steps_of_a_slow_model_are_timed(is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_measurement, "_cache_file", lambda: None)
    if is_slow:
        monkeypatch.setattr(cost_measurement, "SLOW_STEP", 0.0)
        monkeypatch.setattr(cost_measurement, "MAX_TURN_SECONDS", 0.0)
    num_timed, turn = set(), cost_measurement._turn

    def count(*arguments: Any) -> list[float] | None:
        timed = turn(*arguments)
        num_timed.update([] if timed is None else [len(timed)])  # None: requests have reached the end of the context
        return timed

    monkeypatch.setattr(cost_measurement, "_turn", count)
    with LLM(**FLAGS) as llm:
        assert llm.engine.runner.sizer is not None
        costs = llm.engine.runner.sizer.times.costs
    assert num_timed == {1 if is_slow else cost_measurement.TIMED}
    assert list(costs.times[1].chains) == [1, 2, 3, 4]
    assert list(costs.times[2].chains) == ([1, 4] if is_slow else [1, 2, 3, 4])
