"""The final runs of ``specmamba tune tree``, in turns, and its figures as a JSON object.

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
- ``sizing``: with ``--speculative-costs``, the times of steps in that file, by number of requests. Null without it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specmamba import LLM
from specmamba.errors import ConfigError
from specmamba.measure.full_batch import Job, Stretch, accept_length, run_full_batch
from specmamba.measure.prompts import PLAIN, WITHOUT_SHAPE, model_name, sampling_name
from specmamba.measure.report import distinct_4gram_ratio, machine, versions
from specmamba.tune.costs import BatchCost, Sample, is_chain, level_widths
from specmamba.tune.options import TreeTunerConfig
from specmamba.tune.search import Acceptance, Choice, Ranks
from specmamba.tune.texts import Text, dropped_share

DYNAMIC = ((1, 1, 2), (2, 1, 3), (3, 1, 4), (4, 4, 8), (5, 8, 16))  # steps, topk, draft tokens
SHAPE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


def start_engine(config: TreeTunerConfig) -> LLM:
    """Start an engine with room for every draft that will be tried.

    Raises:
        ConfigError: there is no draft head, or the engine cannot start with these flags.
    """
    flags = config.model_dump(include=WITHOUT_SHAPE)
    # a chain needs the fewest slots for this number of nodes
    shape: dict[str, Any] = {"speculative_num_steps": config.max_nodes - 1}
    if config.compare:
        steps, topk, nodes = (max(sizes) for sizes in zip(*DYNAMIC, strict=True))
        shape = dict(zip(SHAPE, (steps, topk, max(nodes, config.max_nodes)), strict=True))
    try:
        llm = LLM(**flags, **shape, speculative_algorithm=config.speculative_algorithm)
    except ConfigError as error:
        if "no MTP head" not in str(error):
            raise
        raise ConfigError(
            "this checkpoint has no MTP head (no mtp.* tensors), so it has no trees to tune: give a head with "
            "--speculative-draft-model-path"
        ) from None
    if llm.engine.draft_plan.algorithm == "draft-model":
        llm.close()
        raise ConfigError(
            f"--speculative-draft-model-path {config.speculative_draft_model_path}: this is a model of its own, and "
            "only the trees of a draft head can be tuned"
        )
    return llm


def check_room(config: TreeTunerConfig, llm: LLM, texts: Sequence[Text]) -> None:
    """Raise ConfigError when the largest batch does not fit the memory, so that no full batch could be measured."""
    size, stats, plan = max(config.batch_sizes), llm.engine.stats(), llm.engine.memory_plan
    longest = max(len(text.prompt) for text in texts) + config.max_tokens + plan.num_lookahead_slots
    page = llm.engine.config.page_size
    needed = size * -(-longest // page) * page
    if needed > stats.kv_total_tokens:
        raise ConfigError(
            f"--batch-sizes {size} needs {needed} tokens of KV, but there are {stats.kv_total_tokens}: raise "
            "--max-total-tokens or --mem-fraction-static, or lower --batch-sizes or --max-tokens"
        )
    if size > plan.num_running_requests:
        flag = "--max-mamba-cache-size" if plan.num_state_slots < size else "--max-running-requests"
        raise ConfigError(f"--batch-sizes {size}: only {plan.num_running_requests} requests run together: raise {flag}")


def dynamic_flags() -> dict[str, dict[str, Any]]:
    """The flags of the dynamic drafts that a static tree is compared with, by name."""
    return {
        f"dynamic {','.join(map(str, shape))}": {
            "speculative_num_steps": shape[0],
            "speculative_eagle_topk": shape[1],
            "speculative_num_draft_tokens": shape[2],
        }
        for shape in DYNAMIC
    }


@dataclass(frozen=True)
class ContestFigures:
    """The figures of one contestant over all waves."""

    accept_length: float  # over all requests
    step_ms: float  # mean over all steps
    step_ratio: float  # median over waves: step time of plain decoding over the own one in the same wave
    tokens_per_second: float  # from accept_length and step_ms
    wall_tokens_per_second: float  # all tokens over the whole time, interruptions included

    @property
    def speedup(self) -> float:
        """The speed over plain decoding: tokens of all waves, but times by their ratio within a wave.

        A machine changes its speed from wave to wave; the ratio within a wave does not depend on that.
        """
        return self.accept_length * self.step_ratio


def contest(
    llm: LLM,
    contestants: Mapping[str, Mapping[str, Any]],
    waves: Sequence[Sequence[Job]],
    advance: Callable[[], None],
) -> dict[str, ContestFigures]:
    """Run every wave of requests with every contestant, in an order that changes from wave to wave.

    Args:
        llm: an engine with room for the drafts of all contestants.
        contestants: ``speculative_*`` flags by name; ``PLAIN`` is one of them.
        waves: batches of requests, all of one size.
        advance: called after every wave.
    """
    names = list(contestants)
    stretches: dict[str, list[Stretch]] = {name: [] for name in names}
    for number, jobs in enumerate(waves):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            llm.workbench.use_drafts(**contestants[name])
            stretches[name].append(run_full_batch(llm, jobs))
        advance()
    return {name: _contest_figures(own, stretches[PLAIN]) for name, own in stretches.items()}


def _contest_figures(own: Sequence[Stretch], plain: Sequence[Stretch]) -> ContestFigures:
    batch_size = own[0].batch_size
    accepted = accept_length(own)
    seconds = sum(s.seconds for s in own)
    step_ms = seconds / sum(s.num_steps for s in own) * 1e3
    ratios = [other.step_ms / s.step_ms for s, other in zip(own, plain, strict=True)]
    return ContestFigures(
        accept_length=accepted,
        step_ms=step_ms,
        step_ratio=statistics.median(ratios),
        tokens_per_second=batch_size * accepted / step_ms * 1e3,
        wall_tokens_per_second=sum(s.num_tokens for s in own) / seconds,
    )


def provenance(config: TreeTunerConfig, llm: LLM) -> str:
    """Describe how the trees were made, for the tree file."""
    about = llm.engine.describe()
    return (
        f"specmamba tune tree: {model_name(about)}, {about['dtype']} on {about['device']}, {machine()}, "
        f"{llm.engine.num_threads} threads; {sampling_name(None if config.replay else config.temperature)}, "
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
    sizing: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Compute the report, a JSON object; ``sizing`` is that of ``step_times``."""
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
        "sizing": sizing,
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
        "threads": llm.engine.num_threads,
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
    chains = {sample.tree.num_nodes - 1: cost.step(sample.tree).draft for sample in samples if is_chain(sample.tree)}
    return {**cost.as_json(), "chain_draft_ms": chains, "cost_model": model, "measured": measured}


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
    names = ("accept_length", "step_ms", "tokens_per_second", "wall_tokens_per_second", "speedup")
    return {name: getattr(found, name) for name in names}
