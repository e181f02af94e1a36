"""Names of the forms that weights run in, as benchmarks take them, and the engine's flags for each.

A name is a type (``fp32``, ``bf16``, ``fp16``), for weights that are not quantized, or a value of ``--quantization``:
``int8``, or ``auto`` for the codes of the checkpoint. Where a form has groups, ``-g`` and their size may follow:
``int4-g128``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specmamba.config import EngineConfig
from specmamba.errors import ConfigError
from specmamba.flags.command_line import describe_validation_error

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPE_OF_CODES = "bfloat16"  # of activations, and of weights that stay unquantized, beside quantized ones
GROUPED = "int4"  # has --quantization-group-size
# A benchmark that takes forms sets these flags.
FORM_FIELDS = ("dtype", "quantization", "quantization_group_size")
_CODES = re.compile(r"(?P<quantization>[a-z0-9]+(?:-dynamic)?)(?:-g(?P<group>[1-9]\d*))?")


def form_flags(name: str, option: str) -> dict[str, Any]:
    """The engine's flags that make its weights run in a form.

    Args:
        name: of the form.
        option: of the command line that gave the name, for messages.

    Raises:
        ConfigError: the name has another form, or the engine cannot quantize so.
    """
    if name in DTYPES:
        return {"dtype": DTYPES[name], "quantization": "none"}
    found = _CODES.fullmatch(name)
    if found is None or found["quantization"] == "none" or (found["group"] and found["quantization"] != GROUPED):
        raise ConfigError(f"{option}: {name!r} is no form of weights, such as bf16, int8 or int4-g128")
    flags: dict[str, Any] = {"dtype": DTYPE_OF_CODES, "quantization": found["quantization"]}
    if found["group"] is not None:
        flags["quantization_group_size"] = int(found["group"])
    try:
        EngineConfig(**flags)
    except ValidationError as error:
        raise ConfigError(f"{option} {name}: {describe_validation_error(error)}") from None
    return flags


def gguf_flags(file: Path) -> dict[str, Any]:
    """The engine's flags that make it run a GGUF file as it is stored."""
    return {"model": str(file), "revision": None, "dtype": DTYPE_OF_CODES, "quantization": "auto"}
