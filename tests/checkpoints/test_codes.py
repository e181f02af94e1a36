"""Checkpoints that run in their codes: near the weights that these stand for, and drafts change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba import LLM, SamplingParams
from specmamba.cli import main
from specmamba.config import EngineConfig
from specmamba.engine.model_report import model_info
from specmamba.errors import ConfigError
from specmamba.kernels import linear
from specmamba.kernels.linear import native_ops
from specmamba.kernels.linear.quantized import e4m3_values
from specmamba.measure.full_batch import Job, accept_length, run_full_batch
from specmamba.measure.prompts import bundled_texts, encode_with_continuation
from tests.exactness import assert_same_greedy_texts

PROMPTS = ["import os\n\ndef read_file(path):\n    ", "class Stack:\n    def __init__(self):\n"]
FLAGS: dict[str, Any] = {"dtype": "float32", "context_length": 160, "max_total_tokens": 2048, "max_running_requests": 2}
TEXT = 'with open(path, "r") as file:\n        return file.read()\n\n\nclass Stack:\n    def __init__(self):\n'
FORMS = ["int4", "int8", "fp8"]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo as ``specmamba quantize`` writes it, by form."""
    folder = tmp_path_factory.mktemp("quantized")
    for form in FORMS:
        assert main(["quantize", "--out", str(folder / form), "--format", form, "--group-size", "32"]) == 0
    return {form: folder / form for form in FORMS}


def logits(folder: Path, **flags: Any) -> Tensor:
    """Along a given text: [tokens, V]."""
    seen: list[Tensor] = []
    with LLM(model=str(folder), speculative_algorithm="none", **(FLAGS | flags)) as llm:
        encode = llm.engine.tokenizer.encode
        llm.workbench.logits_along(encode(PROMPTS[0]), encode(TEXT), seen.append)
    return torch.stack(seen)


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_weights(form: str, quantized: dict[str, Path], needs_native: None) -> None:
    """Inputs of products are rounded to bytes, which moves the demo's logits by 1 %; FP8 is rounded anew, to bytes."""
    found, meant = (logits(quantized[form], quantization=run) for run in ("auto", "none"))
    off = (found - meant).norm() / (meant - meant.mean(-1, keepdim=True)).norm()
    assert 0 < off < 0.03


@pytest.mark.parametrize(
    "flags", [{"speculative_num_steps": 3}, {"speculative_num_steps": 3, "speculative_eagle_topk": 3}]
)
@pytest.mark.parametrize("form", FORMS)
def test_drafts_change_nothing(
    form: str, flags: dict[str, int], quantized: dict[str, Path], needs_native: None
) -> None:
    """Chains and trees, with the checkpoint's head in codes too; and drafts are accepted."""

    def texts(**other: Any) -> list[tuple[tuple[int, ...], float]]:
        with LLM(model=str(quantized[form]), **(FLAGS | other)) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=64, temperature=0, ignore_eos=True))
        return [(tuple(output.token_ids), output.spec.accept_length) for output in outputs]

    drafted, plain = texts(speculative_adaptive="off", **flags), texts(speculative_algorithm="none")
    assert [text for text, _ in drafted] == [text for text, _ in plain]
    assert min(length for _, length in drafted) > 1.5


@pytest.mark.parametrize("form", FORMS)
def test_a_head_in_codes_beside_a_target_without(form: str, needs_native: None) -> None:
    """It is smaller, drafts with it are accepted, and the text is that of plain decoding."""
    sizes, texts = {}, {}
    for own in (form, "none"):
        flags = {"speculative_draft_model_quantization": own, "speculative_num_steps": 3, "speculative_adaptive": "off"}
        with LLM(**(FLAGS | flags)) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=64, temperature=0, ignore_eos=True))
            sizes[own] = llm.engine.models.weight_bytes
        texts[own] = [output.token_ids for output in outputs]
        assert min(output.spec.accept_length for output in outputs) > 1.5
    assert texts[form] == texts["none"]
    assert sizes[form] < sizes["none"]


@pytest.mark.parametrize("form", FORMS)
def test_rounding_at_load_is_that_of_the_command(form: str, quantized: dict[str, Path], needs_native: None) -> None:
    """But for scales, which the file stores in bf16, and the output head, which is rounded at load only."""
    rounded = logits(Path(EngineConfig().model_path), quantization=form)
    stored = logits(quantized[form])
    off = (rounded - stored).norm() / (stored - stored.mean(-1, keepdim=True)).norm()
    assert off < (0.05 if form == "fp8" else 0.04)


def test_sizes(quantized: dict[str, Path], needs_native: None) -> None:
    """A step of one request reads a byte or half a byte per weight, and the scales."""
    flags = {"device": "cpu", "dtype": "bfloat16", "speculative_algorithm": "none"}
    models = {form: {"model": str(folder)} for form, folder in quantized.items()} | {"bfloat16": {}}
    found = {form: model_info(EngineConfig.model_validate(flags | model)) for form, model in models.items()}
    sizes = {form: info["bytes"]["weights_per_step"] for form, info in found.items()}
    assert sizes["int4"] < sizes["int8"] <= sizes["fp8"] < sizes["bfloat16"]


def test_texts_part_only_where_logits_are_close(quantized: dict[str, Path], needs_native: None) -> None:
    """A batch, and requests one by one: rows do not know of each other."""
    with LLM(model=str(quantized["int4"]), **FLAGS) as llm:
        params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        together = [tuple(output.token_ids) for output in llm.generate(PROMPTS, params)]
        alone = [tuple(llm.generate([prompt], params)[0].token_ids) for prompt in PROMPTS]
    assert_same_greedy_texts(together, alone, PROMPTS, lambda: LLM(model=str(quantized["int4"]), **FLAGS))
    assert together == alone


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_head_in_codes_guesses_as_well(form: str, quantized: dict[str, Path], needs_native: None) -> None:
    """Accepted length along given texts, target and head in codes: within 3 % of bf16's."""
    texts = [text for text in bundled_texts() if text.continuation]

    def accepted(model: Path) -> float:
        flags: dict[str, Any] = {"dtype": "bfloat16", "speculative_num_steps": 3, "speculative_adaptive": "off"}
        with LLM(model=str(model), max_running_requests=len(texts), **flags) as llm:
            params = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
            pairs = [encode_with_continuation(text, llm.engine.tokenizer) for text in texts]
            jobs = [Job(tuple(prompt), params, tuple(follows[:120])) for prompt, follows in pairs]
            return accept_length([run_full_batch(llm, jobs)])

    assert accepted(quantized[form]) == pytest.approx(accepted(Path(EngineConfig().model_path)), rel=0.03)


@pytest.mark.parametrize("flag", ["quantization", "speculative_draft_model_quantization"])
@pytest.mark.parametrize("form", ["int4", "fp8"])
def test_codes_need_native_code(form: str, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_ops, "can_pack_codes", lambda *_: False)
    with pytest.raises(ConfigError, match=f"{flag} {form} needs native code"):
        LLM(**{flag: form})  # type: ignore[arg-type]


def test_scaled_products_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match="quantization fp8-dynamic needs bfloat16 on a GPU of compute capability"):
        LLM(quantization="fp8-dynamic", dtype="bfloat16", device="cpu")


def test_scaled_products_in_a_model(monkeypatch: pytest.MonkeyPatch, needs_native: None) -> None:
    """In PyTorch's form for CPUs: near the demo's logits, and drafts of its head are accepted."""
    demo = Path(EngineConfig().model_path)
    monkeypatch.setattr(linear, "runs_scaled", lambda *_: True)
    flags = {"dtype": "bfloat16", "disable_cuda_graph": True}
    found, meant = (logits(demo, **flags, quantization=form).float() for form in ("fp8-dynamic", "none"))
    off = (found - meant).norm() / (meant - meant.mean(-1, keepdim=True)).norm()
    assert 0.005 < off < 0.12
    with LLM(quantization="fp8-dynamic", **(FLAGS | flags)) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=48, temperature=0, ignore_eos=True))
    assert min(output.spec.accept_length for output in outputs) > 1.5


def test_groups_from_the_command_line(capsys: pytest.CaptureFixture[str], needs_native: None) -> None:
    """Where values are text."""
    flags = ["generate", "--prompt", "def", "--max-tokens", "4", "--quantization", "int4", "--quantization-group-size"]
    assert main([*flags, "64"]) == 0
    with pytest.raises(SystemExit, match="2"):
        main([*flags, "48"])
    assert "32, 64 or 128" in capsys.readouterr().err


def test_groups_belong_to_int4() -> None:
    with pytest.raises(ConfigError, match="quantization_group_size: only int4 has groups"):
        LLM(quantization="int8", quantization_group_size=64)


def test_a_draft_model_has_its_own_form(quantized: dict[str, Path], needs_native: None) -> None:
    """Codes of a draft model stay, or are dequantized, apart from the target's."""
    sizes = {}
    for form in ("auto", "none"):
        flags = {"speculative_draft_model_path": str(quantized["int4"]), "speculative_draft_model_quantization": form}
        with LLM(**FLAGS | flags) as llm:
            assert llm.engine.models.draft is not None
            sizes[form] = llm.engine.models.draft.weight_bytes
    assert sizes["auto"] < sizes["none"] / 2


def test_gates_are_not_rounded(needs_native: None) -> None:
    """As ``specmamba quantize`` leaves them: few outputs that decide much."""
    parts, gate = [torch.randn(40, 64)], torch.randn(2, 64)
    x = torch.randn(3, 64)
    product = linear.packed(parts, "int4-g32", gates=[gate])
    assert torch.equal(product(x)[:, 40:], linear.pack(gate)(x))
    assert not torch.equal(product(x)[:, :40], linear.pack(parts[0])(x))


def test_codes_need_a_dtype_that_products_take(needs_native: None) -> None:
    with pytest.raises(ConfigError, match="this is float16 on cpu"):
        LLM(quantization="int4", dtype="float16")


def test_tables_with_nan_are_alike() -> None:
    """FP8 has codes that are NaN: experts and neighbouring projections in it are joined all the same."""
    codes, scale = torch.zeros(4, 8, dtype=torch.uint8), torch.ones(4, 1)
    first, second = (linear.QuantizedMatrix(codes, scale, 8, table=e4m3_values()) for _ in range(2))
    assert first.is_like(second)
    other = linear.QuantizedMatrix(codes, scale, 8, table=e4m3_values().neg())
    assert not first.is_like(other)
