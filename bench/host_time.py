"""Time of a decoding step outside of its captured calls: scheduler, inputs, reading, text.

    python -m specmamba.bench.host_time [--json FILE] [--batches 1,8] [--rounds 7] [--stubbed] [any engine flag]

Batches of requests decode together. The host time of a step is its time less that of its replay, a mean over a
stretch of steps in which all requests take part; reported are medians over stretches. All settings take turns within a
round.

With ``--stubbed`` steps do nothing (``Workbench.stubbed_steps``), and the engine works as beside a GPU: chained, or
each step read first. What a driver takes to launch and to copy is no part of it.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from specmamba.errors import ConfigError
from specmamba.measure.command import Page, Report, put_out, run_command
from specmamba.measure.prompts import bundled_texts, model_name
from specmamba.measure.report import (
    Count,
    JsonOption,
    NoRadixCache,
    machine,
    progress_bar,
    refuse_draft_flags,
    versions,
)

if TYPE_CHECKING:
    from specmamba import LLM
    from specmamba.measure.full_batch import Stretch

PROG = "python -m specmamba.bench.host_time"
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 8}
DRAFTS: dict[str, dict[str, Any]] = {
    "tree of 8": TREE,
    "chain of 3": {"speculative_num_steps": 3},
    "plain": {"speculative_algorithm": "none"},
}
KEPT_FLAGS = {"speculative_state"} | {
    f"speculative_draft_model_{name}" for name in ("path", "revision", "quantization")
}
STUBBED = "chained", "read first"
Setting = tuple[str, int, float, str]  # drafts, requests, temperature, how steps run


class HostTimeConfig(JsonOption):
    """Time of a step outside of its captured calls."""

    disable_radix_cache: NoRadixCache = True
    rounds: Annotated[Count, Field(description="rounds of all settings; the median over them is reported")] = 7
    batches: Annotated[tuple[Count, ...], Field(description="requests at a time")] = (1, 8)
    max_tokens: Annotated[int, Field(ge=16, description="new tokens of a request")] = 160
    stubbed: Annotated[bool, Field(description="steps do nothing, and the host works as beside a GPU")] = False
    temperatures: Annotated[tuple[float, ...], Field(description="sampling temperatures; 0 is greedy")] = (0.0, 0.8)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 0, or 130 after Ctrl-C."""
    return run_command(PROG, HostTimeConfig, arguments, lambda config: put_out(config, run(config), print_report))


def run(config: HostTimeConfig) -> dict[str, Any]:
    """Run all rounds; the report as a JSON object.

    Raises:
        ConfigError: flags of drafts were given, or steps are not replayed by native code.
    """
    from specmamba import LLM
    from specmamba.config import EngineConfig

    refuse_draft_flags(config, KEPT_FLAGS, f"times its own drafts: {', '.join(DRAFTS)}")
    flags = config.model_dump(include=set(EngineConfig.model_fields))
    stretches: dict[Setting, list[Stretch]] = defaultdict(list)
    fixed = {"speculative_adaptive": "off"} if config.stubbed else {}
    ways = STUBBED if config.stubbed else ("replayed",)
    with progress_bar("rounds", config.rounds + 1) as advance, LLM(**{**flags, **TREE, **fixed}) as llm:
        for number in range(config.rounds + 1):
            for setting in [
                (d, b, t, w) for d in DRAFTS for b in config.batches for t in config.temperatures for w in ways
            ]:
                stretch = time_steps(llm, config, setting)
                if number:  # the first round records the steps
                    stretches[setting].append(stretch)
            advance()
        name = model_name(llm.engine.describe())
    return {
        "model": name,
        "dtype": config.dtype,
        "machine": machine(),
        "versions": versions(("specmamba", "torch")),
        "rounds": config.rounds,
        "results": [{**named(setting), **summarize(found)} for setting, found in stretches.items()],
    }


def time_steps(llm: LLM, config: HostTimeConfig, setting: Setting) -> Stretch:
    """Run one batch.

    Raises:
        ConfigError: steps are not replayed by native code.
    """
    from specmamba import SamplingParams
    from specmamba.measure.full_batch import Job, run_full_batch

    drafts, size, temperature, way = setting
    llm.workbench.use_drafts(**DRAFTS[drafts])
    params = SamplingParams(max_tokens=config.max_tokens, temperature=temperature, seed=1, ignore_eos=True)
    texts = bundled_texts()
    prompts = [tuple(llm.engine.tokenizer.encode(texts[i % len(texts)].text)) for i in range(size)]
    with nullcontext() if way not in STUBBED else llm.workbench.stubbed_steps(is_chained=way == STUBBED[0]):
        stretch = run_full_batch(llm, [Job(prompt, params) for prompt in prompts])
    if not (config.stubbed or llm.workbench.replayed_seconds):
        raise ConfigError("no step was replayed by native code: this needs a CPU, and no --disable-cuda-graph")
    return stretch


def named(setting: Setting) -> dict[str, Any]:
    """The parts of a setting by name."""
    return dict(zip(("drafts", "requests", "temperature", "steps"), setting, strict=True))


def summarize(stretches: list[Stretch]) -> dict[str, Any]:
    """Medians over stretches, with the range of the host's time."""
    hosts = [stretch.host_ms for stretch in stretches]
    return {
        "step_ms": round(statistics.median(stretch.step_ms for stretch in stretches), 3),
        "host_ms": round(statistics.median(hosts), 3),
        "host_range": [round(min(hosts), 3), round(max(hosts), 3)],
    }


def print_report(report: Report) -> None:
    """Print the table of steps."""
    page = Page()
    page.lines(f"{report['model']}, {report['dtype']}", report["machine"])
    rows = [
        (
            row["drafts"], row["steps"], f"{row['requests']}", f"{row['temperature']:g}", f"{row['step_ms']:.2f}",
            f"{row['host_ms']:.3f}", "{:.3f}-{:.3f}".format(*row["host_range"]),
        )
        for row in report["results"]
    ]  # fmt: skip
    page.table(("", "steps", "requests", "T", "step ms", "host ms", "range"), rows, text_columns=(0, 1))


if __name__ == "__main__":
    sys.exit(main())
