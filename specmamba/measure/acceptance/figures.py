"""The figures of an acceptance run, computed from its samples.

- ``accept_length``: output tokens over verify steps, all requests together: 1 + accepted drafts per step. A draft that
  was accepted behind the last token of the output does not count, so the last step of a text is counted too low.
- ``acceptance_per_position[d - 1]``: share of all steps that accepted d drafts or more.
- ``accept_length_histogram[d]``: verify steps that accepted exactly d drafts.
- ``draft_ms``, ``verify_ms``, ``commit_ms``: means over the steps of all rounds in which a full batch of
  ``--batch-size`` requests decoded; means, because some steps also fold states. Steps of fewer requests, at the
  beginning and the end of a batch, do not count. On a GPU the clock waits for the device after each of the three, in
  plain steps too.
- ``plain_tokens_per_second``, ``speculative_tokens_per_second``: batch size times the round's acceptance length over
  the mean time of these steps; medians over rounds. For a batch of 1 that is tokens over the time of all steps. They
  do not include prefill, the host's work between two steps (queues, text), and batches that are not full.
- ``speedup``: median over rounds of the ratio of the two within a round; ``speedup_range`` is the smallest and the
  largest. ``end_to_end_speedup`` and its range are the same for whole calls, which include everything.
- ``break_even_accept_length``: mean time of a speculative step over that of a plain one: below this acceptance length
  drafting costs time.
- ``lossless``: prompts by how their text compares with the plain one: the same, different by near ties only, or
  diverged (judge.py). Null if texts cannot be compared. ``differences`` lists all prompts whose text differs.
- ``distinct_4gram_ratio``: mean over outputs. Text that repeats itself is easy to draft.

``adaptive``, with ``--adaptive``, has the same counts and comparison of texts, and figures of whole calls, prefill
included, since phases are timed in steps that are not captured, and sizes follow the times of those that are:

- ``end_to_end_tokens_per_second``, ``end_to_end_speedup``: medians over rounds, of whole calls.
- ``over_best_fixed``: median over rounds of the ratio to the fixed shape with the largest ``end_to_end_speedup``.
- ``nodes_per_request``, ``draft_depth``, ``plain_share``: means over steps: verified nodes of a request, the root
  included; depth of the draft; share of steps without one. ``num_steps``, ``topk``, ``num_draft_tokens`` are bounds.

Counts of tokens and steps are of all rounds together; a round repeats the texts of the one before.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from specmamba.measure.acceptance.judge import Difference
from specmamba.measure.acceptance.options import AcceptanceBenchConfig, Variant
from specmamba.measure.acceptance.run import Result, Sample, Task
from specmamba.measure.prompts import PLAIN, model_name
from specmamba.measure.report import distinct_4gram_ratio, machine, versions

Rounds = Sequence[Sequence[Sample]]


def full_report(
    config: AcceptanceBenchConfig,
    description: dict[str, object],
    tasks: Sequence[Task],
    result: Result,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Compute the figures of all configurations.

    Args:
        config: what was asked for.
        description: ``Engine.describe()`` of the engine as it was started.
        tasks: the prompts.
        result: what was measured.
        notes: about prompts and shapes that were left out.

    Returns:
        ``configurations``: one object each, as in the JSON file; ``plain``: the figures of plain decoding;
        ``adaptive``: those of adaptive sizes, if they were run.
    """
    notes = [*notes, *_notes(config)]
    shared = _settings(config, description, tasks, result)
    plain = result.samples[PLAIN]
    fixed = [variant for variant in result.variants if not variant.is_adaptive]
    configurations = [
        shared | _figures(variant, plain, result, config.batch_size) | {"notes": notes} for variant in fixed
    ]
    adaptive = [_adaptive_figures(variant, fixed, result) for variant in result.variants if variant.is_adaptive]
    report = {"configurations": configurations, "plain": _plain_figures(plain, config.batch_size), "notes": notes}
    return report | ({"adaptive": shared | adaptive[0] | {"notes": notes}} if adaptive else {})


def _settings(
    config: AcceptanceBenchConfig, description: dict[str, object], tasks: Sequence[Task], result: Result
) -> dict[str, Any]:
    return {
        "model": model_name(description),
        "dtype": description["dtype"],
        "device": description["device"],
        "machine": machine(),
        "threads": result.num_threads,
        "versions": versions(),
        "algorithm": description["speculative_algorithm"],
        "state": config.speculative_state,
        "accept": config.speculative_accept,
        "prefix_cache": not config.disable_radix_cache,
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


def _figures(variant: Variant, plain: Rounds, result: Result, batch_size: int) -> dict[str, Any]:
    rounds = result.samples[variant.name]
    return {
        **_texts(variant, result),
        **_speeds(plain, rounds, batch_size),
        **_step_times(plain, rounds),
    }


def _texts(variant: Variant, result: Result) -> dict[str, Any]:
    return {
        "num_steps": variant.num_steps,
        "topk": variant.topk,
        "num_draft_tokens": variant.num_draft_tokens,
        **_acceptance(result.samples[variant.name], variant.num_steps),
        **_lossless(result, variant),
    }


def _adaptive_figures(variant: Variant, fixed: Sequence[Variant], result: Result) -> dict[str, Any]:
    rounds, plain = result.samples[variant.name], result.samples[PLAIN]
    speedups = {one.name: statistics.median(_whole_ratios(result.samples[one.name], plain)) for one in fixed}
    best = max(speedups, key=lambda name: speedups[name])
    sizes = sum((sample.sizes for samples in rounds for sample in samples), Counter[str]())
    over_plain, over_best = (_whole_ratios(rounds, result.samples[name]) for name in (PLAIN, best))
    return {
        **_texts(variant, result),
        "nodes_per_request": round(sizes["num_nodes"] / sizes["num_requests"], 3),
        "draft_depth": round(sizes["num_draft_levels"] / sizes["num_steps"], 3),
        "plain_share": round(sizes["num_plain_steps"] / sizes["num_steps"], 3),
        "end_to_end_tokens_per_second": round(statistics.median(map(_whole_speed, rounds)), 2),
        "end_to_end_speedup": round(statistics.median(over_plain), 3),
        "end_to_end_speedup_range": [round(min(over_plain), 3), round(max(over_plain), 3)],
        "best_fixed": best,
        "over_best_fixed": round(statistics.median(over_best), 3),
        "over_best_fixed_range": [round(min(over_best), 3), round(max(over_best), 3)],
    }


def _acceptance(rounds: Rounds, depth: int) -> dict[str, Any]:
    outputs = [output for samples in rounds for sample in samples for output in sample.outputs]
    columns = itertools.zip_longest(*(output.spec.accepted_histogram for output in outputs), fillvalue=0)
    histogram = [sum(column) for column in columns]
    # a tree file may have a deeper tree for batches that are not full
    depth = max([depth, *(accepted for accepted, count in enumerate(histogram) if count)])
    histogram = [*histogram, *[0] * depth][: depth + 1]
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


def _speeds(plain: Rounds, rounds: Rounds, batch_size: int) -> dict[str, Any]:
    slow, fast = [[_tokens_per_second(samples, batch_size) for samples in each] for each in (plain, rounds)]
    whole = _whole_ratios(rounds, plain)
    ratios = [b / a for a, b in zip(slow, fast, strict=True)]
    return {
        "plain_tokens_per_second": round(statistics.median(slow), 2),
        "speculative_tokens_per_second": round(statistics.median(fast), 2),
        "speedup": round(statistics.median(ratios), 3),
        "speedup_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "end_to_end_speedup": round(statistics.median(whole), 3),
        "end_to_end_speedup_range": [round(min(whole), 3), round(max(whole), 3)],
    }


def _tokens_per_second(samples: Sequence[Sample], batch_size: int) -> float:
    """The decode speed of one round."""
    num_steps = sum(output.spec.num_verify_steps for sample in samples for output in sample.outputs)
    step_ms = sum(_mean_ms([samples]))
    return batch_size * _num_tokens(samples) / num_steps / step_ms * 1e3


def _whole_ratios(rounds: Rounds, others: Rounds) -> list[float]:
    """Speeds of whole calls over those of others in the same round."""
    return [_whole_speed(own) / _whole_speed(other) for own, other in zip(rounds, others, strict=True)]


def _whole_speed(samples: Sequence[Sample]) -> float:
    return _num_tokens(samples) / sum(sample.seconds for sample in samples)


def _num_tokens(samples: Sequence[Sample]) -> int:
    return sum(len(output.token_ids) for sample in samples for output in sample.outputs)


def _step_times(plain: Rounds, rounds: Rounds) -> dict[str, Any]:
    draft, verify, commit = _mean_ms(rounds)
    plain_step = _mean_ms(plain)
    return {
        "draft_ms": round(draft, 4),
        "verify_ms": round(verify, 4),
        "commit_ms": round(commit, 4),
        "plain_verify_ms": round(plain_step[1], 4),
        "plain_step_ms": round(sum(plain_step), 4),
        "break_even_accept_length": round((draft + verify + commit) / sum(plain_step), 4),
    }


def _plain_figures(plain: Rounds, batch_size: int) -> dict[str, Any]:
    draft, verify, commit = _mean_ms(plain)
    return {
        "tokens_per_second": statistics.median(_tokens_per_second(samples, batch_size) for samples in plain),
        "draft_ms": draft,
        "verify_ms": verify,
        "commit_ms": commit,
        "distinct_4gram_ratio": _acceptance(plain, 0)["distinct_4gram_ratio"],
    }


def _mean_ms(rounds: Rounds) -> tuple[float, float, float]:
    """Mean times of draft, verify and commit in steps of full batches."""
    steps = [step for samples in rounds for sample in samples for step in sample.steps]
    draft, verify, commit = (1e3 * statistics.fmean(column) for column in zip(*steps, strict=True))
    return draft, verify, commit


def _notes(config: AcceptanceBenchConfig) -> list[str]:
    """Notes about what the settings mean for the figures."""
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
