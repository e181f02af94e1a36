"""Decoding of every family at about half a billion parameters, against transformers' ``generate``.

    python -m specmamba.bench.families [--families falcon_h1,mamba2] [--rounds 3] [--processor-time] [--json FILE]

Weights are random, in bfloat16: speeds hardly depend on their values, and nothing is downloaded. A checkpoint per
family is written to a temporary folder. In every round both runtimes decode the same prompts, at batch 1 and 16.
transformers' steps are timed between its choices of tokens, so that its prompt is left out; this runtime's steps are
timed one by one, captured, as they are in use. The cost of a verify is the time of its forward with 4 nodes over
that with 1 node, both operator by operator, since phases of a captured step cannot be timed; its drafts are n-grams of
the text, a repeated pattern, so that trees are full. Each request of a batch repeats a pattern of its own, and both
runtimes are given the same tokens instead of those that they choose: so requests have experts of their own, as requests
of users have, and both runtimes read the same ones.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from specmamba.config import CommandLine
from specmamba.errors import ConfigError
from specmamba.measure.command import Page, Report, put_out, run_command
from specmamba.measure.report import JsonFile, machine, progress_bar, split_numbers, versions

if TYPE_CHECKING:  # --help must not wait for torch
    from torch import Tensor

    from specmamba.measure.full_batch import Stretch

PROG = "python -m specmamba.bench.families"
NAMES = (
    *("qwen3_5", "qwen3_next", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "bailing_hybrid"),
    *("bamba", "falcon_h1", "granite_hybrid", "nemotron_h", "lfm2", "lfm2_moe", "lfm3", "falcon_mamba", "jamba"),
    "mamba2",
)
NUM_NODES = 4
CHAIN_FLAGS: dict[str, Any] = {
    "speculative_adaptive": "off",
    "speculative_algorithm": "ngram",
    "speculative_num_draft_tokens": NUM_NODES,
    "speculative_num_steps": NUM_NODES - 1,
    "speculative_eagle_topk": 1,
}
PATTERN_TOKENS = 7  # of each request's own pattern, which its prompt repeats
FIRST_TOKEN = 100  # behind special ones
PROMPT_TOKENS = 35
CONTEXT_LENGTH = 256


class FamiliesConfig(CommandLine, JsonFile):
    """Decode speed of every family against transformers."""

    families: Annotated[
        tuple[str, ...], BeforeValidator(split_numbers), Field(description=f"of {', '.join(NAMES)}")
    ] = NAMES
    batch_sizes: Annotated[
        tuple[Annotated[int, Field(ge=1, le=256)], ...],
        BeforeValidator(split_numbers),
        Field(description="requests that decode together"),
    ] = (1, 16)
    max_tokens: Annotated[int, Field(ge=4, description="tokens that are decoded and timed, at batch 1")] = 32
    rounds: Annotated[int, Field(ge=1, description="rounds; medians over them are reported")] = 3
    processor_time: Annotated[
        bool,
        Field(
            description="one thread for either runtime, timed by its processor time and without verifies: where other "
            "work shares the machine"
        ),
    ] = False

    @field_validator("families")
    @classmethod
    def _are_known(cls, families: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := set(families) - set(NAMES):
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
        return families


@dataclass(frozen=True)
class Round:
    """Seconds per step of one round, at one batch size."""

    transformers: float
    plain: float
    verify_one: float | None  # None: not measured
    verify_many: float | None


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 0, or 130 after Ctrl-C."""
    return run_command(PROG, FamiliesConfig, arguments, lambda config: put_out(config, run(config), print_report))


def run(config: FamiliesConfig) -> dict[str, Any]:
    """Measure all families, one after the other; the report as a JSON object."""
    families = {}
    with progress_bar("families", len(config.families)) as advance:
        for name in config.families:
            with tempfile.TemporaryDirectory(prefix="specmamba-family-") as folder:
                families[name] = measure_family(config, name, Path(folder))
            gc.collect()
            advance()
    return {
        "dtype": "bfloat16",
        "machine": machine(),
        "versions": versions(),
        "max_tokens": config.max_tokens,
        "rounds": config.rounds,
        "num_nodes": NUM_NODES,
        "texts": "one for each request",
        "timed_by": "processor time of one thread" if config.processor_time else "clock",
        "families": families,
    }


def measure_family(config: FamiliesConfig, name: str, folder: Path) -> dict[str, Any]:
    """Measure both runtimes on one checkpoint, in turns."""
    from specmamba.bench.families.shapes import write_family

    num_parameters, is_alone = write_family(name, folder), not config.processor_time
    ours, theirs = OurSide(folder, max(config.batch_sizes), is_alone), TheirSide(folder, is_alone)
    try:
        for batch_size in config.batch_sizes:  # warm up
            ours.plain(batch_size, 2), theirs.decode(batch_size, 2)
        rounds: dict[int, list[Round]] = {size: [] for size in config.batch_sizes}
        for _ in range(config.rounds):
            for size in config.batch_sizes:
                tokens = config.max_tokens if size == 1 else max(4, config.max_tokens // 4)
                rounds[size].append(Round(theirs.decode(size, tokens), *ours.decode(size, tokens)))
        description = ours.llm.engine.describe()
    finally:
        ours.llm.close()
    return {
        "architecture": description["architecture"],
        "num_parameters": num_parameters,
        "threads": {"specmamba": ours.num_threads, "transformers": theirs.num_threads},
        "batches": {str(size): summarize(found, size) for size, found in rounds.items()},
    }


def summarize(rounds: Sequence[Round], batch_size: int) -> dict[str, float | list[float] | None]:
    """Medians over rounds; ratios are of one round."""
    ratios = [one.transformers / one.plain for one in rounds]
    verifies = [one.verify_many / one.verify_one for one in rounds if one.verify_many and one.verify_one]
    return {
        "plain_tokens_per_second": round(batch_size / statistics.median(one.plain for one in rounds), 1),
        "transformers_tokens_per_second": round(batch_size / statistics.median(one.transformers for one in rounds), 1),
        "ratio_to_transformers": round(statistics.median(ratios), 2),
        "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
        "verify_cost": round(statistics.median(verifies), 2) if verifies else None,
    }


class OurSide:
    """This runtime: plain decoding, and verifying chains. ``is_alone``: on all cores, by the clock."""

    def __init__(self, folder: Path, max_batch: int, is_alone: bool = True) -> None:
        import torch

        from specmamba import LLM

        self.llm = LLM(
            model=str(folder),
            dtype="bfloat16",
            context_length=CONTEXT_LENGTH,
            max_running_requests=max_batch,
            max_total_tokens=max(max_batch * 192, 2 * CONTEXT_LENGTH),
            disable_radix_cache=True,
            num_threads=None if is_alone else 1,
            **CHAIN_FLAGS,
        )
        self.num_threads, self._is_alone = torch.get_num_threads(), is_alone

    def decode(self, batch_size: int, tokens: int) -> tuple[float, float | None, float | None]:
        """Seconds of a plain step, of its verify of one node, and of a verify of a chain; of a step alone."""
        import torch

        torch.set_num_threads(self.num_threads)
        step = self.plain(batch_size, tokens)
        if not self._is_alone:
            return step, None, None
        one = self._run(batch_size, tokens, clock=True).verify_ms / 1e3
        self.llm.workbench.use_drafts(**CHAIN_FLAGS)
        return step, one, self._run(batch_size, tokens * NUM_NODES, clock=True).verify_ms / 1e3

    def plain(self, batch_size: int, tokens: int) -> float:
        """Seconds of a step, captured from the third one of its kind on."""
        self.llm.workbench.use_drafts(speculative_algorithm="none")
        return self._run(batch_size, tokens).step_ms / 1e3

    def _run(self, batch_size: int, tokens: int, clock: bool = False) -> Stretch:
        from specmamba.measure.full_batch import Job, run_full_batch
        from specmamba.sampling_params import SamplingParams

        texts = [prompt_and_rest(request, tokens) for request in range(batch_size)]
        params = SamplingParams(max_tokens=len(texts[0][1]), temperature=0.0, ignore_eos=True)
        jobs = [Job(prompt, params, rest) for prompt, rest in texts]
        if self._is_alone:
            return run_full_batch(self.llm, jobs, clock)
        return run_full_batch(self.llm, jobs, now=time.thread_time)


class TheirSide:
    """transformers' ``generate``, on all cores, or not ``is_alone``."""

    def __init__(self, folder: Path, is_alone: bool = True) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(_num_cores() if is_alone else 1)
        self.num_threads = torch.get_num_threads()
        self._now = time.perf_counter if is_alone else time.thread_time
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16").eval()
        self._model.generation_config.eos_token_id = None

    def decode(self, batch_size: int, tokens: int) -> float:
        """Seconds of a step, behind the prompt: from one choice of tokens to the last."""
        import torch

        torch.set_num_threads(self.num_threads)
        texts = [prompt_and_rest(request, tokens) for request in range(batch_size)]
        inputs, rest = (torch.tensor(part) for part in zip(*texts, strict=True))
        rows, seconds = torch.arange(batch_size), []

        def choose_given(known: Tensor, scores: Tensor) -> Tensor:
            seconds.append(self._now())
            scores[rows, rest[:, known.shape[1] - PROMPT_TOKENS]] = torch.inf
            return scores

        with torch.inference_mode():
            self._model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=1 + tokens,
                do_sample=False,
                logits_processor=[choose_given],
            )
        return (seconds[-1] - seconds[0]) / tokens


def prompt_and_rest(request: int, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A prompt that repeats a pattern, and at least ``tokens`` tokens that continue it; requests share no token."""
    first = FIRST_TOKEN + request * PATTERN_TOKENS
    pattern = tuple(range(first, first + PATTERN_TOKENS))
    stream = pattern * (-(-(PROMPT_TOKENS + tokens + 8) // PATTERN_TOKENS))
    return stream[:PROMPT_TOKENS], stream[PROMPT_TOKENS : PROMPT_TOKENS + tokens + 8]


def _num_cores() -> int:
    import os

    count = os.cpu_count()
    if count is None:
        raise ConfigError("this system does not say how many cores it has")
    return count


def print_report(report: Report) -> None:
    """Print the table of speeds."""
    page = Page()
    page.lines(f"bfloat16, random weights; {report['machine']}; medians of {report['rounds']} rounds")
    rows = [
        (
            name, f"{family['num_parameters'] / 1e6:.0f}M", size,
            f"{row['transformers_tokens_per_second']:.1f}", f"{row['plain_tokens_per_second']:.1f}",
            f"{row['ratio_to_transformers']:.2f}x", "{:.2f}-{:.2f}".format(*row["ratio_range"]),
            "" if row["verify_cost"] is None else f"{row['verify_cost']:.2f}",
        )
        for name, family in report["families"].items()
        for size, row in family["batches"].items()
    ]  # fmt: skip
    columns = ("family", "parameters", "batch", "transformers", "plain", "ratio", "range", "verify of 4 / of 1")
    page.table(columns, rows)


if __name__ == "__main__":
    sys.exit(main())
