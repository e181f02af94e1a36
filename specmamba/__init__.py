"""specmamba: serving hybrid language models with speculative decoding."""

from typing import TYPE_CHECKING, Any

from specmamba.core import OutputDelta, RequestOutput, SpecStats
from specmamba.errors import SpecmambaError
from specmamba.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specmamba.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "OutputDelta", "RequestOutput", "SamplingParams", "SpecStats", "SpecmambaError", "__version__"]


def __getattr__(name: str) -> Any:
    """``LLM`` on first use: it brings torch, which the command line's --help does not want to wait for."""
    if name == "LLM":
        from specmamba.llm import LLM

        return LLM
    raise AttributeError(f"module 'specmamba' has no attribute {name!r}")
