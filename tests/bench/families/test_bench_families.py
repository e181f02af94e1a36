"""``specmamba.bench.families``: the shapes of families, and a whole run of a tiny one."""

import itertools
import json
import time
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from specmamba.bench.families import __main__ as families
from specmamba.bench.families.shapes import COMMON, SHAPES, write_family
from specmamba.core import OutputDelta
from specmamba.cuda_graphs.native_replay import NativeReplay
from specmamba.engine.engine import Engine
from specmamba.measure.full_batch import Stretch

ABOUT_HALF_A_BILLION = 350e6, 600e6


def test_every_family_has_a_shape_and_a_name() -> None:
    assert sorted(families.NAMES) == sorted(SHAPES)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_families_have_about_half_a_billion_parameters(name: str) -> None:
    config_class, model_class, settings = SHAPES[name]
    config = getattr(transformers, config_class)(**COMMON | settings)
    with torch.device("meta"):
        model = getattr(transformers, model_class)(config)
    least, most = ABOUT_HALF_A_BILLION
    assert least < sum(parameter.numel() for parameter in model.parameters()) < most
    assert config.num_hidden_layers > 8


def test_one_request_at_a_time_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both runtimes run; what they take is a count of forwards, and given numbers, so that all figures are known."""
    config_class, model_class, _ = SHAPES["falcon_mamba"]
    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 2}
    monkeypatch.setitem(SHAPES, "falcon_mamba", (config_class, model_class, tiny))
    count_forwards(monkeypatch, getattr(transformers, model_class))
    run, asked = families.OurSide._run, list[tuple[int, bool]]()

    def run_and_say(side: families.OurSide, batch_size: int, tokens: int, clock: bool = False) -> Stretch:
        stretch = run(side, batch_size, tokens, clock)
        assert stretch.step_ms > 0
        assert (stretch.verify_ms > 0) == clock
        assert (stretch.replayed_seconds > 0) == (not clock and NativeReplay.is_available())  # steps are captured ones
        asked.append((tokens, clock))
        return replace(stretch, num_steps=4, seconds=1.0, verify_ms=100.0 if tokens <= 16 else 150.0)

    monkeypatch.setattr(families.OurSide, "_run", run_and_say)
    arguments = ["--families", "falcon_mamba", "--batch-sizes", "1", "--max-tokens", "16", "--rounds", "2"]
    assert families.main([*arguments, "--json", str(tmp_path / "report.json")]) == 0
    # to warm up; then plain steps, their phases, and those with chains of four, in two rounds
    assert asked == [(2, False), *[(16, False), (16, True), (64, True)] * 2]
    family = json.loads((tmp_path / "report.json").read_text("utf8"))["families"]["falcon_mamba"]
    assert family["architecture"] == "FalconMambaForCausalLM"
    assert family["batches"] == {
        "1": {
            "plain_tokens_per_second": 4.0,
            "transformers_tokens_per_second": 1.0,
            "ratio_to_transformers": 4.0,
            "ratio_range": [4.0, 4.0],
            "verify_cost": 1.5,
        }
    }
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["falcon_mamba"]]
    assert line.split()[2:] == ["1", "1.0", "4.0", "4.00x", "4.00-4.00", "1.50"]


def test_beside_other_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One thread of either runtime, by its processor time: what sleeps takes none."""
    config_class, model_class, _ = SHAPES["falcon_mamba"]
    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 2}
    monkeypatch.setitem(SHAPES, "falcon_mamba", (config_class, model_class, tiny))
    step = Engine.step

    def sleep_and_step(engine: Engine) -> list[OutputDelta]:
        time.sleep(0.2)
        return step(engine)

    monkeypatch.setattr(Engine, "step", sleep_and_step)
    arguments = ["--families", "falcon_mamba", "--batch-sizes", "2", "--max-tokens", "4", "--rounds", "1"]
    assert families.main([*arguments, "--processor-time", "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text("utf8"))
    assert report["timed_by"] == "processor time of one thread"
    family = report["families"]["falcon_mamba"]
    assert family["threads"] == {"specmamba": 1, "transformers": 1}
    assert family["batches"]["2"]["plain_tokens_per_second"] > 2 / 0.2
    assert family["batches"]["2"]["verify_cost"] is None
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["falcon_mamba"]]
    assert len(line.split()) == 7


@pytest.mark.parametrize(("family", "attention"), [("lfm2", "full_attention"), ("lfm3", "sliding_attention")])
def test_both_runtimes_run_the_same_tokens(
    family: str, attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each request a text of its own, whatever random weights would choose."""
    config_class, model_class, settings = SHAPES[family]
    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "layer_types": ["conv", attention], "sliding_window": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    monkeypatch.setitem(SHAPES, family, (config_class, model_class, settings | tiny | heads))
    write_family(family, tmp_path)
    texts = [families.prompt_and_rest(request, tokens=6) for request in range(3)]
    assert len({token for prompt, _ in texts for token in prompt}) == 3 * families.PATTERN_TOKENS

    theirs, ran = families.TheirSide(tmp_path), list[torch.Tensor]()
    forward = theirs._model.forward

    def forward_and_say(input_ids: torch.Tensor, **more: Any) -> Any:
        ran.append(input_ids)
        return forward(input_ids, **more)

    monkeypatch.setattr(theirs._model, "forward", forward_and_say)
    theirs.decode(3, 6)
    assert torch.cat(ran, 1).tolist() == [[*prompt, *rest[:6]] for prompt, rest in texts]

    ours = families.OurSide(tmp_path, max_batch=3)
    add, ours_ran = ours.llm.engine.add_request, dict[str, tuple[int, ...]]()

    def add_and_say(name: str, prompt: tuple[int, ...], params: Any, replay: tuple[int, ...]) -> None:
        ours_ran[name] = (*prompt, *replay)
        add(name, prompt, params, replay)

    monkeypatch.setattr(ours.llm.engine, "add_request", add_and_say)
    try:
        ours.plain(3, 6)
    finally:
        ours.llm.close()
    assert [*ours_ran.values()] == [(*prompt, *rest) for prompt, rest in texts]


def count_forwards(monkeypatch: pytest.MonkeyPatch, model_class: Any) -> None:
    """Let each forward of transformers take a second, and all else no time."""
    forward, count = model_class.forward, itertools.count(1)
    now = [0]

    @wraps(forward)
    def counted(*inputs: Any, **more: Any) -> Any:
        now[0] = next(count)
        return forward(*inputs, **more)

    monkeypatch.setattr(model_class, "forward", counted)
    monkeypatch.setattr(families, "time", SimpleNamespace(perf_counter=lambda: float(now[0])))
