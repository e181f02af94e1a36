"""Every format with scales of no use, missing and misshapen parts, and files that are cut or have large headers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, ReaderTensor
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from specmamba.checkpoints.checkpoint import resolve_checkpoint
from specmamba.checkpoints.gguf import gguf_folder
from specmamba.checkpoints.gguf.gguf_reader import GgufReader
from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.errors import CheckpointError
from tests.checkpoints.formats import FORMATS, HALVES, SIZES, write_base

SHAPE = SIZES["intermediate_size"], SIZES["hidden_size"]
MODULE = "model.layers.0.mlp.up_proj"
SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "scales")
CODES = ("weight", "weight_packed", "qweight")
BLOCKS = HALVES | {"Q4_1": (0, 2), "Q5_1": (0, 2)}  # float16 in a block; else one at its beginning
NO_NUMBER, ZERO = "scales that are NaN or infinite", "scales of zero for weights that"
LARGE = f"(a scale of .* with which weights are infinite|{NO_NUMBER})"  # times another scale, or a zero point
MOST_BYTES = 64 << 20  # of memory, beside what was there
FOLDERS = [form for form in FORMATS if not form.startswith("GGUF")]
FILES = [form.removeprefix("GGUF ") for form in FORMATS if form.startswith("GGUF")]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "model")


@contextmanager
def refused(words: str) -> Iterator[None]:
    """In these words, and without much memory."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = resident("VmRSS")
    with pytest.raises(CheckpointError, match=words):
        yield
    assert resident("VmHWM") - before < MOST_BYTES


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def take(folder: Path) -> Tensor:
    with TensorReader(folder) as reader:
        return reader.take(f"{MODULE}.weight", SHAPE)


def spoiled(scale: Tensor, part: str) -> list[tuple[Tensor, str]]:
    """Scales of no use, one of them or all, and what is said of them."""
    if scale.dtype is torch.uint8:  # exponents
        values: dict[float, str] = {255: NO_NUMBER, 0: ZERO, 254: LARGE}
    else:
        values = {NAN: NO_NUMBER, INF: NO_NUMBER, -INF: NO_NUMBER, 0.0: ZERO, 3e38: LARGE}
    if scale.dtype is torch.float8_e4m3fn:  # it has no infinity
        values = {NAN: NO_NUMBER, 0.0: ZERO}
    if scale.dtype is torch.float16:
        del values[3e38]
    if part == "weight_global_scale":  # it divides
        values = {NAN: NO_NUMBER, INF: ZERO, -INF: ZERO, 0.0: NO_NUMBER, 1e-36: LARGE}
    found = []
    for value, words in values.items():
        other = scale.float().clone()
        other.view(-1)[slice(1) if words == NO_NUMBER else slice(None)] = value
        found.append((other.to(scale.dtype), words))
    return found


@pytest.mark.parametrize("form", FOLDERS)
def test_parts(form: str, base: Path, tmp_path: Path) -> None:
    """Of one matrix: scales of no use, fewer scales or zero points, no scales, no codes."""
    folder = FORMATS[form](base, tmp_path / "model")
    file = folder / "model.safetensors"
    whole = load_file(file)
    parts = {name.removeprefix(f"{MODULE}."): x for name, x in whole.items() if name.startswith(f"{MODULE}.")}
    assert take(folder).any()
    scales = [part for part in SCALES if part in parts]
    assert scales

    def refuse(change: dict[str, Tensor | None], words: str) -> None:
        tensors = whole | {f"{MODULE}.{part}": x for part, x in change.items() if x is not None}
        save_file(
            {
                name: x
                for name, x in tensors.items()
                if change.get(name.rpartition(".")[2], x) is not None or not name.startswith(MODULE)
            },
            file,
        )
        with refused(words):
            take(folder)

    for part in scales:
        for scale, words in spoiled(parts[part], part):
            refuse({part: scale}, rf"{re.escape(MODULE)}\.weight has {words}")
        refuse({part: None}, f"{re.escape(MODULE)}.*missing|{re.escape(MODULE)}.*no scales beside it")
    for part in {*scales, "qzeros", "weight_zero_point", "g_idx"} & set(parts):
        fewer = parts[part][: len(parts[part]) // 2].clone() if parts[part].numel() > 1 else torch.ones(3)
        refuse({part: fewer}, f"{re.escape(MODULE)}.*(do not fit|do not divide|scales are for|does not name a group)")
    refuse(dict.fromkeys(set(CODES) & set(parts)), f"{re.escape(MODULE)}.*what is scaled, .* is missing")


@pytest.mark.parametrize("form", FOLDERS)
def test_files(form: str, base: Path, tmp_path: Path) -> None:
    """Cut anywhere, and with a header of any length."""
    folder = FORMATS[form](base, tmp_path / "model")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    for cut in (0, 7, 8 + header // 2, 8 + header, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with refused("is truncated or not a safetensors file"):
            take(folder)
    for length in (header - 1, 1 << 40, (1 << 64) - 1):
        file.write_bytes(length.to_bytes(8, "little") + whole[8:])
        with refused("is truncated or not a safetensors file"):
            take(folder)


@pytest.fixture
def gguf(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Path, ReaderTensor]]:
    """Makes a file in a type, and finds a matrix in it."""
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path / "cache")

    def make(kind: str) -> tuple[Path, ReaderTensor]:
        file = FORMATS[f"GGUF {kind}"](base, tmp_path / "model")
        return file, next(tensor for tensor in GGUFReader(file).tensors if tensor.name == "blk.0.ffn_up.weight")

    return make


@pytest.mark.parametrize("kind", FILES)
def test_blocks(kind: str, gguf: Callable[[str], tuple[Path, ReaderTensor]]) -> None:
    """Scales of no use, in one block or in all."""
    file, tensor = gguf(kind)
    config = AutoConfig.from_pretrained(resolve_checkpoint(str(file), None))
    whole, size = file.read_bytes(), GGML_QUANT_SIZES[tensor.tensor_type][1]
    begins = range(tensor.data_offset, tensor.data_offset + tensor.n_bytes, size)

    def spoil(at: int, value: bytes, everywhere: bool) -> None:
        spoiled = bytearray(whole)
        for begin in begins if everywhere else begins[3:4]:
            spoiled[begin + at : begin + at + len(value)] = value
        file.write_bytes(spoiled)

    def load() -> Tensor:
        with GgufReader(file, config) as reader:
            return reader.take(f"{MODULE}.weight", SHAPE)

    assert load().any()
    if kind == "MXFP4":
        cases = [(0, b"\xff", NO_NUMBER), (0, b"\0", ZERO), (0, b"\xfe", LARGE)]
    else:
        halves = BLOCKS.get(kind, (0,))
        numbers = [np.float16(value).tobytes() for value in (NAN, INF, -INF)]
        cases = [(half, number, NO_NUMBER) for half in halves for number in numbers] + [(halves[0], bytes(2), ZERO)]
    for at, value, words in cases:
        spoil(at, value, everywhere=words != NO_NUMBER)
        with refused(rf"blk\.0\.ffn_up\.weight has {words}"):
            load()


@pytest.mark.parametrize("kind", FILES)
def test_tables_of_tensors(kind: str, gguf: Callable[[str], tuple[Path, ReaderTensor]]) -> None:
    """Another type or another place than that of what is stored; files that are cut."""
    file, tensor = gguf(kind)
    whole = file.read_bytes()
    # name, number of dimensions, two of these, type, offset
    at = whole.index(tensor.name.encode()) + len(tensor.name) + 4 + 16
    assert int.from_bytes(whole[at : at + 4], "little") == tensor.tensor_type
    other = GGMLQuantizationType.Q4_1 if kind == "Q8_0" else GGMLQuantizationType.Q8_0
    file.write_bytes(whole[:at] + int(other).to_bytes(4, "little") + whole[at + 4 :])
    with refused(r"begins at byte \d+, but what is before it ends at \d+"):
        resolve_checkpoint(str(file), None)
    file.write_bytes(whole[: at + 4] + bytes(8) + whole[at + 12 :])
    with refused(r"blk\.0\.ffn_up\.weight begins at byte \d+, but what is before it ends at \d+"):
        resolve_checkpoint(str(file), None)
    for cut in (tensor.data_offset + 1, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with refused(r"is truncated: it ends before .* does"):
            resolve_checkpoint(str(file), None)
