from __future__ import annotations

import gc
import os
import random
import zlib
from collections.abc import Iterator
from contextlib import suppress

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: no test may need a network
# Tests of fixed sizes of drafts are about the sizes that they name; tests of adaptive ones ask for them.
os.environ.setdefault("SPECMAMBA_SPECULATIVE_ADAPTIVE", "off")
# Threads of processes that tests start would wait for each other busily, on cores where other tests run.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

with suppress(ImportError):  # tests of kernels run where it is missing, as on an image for GPUs
    from hypothesis import HealthCheck, settings

    # a process that waits for its core draws slowly, too
    slow = [HealthCheck.too_slow]
    settings.register_profile("specmamba", deadline=None, derandomize=True, suppress_health_check=slow)
    settings.load_profile("specmamba")


NTH = {18: 12, 8: 8, 3: 4}  # of more cases of one test than that, one of so many

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are imported: they run on the CPU, line by line
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it where algorithms are deterministic


def pytest_configure() -> None:
    # the operators are small: a second thread gains little, and costs much when anything else wants its core
    torch.set_num_threads(1)


def pytest_sessionstart() -> None:
    gc.disable()  # of the thousands of tests that are collected none is garbage


def pytest_collection_finish() -> None:
    gc.freeze()  # tests and modules stay to the end: no later collection looks at them
    gc.enable()


def pytest_report_header() -> str:
    from specmamba.kernels.native.levels import LEVELS, NativeUnavailableError, available_levels, chosen_level

    try:
        tried = f"tests use {chosen_level().name}"
    except NativeUnavailableError as reason:
        tried = f"none: {reason}"
    available = available_levels()
    untried = ", ".join(level.name for level in LEVELS if level not in available)
    return f"native kernels: {tried}; compiled only, untried on this CPU: {untried or 'none'}"


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow_cases(items)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)  # the order of the others stays
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


def mark_slow_cases(items: list[pytest.Item]) -> None:
    """Mark the cases that ``fast_cases`` leaves to the slow tier, and take out those that only a full run has.

    ``fast_cases(3)`` keeps three, spread evenly over the cases of a test; ``fast_cases("tree", "chain")`` keeps those
    whose id contains one of the strings. Of more than three others the slow tier has about every fourth, and fewer of
    more (``NTH``), by a number that their names make, since parameters take turns.
    """
    left_out = set[pytest.Item]()
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("fast_cases"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_one in cases.values():
        mark = of_one[0].get_closest_marker("fast_cases")
        assert mark is not None
        count = mark.args[0]
        if isinstance(count, int):
            kept = [of_one[i * len(of_one) // count] for i in range(min(count, len(of_one)))]
        else:
            kept = [item for item in of_one if any(part in item.nodeid.partition("[")[2] for part in mark.args)]
        others = [item for item in of_one if item not in kept]
        for item in others:
            item.add_marker(pytest.mark.slow)
        nth = next((nth for more_than, nth in NTH.items() if len(others) > more_than), None)
        if nth is not None and os.environ.get("SPECMAMBA_TEST_FULL") != "1":
            chosen = [item for item in others if not zlib.crc32(item.nodeid.encode()) % nth] or others[:1]
            left_out.update(item for item in others if item not in chosen)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _forked_workers() -> Iterator[None]:
    """Processes that compile grammars and render templates are forks of one that has imported what they need."""
    from tests.processes.forked import forking_processes

    with forking_processes(("specmamba.grammar.worker", "specmamba.templates.template_worker")):
        yield


@pytest.fixture(scope="module")
def forked_processes() -> Iterator[None]:
    """Start processes of Python as forks of one that has imported torch."""
    from tests.processes.forked import forking_processes

    with forking_processes():
        yield


@pytest.fixture
def needs_native() -> None:
    """Skip where native kernels cannot be had, and say what is missing."""
    from tests.exactness import why_not_native

    if reason := why_not_native():
        pytest.skip(f"no native kernels here: {reason}")


@pytest.fixture
def no_headroom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admit every request that fits at all, without headroom: small pools preempt often then."""
    monkeypatch.setattr("specmamba.engine.scheduler.HEADROOM", 0)


@pytest.fixture
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the settings that the environment of the test run may hold."""
    for name in [name for name in os.environ if name.upper().startswith("SPECMAMBA_")]:
        monkeypatch.delenv(name)
