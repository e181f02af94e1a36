"""Decode speed at batch 1, plain and with MTP, against transformers on the same checkpoint, or of forms of weights.

    python -m specmamba.bench.decode [--forms bf16 int4-g32 ...] [--json FILE] [--rounds 5] [any engine flag]

All contestants take turns within a round, so that a slow minute of the machine affects all of them. The figures are
medians over rounds of each contestant's tokens per second, and of its ratio to the first one in the same round: to
transformers, or with ``--forms`` to plain decoding in the first form. Forms are named as for ``bench.quality``; each
has two engines, so ``--max-total-tokens`` and ``--max-mamba-cache-size`` should bound their pools. How fast memory
delivers weights is measured in each round: tokens per second times bytes of weights, over it, is how near plain
decoding is to that floor.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from specmamba.config import EngineConfig
from specmamba.measure.command import Page, Report, put_out, repeated_flags, run_command
from specmamba.measure.prompts import bundled_texts
from specmamba.measure.report import (
    JsonOption,
    NoRadixCache,
    distinct_4gram_ratio,
    machine,
    median_with_range,
    progress_bar,
    versions,
)
from specmamba.measure.weight_forms import FORM_FIELDS, form_flags

if TYPE_CHECKING:
    from specmamba.core import RequestOutput
    from specmamba.sampling_params import SamplingParams

PROG = "python -m specmamba.bench.decode"


class DecodeBenchConfig(JsonOption):
    """Decode speed against transformers, or of forms of weights."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "bfloat16"
    disable_radix_cache: NoRadixCache = True
    rounds: Annotated[int, Field(ge=1, description="rounds; the median over them is reported")] = 5
    max_tokens: Annotated[int, Field(ge=1, description="new tokens per prompt")] = 128
    num_prompts: Annotated[int, Field(ge=1, description="bundled prompts in a round")] = 6
    temperatures: Annotated[tuple[float, ...], Field(description="sampling temperatures; 0 is greedy")] = (0.0, 0.8)
    forms: list[str] = Field(
        [], description="compare these forms of weights, such as bf16 int8 int4-g32, in place of transformers"
    )

    @model_validator(mode="after")
    def _forms_set_their_flags(self) -> DecodeBenchConfig:
        if self.forms and (given := [name for name in FORM_FIELDS if name in self.model_fields_set]):
            raise ValueError(f"--{given[0].replace('_', '-')}: --forms sets it; drop it")
        return self


@dataclass(frozen=True)
class Sample:
    """One generation."""

    seconds: float
    tokens: Sequence[int]
    accept_length: float

    @property
    def distinct_4gram_ratio(self) -> float:
        return distinct_4gram_ratio(self.tokens)


class Contestant:
    """A generator of text, and the number of threads that it chose when it was made."""

    def __init__(
        self, generate: Callable[[str, float, int], Sample], num_threads: int | None = None, weight_bytes: int = 0
    ) -> None:
        """``num_threads``: of captured steps; None: there are none, and all runs on those of PyTorch."""
        import torch

        self.weight_bytes = weight_bytes
        self._generate = generate
        self._torch_threads = torch.get_num_threads()
        self.num_threads = num_threads or self._torch_threads

    def generate(self, prompt: str, temperature: float, seed: int) -> Sample:
        """Continue a prompt by the configured number of tokens."""
        import torch

        torch.set_num_threads(self._torch_threads)
        return self._generate(prompt, temperature, seed)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 0, or 130 after Ctrl-C."""
    given = repeated_flags(sys.argv[1:] if arguments is None else arguments, ("--forms",))
    return run_command(PROG, DecodeBenchConfig, given, lambda config: put_out(config, run(config), print_report))


def run(config: DecodeBenchConfig) -> dict[str, Any]:
    """Run all rounds; the report as a JSON object."""
    with progress_bar("rounds", config.rounds) as advance:
        contestants = make_contestants(config)
        prompts = [text.text for text in bundled_texts()[: config.num_prompts]]
        results, speeds = play(config, contestants, prompts, advance)
    return {
        "model": Path(config.model_path).name if config.model else "specmamba-demo",
        **({"forms": config.forms} if config.forms else {"dtype": config.dtype}),
        "machine": machine(),
        "threads": {name: contestant.num_threads for name, contestant in contestants.items()},
        "versions": versions(),
        "max_tokens": config.max_tokens,
        "num_prompts": len(prompts),
        "rounds": config.rounds,
        "num_steps": config.num_draft_steps,
        "prefix_cache": not config.disable_radix_cache,
        "weight_bytes": {name: contestant.weight_bytes for name, contestant in contestants.items()},
        "memory_gb_per_s": median_with_range(speeds, 1),
        "results": {f"{t:g}": summarize(results[t]) for t in config.temperatures},
    }


def make_contestants(config: DecodeBenchConfig) -> dict[str, Contestant]:
    """All contestants by name; the others are compared with the first. Raises ConfigError: a form cannot be run."""
    if not config.forms:
        return {
            "transformers": transformers_contestant(config),
            "plain": specmamba_contestant(config, "none"),
            "mtp": specmamba_contestant(config, "mtp"),
        }
    flags = {name: form_flags(name, "--forms") for given in config.forms for name in given.split(",")}
    return {
        f"{form} {title}": specmamba_contestant(config.model_copy(update=of_form), algorithm)
        for form, of_form in flags.items()
        for title, algorithm in (("plain", "none"), ("mtp", "mtp"))
    }


def play(
    config: DecodeBenchConfig,
    contestants: dict[str, Contestant],
    prompts: Sequence[str],
    advance: Callable[[], None],
) -> tuple[dict[float, dict[str, list[list[Sample]]]], list[float]]:
    """Run all rounds; samples by temperature and contestant, a list per round, and the memory's speed in each round.

    ``advance`` is called for each round.
    """
    from specmamba.measure.memory_speed import BEYOND_CACHES, weight_speed

    speeds: list[float] = []
    results: dict[float, dict[str, list[list[Sample]]]] = {
        t: {name: [] for name in contestants} for t in config.temperatures
    }
    for contestant in contestants.values():  # warm up
        contestant.generate(prompts[0], 0.0, 0)
    for number in range(config.rounds):
        for temperature in config.temperatures:
            samples: dict[str, list[Sample]] = {name: [] for name in contestants}
            for i, prompt in enumerate(prompts):
                for name, contestant in contestants.items():
                    samples[name].append(contestant.generate(prompt, temperature, number * len(prompts) + i))
            for name in contestants:
                results[temperature][name].append(samples[name])
        speeds.append(weight_speed(BEYOND_CACHES))
        advance()
    return results, speeds


def summarize(results: dict[str, list[list[Sample]]]) -> dict[str, Any]:
    """Medians over rounds, for one temperature; ratios are to the first contestant."""
    speeds = {
        name: [sum(len(s.tokens) for s in samples) / sum(s.seconds for s in samples) for samples in rounds]
        for name, rounds in results.items()
    }
    summary, first = {}, next(iter(speeds.values()))
    for name, rounds in results.items():
        flat = [sample for samples in rounds for sample in samples]
        ratios = [own / other for own, other in zip(speeds[name], first, strict=True)]
        summary[name] = {
            "tokens_per_second": round(statistics.median(speeds[name]), 1),
            "ratio": round(statistics.median(ratios), 2),
            "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
            "accept_length": round(statistics.mean(s.accept_length for s in flat), 3),
            "distinct_4gram_ratio": round(statistics.mean(s.distinct_4gram_ratio for s in flat), 3),
        }
    return summary


def specmamba_contestant(config: DecodeBenchConfig, algorithm: str) -> Contestant:
    """Make a contestant of this runtime, through its Python interface."""
    from specmamba import LLM

    chosen = without_drafts(config) if algorithm == "none" else config
    flags = chosen.model_dump(include=set(EngineConfig.model_fields)) | {"speculative_algorithm": algorithm}
    llm = LLM(**flags)

    def generate(prompt: str, temperature: float, seed: int) -> Sample:
        params = sampling_params(config, temperature, seed)
        began = time.perf_counter()
        output: RequestOutput = llm.generate(prompt, params, use_tqdm=False)[0]
        return Sample(time.perf_counter() - began, output.token_ids, output.spec.accept_length)

    return Contestant(generate, llm.engine.num_threads, llm.engine.models.weight_bytes)


def without_drafts(config: DecodeBenchConfig) -> DecodeBenchConfig:
    """The configuration with every drafting flag at its default, as plain decoding requires."""
    fields = EngineConfig.model_fields.items()
    return config.model_copy(update={name: field.default for name, field in fields if name.startswith("speculative_")})


def sampling_params(config: DecodeBenchConfig, temperature: float, seed: int) -> SamplingParams:
    """Parameters for outputs of a fixed length: the end-of-text token is ignored."""
    from specmamba import SamplingParams

    return SamplingParams(max_tokens=config.max_tokens, temperature=temperature, seed=seed, ignore_eos=True)


def transformers_contestant(config: DecodeBenchConfig) -> Contestant:
    """Make a contestant of transformers' ``generate``, same checkpoint and device; tokenizing is timed too."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(config.model_path)
    model: Any = AutoModelForCausalLM.from_pretrained(config.model_path, dtype=config.dtype)
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    model.eval().to(device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    model.generation_config.eos_token_id = None

    def generate(prompt: str, temperature: float, seed: int) -> Sample:
        torch.manual_seed(seed)
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        began = time.perf_counter()
        inputs = tokenizer(prompt, return_tensors="pt").to(device)
        length = inputs["input_ids"].shape[1]
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=config.max_tokens, pad_token_id=0, **sampled)
        tokens = output[0, length:].tolist()
        return Sample(time.perf_counter() - began, tokens, 1.0)

    return Contestant(generate)


def print_report(report: Report) -> None:
    """Print the table of speeds."""
    page, memory = Page(), report["memory_gb_per_s"]
    threads = ", ".join(f"{name} {count}" for name, count in report["threads"].items())
    page.lines(
        f"{report['model']}, {report.get('dtype', 'forms of weights')}, batch 1, {report['max_tokens']} new tokens",
        f"{report['machine']}; threads: {threads}",
        "memory delivers weights with {} ({} to {}) GB/s".format(memory["median"], *memory["range"]),
    )
    rows = [
        (
            temperature, name, f"{row['tokens_per_second']:.0f}", f"{row['ratio']:.2f}x",
            "{:.2f}-{:.2f}".format(*row["ratio_range"]), f"{row['accept_length']:.2f}",
            f"{row['distinct_4gram_ratio']:.2f}", _of_memory(report, name, row),
        )
        for temperature, of_one in report["results"].items()
        for name, row in of_one.items()
    ]  # fmt: skip
    page.table(("T", "", "tokens/s", "ratio", "range", "accepted", "4-grams", "GB/s"), rows, text_columns=(0, 1))


def _of_memory(report: Report, name: str, row: dict[str, Any]) -> str:
    """Gigabytes of weights that steps of one token read in a second; "" where others are made, or that is not known."""
    num_bytes = report["weight_bytes"][name]
    return f"{row['tokens_per_second'] * num_bytes / 1e9:.1f}" if num_bytes and row["accept_length"] == 1.0 else ""


if __name__ == "__main__":
    sys.exit(main())
