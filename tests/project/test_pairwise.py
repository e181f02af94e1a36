from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import pairwise as module
from tests.pairwise import all_pairs, pairwise


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_every_pair_occurs_in_few_rows(sizes: list[int]) -> None:
    rows = all_pairs(sizes)
    assert rows == all_pairs(sizes)
    assert all(0 <= i < size for row in rows for i, size in zip(row, sizes, strict=True))
    assert all({row[column] for row in rows} == set(range(size)) for column, size in enumerate(sizes))
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == set(product(range(sizes[a]), range(sizes[b])))
    assert len(rows) == len(set(rows)) <= prod(sizes)
    longest = sorted(sizes, reverse=True)
    assert len(rows) <= 2 * prod(longest[:2])


def test_a_table_of_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = [
        pytest.mark.parametrize("a", [1, 2, 3]),
        pytest.mark.parametrize(("b", "c"), [(1, 2), pytest.param(3, 4, id="b3", marks=pytest.mark.slow)]),
        pytest.mark.parametrize("d", [None, [5]], ids=["no", "yes"]),
    ]
    names, cases = pairwise(*stack).args
    assert names == ["a", "b", "c", "d"]
    assert len(cases) == 6
    assert {case.id for case in cases} >= {"1-1-2-no", "1-b3-yes"}
    assert all(bool(case.marks) == ("b3" in case.id) for case in cases)
    assert all(case.values[1:3] in ((1, 2), (3, 4)) for case in cases)
    monkeypatch.setattr(module, "IS_FULL", True)
    assert len(pairwise(*stack).args[1]) == 12
