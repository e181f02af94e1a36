"""The engine that trees are tuned on, and ways to draft against each other on it: the same requests, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specmamba import LLM
from specmamba.errors import ConfigError
from specmamba.measure.full_batch import Job, Stretch, accept_length, run_full_batch
from specmamba.measure.prompts import PLAIN, WITHOUT_SHAPE
from specmamba.tune.options import TreeTunerConfig
from specmamba.tune.texts import Text

DYNAMIC = ((1, 1, 2), (2, 1, 3), (3, 1, 4), (4, 4, 8), (5, 8, 16))  # steps, topk, draft tokens
SHAPE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


def start_engine(config: TreeTunerConfig) -> LLM:
    """Start an engine with room for every draft that will be tried.

    Raises:
        ConfigError: there is no draft head, or the engine cannot start with these flags.
    """
    flags = config.model_dump(include=WITHOUT_SHAPE)
    shape = {"speculative_num_steps": config.max_nodes - 1}  # a chain needs the fewest slots for this number of nodes
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
