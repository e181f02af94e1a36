"""Time of a decoding step outside of its captured calls: scheduler, inputs, reading, text.

    python -m specmamba.bench.host_time [--against CHECKOUT] [--json FILE] [--batches 1,8] [--rounds 7] [engine flags]
    python -m specmamba.bench.host_time --stubbed [--against CHECKOUT]

Batches of requests decode together. The host time of a step is its time less that of its replay, a mean over a
stretch of steps in which all requests take part; reported are medians over stretches. All settings take turns within a
round.

With ``--stubbed`` steps do nothing (``Workbench.stubbed_steps``), and the engine works as beside a GPU: chained, or
each step read first. What a driver takes to launch and to copy is no part of it. ``--against`` times an older version
in the same rounds, in a process of its own (``host_time_before.py``): its replayed steps, or with ``--stubbed`` stubbed
ones that are read first. Of replayed steps the report has tokens per second too, and the median over rounds of this
version's over the older one's.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from specmamba.errors import ConfigError, SpecmambaError
from specmamba.measure.command import Page, Report, put_out, run_command
from specmamba.measure.prompts import bundled_texts, model_name
from specmamba.measure.report import (
    Count,
    JsonOption,
    NoRadixCache,
    machine,
    median_with_range,
    progress_bar,
    range_text,
    refuse_draft_flags,
    versions,
)

if TYPE_CHECKING:
    from specmamba import LLM

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
REPLAYED = "replayed"
BEFORE = "before"  # steps of another version
OLD = Path(__file__).with_name("host_time_before.py")
Setting = tuple[str, int, float, str]  # drafts, requests, temperature, how steps run


class Times(NamedTuple):
    """Means over a stretch of steps."""

    step_ms: float
    host_ms: float  # outside of the replay
    tokens_per_second: float  # of all requests; without meaning where steps do nothing


class HostTimeConfig(JsonOption):
    """Time of a step outside of its captured calls."""

    disable_radix_cache: NoRadixCache = True
    rounds: Annotated[Count, Field(description="rounds of all settings; the median over them is reported")] = 7
    batches: Annotated[tuple[Count, ...], Field(description="requests at a time")] = (1, 8)
    max_tokens: Annotated[int, Field(ge=16, description="new tokens of a request")] = 160
    stubbed: Annotated[bool, Field(description="steps do nothing, and the host works as beside a GPU")] = False
    temperatures: Annotated[tuple[float, ...], Field(description="sampling temperatures; 0 is greedy")] = (0.0, 0.8)
    against: Annotated[Path | None, Field(description="a checkout of an older version, timed in the same rounds")] = (
        None
    )


class OldVersion:
    """A process of another version, which times its steps."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, given: dict[str, Any]) -> dict[str, Any]:
        """Its answer to a line of ``host_time_before.py``. Raises SpecmambaError: it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # then it has no answer
            print(json.dumps(given), file=self._process.stdin, flush=True)
        if not (line := self._process.stdout.readline()):
            raise SpecmambaError("the process of the older version ended: what it has said is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def old_version(checkout: Path, flags: dict[str, Any], is_stubbed: bool) -> Iterator[OldVersion]:
    """Start a process of the version in a checkout, and load an engine in it; it ends with the context.

    Args:
        checkout: the folder that has the package.
        flags: keywords of ``LLM``.
        is_stubbed: its steps do nothing.

    Raises:
        ConfigError: there is no package.
        SpecmambaError: it cannot be loaded.
    """
    if not (checkout / "specmamba" / "__init__.py").is_file():
        raise ConfigError(f"--against: {checkout} is no checkout of this package: there is no specmamba/__init__.py")
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    process = subprocess.Popen(
        (sys.executable, "-P", OLD), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    try:
        old = OldVersion(process)
        old.ask({"flags": flags, "stubbed": is_stubbed})
        yield old
    finally:
        process.kill()
        process.communicate()


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 0, or 130 after Ctrl-C."""
    return run_command(PROG, HostTimeConfig, arguments, lambda config: put_out(config, run(config), print_report))


def run(config: HostTimeConfig) -> dict[str, Any]:
    """Run all rounds; the report as a JSON object.

    Raises:
        ConfigError: flags of drafts were given, or steps are not replayed by native code.
        SpecmambaError: the older version cannot be timed.
    """
    from specmamba import LLM
    from specmamba.config import EngineConfig

    refuse_draft_flags(config, KEPT_FLAGS, f"times its own drafts: {', '.join(DRAFTS)}")
    flags = config.model_dump(include=set(EngineConfig.model_fields))
    fixed = TREE | ({"speculative_adaptive": "off"} if config.stubbed else {})
    given = config.model_dump(mode="json", include=config.model_fields_set & set(EngineConfig.model_fields))
    of_old = {"disable_radix_cache": True, **given, **fixed}
    before = old_version(config.against, of_old, config.stubbed) if config.against else None
    bar = progress_bar("rounds", config.rounds + 1)  # begins before engines are loaded
    with bar as advance, before or nullcontext() as old, LLM(**{**flags, **fixed}) as llm:
        stretches, name = run_rounds(config, llm, old, advance), model_name(llm.engine.describe())
    return {
        "model": name,
        "dtype": config.dtype,
        "machine": machine(),
        "versions": versions(("specmamba", "torch")),
        "rounds": config.rounds,
        "results": [{**named(setting), **summarize(found)} for setting, found in stretches.items()],
        "ratios": [] if config.stubbed else list(ratios_of(stretches)),
    }


def run_rounds(
    config: HostTimeConfig, llm: LLM, old: OldVersion | None, advance: Callable[[], None]
) -> dict[Setting, list[Times]]:
    """Time every setting once in each round, but for the first round, which records the steps."""
    ways = (*(STUBBED if config.stubbed else (REPLAYED,)), *((BEFORE,) if old is not None else ()))
    settings = [(d, b, t, w) for d in DRAFTS for b in config.batches for t in config.temperatures for w in ways]
    found: dict[Setting, list[Times]] = {setting: [] for setting in settings}
    for number in range(config.rounds + 1):
        for setting in settings:
            times = time_steps(llm, config, setting, old)
            if number:
                found[setting].append(times)
        advance()
    return found


def time_steps(llm: LLM, config: HostTimeConfig, setting: Setting, old: OldVersion | None) -> Times:
    """Run one batch; ``old`` does for the setting ``BEFORE``.

    Raises:
        ConfigError: steps are not replayed by native code.
    """
    from specmamba import SamplingParams
    from specmamba.measure.full_batch import Job, run_full_batch

    drafts, size, temperature, way = setting
    texts = bundled_texts()
    prompts = [tuple(llm.engine.tokenizer.encode(texts[i % len(texts)].text)) for i in range(size)]
    if way == BEFORE:
        assert old is not None
        lengths = {"max_tokens": config.max_tokens, "temperature": temperature}
        return Times(**old.ask({"drafts": DRAFTS[drafts], "prompts": prompts, **lengths}))
    llm.workbench.use_drafts(**DRAFTS[drafts])
    params = SamplingParams(max_tokens=config.max_tokens, temperature=temperature, seed=1, ignore_eos=True)
    with nullcontext() if way not in STUBBED else llm.workbench.stubbed_steps(is_chained=way == STUBBED[0]):
        stretch = run_full_batch(llm, [Job(prompt, params) for prompt in prompts])
    if not (config.stubbed or llm.workbench.replayed_seconds):
        raise ConfigError("no step was replayed by native code: this needs a CPU, and no --disable-cuda-graph")
    return Times(stretch.step_ms, stretch.host_ms, stretch.num_tokens / stretch.seconds)


def named(setting: Setting) -> dict[str, Any]:
    """The parts of a setting by name."""
    return dict(zip(("drafts", "requests", "temperature", "steps"), setting, strict=True))


def summarize(stretches: list[Times]) -> dict[str, Any]:
    """Medians over stretches, with the range of the host's time."""
    hosts = [stretch.host_ms for stretch in stretches]
    return {
        "tokens_per_second": round(statistics.median(stretch.tokens_per_second for stretch in stretches), 1),
        "step_ms": round(statistics.median(stretch.step_ms for stretch in stretches), 3),
        "host_ms": round(statistics.median(hosts), 3),
        "host_range": [round(min(hosts), 3), round(max(hosts), 3)],
    }


def ratios_of(stretches: dict[Setting, list[Times]]) -> Iterator[dict[str, Any]]:
    """This version's tokens per second over the older one's, within each round: medians and ranges."""
    for setting, found in stretches.items():
        before = stretches.get((*setting[:3], BEFORE))
        if setting[3] == REPLAYED and before is not None:
            pairs = zip(found, before, strict=True)
            ratios = [own.tokens_per_second / old.tokens_per_second for own, old in pairs]
            yield {**named(setting), **median_with_range(ratios, 3)}


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
    for row in report["ratios"]:
        setting = f"{row['drafts']}, {row['requests']} requests, T {row['temperature']:g}"
        page.lines(f"tokens/s over those of the older version, {setting}: {range_text(row, '{:.3f}'.format)}")


if __name__ == "__main__":
    sys.exit(main())
