"""Reading Hugging Face checkpoints: folder, config, tensors. Safetensors only, and never code from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from specmamba.errors import CheckpointError, ConfigError, UnsupportedModelError
from specmamba.models.checkpoint_limits import (
    MAX_JSON_BYTES,
    MAX_TENSORS,
    require_bounded_folder,
    require_bounded_header,
    require_bounded_layers,
    require_file,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_TYPES = ("F32", "BF16", "F16")
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


def resolve_checkpoint(model: str, revision: str | None, revision_flag: str = "--revision") -> Path:
    """The folder of a checkpoint: ``model`` itself, or a download of the hub repository of that name.

    Args:
        model: a folder or a hub id.
        revision: on the hub.
        revision_flag: what the user calls it.

    Raises:
        ConfigError: a revision is given for a local folder.
        CheckpointError: ``model`` is neither a folder nor a hub id, the hub or the repository cannot be reached, or
            there are no safetensors in it, or a file is larger than any of its kind.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ConfigError(
                f"{revision_flag} names a version on the hub, but {folder} is a local folder: leave it out"
            )
    elif folder.exists():
        raise CheckpointError(f"{folder} is a file: give the folder of the checkpoint (with its config.json)")
    else:
        folder = _download(model, revision)
    _require_safetensors(folder)
    require_bounded_folder(folder)
    return folder


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``.

    Raises:
        CheckpointError: the file is missing, unreadable or too large, or holds anything but a JSON object.
    """
    try:
        require_file(file, MAX_JSON_BYTES)
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} has no {file.name}: it is not a complete checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} should hold a JSON object, but holds a {type(value).__name__}")
    return value


def read_architecture(folder: Path) -> str:
    """The name of the model that a checkpoint says it is. Raises CheckpointError where it says none."""
    file = folder / "config.json"
    config = read_json(file)
    require_bounded_layers(file, config)
    names = config.get("architectures")
    if not (isinstance(names, list) and names and isinstance(names[0], str)):
        raise CheckpointError(f'{file} names no model: it needs "architectures": ["..."]')
    return names[0]


def read_config(folder: Path, supported: Sequence[str]) -> tuple[PretrainedConfig, str]:
    """The config of a checkpoint, and the name of its architecture, which is one of ``supported``.

    Raises:
        UnsupportedModelError: the architecture is not supported; the message lists those that are.
        CheckpointError: config.json is missing, damaged, names no architecture, or has values that do not fit it.
    """
    architecture = read_architecture(folder)
    if architecture not in supported:
        raise UnsupportedModelError(
            f"{folder} is a {architecture} model; specmamba has models for: {', '.join(sorted(supported))}"
        )
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # The config classes validate what anybody may have written into the file, and raise whatever comes up.
    except Exception as error:
        raise CheckpointError(f"{folder / 'config.json'} is not a config that transformers accepts: {error}") from error
    return config, architecture


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a config that describes the language model: nested in a multimodal one, else the whole."""
    nested: PretrainedConfig | None = getattr(config, "text_config", None)
    return config if nested is None else nested


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and what it is, known without loading it."""

    stored_name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: F32, BF16, F8_E4M3, ...


class TensorReader:
    """The tensors of a checkpoint folder by name, with a count of which ones the model took.

    ``renames`` are (stored prefix, name prefix) pairs; the first that matches is applied, so that one model class
    reads checkpoints that nest it differently.

    Raises:
        CheckpointError: a file is missing, truncated or damaged, the index does not fit the shards or points out of
            the folder, or two tensors end up with one name.
    """

    def __init__(self, folder: Path, renames: Sequence[tuple[str, str]] = ()) -> None:
        self._tensors: dict[str, StoredTensor] = {}
        self._taken: set[str] = set()
        self._handles: dict[Path, Any] = {}
        self._folder = folder
        with ExitStack() as self._stack:
            single = folder / SINGLE_FILE
            for tensor in self._open(single) if single.exists() else self._open_shards():
                self._add(_renamed(tensor.stored_name, renames), tensor)
            self._stack = self._stack.pop_all()  # no error: the files stay open

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Tensors that were taken stay valid."""
        self._stack.close()

    def read_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """Some rows of a matrix, [rows, width], whatever kind of reader this is. Raises CheckpointError."""
        import torch
        from safetensors import SafetensorError

        tensor = self.stored(name)
        try:
            stored = self._handles[tensor.file].get_slice(tensor.stored_name)
            return torch.cat([stored[row : row + 1] for row in rows])
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{tensor.stored_name} cannot be read from {tensor.file}: {error}") from None

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def stored(self, name: str) -> StoredTensor:
        """What is known of a tensor without loading it.

        Raises:
            CheckpointError: there is no such tensor.
        """
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self._folder} lacks the tensor {name}") from None

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Load one tensor, in the type it is stored in and in memory of its own, and mark it as used.

        Raises:
            CheckpointError: the tensor is missing, has another shape, is not of a float type, or cannot be read.
        """
        tensor = self.stored(name)
        if tensor.shape != tuple(shape):
            raise CheckpointError(
                f"{tensor.stored_name} has the shape {list(tensor.shape)} in {tensor.file}, "
                f"but its config.json asks for {list(shape)}"
            )
        if tensor.dtype not in FLOAT_TYPES:
            raise CheckpointError(
                f"{tensor.stored_name} is stored as {tensor.dtype} in {tensor.file}: "
                f"use a checkpoint that is not quantised (specmamba reads {', '.join(FLOAT_TYPES)})"
            )
        self._taken.add(name)
        return self._read(tensor)

    def _read(self, tensor: StoredTensor) -> Tensor:
        from safetensors import SafetensorError

        try:
            mapped: Tensor = self._handles[tensor.file].get_tensor(tensor.stored_name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{tensor.stored_name} cannot be read from {tensor.file}: {error}") from None
        return mapped.clone()  # else the weights would be a view of the file, and change or crash with it

    def finish(self, ignore: tuple[str, ...] = ()) -> None:
        """Check that the model took every tensor, but for those whose names start with one of ``ignore``.

        Raises:
            CheckpointError: tensors are left over; the message names the first of them.
        """
        left = [
            tensor.stored_name
            for name, tensor in self._tensors.items()
            if name not in self._taken and not name.startswith(ignore)
        ]
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise CheckpointError(
                f"{self._folder} has tensors that the model in its config.json does not have: "
                + ", ".join(map(repr, left[:5]))
                + more
            )

    def _add(self, name: str, tensor: StoredTensor) -> None:
        other = self._tensors.setdefault(name, tensor)
        if other is not tensor:
            raise CheckpointError(
                f"two tensors are named {name!r}: {other.stored_name!r} in {other.file} "
                f"and {tensor.stored_name!r} in {tensor.file}"
            )

    def _open_shards(self) -> list[StoredTensor]:
        _require_safetensors(self._folder)
        index = self._folder / INDEX_FILE
        weight_map = _read_index(index)
        shards = {name: self._open(self._folder / name) for name in sorted(set(weight_map.values()))}
        present = {(name, tensor.stored_name) for name, tensors in shards.items() for tensor in tensors}
        for tensor_name, shard in weight_map.items():
            if (shard, tensor_name) not in present:
                raise CheckpointError(f"{index} places {tensor_name!r} in {shard}, which lacks it")
        return [tensor for tensors in shards.values() for tensor in tensors]

    def _open(self, file: Path) -> list[StoredTensor]:
        from safetensors import SafetensorError, safe_open

        try:
            require_bounded_header(file)
            handle = self._stack.enter_context(safe_open(file, framework="pt"))
            self._handles[file] = handle
            names = handle.keys()
            if len(names) > MAX_TENSORS:
                raise CheckpointError(f"{file} has {len(names)} tensors; {MAX_TENSORS} is the most that is read")
            slices = {name: handle.get_slice(name) for name in names}
            return [StoredTensor(name, file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()]
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing, though {INDEX_FILE} names it") from None
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(f"{file} is truncated or not a safetensors file: {error}") from None


def _renamed(name: str, renames: Iterable[tuple[str, str]]) -> str:
    for stored, wanted in renames:
        if name.startswith(stored):
            return wanted + name[len(stored) :]
    return name


def _read_index(file: Path) -> dict[str, str]:
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'{file} has no "weight_map" that says which shard holds which tensor')
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard or "\0" in shard:
            raise CheckpointError(f"{file} names the shard {shard!r}, which is not the name of a file in its folder")
        if not shard.endswith(".safetensors"):
            raise CheckpointError(f"{file} names the shard {shard!r}: only .safetensors files are read")
    return weight_map


def _require_safetensors(folder: Path) -> None:
    if (folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists():
        return
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in folder.glob(pattern))
    refused = f"; {pickles[0]} is refused, since loading a pickle runs code from it" if pickles else ""
    raise CheckpointError(
        f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{refused}: specmamba reads safetensors only"
    )


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        # What lies in subfolders is other formats or other models: not the checkpoint proper.
        return Path(snapshot_download(model, revision=revision, allow_patterns=HUB_PATTERNS, ignore_patterns=["*/*"]))
    except HFValidationError:
        raise CheckpointError(f"{model!r} is neither a folder nor a hub id like 'owner/name'") from None
    except RevisionNotFoundError:
        raise CheckpointError(f"the hub repository {model} has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"there is no folder {model}, and no hub repository of that name that you may read "
            "(private or gated: log in with `hf auth login`)"
        ) from None
    # The HTTP library below has its own errors, and the hub client has changed that library before.
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise CheckpointError(
            f"there is no folder {model}, and the hub cannot be asked for a repository of that name: {reason}"
        ) from error
