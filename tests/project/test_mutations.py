"""The planted bugs of ``mutations.toml``: each still fits the code, and the fast tier notices nearly all of them."""

from __future__ import annotations

import re

import pytest

from tests.mutations import ESCAPED, Mutation, read_results, read_table
from tests.repository import ROOT

MUTATIONS = read_table()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_it_still_fits(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text("utf8")
    assert text.count(mutation.old) == 1
    assert mutation.new != mutation.old
    assert "\n" not in mutation.old
    for test in mutation.tests:
        file, *names = test.split("::")
        source = (ROOT / file).read_text("utf8")
        assert all(re.search(rf"^ *(class|def) {name}\b", source, re.MULTILINE) for name in names)


def test_the_fast_tier_keeps_its_power() -> None:
    results = read_results()
    assert results.keys() == {mutation.name for mutation in MUTATIONS}
    tiers = [result.tier for result in results.values()]
    assert len(tiers) >= 60
    assert tiers.count("fast") >= 0.9 * (len(tiers) - tiers.count(ESCAPED))


def test_the_recorded_tests_exist() -> None:
    for result in read_results().values():
        if result.test:
            file, *names = result.test.partition("[")[0].split("::")
            source = (ROOT / file).read_text("utf8")
            assert all(re.search(rf"^ *(class|def) {name}\b", source, re.MULTILINE) for name in names), result
