"""What ``--deterministic`` needs of the process and of the model: that every operator has an exact form."""

from __future__ import annotations

import torch

from specmamba.errors import ConfigError
from specmamba.kernels.native import library
from specmamba.models.base import LoadedModel
from specmamba.models.hybrid import inexact_layers

EXACT_DTYPES = (torch.float32, torch.bfloat16)


def require_exact(loaded: LoadedModel, device: torch.device) -> None:
    """Check that a target's texts can have the same bits however their tokens are run.

    Args:
        loaded: the target.
        device: where it runs.

    Raises:
        ConfigError: on a GPU, without native code, in float16, or where a layer has no exact form.
    """
    if device.type != "cpu":
        raise ConfigError("--deterministic needs a CPU: sums on a GPU have no fixed order; add --device cpu")
    if any(library.load(source) is None for source in library.sources()):
        raise ConfigError(
            "--deterministic needs native code, since PyTorch's sums depend on the number of rows, and there is none "
            "(specmamba doctor says why; SPECMAMBA_NATIVE=0 turns it off)"
        )
    dtype = loaded.cache_shape.dtype
    if dtype not in EXACT_DTYPES:
        kind = str(dtype).removeprefix("torch.")
        raise ConfigError(f"--deterministic needs float32 or bfloat16, and this model is {kind}: choose --dtype")
    if layers := inexact_layers(loaded.target):
        raise ConfigError(
            f"--deterministic: {loaded.architecture} has {', '.join(layers)}, which has no exact form: drop it"
        )
