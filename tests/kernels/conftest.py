from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """``torch.set_num_threads`` for the rest of a test; what was before comes back even where the test fails."""
    before = torch.get_num_threads()
    try:
        yield torch.set_num_threads
    finally:
        torch.set_num_threads(before)
