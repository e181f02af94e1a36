"""``--deterministic``: the same bits for a request whatever is drafted, cached, chunked or run beside it."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.nn import functional as F

from specmamba import LLM, RequestOutput, SamplingParams
from specmamba.config import EngineConfig
from specmamba.errors import ConfigError, RequestError
from specmamba.flags.command_line import parse_command_line
from specmamba.kernels.native import library
from specmamba.models import nemotron_h
from specmamba.sampling_params import SpeculationParams
from tests.blocks import write_block_head
from tests.decisions import decide_at_random, without_measurement
from tests.families import FAMILIES
from tests.noise import add_noise
from tests.taught import teach

pytestmark = pytest.mark.usefixtures("needs_native")

PATTERN = [7, 21, 90, 33, 64, 21, 5]
PROMPTS = [PATTERN * 4, [11, 42, 3], PATTERN * 2 + [100, 8] + PATTERN, [3, 5, 9, 12, 40] * 17]
SHARED: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "logprobs": 3}
PARAMS = [  # what one of them asks for must not change the bits of the others
    SamplingParams(temperature=0.0, **SHARED),
    SamplingParams(temperature=0.9, seed=5, top_p=0.9, **SHARED),
    SamplingParams(temperature=0.7, seed=6, frequency_penalty=0.5, logit_bias={9: 2.0}, **SHARED),
    SamplingParams(temperature=0.0, prompt_logprobs=2, **SHARED),
]
LIMITS: dict[str, Any] = {"context_length": 160, "max_total_tokens": 2048, "max_running_requests": 4}
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 7}
WAYS: dict[str, dict[str, Any]] = {
    "adaptive": {"speculative_adaptive": "auto", "chunked_prefill_size": 64},
    "batch": {"speculative_algorithm": "none", "chunked_prefill_size": 32},
    "block": {"speculative_algorithm": "dflash", **TREE, "chunked_prefill_size": 17},
    "chain": {"speculative_num_steps": 3},
    "ngram": {"speculative_algorithm": "ngram", "chunked_prefill_size": 32},
    "operators": {**TREE, "disable_cuda_graph": True, "chunked_prefill_size": 17},
    "preempted": {"speculative_num_steps": 2, "chunked_prefill_size": 32},
    "suffix": {"speculative_algorithm": "suffix", "chunked_prefill_size": 64},
    "tree": {**TREE, "chunked_prefill_size": 32},
}
MODELS = {
    "demo": None,
    "gated delta net": "qwen3.5",
    "gated delta net, steps to 2": "olmo-hybrid",
    "windows alone": "lfm2",
    "Mamba1 alone": "falcon-mamba",
    "Mamba1 and experts": "jamba",
    "Mamba2": "granite-hybrid",
    "Mamba2 and experts with GELU": "nemotron-h",
    "KDA and latents": "kimi-linear",
    "KDA and limits of activations": "bailing-hybrid",
}
# Of parts that those above have, in another order: fewer ways.
SIMILAR = {
    "Bamba": "bamba",
    "Falcon-H1": "falcon-h1",
    "gated delta net and experts": "qwen3.5-moe",
    "Mamba1 beside nothing": "mamba1",
    "Mamba2 alone": "mamba2",
    "Qwen3-Next": "qwen3-next",
    "windows and experts": "lfm2-moe",
    "windows of attention": "lfm3",
}
WAYS_OF_SIMILAR = ("operators", "preempted", "tree")
GELU = {"mlp_hidden_act": "gelu"}
LIMITED = {"expert_swiglu_limit_list": [0.05] * 4, "share_expert_swiglu_limit_list": [0.02] * 4}

Answers = list[tuple[Any, ...]]


def answers(outputs: list[RequestOutput]) -> Answers:
    return [(out.token_ids, out.text, out.logprobs, out.prompt_logprobs) for out in outputs]


@cache
def folder_of(model: str, root: Path) -> Path | None:
    if (name := (MODELS | SIMILAR)[model]) is None:
        return None
    folder = root / name
    FAMILIES[name].build(folder / "target", seed=3)
    if changes := {"bailing-hybrid": LIMITED, "nemotron-h": GELU}.get(name):
        file = folder / "target" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text("utf8")) | changes), "utf8")
    add_noise(folder / "target", folder / "draft", 0.01)  # a small model that guesses right mostly, and not always
    write_block_head(folder / "block", folder / "target", seed=4, reads=(1, 0))
    return folder


def start(model: str, root: Path, dtype: str, flags: dict[str, Any], is_exact: bool = True) -> LLM:
    folder = folder_of(model, root)
    given = {"speculative_adaptive": "off", "dtype": dtype, **LIMITS, **flags}
    if folder is not None and flags.get("speculative_algorithm", "dflash") == "dflash":
        given["speculative_draft_model_path"] = str(folder / ("block" if "speculative_algorithm" in flags else "draft"))
    target = None if folder is None else str(folder / "target")
    return LLM(model=target, deterministic=is_exact, **given)


@cache
def alone(model: str, root: Path, dtype: str) -> Answers:
    """Without drafts, each alone and cold, in one chunk."""
    flags = {"speculative_algorithm": "none", "disable_radix_cache": True}
    with start(model, root, dtype, flags) as llm:
        found = answers([llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)])
    assert sum(len(set(tokens)) > 4 for tokens, *_ in found) >= 2  # texts that say one thing only prove little
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def preempt_often(llm: LLM) -> None:
    engine, step, numbers = llm.engine, llm.engine.step, itertools.count()

    def step_and_preempt() -> Any:
        deltas = step()
        if next(numbers) % 3 == 2 and engine.scheduler.verifying:
            engine.preempt(engine.scheduler.verifying[-1])
        return deltas

    engine.step = step_and_preempt  # type: ignore[method-assign]


CASES = [
    (model, dtype, way)
    for model in MODELS
    for dtype in ("bfloat16", "float32")
    for way in WAYS
    if MODELS[model] or way != "block"  # a head of blocks is made for tiny models
] + [(model, dtype, way) for model in SIMILAR for dtype in ("bfloat16", "float32") for way in WAYS_OF_SIMILAR]


@pytest.mark.fast_cases(
    "demo-float32", "Mamba2-float32-tree", "Mamba2-bfloat16-chain", "demo-bfloat16-tree", "GELU-float32-chain"
)
@pytest.mark.parametrize(("model", "dtype", "way"), CASES)
def test_bits_are_those_of_a_request_alone(
    model: str, dtype: str, way: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_measurement(monkeypatch)
    wanted = alone(model, root, dtype)
    with start(model, root, dtype, WAYS[way]) as llm:
        if way == "adaptive":
            decide_at_random(llm, seed=4)
        if way == "preempted":
            preempt_often(llm)
        if way == "block":  # a random head guesses nothing
            texts = [prompt + list(tokens) for prompt, (tokens, *_) in zip(PROMPTS, wanted, strict=True)]
            teach(llm.engine, texts, tmp_path)
        cold = llm.generate(PROMPTS, PARAMS)
        assert answers(cold) == wanted
        hit = llm.generate(PROMPTS, PARAMS)
        assert answers(hit) == wanted
        assert hit[0].num_cached_tokens > 0
        if way == "preempted":
            assert llm.engine.stats().num_preemptions >= 3
        if way in ("block", "chain", "suffix", "tree"):
            drafted = hit if way == "suffix" else cold  # the second time texts are known
            assert sum(out.spec.num_accepted_tokens for out in drafted) > 0


def test_without_the_flag_bits_differ(root: Path) -> None:
    """So the comparison finds other orders of sums."""
    with start("demo", root, "float32", WAYS["tree"], is_exact=False) as llm:
        assert answers(llm.generate(PROMPTS, PARAMS)) != alone("demo", root, "float32")


def test_decides_under_the_rule_that_does_not_look_at_drafts(root: Path) -> None:
    assert EngineConfig(deterministic=True).on_device("cpu").speculative_accept == "target"
    assert EngineConfig().on_device("cpu").speculative_accept == "auto"
    with (
        start("demo", root, "float32", {}) as llm,
        pytest.raises(RequestError, match="under target"),
    ):
        llm.generate([PROMPTS[1]], SamplingParams(temperature=1.0, speculative=SpeculationParams(accept="rejection")))


@pytest.mark.parametrize(
    "flags",
    [
        "--device cuda",
        "--dtype float16",
        "--hicache-size 1 --hicache-state-dtype bfloat16",
        "--mamba-ssm-dtype bfloat16",
        "--speculative-accept rejection",
        "--speculative-state snapshots",
        "--tp-size 2",
    ],
)
def test_refuses_flags(flags: str) -> None:
    parse_command_line(EngineConfig, "specmamba serve", flags.split())
    with pytest.raises(ConfigError, match=f"{' '.join(flags.split()[-2:])}.*deterministic"):
        parse_command_line(EngineConfig, "specmamba serve", ["--deterministic", *flags.split()])


def test_refuses_a_process_without_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda _: None)
    with pytest.raises(ConfigError, match="needs native code"):
        LLM(deterministic=True, **LIMITS)


def test_refuses_activations_whose_bits_depend_on_their_place(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model of one's own may have them."""
    monkeypatch.setitem(nemotron_h.ACTIVATIONS, "gelu", F.gelu)
    folder = folder_of("Mamba2 and experts with GELU", root)
    assert folder is not None
    with pytest.raises(ConfigError, match="NemotronHForCausalLM has gelu, which has no exact form"):
        LLM(model=str(folder / "target"), deterministic=True, **LIMITS)
