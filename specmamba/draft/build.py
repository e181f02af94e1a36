"""From a plan to a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specmamba.cache.kv_pool import KVPool
from specmamba.cache.request_table import RequestTable
from specmamba.config import EngineConfig
from specmamba.draft.base import Drafter, NoDrafter
from specmamba.draft.mtp import MTPDrafter
from specmamba.draft.ngram import NgramDrafter
from specmamba.draft.ngram_corpus import read_corpus
from specmamba.draft.plan import DraftPlan
from specmamba.models.base import LoadedModel


def build_drafter(
    plan: DraftPlan,
    config: EngineConfig,
    model: LoadedModel,
    kv_pool: KVPool,
    table: RequestTable,
    encode: Callable[[str], Sequence[int]],
) -> Drafter:
    """The drafter that a plan asks for; ``encode`` turns the text of a corpus into tokens.

    Raises:
        ConfigError: the corpus cannot be read.
    """
    if plan.algorithm == "none":
        return NoDrafter()
    if plan.algorithm == "ngram":
        file = config.speculative_ngram_corpus
        corpus = None if file is None else read_corpus(file, encode, model.target.vocab_size)
        return NgramDrafter(plan, config, table, corpus)
    assert model.draft_head is not None
    return MTPDrafter(model.draft_head, plan, kv_pool, table, model.target.hidden_size)
