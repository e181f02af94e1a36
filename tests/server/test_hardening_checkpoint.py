"""Checkpoints with wrong sizes, offsets or counts are refused before memory is allocated for them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from specmamba.checkpoints import files, tensor_reader
from specmamba.checkpoints.checkpoint import read_architecture, read_config, resolve_checkpoint
from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.config import DEMO_MODEL
from specmamba.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(folder: Path, header: object, data: bytes = bytes(16)) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_a_valid_header_of_these_tests_is_read(tmp_path: Path) -> None:
    write(tmp_path, {"a": tensor([2], 0, 8), "b": tensor([2], 8, 16)})
    with TensorReader(tmp_path) as reader:
        assert set(reader.names()) == {"a", "b"}


@pytest.mark.parametrize(
    "header",
    [
        {"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)},  # overlap
        {"a": tensor([4], 0, 16), "b": tensor([2], 8, 16)},
        {"a": tensor([2], 0, 8), "b": tensor([1], 12, 16)},  # a hole
        {"a": tensor([2], 0, 8)},  # bytes that belong to no tensor
        {"a": tensor([8], 0, 32)},  # beyond the end of the file
        {"a": tensor([4], 16, 0)},
        {"a": tensor([4], -16, 0)},
        {"a": tensor([4], 0, 2**64)},
        {"a": tensor([2**40], 0, 16)},  # more elements than bytes
        {"a": tensor([2**32, 2**32, 4], 0, 16)},  # the product is 0 modulo 2**64
        {"a": tensor([2**63, 2], 0, 16)},
        {"a": tensor([-4], 0, 16)},
        {"a": tensor([1.5], 0, 16)},  # type: ignore[list-item]
        {"a": tensor([4], 0, 16, "F33")},
        {"a": {"dtype": "F32", "shape": [4]}},
        {"a": [1, 2]},
        [],
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"{" + b" " * 1000,
        b"\xff" * 100,
    ],
)
def test_wrong_headers(tmp_path: Path, header: Any) -> None:
    write(tmp_path, header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or not a safetensors file"):
        TensorReader(tmp_path)


def test_a_header_is_not_read_when_it_is_too_long(tmp_path: Path) -> None:
    """The file is as long as it says, so that no other check would refuse it."""
    length = tensor_reader.MAX_HEADER_BYTES + 1
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(length + 8)
    with pytest.raises(CheckpointError, match=f"its header would have {length} bytes; {length - 1} is the most"):
        TensorReader(tmp_path)


def test_too_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_reader, "MAX_TENSORS", 3)
    write(tmp_path, {str(i): tensor([1], 4 * i, 4 * i + 4) for i in range(4)})
    with pytest.raises(CheckpointError, match="has 4 tensors; 3 is the most"):
        TensorReader(tmp_path)


@pytest.mark.parametrize("name", [SINGLE, INDEX, "0.safetensors", "config.json", "tokenizer.json"])
def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path: Path, name: str) -> None:
    if name == "0.safetensors":
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    elif name != INDEX:
        write(tmp_path, {"a": tensor([4], 0, 16)})
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="not a regular file"):
        with TensorReader(resolve_checkpoint(str(tmp_path), None)):
            pass


@pytest.mark.parametrize(
    "name", ["config.json", INDEX, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_files_that_are_too_large(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"a": tensor([4], 0, 16)})
    size = files.MAX_TEXT_BYTES + 1
    with (tmp_path / name).open("wb") as file:
        file.truncate(size)  # takes no room on the disk
    with pytest.raises(CheckpointError, match=f"has {size} bytes"):
        resolve_checkpoint(str(tmp_path), None)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "special_tokens_map.json"])
def test_files_of_too_many_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """256 MiB of empty lists would take 5.6 GB."""
    write(tmp_path, {"a": tensor([4], 0, 16)})
    (tmp_path / name).write_text(json.dumps([[]] * 100))
    monkeypatch.setattr(files, "MAX_JSON_VALUES", 200)
    assert resolve_checkpoint(str(tmp_path), None) == tmp_path
    monkeypatch.setattr(files, "MAX_JSON_VALUES", 199)
    with pytest.raises(CheckpointError, match=rf"{name} has 200 values; 199 are the most"):
        resolve_checkpoint(str(tmp_path), None)


def test_a_config_that_is_too_large(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(files.MAX_JSON_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"config\.json has 67108865 bytes"):
        read_architecture(tmp_path)


def test_dangling_links(tmp_path: Path) -> None:
    write(tmp_path, {"a": tensor([4], 0, 16)})
    (tmp_path / "config.json").symlink_to(tmp_path / "nothing.json")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        resolve_checkpoint(str(tmp_path), None)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("field", ["num_hidden_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers"])
def test_too_many_layers(tmp_path: Path, field: str, nested: bool) -> None:
    config: dict[str, Any] = json.loads((DEMO_MODEL / "config.json").read_text())
    changed: dict[str, Any] = {field: 10**12}
    (tmp_path / "config.json").write_text(json.dumps({**config, **({"text_config": changed} if nested else changed)}))
    with pytest.raises(CheckpointError, match=f"{field} is 1000000000000; 10000 layers are the most"):
        read_config(tmp_path, ["Qwen3_5ForCausalLM"])
