"""Reading a target for tools: hidden states, features before layers, and its two matrices."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from specmamba import LLM, SamplingParams
from specmamba.engine.target_reader import TargetStates
from specmamba.errors import ConfigError, PromptTooLongError, RequestError, UnsupportedModelError
from tests.families import FAMILIES
from tests.heads import write_head
from tests.models.test_model_exact import assert_close, random_prompts
from tests.tiny import write_tiny_checkpoint

LENGTHS = (9, 2, 31, 9, 3, 17)


def new_llm(folder: Path, **flags: Any) -> LLM:
    plain: dict[str, Any] = {"speculative_algorithm": "none", "disable_radix_cache": True, "context_length": 64}
    plain |= {"model": str(folder), "dtype": "float32", "device": "cpu", "max_total_tokens": 512}
    return LLM(**plain | flags)


def read(llm: LLM, texts: list[list[int]], layers: tuple[int, ...]) -> dict[int, TargetStates]:
    found: dict[int, TargetStates] = {}

    def see(index: int, states: TargetStates) -> None:
        assert index not in found
        found[index] = states

    llm.workbench.read_target(texts, layers, see)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=2)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with new_llm(folder) as one:
        yield one


@torch.no_grad()
def states_of(model: PreTrainedModel, tokens: list[int], num_layers: int) -> tuple[list[Tensor], Any]:
    """What goes into each layer of transformers' model, [T, H], and what it says. (Families differ in which of their
    hidden states they give out.)"""
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers)
    streams: list[Tensor] = []

    def see(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        streams.append((args[0] if args else kwargs["hidden_states"])[0])

    hooks = [layer.register_forward_pre_hook(see, with_kwargs=True) for layer in layers]
    said = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    return streams, said


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_matrices_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family].build(tmp_path)
    texts = random_prompts(LENGTHS, seed=1)
    texts[3] = list(texts[0])  # the same text twice
    with new_llm(tmp_path, chunked_prefill_size=7, max_running_requests=3, max_queued_requests=2) as llm:
        num_layers = llm.engine.model.num_layers
        layers = (0, num_layers - 1)
        found = read(llm, texts, layers)
        embedding, output = llm.workbench.target_matrices()
    assert found.keys() == set(range(len(texts)))
    assert torch.equal(embedding, model.get_input_embeddings().weight.detach())
    for index, states in found.items():
        streams, said = states_of(model, texts[index][:-1], num_layers)
        assert_close(states.features, torch.cat([streams[layer] for layer in layers], -1))
        assert_close(states.hidden, said.hidden_states[-1][0])
        assert_close(states.hidden @ output.T, said.logits[0])


@pytest.mark.parametrize("flags", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
@pytest.mark.parametrize("family", ["falcon-h1", "granite-hybrid", "qwen3.5"])
def test_the_output_matrix_of_other_forms(family: str, flags: dict[str, Any], tmp_path: Path) -> None:
    FAMILIES[family].build(tmp_path)
    with new_llm(tmp_path, **flags) as llm:
        _, output = llm.workbench.target_matrices()
        target, dtype = llm.engine.model.target, llm.engine.model.cache_shape.dtype
        hidden = torch.randn(5, target.hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
        expected = target.logits(hidden).float()
    assert output.is_contiguous()
    assert output.dtype is torch.float32
    tolerance = 1e-4 if dtype is torch.float32 else 2**-7
    assert float((hidden.float() @ output.T - expected).abs().max()) <= tolerance * float(expected.abs().max())


def test_matrices_can_be_trained_on(llm: LLM) -> None:
    """They are copies, and no inference tensors."""
    embedding, output = llm.workbench.target_matrices()
    assert not embedding.is_inference()
    assert not output.is_inference()
    embedding.zero_()
    assert float(llm.workbench.target_matrices()[0].abs().max()) > 0


def test_features_are_the_states_where_no_layer_is_named(llm: LLM) -> None:
    for states in read(llm, random_prompts((8,), seed=0), ()).values():
        assert torch.equal(states.features, states.hidden)


def test_the_engine_is_restored(llm: LLM) -> None:
    prompt, params = random_prompts((12,), seed=4), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    before, drafter = llm.generate(prompt, params), llm.engine.runner.drafter
    read(llm, random_prompts(LENGTHS, seed=1), (1, 2))
    assert llm.engine.runner.drafter is drafter
    assert llm.engine.runner.target is llm.engine.model.target
    assert llm.generate(prompt, params) == before

    def fail(index: int, states: TargetStates) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.workbench.read_target(random_prompts(LENGTHS, seed=1), (1,), fail)
    assert not llm.engine.has_unfinished_requests
    stats = llm.engine.stats()
    assert (stats.kv_used_tokens, stats.state_used_slots) == (0, 0)
    assert llm.generate(prompt, params) == before


def test_a_draft_head_reads_its_own_layers_again(folder: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, folder, "eagle3", seed=0)
    drafts = {"speculative_algorithm": "eagle3", "speculative_draft_model_path": str(head.folder)}
    prompt, params = random_prompts((12,), seed=4), SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with new_llm(folder, **drafts) as llm:
        before = llm.generate(prompt, params)
        read(llm, random_prompts((5,), seed=1), (0,))
        assert llm.generate(prompt, params) == before
        assert before[0].spec.num_draft_tokens > 0


def test_bad_requests_are_refused_before_anything_runs(llm: LLM, folder: Path) -> None:
    seen: list[int] = []

    def see(index: int, states: TargetStates) -> None:
        seen.append(index)

    good = [3, 4, 5]
    for bad, error in (
        ([7], RequestError),
        ([], RequestError),
        ([1, 131], RequestError),
        ([1] * 64, PromptTooLongError),
    ):
        with pytest.raises(error):
            llm.workbench.read_target([good, bad], (), see)
    with pytest.raises(UnsupportedModelError, match="in front of layer 4, the target has layers 0 to 3"):
        llm.workbench.read_target([good], (4,), see)
    assert not seen
    llm.engine.add_request("running", good, SamplingParams(max_tokens=4))
    with pytest.raises(RequestError, match="requests are running"):
        llm.workbench.read_target([good], (), see)
    with (
        new_llm(folder, disable_radix_cache=False) as caching,
        pytest.raises(ConfigError, match="--disable-radix-cache"),
    ):
        caching.workbench.read_target([good], (), see)


def test_numbers_that_are_not_finite_are_an_error(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][5] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with new_llm(tmp_path) as llm:
        with pytest.raises(RequestError, match=r"text 2: .* not finite"):
            read(llm, [[1, 2, 3], [4, 5, 6]], ())
        assert not llm.engine.has_unfinished_requests
        assert len(read(llm, [[1, 2, 3]], ())) == 1


def test_the_digest_tells_targets_apart(folder: Path, tmp_path: Path) -> None:
    def digest(path: Path, **flags: Any) -> str:
        with new_llm(path, **flags) as llm:
            return llm.workbench.target_digest

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert digest(copy) == digest(folder)
    others = {digest(folder), digest(folder, dtype="bfloat16"), digest(folder, quantization="int8")}
    tensors: dict[str, Tensor] = load_file(copy / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][0, 0] += 1
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    others.add(digest(copy))
    config = json.loads((copy / "config.json").read_text("utf8"))
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}), "utf8")
    others.add(digest(copy))
    assert len(others) == 5
