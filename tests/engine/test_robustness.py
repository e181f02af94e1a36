"""Extreme settings of clients and invalid numbers of models must not affect other requests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from specmamba import LLM, SamplingParams
from specmamba.config import EngineConfig
from specmamba.core import OutputDelta
from specmamba.engine.engine import Engine
from specmamba.errors import QueueFullError
from specmamba.flags.command_line import parse_command_line
from specmamba.generate_config import GenerateConfig
from specmamba.kernels import sampling
from specmamba.layers.primitives import Embedding
from specmamba.server_config import ServerConfig
from tests.pairwise import pairwise
from tests.server.test_server_process import ROOT


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", device="cpu", context_length=128, max_running_requests=4) as llm:
        yield llm


def assert_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_used_tokens, stats.state_used_slots) == (0, 0, 0, 0)


class TestExtremeSettings:
    @pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-38, 1e-5])
    def test_a_tiny_temperature_is_greedy(self, llm: LLM, temperature: float) -> None:
        greedy, cold = (SamplingParams(max_tokens=12, temperature=t, seed=1) for t in (0.0, temperature))
        assert llm.generate("def main():", cold)[0].token_ids == llm.generate("def main():", greedy)[0].token_ids

    @pytest.mark.parametrize("name", ["temperature", "top_p"])
    def test_probabilities_stay_probabilities(self, name: str) -> None:
        logits = torch.tensor([[[3.0e38, -3.0e38, 0.0], [1e4, 1e4, -1e4]]])
        value = torch.tensor([1e-38])
        top_p = value if name == "top_p" else None
        probs = sampling.probabilities(logits, torch.tensor([1e-38]), None, top_p, None)
        assert torch.isfinite(probs).all()
        torch.testing.assert_close(probs.sum(-1), torch.ones(1, 2))

    @pytest.mark.parametrize(
        "settings",
        [{"repetition_penalty": 1e-40}, {"repetition_penalty": 0}, {"top_k": 10**30}, {"top_k": 2**31 + 1}],
        ids=str,
    )
    def test_values_beyond_the_range_of_numbers_are_refused(self, settings: dict[str, float]) -> None:
        with pytest.raises(ValidationError):
            SamplingParams(**settings)  # type: ignore[arg-type]

    def test_the_strongest_penalties_still_give_tokens(self, llm: LLM) -> None:
        params = SamplingParams(max_tokens=24, temperature=0.8, seed=1, repetition_penalty=0.01, top_k=2**31)
        output = llm.generate("x = ", params)[0]
        assert len(output.token_ids) == 24 or output.finish_reason == "stop"
        assert output.finish_reason != "error"


class TestNumbersThatAreNotFinite:
    """A request whose numbers overflow ends with an error; other requests, also in its memory, are not affected."""

    BAD_TOKEN = 9

    @pytest.fixture
    def engine(self) -> Engine:
        config = EngineConfig(dtype="float32", device="cpu", context_length=128, max_running_requests=3, page_size=4)
        return Engine(config)

    @pytest.fixture
    def sick(self, engine: Engine) -> Engine:
        """One token's embedding is NaN, as an overflow in float16 would make it; the output head is not."""
        target: Any = engine.model.target
        target.embedding = Embedding(target.embedding.shape, target.embedding.table.clone())
        target.embedding.table[self.BAD_TOKEN] = float("nan")
        return engine

    @pairwise(
        pytest.mark.parametrize("temperature", [0.0, 0.8]),
        pytest.mark.parametrize("order", [("long", "good", "bad"), ("bad", "good", "long"), ("good", "bad", "long")]),
        pytest.mark.parametrize("bad", [[8, 9, 7], [5, 8, 9], [9]], ids=["in the prompt", "at the root", "alone"]),
    )
    def test_only_the_request_concerned_ends(
        self, sick: Engine, temperature: float, order: tuple[str, ...], bad: list[int]
    ) -> None:
        params = SamplingParams(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True)
        prompts = {"long": list(range(20, 60)), "good": [5, 6, 7], "bad": bad}
        expected = {name: self.run(sick, {name: prompts[name]}, params)[name] for name in ("long", "good")}
        deltas = self.run(sick, {name: prompts[name] for name in order}, params)
        assert deltas["bad"][-1].finish_reason == "error"
        assert "not finite" in (deltas["bad"][-1].error or "")
        for name in ("long", "good"):
            assert tokens_of(deltas[name]) == tokens_of(expected[name])
        assert_idle(sick)

    def test_memory_of_an_aborted_request(self, sick: Engine) -> None:
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        prompts = {"long": list(range(20, 60)), "good": [5, 6, 7]}
        expected = {name: self.run(sick, {name: prompt}, params)[name] for name, prompt in prompts.items()}
        for i in range(3):
            sick.add_request(f"bad {i}", [8] * 30 + [9] * 10, params)
        for i in range(3):
            sick.abort(f"bad {i}")  # waiting, or with its KV written
            sick.step()
        deltas = self.run(sick, prompts, params)
        assert {name: tokens_of(of) for name, of in deltas.items()} == {n: tokens_of(of) for n, of in expected.items()}

    def test_in_the_middle_of_a_text(self, engine: Engine) -> None:
        params = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)
        expected = self.run(engine, {"good": [5, 6, 7]}, params)["good"]
        engine.add_request("good", [5, 6, 7], params)
        engine.add_request("bad", [8, 9], params)
        engine.step()
        records: Any = engine.pools.state_buffers
        records.conv_inputs[:, engine.live.by_id["bad"].held_row] = float("nan")
        deltas = self.run(engine, {}, params)
        assert deltas["bad"][-1].finish_reason == "error"
        good = tokens_of(deltas["good"])
        assert good == tokens_of(expected)[-len(good) :]
        again = self.run(engine, {"good": [5, 6, 7], "other": [8, 9]}, params)  # in the memory that held NaN
        assert tokens_of(again["good"]) == tokens_of(expected)
        assert again["other"][-1].finish_reason == "length"

    def test_the_reason_reaches_python(self) -> None:
        with LLM(dtype="float32", device="cpu", context_length=64) as llm:
            target: Any = llm.engine.model.target
            target.embedding = Embedding(target.embedding.shape, target.embedding.table * float("nan"))
            output = llm.generate([[5, 6]])[0]
            assert (output.finish_reason, output.token_ids) == ("error", ())
            assert "not finite" in (output.error or "")

    @staticmethod
    def run(engine: Engine, prompts: dict[str, list[int]], params: SamplingParams) -> dict[str, list[OutputDelta]]:
        deltas: dict[str, list[OutputDelta]] = {name: [] for name in engine.live.by_id.keys() | prompts.keys()}
        for name, prompt in prompts.items():
            engine.add_request(name, prompt, params)
        while engine.has_unfinished_requests:
            for delta in engine.step():
                deltas[delta.request_id].append(delta)
        return deltas


def tokens_of(deltas: list[OutputDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


class TestLLM:
    def test_a_stream_ends_when_the_model_is_closed(self) -> None:
        llm = LLM(dtype="float32", device="cpu", context_length=128, max_running_requests=2)
        stream = llm.stream("def main():", SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
        next(stream)
        llm.close()
        *_, last = stream
        assert (last.finish_reason, last.error) == ("abort", "this model is shutting down")

    def test_requests_added_to_the_engine_directly_do_not_disturb_generate(self, llm: LLM) -> None:
        llm.engine.add_request("by hand", [5], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(llm.generate("x", SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids) == 8
        llm.engine.abort("by hand")
        assert_idle(llm.engine)

    def test_a_prompt_may_be_an_iterator(self, llm: LLM) -> None:
        output = llm.generate([iter([5, 6, 7])], SamplingParams(max_tokens=2))[0]  # type: ignore[list-item]
        assert output.prompt_token_ids == (5, 6, 7)

    def test_the_number_of_threads_is_restored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = torch.get_num_threads()
        with LLM(dtype="float32", device="cpu", context_length=64, num_threads=before + 1):
            assert torch.get_num_threads() == before + 1
        assert torch.get_num_threads() == before


def test_a_burst_fills_free_rows_before_the_queue() -> None:
    engine = Engine(
        EngineConfig(dtype="float32", device="cpu", context_length=64, max_running_requests=4, max_queued_requests=2)
    )
    for i in range(6):
        engine.add_request(str(i), [5], SamplingParams(max_tokens=2))
    with pytest.raises(QueueFullError):
        engine.add_request("6", [5], SamplingParams(max_tokens=2))
    while engine.has_unfinished_requests:
        engine.step()
    assert_idle(engine)


def test_one_file_serves_all_commands(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("port = 8000\nmax-tokens = 5\npage_size = 16\n")
    arguments = ["--config", str(file)]
    server = parse_command_line(ServerConfig, "specmamba serve", arguments)
    assert (server.port, server.page_size) == (8000, 16)
    generate = parse_command_line(GenerateConfig, "specmamba generate", [*arguments, "--prompt", "x"])
    assert (generate.max_tokens, generate.page_size) == (5, 16)


def test_sigterm_while_the_model_loads_ends_quietly() -> None:
    running = subprocess.Popen(
        [sys.executable, "-c", SLOW], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout is not None
    assert running.stdout.readline() == "loading\n"
    running.send_signal(signal.SIGTERM)
    out, err = running.communicate(timeout=120)
    assert (running.returncode, out, err) == (0, "", "")


SLOW = """
import sys, time
from specmamba.server_config import ServerConfig
from specmamba.server.serve import run_server
def build():
    print("loading", flush=True)
    time.sleep(60)
sys.exit(run_server(ServerConfig(port=0), build))
"""
