"""Models in every quantized format: logits as far from those of the dequantized weights as rounded inputs explain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba import LLM, SamplingParams
from specmamba.checkpoints.gguf import gguf_folder
from specmamba.kernels import linear
from specmamba.kernels.linear import QuantizedMatrix
from specmamba.kernels.linear.grouped import regroup
from tests.checkpoints.data.make_quantized_gguf import NUM_TOKENS
from tests.checkpoints.formats import DEQUANTIZED, FORMATS, write_base
from tests.exactness import assert_same_greedy_texts, rows_are_independent

FLAGS: dict[str, Any] = {"dtype": "float32", "context_length": 96, "max_total_tokens": 512, "max_running_requests": 2}
PROMPTS = [[7, 21, 90, 33, 64, 21, 5], [11, 42, 3]]
GIVEN = torch.randint(0, NUM_TOKENS, (80,), generator=torch.Generator().manual_seed(1)).tolist()
NUM_NEW = 24
# One of each way to store and to run
FAST = ("Q4_K", "Q8_0", "Q2_K", "zero points", "nvfp4", "Qwen", "GPTQ 4", "AWQ")


class Disturbed:
    """A product of the weights that products hold, with inputs that are off at random by as much as rounding moves."""

    def __init__(self, matrix: QuantizedMatrix, random: torch.Generator) -> None:
        grouped = regroup(matrix)
        self._weight, self._group, self._random = grouped.dequantize(), grouped.group, random
        self.nbytes = self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        groups = torch.nn.functional.pad(x, (0, -width % self._group)).unflatten(-1, (-1, self._group))
        step = (groups.abs().amax(-1) / 127).repeat_interleave(self._group, -1)[..., :width]
        return (x + step * (torch.rand(x.shape, generator=self._random) - 0.5)) @ self._weight.t()

    def rows(self, index: Tensor) -> Tensor:
        return self._weight[index]


def logits_of(llm: LLM) -> Tensor:
    """Along given tokens, in plain decoding: [tokens, V]."""
    seen: list[Tensor] = []
    llm.workbench.logits_along(PROMPTS[0], GIVEN, seen.append)
    return torch.stack(seen)


def texts_of(llm: LLM) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True)
    return [tuple(output.token_ids) for output in llm.generate([list(prompt) for prompt in PROMPTS], params)]


def plain(model: Path, **flags: Any) -> LLM:
    return LLM(model=str(model), speculative_algorithm="none", **(FLAGS | flags))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_folder, "cache_folder", lambda: tmp_path / "cache")
        yield


@pytest.mark.fast_cases(*FAST)
@pytest.mark.parametrize("form", FORMATS)
def test_logits_and_drafts(form: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits in codes against those of the dequantized weights in float32; drafts, chains and trees, change no text.

    Products round an input to a whole number of steps, 1/127 of the largest of its group, so it is off by an error that
    is spread evenly over half a step to both sides. The same products with random errors of that distribution, and
    nothing else, are therefore off by as much: to first order logits are moved by a sum of these errors, the same in
    both, so its mean square has the same expectation. Each token has errors of its own, so that the ratio of both
    mean squares is that of two chi-squares with as many degrees of freedom as tokens at the least. With 80 it is above
    1.5^2 or below 1/1.5^2 four times in ten thousand: the distances differ by a factor of 1.5 at the most. Weights are
    those of the products in both (scales of 11 bits, FP8 as bytes), so that what they move is in both distances.

    Where products do not multiply by codes, weights are dequantized, and the logits are the same, but for the order of
    sums where there is no native code.
    """
    model = FORMATS[form](base, tmp_path / "model")
    flags = FLAGS | {"speculative_num_steps": 2, "speculative_eagle_topk": 2}
    with LLM(model=str(model), **flags) as llm:
        runs_as = {each.runs_as for each in llm.engine.model.stored.matrices}
        texts = [texts_of(llm)]
        llm.workbench.use_drafts(speculative_algorithm="mtp", speculative_num_steps=2)
        texts.append(texts_of(llm))
        llm.workbench.use_drafts(speculative_algorithm="none")
        expected, found = texts_of(llm), logits_of(llm)
    for drafted in texts:
        assert_same_greedy_texts(drafted, expected, PROMPTS, lambda: plain(model))
    with plain(model, quantization="none") as llm:
        meant = logits_of(llm)
    in_codes = linear.runs_codes(torch.device("cpu"), torch.float32) and form not in DEQUANTIZED
    assert any("bits in groups" in each for each in runs_as) == in_codes
    if not in_codes:
        # without native code sums of float32 depend on what else is in memory
        tolerance = 0.0 if rows_are_independent(torch.float32) else 1e-4
        torch.testing.assert_close(found, meant, rtol=0.0, atol=tolerance)
        return
    random = torch.Generator().manual_seed(0)
    monkeypatch.setattr(linear, "pack_codes", lambda matrix, dtype: Disturbed(matrix, random))
    with plain(model, disable_cuda_graph=True) as llm:
        disturbed = logits_of(llm)
    off, explained = ((x - meant).square().mean().sqrt() for x in (found, disturbed))
    print(f"RATIO {form}: {float(off / explained):.3f} off {float(off / meant.std()):.4f}")
    assert explained / 1.5 < off < 1.5 * explained
    assert explained < 0.1 * meant.std()
