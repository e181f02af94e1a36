from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a form in PyTorch runs; its tests make operands on the CPU and compare there."""
    return str(request.param)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """``torch.set_num_threads`` for the rest of a test; what was before comes back even where the test fails."""
    before = torch.get_num_threads()
    try:
        yield torch.set_num_threads
    finally:
        torch.set_num_threads(before)
