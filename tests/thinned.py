"""A pytest plugin that runs a part of the cases of every test: ``-p tests.thinned --every 5``.

For runs that repeat tests on slower or other hardware, whose cases have passed where they are fast.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.pairwise import IS_FULL

EVERY_THIRD, EVERY_FIFTH, EVERY_TENTH = (
    [] if IS_FULL else ["-p", "tests.thinned", "--every", str(nth)] for nth in (3, 5, 10)
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every", type=int, required=True, help="run the first case of every test, and every nth after it"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.split("[")[0]].append(item)
    kept = {item for of_test in cases.values() for item in of_test[:: config.getoption("--every")]}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
