"""Files that llama.cpp's own llama-quantize wrote: the weights that they hold, by the format's library, and text.

``data/make_quantized_gguf.py`` made them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor
from transformers import AutoConfig

from specmamba import LLM, SamplingParams
from specmamba.checkpoints.checkpoint import resolve_checkpoint
from specmamba.checkpoints.gguf import gguf_folder
from specmamba.checkpoints.gguf.gguf_reader import GgufReader
from tests.gguf_files import converted, name_of

DATA = Path(__file__).parents[1] / "data"
KINDS = {"q4_k_m.gguf": {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}, "q6_k.gguf": {"F32", "Q6_K", "Q8_0"}}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path / "cache")


@pytest.mark.parametrize("file", KINDS)
def test_weights(file: str) -> None:
    stored = {tensor.name: tensor for tensor in GGUFReader(DATA / file).tensors}
    assert {tensor.tensor_type.name for tensor in stored.values()} == KINDS[file]
    config = AutoConfig.from_pretrained(resolve_checkpoint(str(DATA / file), None))
    num_exact = 0
    with GgufReader(DATA / file, config) as reader:
        for name in reader.names():
            tensor = stored.pop(name_of(name, config.num_hidden_layers))
            values: Tensor = reader.take(name, reader.stored(name).shape).float()
            found = converted(name, values, config.to_dict()).numpy()
            expected = dequantize(tensor.data, tensor.tensor_type)
            assert expected.any()
            if tensor.tensor_type.name == "F32":  # norms and decays are moved by 1, or by a logarithm
                assert np.allclose(found, expected, rtol=1e-6, atol=1e-6), name
            else:
                assert np.array_equal(found, expected), name
                num_exact += 1
        reader.finish()
    assert not stored
    assert num_exact == 16


@pytest.mark.parametrize("file", KINDS)
def test_text(file: str) -> None:
    """In codes, and dequantized: inputs are rounded in one of them, so that the text may part after a while."""
    tokens = []
    for form in ("auto", "none"):
        with LLM(model=str(DATA / file), quantization=form, dtype="float32", max_running_requests=1) as llm:
            output = llm.generate([[5, 9, 20, 77]], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))[0]
        assert len(output.token_ids) == 6
        tokens.append(output.token_ids)
    assert tokens[0][0] == tokens[1][0]
