from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from specmamba.kernels import gpu
from tests.kernels.interpreter import quicken_interpreter


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a form in PyTorch runs; its tests make operands on the CPU and compare there."""
    return str(request.param)


@pytest.fixture(params=["torch", "native"])
def form(request: pytest.FixtureRequest) -> str:
    """Which form of an operator a test runs."""
    if request.param == "native":
        request.getfixturevalue("needs_native")
    return str(request.param)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """``torch.set_num_threads`` for the rest of a test; what was before comes back even where the test fails."""
    before = torch.get_num_threads()
    try:
        yield torch.set_num_threads
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def gpu_device() -> str:
    """Where Triton kernels run: on the GPU, and where there is none on the CPU, through Triton's interpreter."""
    if not gpu.has_triton():
        pytest.skip("needs triton: pip install 'specmamba[gpu]'")
    if not torch.cuda.is_available():
        quicken_interpreter()
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def launchable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators choose Triton for tensors on the CPU too, as if they were on a GPU."""
    monkeypatch.setattr(gpu, "is_interpreted", lambda: True)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that is not written holds NaN (integers: their largest number)."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
