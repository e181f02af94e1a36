"""A rank reads its part of a checkpoint: the same bits as cut out of whole tensors, and about one of N bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specmamba.checkpoints import mapped, tensor_reader
from specmamba.checkpoints.checkpoint import resolve_checkpoint
from specmamba.checkpoints.gguf import gguf_folder, gguf_reader
from specmamba.checkpoints.gguf.gguf_reader import GgufReader
from specmamba.checkpoints.mapped import copy_mapped
from specmamba.checkpoints.tensor_reader import TensorReader
from specmamba.errors import ConfigError
from specmamba.kernels.linear import QuantizedMatrix
from specmamba.models.base import LoadOptions
from specmamba.models.registry import load_model
from specmamba.parallel.ranks import Ranks
from specmamba.parallel.share import Part, Segment, Share
from specmamba.processes import unused_memory
from tests.checkpoints.formats import FORMATS, write_base
from tests.families import FAMILIES
from tests.parallel.even_variants import EVEN, build_variant, variants
from tests.tiny import FULL, LINEAR, write_tiny_checkpoint

VARIANTS = {f"{family}-{variant}": (family, variant) for family in sorted(FAMILIES) for variant in variants(family)}
FAST = "granite-hybrid", "jamba-even", "kimi-linear-even", "lfm2-moe", "nemotron-h", "qwen3-next"
# Two ranks and four divide all of it; matrices are most of it, the embedding is little.
LARGE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": [LINEAR, FULL, LINEAR, FULL],
}
# Likewise; of Jamba two ranks and four have grouped heads, and channels of Mamba1.
LARGE_OF: dict[str, dict[str, Any]] = {
    "jamba": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 16,
        "mamba_d_state": 16,
    },
    "kimi-linear": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "linear_num_heads": 8,
        "linear_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
    },
    "qwen3.5-moe": LARGE | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_experts": 16},
}
ON_ALL_RANKS = re.compile(r"embed_tokens|^mtp\.fc\.weight$|\.(kv_a|q_a|f_a|g_a)_proj|conv1d|A_log")
# Formats whose codes are read whole.
WHOLE = {"GGUF Q2_K", "GGUF Q3_K", "GGUF IQ4_XS", "GGUF IQ3_S", "GPTQ 4 act order"}


def options(rank: int, size: int, **changes: Any) -> LoadOptions:
    usual: dict[str, Any] = {"want_draft_head": True, "ranks": Ranks(rank, size), "keeps_codes": True}
    return LoadOptions(torch.float32, torch.device("cpu"), **usual | changes)


class Watch:
    """Readers that count what they copy, and compare every part with what is cut out of the whole."""

    def __init__(self, patched: pytest.MonkeyPatch, compares: bool = True) -> None:
        self.num_parts = self.num_bytes = 0
        self._is_comparing, self._compares = False, compares
        for module in (tensor_reader, gguf_reader):
            patched.setattr(module, "copy_mapped", self._count)
        take = TensorReader.take

        def watched(reader: Any, name: str, shape: Any, dtype: Any = torch.float32, part: Part | None = None) -> Tensor:
            found = take(reader, name, shape, dtype, part)
            self._compare(found, part, lambda: take(reader, name, shape, dtype))
            return found

        patched.setattr(TensorReader, "take", watched)
        for kind in (TensorReader, GgufReader):
            patched.setattr(kind, "take_quantized", self._of_codes(kind.take_quantized))

    def _of_codes(self, take: Callable[..., Any]) -> Callable[..., Any]:
        def watched(reader: Any, name: str, shape: Any, part: Part | None = None) -> Any:
            found = take(reader, name, shape, part)
            self._compare(found, part, lambda: take(reader, name, shape))
            return found

        return watched

    def _count(self, tensor: Tensor, part: Part | None = None) -> Tensor:
        copy = copy_mapped(tensor, part)
        self.num_bytes += 0 if self._is_comparing else copy.nbytes
        return copy

    def _compare(self, found: Any, part: Part | None, whole: Callable[[], Any]) -> None:
        if part is None or self._is_comparing or not self._compares:
            return
        self._is_comparing = True
        expected: Any = part.of(whole()) if isinstance(found, QuantizedMatrix) else part.of_tensor(dense(whole()))
        self._is_comparing, self.num_parts = False, self.num_parts + 1
        assert type(found) is type(expected)
        if isinstance(found, Tensor):
            assert torch.equal(found, expected)
            return
        assert found.is_like(expected)
        for name in ("codes", "scale", "minimum"):
            ours, theirs = getattr(found, name), getattr(expected, name)
            assert ours is theirs is None or torch.equal(ours, theirs)


def dense(matrix: Any) -> Tensor:
    return matrix.dequantize(torch.float32) if isinstance(matrix, QuantizedMatrix) else matrix


@pytest.mark.fast_cases(*(f"{family}-default" for family in FAST))
@pytest.mark.parametrize("case", VARIANTS)
def test_parts_are_those_of_whole_tensors(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every family, whether tensors are stored fused or not, and with the checkpoint's draft head."""
    family, variant = VARIANTS[case]
    build_variant(tmp_path, family, variant)
    for rank in range(2):
        with monkeypatch.context() as patched:
            watch, problem = Watch(patched), ""
            try:
                load_model(tmp_path, options(rank, 2))
            except ConfigError as error:
                problem = str(error)
        assert watch.num_parts > 5 or re.search("cannot be divided among (2 )?ranks", problem)
        assert not problem or variant not in EVEN.get(family, ())


@pytest.mark.fast_cases("GGUF Q4_K", "compressed-tensors nvfp4", "AWQ", "GPTQ 4", "FP8 blocks of Qwen")
@pytest.mark.parametrize("keeps_codes", [True, False])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_parts_of_codes(name: str, keeps_codes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes, scales and minima of every format, kept or dequantized; of most no more codes are read than that."""
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path / "cache")
    stored = FORMATS[name](write_base(tmp_path / "base"), tmp_path / "stored")
    folder, copied = resolve_checkpoint(str(stored), None), []
    for ranks in (Ranks(), Ranks(0, 2), Ranks(1, 2)):
        with monkeypatch.context() as patched:
            watch = Watch(patched)
            load_model(folder, options(0, 1, ranks=ranks, keeps_codes=keeps_codes))
            assert watch.num_parts > 10 or ranks.size == 1
            copied.append(watch.num_bytes)
    assert copied[1] < (1.01 if name in WHOLE else 0.8) * copied[0]


@pytest.mark.parametrize("family", ["jamba", "kimi-linear", "qwen3.5", "qwen3.5-moe"])
def test_a_rank_reads_its_part(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """About one of N bytes of a dense model and of one with experts, beside what all ranks have."""
    if family == "qwen3.5":
        write_tiny_checkpoint(tmp_path, 0, **LARGE | {"intermediate_size": 1024})
    else:
        module, sizes = FAMILIES[family], LARGE_OF[family]
        fused = patch.dict(getattr(module, "FUSED", {}), large=(True, False))
        with patch.dict(module.VARIANTS, large=sizes), fused:
            module.build(tmp_path, "large")
    stored = load_file(tmp_path / "model.safetensors")
    whole = sum(tensor.nbytes for tensor in stored.values())
    shared = sum(stored[name].nbytes for name in stored if ON_ALL_RANKS.search(name))
    for size in (1, 2, 4):
        read = []
        for rank in range(size):
            with monkeypatch.context() as patched:
                watch = Watch(patched, compares=False)
                load_model(tmp_path, options(rank, size))
                read.append(watch.num_bytes)
        assert max(read) < (whole - shared) / size * 1.1 + shared
        assert sum(read) >= whole


def test_no_more_pages_of_rows_are_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of four maps a quarter of a matrix that is cut by rows, and gives its pages back when it has them."""
    matrix = torch.arange(4 << 20, dtype=torch.float32).view(1024, 4096)  # 16 MiB
    save_file({"a.weight": matrix}, tmp_path / "model.safetensors")
    part = Share(1, 4).part([Segment("heads", 16, 64)])
    assert part is not None
    with TensorReader(tmp_path) as reader:
        with monkeypatch.context() as patched:
            patched.setattr(mapped, "give_back_pages", lambda address, num_bytes: num_bytes)
            found = reader.take("a.weight", (1024, 4096), part=part)
            touched = resident_bytes(tmp_path / "model.safetensors")
        assert torch.equal(found, matrix[256:512])
        assert found.nbytes <= touched < found.nbytes + (4 << 20)  # the system maps up to 2 MiB at each end
        reader.take("a.weight", (1024, 4096), part=part)
        assert resident_bytes(tmp_path / "model.safetensors") < 0.1 * found.nbytes


def test_memory_while_a_large_part_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of the file are given back piece by piece, those of columns too, which all rows have some of."""
    monkeypatch.setattr(mapped, "_PIECE_BYTES", 2 << 20)
    matrix = torch.arange(4 << 20, dtype=torch.float32).view(4096, 1024)
    save_file({"a.weight": matrix}, tmp_path / "model.safetensors")
    largest, give_back = 0, unused_memory.give_back_pages

    def look(address: int, num_bytes: int) -> int:
        nonlocal largest
        largest = max(largest, resident_bytes(tmp_path / "model.safetensors"))
        return give_back(address, num_bytes)

    monkeypatch.setattr(mapped, "give_back_pages", look)
    part = Part(1, torch.arange(256, 768))
    with TensorReader(tmp_path) as reader:
        assert torch.equal(reader.take("a.weight", (4096, 1024), part=part), matrix[:, 256:768])
    assert 1 << 20 <= largest < 3 << 20


def resident_bytes(file: Path) -> int:
    """Of the file, in this process."""
    found, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            is_of_file = line.endswith(str(file))
        elif is_of_file and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found
