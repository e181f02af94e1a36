"""specmamba: serving hybrid language models with speculative decoding."""

from typing import TYPE_CHECKING, Any

from specmamba.core import OutputDelta, RequestOutput, SpecStats
from specmamba.errors import SpecmambaError
from specmamba.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specmamba.async_llm import AsyncLLM
    from specmamba.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "OutputDelta",
    "RequestOutput",
    "SamplingParams",
    "SpecStats",
    "SpecmambaError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """``LLM`` and ``AsyncLLM`` on first use: they bring torch, for which the command line's --help need not wait."""
    if name == "LLM":
        from specmamba.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from specmamba.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'specmamba' has no attribute {name!r}")
