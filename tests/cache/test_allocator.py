"""Memory that operators free stays with the process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not this C library")

# Allocates and frees the memory of 20 operators' results in a thread; prints the page faults of the last ten rounds.
CHURN = """
import resource, threading
import torch
from specmamba.engine.loading import keep_freed_memory

print(keep_freed_memory())

def churn():
    for number in range(20):
        results = [torch.empty(400_000).fill_(1.0) for _ in range(20)]
        del results
        if number == 9:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    print(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)

thread = threading.Thread(target=churn)
thread.start()
thread.join()
"""


def _run(**env: str) -> tuple[bool, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    output = subprocess.run(
        [sys.executable, "-c", CHURN], env=clean | env, capture_output=True, text=True, check=True, timeout=120
    ).stdout.split()
    return output[0] == "True", int(output[1])


def test_results_of_the_same_size_cause_no_page_faults() -> None:
    is_kept, num_faults = _run()
    assert is_kept
    assert num_faults < 100  # 200 results have 78,000 pages


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "env", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}]
)
def test_settings_of_the_user_stay(env: dict[str, str]) -> None:
    is_kept, num_faults = _run(**env)
    assert not is_kept
    assert num_faults > 10_000
