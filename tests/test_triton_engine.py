"""Whole steps through the Triton kernels, in Triton's interpreter: the same text as without them.

The interpreter takes a second or more for a layer, so texts are short. It is chosen when kernels are imported, so each
run is a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.families import falcon_h1
from tests.tiny import FULL, LINEAR, write_tiny_checkpoint

PROGRAM = """
import json, sys, torch
from specmamba import LLM, SamplingParams
from specmamba.cuda_graphs import EagerReplay
from specmamba.kernels import gpu

torch.set_num_threads(1)
flags = json.loads(sys.argv[1])
with LLM(dtype="float32", context_length=48, max_total_tokens=192, max_running_requests=2, **flags) as llm:
    runner = llm.engine.runner
    if runner.replays is not None:
        runner.replays.replay = EagerReplay(has_fixed_shapes=True)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    outputs = llm.generate([[5, 6, 7, 8, 9], [11, 12]], params)
    assert gpu.runs_on(torch.device("cpu")) == llm.engine.model.cache_shape.folds_in_verify
    print(json.dumps({"tokens": [o.token_ids for o in outputs], "triton": gpu.is_interpreted()}))
"""
TREE: dict[str, Any] = {"speculative_num_steps": 2, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 5}


def run(folder: Path, interpreted: bool, **flags: Any) -> dict[str, Any]:
    switches = {"SPECMAMBA_TRITON": "interpret", "TRITON_INTERPRET": "1"} if interpreted else {"SPECMAMBA_TRITON": "0"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_INTERPRET")} | switches
    arguments = json.dumps({"model": str(folder), "device": "cpu"} | flags)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, arguments],
        env=environment,
        capture_output=True,
        check=False,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["triton"] == interpreted
    return answer


def test_a_gated_delta_net_with_a_draft_tree(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    folder = write_tiny_checkpoint(tmp_path / "model", seed=2, layer_types=[LINEAR, FULL])
    tokens = run(folder, interpreted=False, **TREE)["tokens"]
    assert run(folder, interpreted=True, cuda_graph_max_bs=2, **TREE)["tokens"] == tokens


def test_mamba2(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    falcon_h1.build(tmp_path / "model", seed=3)
    tokens = run(tmp_path / "model", interpreted=False)["tokens"]
    assert run(tmp_path / "model", interpreted=True)["tokens"] == tokens
