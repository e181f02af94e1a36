"""The tensors of a checkpoint of which there is nothing but config.json: those that its model asks for.

For sizes alone. Where a family looks whether a tensor is stored, it finds what published checkpoints have.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmamba.checkpoints.quantized.storage import Storage, read_method
from specmamba.checkpoints.tensor_reader import DTYPES, StoredTensor, TensorReader
from specmamba.errors import CheckpointError
from specmamba.parallel.share import Part

# Experts in one tensor, convolutions too: their bytes are the same in any form. Experts in the blocks of an MTP head.
STORED = re.compile(r"\.experts\.(gate_up|up|down)_proj$|\.conv1d\.weight$|^mtp\.layers\.\d+\.mlp\.gate\.weight$")
MTP = re.compile(r"(mtp\.fc|mtp\.layers\.0\.eh_proj|model\.layers\.\d+\.eh_proj)\.weight")
MTP_FIELDS = "mtp_num_hidden_layers", "num_nextn_predict_layers"


class AssumedReader(TensorReader):
    """A reader whose tensors have the shapes that are asked for, the type of the config, and no values."""

    def __init__(self, folder: Path, config: Any, dtype: torch.dtype) -> None:
        """Find out what there would be.

        Args:
            folder: has the config.json.
            config: the text part of it, as transformers has it.
            dtype: of all tensors.

        Raises:
            CheckpointError: the model is quantized, and how its matrices are stored is not known without them.
        """
        method = read_method(folder)
        if method is not None:
            raise CheckpointError(
                f"{folder}/config.json says that its matrices are quantized ({method}), but not which, and there are "
                "no safetensors: plan with the config of the model that is not quantized, and --quantization"
            )
        self._folder, self._config = folder, config
        self._tensors: dict[str, StoredTensor] = {}
        self._parts: dict[str, dict[str, str]] = {}
        self._taken: set[str] = set()
        self._ignored: list[str] = []
        self._run_forms: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._storage, self._names = Storage(), ()
        self._dtype = next(name for name, known in DTYPES.items() if known is dtype)

    def close(self) -> None:
        """Nothing is open."""

    def has(self, name: str) -> bool:
        """Whether published checkpoints have such a tensor; of a draft head, unless the config says there is none."""
        if MTP.fullmatch(name):
            said = [getattr(self._config, field, None) for field in MTP_FIELDS]
            return any(said) or all(number is None for number in said)
        return STORED.search(name) is not None

    def stored(self, name: str) -> StoredTensor:
        """As of a tensor of one dimension, where it was not taken yet."""
        file = self._folder / "config.json"
        return self._tensors.get(name) or StoredTensor(name, file, (1,), self._dtype)

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, part: Part | None = None
    ) -> Tensor:
        """Give a tensor of this shape without values."""
        self.leave(name, shape)
        own = shape if part is None else part.shape(shape)
        return torch.empty(own, dtype=DTYPES[self._dtype], device="meta")

    def leave(self, name: str, shape: tuple[int, ...]) -> None:
        """Note a tensor of this shape."""
        self._tensors[name] = StoredTensor(name, self._folder / "config.json", tuple(shape), self._dtype)
        self._taken.add(name)
