"""The figures of ``specmamba tune tree``, as a JSON object.

- ``predicted`` of a tree: ``accept_length`` on text that it was not searched on; ``step_ms``, ``tokens_per_second`` and
  ``speedup`` over plain decoding from the measured costs.
- ``measured``: on the requests of the final run; ``step_ms`` is the mean, ``accept_length`` gives every request the
  same weight (full_batch.py), ``tokens_per_second`` follows from these two; ``wall_tokens_per_second`` is all
  tokens over the whole time. These requests continue behind an end of text. ``check_text`` says whether their text was
  recorded before: with ``--replay`` and at temperature 0 there is no other. ``deviation_percent`` is predicted over
  measured tokens per second. A shared machine may have changed its speed since the costs were measured, by
  ``machine_drift``: time of a plain step then over now. Both speed-ups are relative to plain decoding at their own
  time, so most of that drift is not in ``speedup_deviation_percent``.
- ``dropped_share``: of the sampled tokens, those behind an end of text; acceptance is not recorded on them.
- ``cost_model``: predicted over measured time of the steps that the costs were fitted to.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specmamba import LLM
from specmamba.measure.prompts import PLAIN, model_name, sampling_name
from specmamba.measure.report import distinct_4gram_ratio, machine, versions
from specmamba.tune.contest import ContestFigures
from specmamba.tune.costs import BatchCost, Sample, level_widths
from specmamba.tune.options import TreeTunerConfig
from specmamba.tune.search import Acceptance, Choice, Ranks
from specmamba.tune.texts import Text, dropped_share


def provenance(config: TreeTunerConfig, llm: LLM) -> str:
    """Describe how the trees were made, for the tree file."""
    about = llm.engine.describe()
    return (
        f"specmamba tune tree: {model_name(about)}, {about['dtype']} on {about['device']}, {machine()}, "
        f"{torch.get_num_threads()} threads; {sampling_name(None if config.replay else config.temperature)}, "
        f"seed {config.seed}, {config.speculative_state}, page size {llm.engine.config.page_size}, "
        f"at most {config.max_nodes} nodes, depth {config.max_depth}"
    )


def full_report(
    config: TreeTunerConfig,
    llm: LLM,
    texts: Sequence[Text],
    ranks: Sequence[Ranks],
    costs: Mapping[int, tuple[BatchCost, Sequence[Sample]]],
    choices: Sequence[Choice],
    contests: Mapping[int, Mapping[str, ContestFigures]],
) -> dict[str, Any]:
    """Compute the report, a JSON object."""
    acceptance = Acceptance.of(ranks, config.max_rank)
    return {
        **_settings(config, llm),
        "num_prompts": len(texts),
        "dropped_share": dropped_share(texts),
        "distinct_4gram_ratio": statistics.fmean(distinct_4gram_ratio(text.recorded) for text in texts),
        "acceptance": {
            "probability": acceptance.odds.tolist(),
            "counts": acceptance.counts.tolist(),
            "num_samples": acceptance.num_samples.tolist(),
        },
        "costs": {str(size): _cost_report(cost, samples) for size, (cost, samples) in costs.items()},
        "results": [_result(choice, contests[choice.batch_size]) for choice in choices],
    }


def _settings(config: TreeTunerConfig, llm: LLM) -> dict[str, Any]:
    about = llm.engine.describe()
    is_known = config.replay or config.temperature == 0
    return {
        "model": model_name(about),
        "dtype": about["dtype"],
        "device": about["device"],
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "prompts": "bundled" if config.prompts is None else config.prompts.name,
        "max_tokens": config.max_tokens,
        "temperature": None if config.replay else config.temperature,
        "replay": config.replay,
        "check_text": "the recorded text" if is_known else "text that was not recorded",
        "seed": config.seed,
        "speculative_state": config.speculative_state,
        "page_size": llm.engine.config.page_size,
        "prefix_cache": not config.disable_radix_cache,
        "rounds": config.rounds,
        "max_depth": config.max_depth,
        "max_rank": config.max_rank,
        "max_nodes": config.max_nodes,
        "tree_file": config.out.name,
    }


def _cost_report(cost: BatchCost, samples: Sequence[Sample]) -> dict[str, Any]:
    errors = [cost.step(sample.tree).total / sample.step - 1 for sample in samples]
    measured = [
        {
            "nodes": sample.tree.num_nodes,
            "level_widths": level_widths(sample.tree),
            "draft_ms": sample.draft,
            "verify_ms": sample.verify,
            "step_ms": sample.step,
        }
        for sample in samples
    ]
    model = {
        "median_error_percent": 100 * statistics.median(map(abs, errors)),
        "worst_error_percent": 100 * max(map(abs, errors)),
    }
    return {**cost.as_json(), "cost_model": model, "measured": measured}


def _result(choice: Choice, contests: Mapping[str, ContestFigures]) -> dict[str, Any]:
    tree = contests["tree"]
    predicted = {
        "accept_length": choice.candidate.accept_length,
        "accept_length_on_recorded_text": choice.candidate.accept_length_seen,
        "draft_ms": choice.cost.draft,
        "verify_ms": choice.cost.verify,
        "overhead_ms": choice.cost.overhead,
        "step_ms": choice.cost.total,
        "tokens_per_second": choice.tokens_per_second,
        "speedup": choice.speedup,
    }
    return {
        "batch_size": choice.batch_size,
        "parents": choice.tree.parents,
        "ranks": choice.tree.ranks,
        "predicted": predicted,
        "measured": _as_json(tree),
        "machine_drift": choice.plain_ms / contests[PLAIN].step_ms,
        "deviation_percent": 100 * (choice.tokens_per_second / tree.tokens_per_second - 1),
        "speedup_deviation_percent": 100 * (choice.speedup / tree.speedup - 1),
        "contestants": {name: _as_json(one) for name, one in contests.items() if name != "tree"},
        "predicted_tokens_per_second_by_nodes": {str(nodes): speed for nodes, speed in choice.speeds.items()},
    }


def _as_json(found: ContestFigures) -> dict[str, float]:
    return {
        "accept_length": found.accept_length,
        "step_ms": found.step_ms,
        "tokens_per_second": found.tokens_per_second,
        "wall_tokens_per_second": found.wall_tokens_per_second,
        "speedup": found.speedup,
    }
