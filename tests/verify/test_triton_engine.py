"""Whole steps through the Triton kernels, in Triton's interpreter: the same text as without them.

The interpreter takes a second or more for a layer, so texts are short. It is chosen when kernels are imported, so each
of its runs is a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from specmamba import LLM, SamplingParams
from specmamba.cli import main
from specmamba.cuda_graphs import EagerReplay
from specmamba.kernels import gpu
from specmamba.kernels.paged_attention import AttentionConfig, crossover, torch_ops
from tests.families import falcon_h1, kimi_linear, lfm2, mamba1
from tests.families.checkpoints import write_checkpoint
from tests.pairwise import IS_FULL
from tests.repository import ROOT
from tests.tiny import FULL, LINEAR, WHOLE_BLOCKS, write_tiny_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("forked_processes")]
STATES = ["records", "snapshots"] if IS_FULL else ["records"]  # operators have tests of both

pytest.importorskip("triton")

PROGRAM = """
import json, sys, torch
from specmamba.kernels import gpu
from tests.kernels.interpreter import quicken_interpreter
from tests.verify.test_triton_engine import generate

torch.set_num_threads(1)
quicken_interpreter()
assert gpu.runs_on(torch.device("cpu"))
print(json.dumps(generate(**json.loads(sys.argv[1]))))
"""
TREE: dict[str, Any] = {"speculative_num_steps": 2, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 5}


def generate(**flags: Any) -> list[list[int]]:
    """The tokens of two prompts: three, or ``max_tokens``; the first prompt has 5 tokens, or ``length``."""
    first, gathered = flags.pop("length", 5), gather_long_runs() if flags.pop("gathers", False) else None
    params = SamplingParams(max_tokens=flags.pop("max_tokens", 3), temperature=0.0, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "context_length": 48, "max_total_tokens": 192}
    with LLM(**settings | flags, max_running_requests=2) as llm:
        runner = llm.engine.runner
        if runner.graph_runner is not None:
            runner.graph_runner.replay = EagerReplay(has_fixed_shapes=True)
        assert llm.engine.model.cache_shape.folds_in_verify == gpu.folds_in_verify(torch.device("cpu"))
        outputs = llm.generate([[5 + i % 97 for i in range(first)], [11, 12]], params)
        assert gathered is None or gathered == [flags["chunked_prefill_size"]] * 3
        return [list(output.token_ids) for output in outputs]


def gather_long_runs() -> list[int]:
    """Make an engine find that PyTorch is faster for every run, in a process of its own.

    Returns:
        What will hold the queries of each call that gathers.
    """
    lengths: list[int] = []
    attend, patch = torch_ops.attend_spans, pytest.MonkeyPatch()

    def noted(q: Tensor, *given: Any) -> Tensor:
        lengths.append(q.shape[1])
        return attend(q, *given)

    def heads_of(layer: AttentionConfig, dtype: torch.dtype, device: torch.device) -> crossover.Heads:
        sizes = layer.num_query_heads, layer.num_key_heads, layer.head_dim
        return crossover.Heads(*sizes, layer.has_gate, dtype, device)

    patch.setattr(crossover, "can_measure", lambda _: True)
    patch.setattr(crossover, "heads_of", heads_of)  # also in float32, whose texts can be compared
    patch.setattr(crossover, "measure", lambda heads, *_: crossover._least.setdefault(heads, 1))
    patch.setattr(torch_ops, "attend_spans", noted)
    return lengths


def generate_interpreted(switch: str = "interpret", **flags: Any) -> list[list[int]]:
    """In a process that chose Triton's interpreter, for all operators or for some."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(flags)],
        cwd=ROOT,
        env={**os.environ, "SPECMAMBA_TRITON": switch, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    tokens: list[list[int]] = json.loads(done.stdout)
    return tokens


@pytest.mark.parametrize("kv", ["auto", "int8", "fp8_e4m3"] if IS_FULL else ["fp8_e4m3"])
def test_a_gated_delta_net_with_a_draft_tree(tmp_path: Path, kv: str) -> None:
    flags = {"model": str(write_tiny_checkpoint(tmp_path / "model", seed=2, layer_types=[LINEAR, FULL]))}
    flags |= {"kv_cache_dtype": kv, **TREE}
    tokens = generate(**flags)
    assert generate_interpreted(**flags, cuda_graph_max_bs=2) == tokens


def test_long_runs_whose_keys_are_gathered(tmp_path: Path) -> None:
    """Both whole chunks in the target, the second in the draft head too: its first query of all has no key."""
    flags: dict[str, Any] = {
        "model": str(write_tiny_checkpoint(tmp_path / "model", seed=2, layer_types=[LINEAR, FULL]))
    }
    flags |= {"length": 135, "context_length": 160, "max_total_tokens": 512, "chunked_prefill_size": 65}
    tokens = generate(**flags)
    assert generate_interpreted("interpret,paged_attention", **flags, gathers=True) == tokens


def test_without_some_operators(tmp_path: Path) -> None:
    """A layer that is half in Triton: its records are folded before the verify."""
    flags = {"model": str(write_tiny_checkpoint(tmp_path / "model", seed=2, layer_types=[LINEAR, FULL]))}
    flags |= {"mamba_ssm_dtype": "bfloat16", **TREE}
    switch = "interpret,-gated_delta_rule,-paged_attention,-state_copy"
    assert generate_interpreted(switch, **flags) == generate(**flags)


def test_mamba2(tmp_path: Path) -> None:
    config = FalconH1Config(**falcon_h1.DEFAULTS | {"num_hidden_layers": 2})
    write_checkpoint(tmp_path / "model", FalconH1ForCausalLM(config), seed=3)
    assert generate_interpreted(model=str(tmp_path / "model")) == generate(model=str(tmp_path / "model"))


@pytest.mark.parametrize("state", STATES)
def test_mamba1_with_drafts(tmp_path: Path, state: str) -> None:
    """With more tokens than a row has records for: rows fold in the verify."""
    config = MambaConfig(**mamba1.DEFAULTS | {"num_hidden_layers": 2})
    write_checkpoint(tmp_path / "model", MambaForCausalLM(config), seed=3)
    flags: dict[str, Any] = {"model": str(tmp_path / "model"), "speculative_state": state, "max_tokens": 20}
    flags |= {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 5}
    assert generate_interpreted(**flags, cuda_graph_max_bs=2) == generate(**flags)


@pytest.mark.parametrize("state", ["records", "snapshots"] if IS_FULL else ["snapshots"])
def test_short_convolutions_with_drafts(tmp_path: Path, state: str) -> None:
    """States are windows alone, which a verify moves where a row folds."""
    settings = lfm2.DEFAULTS | {"num_hidden_layers": 2, "layer_types": [lfm2.CONV, lfm2.ATTENTION]}
    write_checkpoint(tmp_path / "model", Lfm2ForCausalLM(Lfm2Config(**settings)), seed=3)
    flags = {"model": str(tmp_path / "model"), "speculative_state": state, "speculative_algorithm": "ngram"}
    assert generate_interpreted(**flags) == generate(**flags)


def test_decays_by_key_channel_with_drafts(tmp_path: Path) -> None:
    """Beside latent attention; rows fold in the verify."""
    layers = {"layer_types": [kimi_linear.LINEAR, kimi_linear.FULL], "mlp_layer_types": ["dense", "sparse"]}
    config = KimiLinearConfig(**kimi_linear.DEFAULTS | layers, num_hidden_layers=2)
    write_checkpoint(tmp_path / "model", KimiLinearForCausalLM(config), seed=3)
    flags: dict[str, Any] = {"model": str(tmp_path / "model"), "speculative_algorithm": "ngram", "max_tokens": 16}
    flags |= {"speculative_num_draft_tokens": 5}
    assert generate_interpreted(**flags, cuda_graph_max_bs=2) == generate(**flags)


def test_a_checkpoint_in_codes(tmp_path: Path) -> None:
    """The text of the weights that the codes stand for, which are exact: scales are stored in bf16."""
    write_tiny_checkpoint(tmp_path / "model", seed=4, layer_types=[LINEAR, FULL], **WHOLE_BLOCKS)
    command = ["quantize", "--model", str(tmp_path / "model"), "--format", "int4", "--group-size", "32"]
    assert main([*command, "--out", str(tmp_path / "codes")]) == 0
    tokens = generate(model=str(tmp_path / "codes"), quantization="none")
    assert generate_interpreted(model=str(tmp_path / "codes"), **TREE) == tokens
    if IS_FULL:  # rows of one token, which the operator's own tests have
        assert generate_interpreted(model=str(tmp_path / "codes")) == tokens
