"""GGUF files as checkpoints: the same tensors, the same text, the same drafts; and damaged files."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from specmamba import LLM, SamplingParams
from specmamba.checkpoints.checkpoint import resolve_checkpoint
from specmamba.checkpoints.gguf import gguf_folder as folder
from specmamba.checkpoints.gguf.gguf_reader import GgufReader
from specmamba.errors import CheckpointError, UnsupportedModelError
from tests.families import qwen3_5_moe
from tests.gguf_files import converted, name_of, write_gguf
from tests.tiny import FULL, LINEAR, WHOLE_BLOCKS, write_tiny_checkpoint

F32, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0
SIZES: dict[str, Any] = WHOLE_BLOCKS | {"vocab_size": 4096, "layer_types": [LINEAR, FULL, LINEAR, FULL]}
PROMPTS = ([5, 9, 200, 31, 77], [1000, 3, 2, 8, 8, 8, 90])

REAL_CACHE_FOLDER = folder.cache_folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), 3, **SIZES)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "cache_folder", lambda: tmp_path / "cache")


def texts(model: Path, **flags: Any) -> list[tuple[int, ...]]:
    with LLM(model=str(model), dtype="float32", max_running_requests=2, **flags) as llm:
        outputs = llm.generate(
            [list(p) for p in PROMPTS], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        )
    return [(*output.token_ids, *output.spec.accepted_histogram) for output in outputs]


def test_text_and_drafts_are_those_of_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    file = write_gguf(checkpoint, tmp_path / "tiny.gguf")
    assert texts(file, speculative_num_steps=3) == texts(checkpoint, speculative_num_steps=3)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "MXFP4"])
def test_tensors(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    """Every tensor, converted again, is what the file holds, by the format's own library."""
    number = GGMLQuantizationType[kind]
    file = write_gguf(checkpoint, tmp_path / "tiny.gguf", lambda name, shape: number)
    stored = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    config = json.loads((checkpoint / "config.json").read_text())
    made = resolve_checkpoint(str(file), None)
    with GgufReader(file, AutoConfig.from_pretrained(made)) as reader:
        for name, original in load_file(checkpoint / "model.safetensors").items():
            tensor = stored[name_of(name, config["num_hidden_layers"])]
            expected = dequantize(tensor.data, tensor.tensor_type)
            found = converted(name, reader.take(name, tuple(original.shape)).float(), config)
            assert np.array_equal(found.numpy(), expected) or np.allclose(found.numpy(), expected, atol=1e-6, rtol=1e-6)
            if tensor.tensor_type == number and "norm" not in name:
                assert np.array_equal(found.numpy(), expected)
        reader.finish()
    with GgufReader(file, AutoConfig.from_pretrained(made), has_values=False) as shapes:
        for name, original in load_file(checkpoint / "model.safetensors").items():
            assert shapes.take(name, tuple(original.shape)).shape == original.shape


def test_quantized_file_runs_with_drafts(checkpoint: Path, tmp_path: Path) -> None:
    """Speculative text is that of plain decoding."""
    file = write_gguf(checkpoint, tmp_path / "tiny.gguf", lambda name, shape: Q8_0)
    for form in ("auto", "none"):
        drafted, plain = (
            texts(file, quantization=form, **flags)
            for flags in ({"speculative_num_steps": 2}, {"speculative_algorithm": "none"})
        )
        assert [text[:24] for text in drafted] == [text[:24] for text in plain]
    assert any(sum(text[25:]) for text in drafted)


@pytest.mark.parametrize("kind", [F32, Q8_0])
def test_experts(tmp_path: Path, kind: GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text and drafts of a mixture are those of the checkpoint; the stacks of ups stand before those of gates."""
    sizes = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
    sizes |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    monkeypatch.setitem(qwen3_5_moe.VARIANTS, "blocks", sizes)
    monkeypatch.setitem(qwen3_5_moe.FUSED, "blocks", (True, True))
    folder = tmp_path / "moe"
    qwen3_5_moe.build(folder, "blocks")
    file = write_gguf(folder, tmp_path / "moe.gguf", lambda name, shape: kind)
    if kind is F32:
        assert texts(file, speculative_num_steps=2) == texts(folder, speculative_num_steps=2)
        return
    plain = texts(file, speculative_algorithm="none")
    assert [text[:24] for text in texts(file, speculative_num_steps=2)] == [text[:24] for text in plain]


def test_folder_is_made_once(checkpoint: Path, tmp_path: Path) -> None:
    """And again when the file has changed."""
    file = write_gguf(checkpoint, tmp_path / "tiny.gguf")
    first = resolve_checkpoint(str(file), None)
    assert resolve_checkpoint(str(file), None) == first
    write_gguf(checkpoint, file, lambda name, shape: Q8_0)
    assert resolve_checkpoint(str(file), None) != first
    assert {x.name for x in first.iterdir()} >= {"config.json", "tokenizer.json", "model.gguf"}


def test_folder_that_cannot_be_written(checkpoint: Path, tmp_path: Path) -> None:
    file = write_gguf(checkpoint, tmp_path / "tiny.gguf")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cache cannot be written: .*XDG_CACHE_HOME names another place"):
        resolve_checkpoint(str(file), None)


def test_cache_that_others_can_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config that another user has left there would be read as the file's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert REAL_CACHE_FOLDER() == tmp_path / "specmamba" / "gguf"
    (tmp_path / "specmamba").chmod(0o777)
    with pytest.raises(CheckpointError, match="others can write to it"):
        REAL_CACHE_FOLDER()


class TestDamage:
    @pytest.fixture
    def file(self, checkpoint: Path, tmp_path: Path) -> Path:
        return write_gguf(checkpoint, tmp_path / "tiny.gguf", lambda name, shape: Q8_0)

    def test_other_files(self, tmp_path: Path) -> None:
        other = tmp_path / "notes.txt"
        other.write_text("no model")
        with pytest.raises(CheckpointError, match="neither a GGUF file nor a checkpoint's folder"):
            resolve_checkpoint(str(other), None)

    def test_wrong_magic(self, tmp_path: Path) -> None:
        file = tmp_path / "x.gguf"
        file.write_bytes(b"GGML" + bytes(100))
        with pytest.raises(CheckpointError, match="not a GGUF file"):
            resolve_checkpoint(str(file), None)

    def test_truncated_anywhere(self, file: Path) -> None:
        whole = file.read_bytes()
        for cut in {4, 5, 23, 24, len(whole) - 1, *random.Random(0).sample(range(len(whole)), 30)}:
            file.write_bytes(whole[:cut])
            with pytest.raises(CheckpointError, match="truncated"):
                resolve_checkpoint(str(file), None)

    @pytest.mark.parametrize("at", [8, 16])
    @pytest.mark.parametrize("count", [1 << 40, 1 << 63, (1 << 64) - 1])
    def test_huge_counts(self, file: Path, at: int, count: int) -> None:
        """Of tensors, and of metadata."""
        whole = bytearray(file.read_bytes())
        whole[at : at + 8] = struct.pack("<Q", count)
        file.write_bytes(whole)
        with pytest.raises(CheckpointError, match="truncated, damaged or not a GGUF file"):
            resolve_checkpoint(str(file), None)

    def test_damaged_header_never_crashes(self, file: Path) -> None:
        whole = file.read_bytes()
        end, rng, num_refused = whole.index(b"tokenizer.ggml.merges"), random.Random(1), 0
        for _ in range(150):
            damaged = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(4, 1200 if rng.random() < 0.7 else end)] = rng.randrange(256)
            file.write_bytes(damaged)
            try:
                resolve_checkpoint(str(file), None)
            except (CheckpointError, UnsupportedModelError):
                num_refused += 1
        assert num_refused > 50

    def test_another_architecture(self, file: Path) -> None:
        file.write_bytes(file.read_bytes().replace(b"qwen35", b"llama4"))
        with pytest.raises(
            UnsupportedModelError, match=r"'llama4' model; of GGUF files, qwen35, qwen35moe, lfm2 are read"
        ):
            resolve_checkpoint(str(file), None)

    def test_part_of_a_split_file(self, checkpoint: Path, tmp_path: Path) -> None:
        file = write_gguf(checkpoint, tmp_path / "a-00001-of-00003.gguf", extra={"split.count": 3})
        with pytest.raises(UnsupportedModelError, match="is one of 3 parts: llama-gguf-split --merge joins them"):
            resolve_checkpoint(str(file), None)

    def test_scales_that_are_none(self, file: Path) -> None:
        made = resolve_checkpoint(str(file), None)
        tensor = next(t for t in GGUFReader(file).tensors if t.name == "output.weight")
        whole = bytearray(file.read_bytes())
        whole[tensor.data_offset : tensor.data_offset + 2] = np.float16(np.inf).tobytes()
        file.write_bytes(whole)
        with (
            GgufReader(file, AutoConfig.from_pretrained(made)) as reader,
            pytest.raises(CheckpointError, match=r"output\.weight has scales that are NaN or infinite"),
        ):
            reader.take("lm_head.weight", (4096, 64), torch.float32)

    @pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
    def test_scales_that_are_zero(self, checkpoint: Path, tmp_path: Path, kind: str) -> None:
        """Everywhere they are an error. One block of zeros, as a writer makes it, is none."""
        file = write_gguf(checkpoint, tmp_path / "tiny.gguf", lambda name, shape: GGMLQuantizationType[kind])
        made = resolve_checkpoint(str(file), None)
        tensor = next(t for t in GGUFReader(file).tensors if t.name == "output.weight")
        whole, block = bytearray(file.read_bytes()), GGML_QUANT_SIZES[tensor.tensor_type][1]
        for number, begin in enumerate(range(tensor.data_offset, tensor.data_offset + tensor.n_bytes, block)):
            if number == 1:
                file.write_bytes(whole)
                with GgufReader(file, AutoConfig.from_pretrained(made)) as reader:
                    assert reader.take("lm_head.weight", (4096, 64), torch.float32).any()
            whole[begin : begin + 2] = bytes(2)
        file.write_bytes(whole)
        with (
            GgufReader(file, AutoConfig.from_pretrained(made)) as reader,
            pytest.raises(CheckpointError, match=r"output\.weight has scales of zero for weights that are not zero"),
        ):
            reader.take("lm_head.weight", (4096, 64), torch.float32)

    @pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
    def test_a_matrix_of_zeros(self, checkpoint: Path, tmp_path: Path, kind: str) -> None:
        """Its scales are zero, and its codes are those that stand for zero."""
        folder = tmp_path / "zeros"
        shutil.copytree(checkpoint, folder)
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"].zero_()
        save_file(tensors, folder / "model.safetensors")
        file = write_gguf(folder, tmp_path / "zeros.gguf", lambda name, shape: GGMLQuantizationType[kind])
        made = resolve_checkpoint(str(file), None)
        with GgufReader(file, AutoConfig.from_pretrained(made)) as reader:
            assert not reader.take("lm_head.weight", (4096, 64), torch.float32).any()
