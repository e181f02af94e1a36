"""specmamba: serving hybrid language models with speculative decoding."""

import importlib
from typing import TYPE_CHECKING, Any

from specmamba.version import __version__

if TYPE_CHECKING:
    from specmamba.async_llm import AsyncLLM
    from specmamba.core import OutputDelta, RequestOutput, SpecStats
    from specmamba.errors import SpecmambaError
    from specmamba.llm import LLM
    from specmamba.sampling_params import SamplingParams

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

# Imported on first use: the command line's --help and a server's early end wait for none of them.
_MODULE_OF = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "OutputDelta": "core",
    "RequestOutput": "core",
    "SamplingParams": "sampling_params",
    "SpecStats": "core",
    "SpecmambaError": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'specmamba' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specmamba.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
