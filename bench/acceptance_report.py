"""From samples to figures.

- ``accept_length``: output tokens over verify steps, all requests together: 1 + accepted drafts per step. A draft that
  was accepted behind the last token wanted does not count, so the last step of a text can only look worse than it was.
- ``acceptance_per_position[d - 1]``: share of all steps that accepted d drafts or more.
- ``accept_length_histogram[d]``: verify steps that accepted exactly d drafts.
- ``draft_ms``, ``verify_ms``, ``commit_ms``: medians over the steps of all rounds, of a whole batch each. On a GPU the
  clock waits for the device after each of the three, in plain steps as in others.
- ``plain_tokens_per_second``, ``speculative_tokens_per_second``: tokens over the time of the steps, medians over
  rounds. Prefill is not in it, and neither is what the host does between two steps (queues, text). That is as much for
  a plain step as for a speculative one, of which there are fewer: the speed-up rather looks too low for it.
- ``speedup``: median over rounds of the ratio of the two within a round; ``speedup_range`` is the smallest and the
  largest. ``end_to_end_speedup`` is the same for whole calls, prefill and host included.
- ``break_even_accept_length``: the three medians of a speculative step over those of a plain step: with a smaller
  acceptance length drafting costs time.
- ``lossless``: prompts by how their text compares with the plain one: the same, different by near ties only, or
  diverged (acceptance_compare.py). Null where texts do not compare. ``differences`` has all that are not the same.
- ``distinct_4gram_ratio``: mean over outputs. Text that repeats itself is easy to guess.

Counts of tokens and steps are of all rounds together; a round repeats the texts of the one before.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specmamba.bench.acceptance_compare import Difference
from specmamba.bench.acceptance_run import PLAIN, Result, Sample, Task
from specmamba.bench.acceptance_shapes import Variant
from specmamba.bench.report import distinct_4gram_ratio, machine, versions

if TYPE_CHECKING:
    from specmamba.bench.acceptance import AcceptanceBenchConfig

LOOPING = 0.5  # share of distinct 4-grams below which acceptance says little
Rounds = Sequence[Sequence[Sample]]


def full_report(
    config: AcceptanceBenchConfig,
    description: dict[str, object],
    tasks: Sequence[Task],
    result: Result,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Figures of all configurations.

    Args:
        config: what was asked for.
        description: ``Engine.describe()`` of the engine as it was started.
        tasks: the prompts.
        result: what was measured.
        notes: on what was left out.

    Returns:
        ``configurations``: an object for each, as in the JSON file; ``plain``: what the table says of plain decoding.
    """
    notes = [*notes, *_notes(config)]
    shared = _settings(config, description, tasks, result)
    plain = result.samples[PLAIN]
    configurations = [shared | _figures(variant, plain, result) | {"notes": notes} for variant in result.variants]
    return {"configurations": configurations, "plain": _plain_figures(plain), "notes": notes}


def _settings(
    config: AcceptanceBenchConfig, description: dict[str, object], tasks: Sequence[Task], result: Result
) -> dict[str, Any]:
    return {
        "model": description["model"],
        "dtype": description["dtype"],
        "device": description["device"],
        "machine": machine(),
        "threads": result.num_threads,
        "versions": versions(),
        "algorithm": description["speculative_algorithm"],
        "state": config.speculative_state,
        "accept": config.speculative_accept,
        "tree": None if config.speculative_tree is None else config.speculative_tree.name,
        "synthetic_acceptance": config.synthetic_acceptance,
        "prompts": "bundled" if config.prompts is None else config.prompts.name,
        "num_prompts": len(tasks),
        "max_tokens": config.max_tokens,
        "temperature": None if config.replay else config.temperature,
        "replay": config.replay,
        "seed": config.seed,
        "batch_size": config.batch_size,
        "rounds": config.rounds,
    }


def _figures(variant: Variant, plain: Rounds, result: Result) -> dict[str, Any]:
    rounds = result.samples[variant.name]
    return {
        "num_steps": variant.num_steps,
        "topk": variant.topk,
        "num_draft_tokens": variant.num_draft_tokens,
        **_acceptance(rounds, variant.num_steps),
        **_lossless(result, variant),
        **_speeds(plain, rounds),
        **_step_times(plain, rounds),
    }


def _acceptance(rounds: Rounds, depth: int) -> dict[str, Any]:
    outputs = [output for samples in rounds for sample in samples for output in sample.outputs]
    histogram = [0] * (depth + 1)
    for output in outputs:
        for accepted, count in enumerate(output.spec.accepted_histogram[: depth + 1]):
            histogram[accepted] += count
    num_steps, num_tokens = sum(histogram), sum(len(output.token_ids) for output in outputs)
    return {
        "output_tokens": num_tokens,
        "distinct_4gram_ratio": round(statistics.fmean(distinct_4gram_ratio(o.token_ids) for o in outputs), 4),
        "accept_length": round(num_tokens / num_steps, 4),
        "acceptance_per_position": [round(sum(histogram[d:]) / num_steps, 4) for d in range(1, depth + 1)],
        "accept_length_histogram": histogram,
    }


def _lossless(result: Result, variant: Variant) -> dict[str, Any]:
    if result.differences is None:
        return {"lossless": None, "differences": []}
    differences = result.differences[variant.name]
    kinds = [None if each is None else each.kind for each in differences]
    return {
        "lossless": {
            "identical": kinds.count(None),
            "near_tie": kinds.count("near_tie"),
            "diverged": kinds.count("diverged"),
        },
        "differences": [_as_json(each) for each in differences if each is not None],
    }


def _as_json(difference: Difference) -> dict[str, Any]:
    return {
        "kind": difference.kind,
        "prompt": difference.prompt + 1,
        "first_position": difference.first_position,
        "position": difference.position,
        "plain_token": difference.plain_token,
        "speculative_token": difference.speculative_token,
        "shift": difference.shift,
        "bound": difference.bound,
    }


def _speeds(plain: Rounds, rounds: Rounds) -> dict[str, Any]:
    slow, fast = [_tokens_per_second(s) for s in plain], [_tokens_per_second(s) for s in rounds]
    whole = [_whole_speed(b) / _whole_speed(a) for a, b in zip(plain, rounds, strict=True)]
    ratios = [b / a for a, b in zip(slow, fast, strict=True)]
    return {
        "plain_tokens_per_second": round(statistics.median(slow), 2),
        "speculative_tokens_per_second": round(statistics.median(fast), 2),
        "speedup": round(statistics.median(ratios), 3),
        "speedup_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "end_to_end_speedup": round(statistics.median(whole), 3),
    }


def _tokens_per_second(samples: Sequence[Sample]) -> float:
    return _num_tokens(samples) / sum(sum(step) for sample in samples for step in sample.steps)


def _whole_speed(samples: Sequence[Sample]) -> float:
    return _num_tokens(samples) / sum(sample.seconds for sample in samples)


def _num_tokens(samples: Sequence[Sample]) -> int:
    return sum(len(output.token_ids) for sample in samples for output in sample.outputs)


def _step_times(plain: Rounds, rounds: Rounds) -> dict[str, Any]:
    draft, verify, commit = _median_ms(rounds)
    plain_step = _median_ms(plain)
    return {
        "draft_ms": round(draft, 4),
        "verify_ms": round(verify, 4),
        "commit_ms": round(commit, 4),
        "plain_verify_ms": round(plain_step[1], 4),
        "plain_step_ms": round(sum(plain_step), 4),
        "break_even_accept_length": round((draft + verify + commit) / sum(plain_step), 4),
    }


def _plain_figures(plain: Rounds) -> dict[str, Any]:
    draft, verify, commit = _median_ms(plain)
    return {
        "tokens_per_second": statistics.median(_tokens_per_second(samples) for samples in plain),
        "draft_ms": draft,
        "verify_ms": verify,
        "commit_ms": commit,
        "distinct_4gram_ratio": _acceptance(plain, 0)["distinct_4gram_ratio"],
    }


def _median_ms(rounds: Rounds) -> tuple[float, float, float]:
    """Of draft, verify and commit."""
    steps = [step for samples in rounds for sample in samples for step in sample.steps]
    draft, verify, commit = (1e3 * statistics.median(column) for column in zip(*steps, strict=True))
    return draft, verify, commit


def _notes(config: AcceptanceBenchConfig) -> list[str]:
    """On what the settings mean for the figures."""
    notes = []
    if config.replay and "temperature" in config.model_fields_set:
        notes.append(f"the text is given: --temperature {config.temperature:g} has no effect with --replay")
    if config.replay and config.speculative_accept == "rejection":
        notes.append(
            "the text is given: drafts are accepted when they are its tokens, whatever --speculative-accept says"
        )
    if config.speculative_accept == "rejection" and config.temperature > 0 and not config.replay:
        notes.append("with rejection, sampled texts have the same distribution but not the same tokens: not compared")
    if config.synthetic_acceptance is not None:
        notes.append(
            f"synthetic acceptance {config.synthetic_acceptance:g}: made up; the text is worthless, not compared"
        )
    return notes
