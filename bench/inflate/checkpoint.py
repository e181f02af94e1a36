"""The folders of both checkpoints: the small one is read, the large one is written shard by shard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from specmamba.errors import CheckpointError, ConfigError

ARCHITECTURE = "Qwen3_5ForCausalLM"
EMBEDDING = "model.embed_tokens.weight"
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
WEIGHT_FILES = ("*.safetensors", "*.safetensors.part", INDEX_FILE)
COPIED_FILES = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.jinja")


def read_config(folder: Path) -> tuple[dict[str, Any], Any]:
    """Read config.json: its content, and the configuration that transformers makes of it.

    Raises:
        CheckpointError: there is none, or it is not of Qwen3.5's text model.
    """
    from transformers import AutoConfig

    try:
        raw = json.loads((folder / "config.json").read_bytes())
        if raw.get("architectures") != [ARCHITECTURE]:
            raise CheckpointError(f"{folder} holds {raw.get('architectures')}: inflate knows {ARCHITECTURE} only")
        return raw, AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder} has no readable config.json (--model takes a local folder): {error}") from None


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint, from one file or from the shards of its index.

    Raises:
        CheckpointError: files are missing or damaged.
    """
    try:
        names = [SINGLE_FILE]
        if not (folder / SINGLE_FILE).exists():
            names = sorted(set(json.loads((folder / INDEX_FILE).read_bytes())["weight_map"].values()))
        return {name: tensor for file in names for name, tensor in load_file(folder / Path(file).name).items()}
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"the tensors in {folder} cannot be read: {error}") from None


def matrix_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The type of the embedding, as the type of all matrices.

    Raises:
        CheckpointError: there is no embedding.
    """
    if EMBEDDING not in tensors:
        raise CheckpointError(f"the checkpoint lacks the tensor {EMBEDDING}")
    return tensors[EMBEDDING].dtype


def check_folder(out: Path, model: Path, force: bool) -> None:
    """Check that the folder may be written to.

    Raises:
        ConfigError: ``out`` is the small model itself, no folder, or not empty.
    """
    if out.resolve() == model.resolve():
        raise ConfigError(f"--out {out} is the small checkpoint itself, which is read: choose another folder")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file: give a folder")
    if out.exists() and any(out.iterdir()) and not force:
        raise ConfigError(f"--out {out} is not empty: choose another folder, or replace the checkpoint in it (--force)")


def prepare_folder(out: Path) -> None:
    """Make the folder; the weights and the config of a checkpoint found there are removed."""
    out.mkdir(parents=True, exist_ok=True)
    for pattern in (*WEIGHT_FILES, "config.json"):
        for file in out.glob(pattern):
            file.unlink()


def copy_companions(model: Path, out: Path) -> None:
    """Copy the tokenizer, its template, and the generation config."""
    for pattern in COPIED_FILES:
        for file in sorted(model.glob(pattern)):
            shutil.copyfile(file, out / file.name)


def write_json(file: Path, value: object) -> None:
    """Write a value as indented JSON."""
    file.write_text(json.dumps(value, indent=2) + "\n", "utf8")


class Totals:
    """Number of parameters and bytes of the tensors that were added."""

    def __init__(self) -> None:
        self.target_parameters = self.mtp_parameters = self.num_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if name.startswith("mtp."):
            self.mtp_parameters += tensor.numel()
        else:
            self.target_parameters += tensor.numel()
        self.num_bytes += tensor.nbytes


class ShardWriter:
    """Write tensors one by one, with at most one shard in memory."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.totals = Totals()
        self._folder, self._max_bytes = folder, max_bytes
        self._shard: dict[str, Tensor] = {}
        self._shard_bytes = 0
        self._names: list[list[str]] = []  # names of the tensors in each written shard

    def add(self, name: str, tensor: Tensor) -> None:
        if self._shard and self._shard_bytes + tensor.nbytes > self._max_bytes:
            self._write_shard()
        self._shard[name] = tensor.contiguous()
        self._shard_bytes += tensor.nbytes
        self.totals.add(name, tensor)

    def finish(self) -> None:
        """Write the last shard, name the shards, and write the index if there are several."""
        self._write_shard()
        count = len(self._names)
        files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else [SINGLE_FILE]
        for i, file in enumerate(files):
            self._part(i).rename(self._folder / file)
        if count > 1:
            weight_map = {name: file for file, names in zip(files, self._names, strict=True) for name in names}
            index = {"metadata": {"total_size": self.totals.num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            write_json(self._folder / INDEX_FILE, index)

    def _write_shard(self) -> None:
        data = save(self._shard, metadata={"format": "pt"})
        self._part(len(self._names)).write_bytes(data)  # save_file would make it readable by its owner only
        self._names.append(list(self._shard))
        self._shard, self._shard_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._folder / f"{number}.safetensors.part"
