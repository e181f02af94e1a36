"""How many threads an engine takes: by its flags, the size of its weights, and what the process had at first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specmamba.config import EngineConfig
from specmamba.engine import loading
from specmamba.engine.loading import SHARED_MODEL_BYTES, SMALL_MODEL_BYTES, set_threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def process_of_eight(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(loading, "process_threads", lambda: 8)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("weight_bytes", "direct", "replayed"),
    [
        (SHARED_MODEL_BYTES - 1, 1, 1),
        (SHARED_MODEL_BYTES, 1, 2),
        (SMALL_MODEL_BYTES, 1, 2),
        (SMALL_MODEL_BYTES + 1, 8, 8),
    ],
)
def test_by_the_size_of_the_weights(weight_bytes: int, direct: int, replayed: int) -> None:
    """Whatever an engine that is still open has chosen."""
    for others in (1, 2, 8):
        torch.set_num_threads(others)
        assert set_threads(EngineConfig(), CPU, weight_bytes) == replayed
        assert torch.get_num_threads() == direct


@pytest.mark.parametrize("weight_bytes", [1, SHARED_MODEL_BYTES, SMALL_MODEL_BYTES + 1])
def test_the_flag_decides(weight_bytes: int) -> None:
    assert set_threads(EngineConfig(num_threads=3), CPU, weight_bytes) == 3
    assert torch.get_num_threads() == 3
