"""The engine that trees are tuned on: one, with room for every draft that is tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specmamba import LLM
from specmamba.errors import ConfigError
from specmamba.measure.prompts import WITHOUT_SHAPE
from specmamba.tune.contest import DYNAMIC
from specmamba.tune.texts import Text

if TYPE_CHECKING:
    from specmamba.tune.tree import TreeTunerConfig

SHAPE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


def start_engine(config: TreeTunerConfig) -> LLM:
    """An engine with room for every draft that will be tried.

    Raises:
        ConfigError: there is no draft head, or the flags do not allow to start.
    """
    flags = config.model_dump(include=WITHOUT_SHAPE)
    shape = {"speculative_num_steps": config.max_nodes - 1}  # a chain: the fewest slots for so many nodes
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
    """Raises ConfigError when the largest batch does not fit all at once: no full batch could be measured."""
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
