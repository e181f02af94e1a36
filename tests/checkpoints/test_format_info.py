"""What ``info`` says of checkpoints in every quantized format, and that formats of a model share no measured times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specmamba import LLM
from specmamba.checkpoints.gguf import gguf_folder
from specmamba.config import EngineConfig
from specmamba.engine.cost_measurement import engine_key
from specmamba.engine.model_report import model_info
from specmamba.kernels import linear
from tests.checkpoints.formats import DEQUANTIZED, FORMATS, write_base

REGROUPED = "8 bits in groups of 128, rounded anew"
# What is stored in a layer, and what it runs as where products multiply by codes
SAID = {
    "GGUF Q4_0": ("Q4_0", "4 bits in groups of 32"),
    "GGUF Q5_1": ("Q5_1", "6 bits in groups of 32"),
    "GGUF Q8_0": ("Q8_0", "8 bits in groups of 32"),
    "GGUF MXFP4": ("MXFP4", "4 bits in groups of 32"),
    "GGUF Q2_K": ("Q2_K", "bfloat16"),
    "GGUF Q4_K": ("Q4_K", "4 bits in groups of 32"),
    "GGUF Q6_K": ("Q6_K", "6 bits in groups of 16"),
    "GGUF IQ4_NL": ("IQ4_NL", "4 bits in groups of 32"),
    "compressed-tensors int4 groups of 64, bf16": ("packed words of 4 bits in groups", "4 bits in groups of 64"),
    "compressed-tensors int4 per channel": ("packed words of 4 bits per output", "4 bits in groups of 128"),
    "compressed-tensors packed int8": ("packed words of 8 bits in groups", "8 bits in groups of 64"),
    "compressed-tensors int8 per tensor": ("int8 per tensor", "8 bits in groups of 128"),
    "compressed-tensors fp8 per channel": ("FP8 per output", REGROUPED),
    "compressed-tensors nvfp4": ("NVFP4", "4 bits in groups of 16"),
    "compressed-tensors mxfp4": ("MXFP4", "4 bits in groups of 32"),
    "compressed-tensors mxfp8": ("MXFP8", REGROUPED),
    "FP8 blocks of Qwen": ("FP8 in blocks", REGROUPED),
    "ModelOpt NVFP4": ("NVFP4", "4 bits in groups of 16"),
    "ModelOpt FP8": ("FP8 per tensor", REGROUPED),
    "GPTQ 4": ("GPTQ of 4 bits", "4 bits in groups of 32"),
    "GPTQ 8": ("GPTQ of 8 bits", "8 bits in groups of 32"),
    "GPTQ 4 act order": ("GPTQ of 4 bits", "float32"),
    "AWQ": ("AWQ of 4 bits", "4 bits in groups of 32"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_folder, "cache_folder", lambda: tmp_path / "cache")
        yield


@pytest.mark.parametrize("form", SAID)
def test_what_is_stored(form: str, base: Path, tmp_path: Path) -> None:
    """By name, with what it runs as; and a step reads fewer bytes than one of float32."""
    flags = {"device": "cpu", "dtype": "bfloat16" if form.startswith("GGUF") else "float32"}
    model, plain = (
        model_info(EngineConfig.model_validate(flags | {"model": str(folder)}))
        for folder in (FORMATS[form](base, tmp_path / "model"), base)
    )
    stored, runs_as = SAID[form]
    found = {(each["form"], each["runs_as"]) for each in model["stored"] if each["layers"] == "mlp"}
    in_codes = linear.runs_codes(torch.device("cpu"), getattr(torch, flags["dtype"]))
    assert found == {(stored, runs_as if in_codes else flags["dtype"])}
    assert model["ignored"] == {}
    read, read_plain = model["bytes"]["weights_per_step"], plain["bytes"]["weights_per_step"]
    if in_codes and form not in DEQUANTIZED:
        assert read < 0.6 * read_plain
    else:
        assert read == pytest.approx(read_plain, rel=0.01)


def test_formats_share_no_times(base: Path, tmp_path: Path) -> None:
    """Times of steps are kept by model, format and how it runs: none is read for another format of the same model."""
    forms = ("GGUF Q4_0", "GGUF Q8_0", "compressed-tensors int4 groups of 32", "compressed-tensors packed int8")
    models = [FORMATS[form](base, tmp_path / f"model-{i}") for i, form in enumerate(forms)] + [base]
    keys = []
    for model, quantization in [*((model, "auto") for model in models), (models[0], "none"), (base, "int8")]:
        with LLM(model=str(model), quantization=quantization, max_running_requests=1, context_length=64) as llm:  # type: ignore[arg-type]
            keys.append(tuple(engine_key(llm.engine).items()))
    assert len(set(keys)) == len(keys) == 7
