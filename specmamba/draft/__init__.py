"""Drafters propose a draft tree for each running request; ``build_drafter`` makes the one that a plan asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specmamba.cache.kv_pool import KVPool
from specmamba.cache.request_table import RequestTable
from specmamba.config import TEXT_ALGORITHMS, EngineConfig
from specmamba.draft.blocks import BlockDrafter
from specmamba.draft.draft_model import ModelDrafter
from specmamba.draft.draft_plan import DraftPlan
from specmamba.draft.drafter import Drafter, NoDrafter
from specmamba.draft.heads import MTPDrafter
from specmamba.draft.ngram import NgramDrafter
from specmamba.draft.suffix import SuffixDrafter
from specmamba.draft.text_drafter import read_corpus
from specmamba.models.base import BlockHead, Models
from specmamba.models.hybrid import num_attention_layers


def build_drafter(
    plan: DraftPlan,
    config: EngineConfig,
    models: Models,
    kv_pool: KVPool,
    table: RequestTable,
    encode: Callable[[str], Sequence[int]],
) -> Drafter:
    """Make the drafter that a plan asks for; ``encode`` turns the text of a corpus into tokens.

    Raises:
        ConfigError: the corpus cannot be read.
    """
    if plan.algorithm == "none":
        return NoDrafter()
    if plan.algorithm in TEXT_ALGORITHMS:
        file, vocab_size = config.draft_corpus, models.target.target.vocab_size
        corpus = None if file is None else read_corpus(file, encode, vocab_size, plan.algorithm)
        drafts_by = NgramDrafter if plan.algorithm == "ngram" else SuffixDrafter
        return drafts_by(plan, config, table, corpus)
    if models.draft is not None:
        return ModelDrafter(models.draft, plan, kv_pool, table)
    head = models.target.draft_head
    assert head is not None
    dtype = models.target.cache_shape.dtype
    own_kv = kv_pool.from_layer(num_attention_layers(models.target.target))
    if isinstance(head, BlockHead):
        return BlockDrafter(head, plan, kv_pool, table, dtype, own_kv)
    return MTPDrafter(head, plan, kv_pool, table, dtype, own_kv)
