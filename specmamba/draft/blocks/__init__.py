"""Drafting with a block head (DFlash, DSpark, DFlash2): one pass over a root and masks for all depths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specmamba.cache.access import PagedKV, prefill_chunk
from specmamba.cache.kv_pool import KVPool
from specmamba.cache.request_table import RequestTable
from specmamba.core import Batch, DraftTree, PrefillChunk, Verdict
from specmamba.draft.blocks.block_keys import keys_of_block
from specmamba.draft.blocks.judged_drafts import judged
from specmamba.draft.blocks.linked_block import LinkedBlock, num_expanded
from specmamba.draft.blocks.marginal_trees import chain_of, marginal_trees
from specmamba.draft.candidates import Candidates
from specmamba.draft.draft_plan import DraftPlan
from specmamba.draft.drafter import Drafter, HostPendingTokens, root_tree
from specmamba.draft.heads.children import ChildPicker, grow_chain
from specmamba.draft.heads.missed_steps import MissedSteps
from specmamba.draft.heads.tree_growth import comb_of, exact_widths, grow_dynamic_tree, offer_comb
from specmamba.kernels import paged_attention
from specmamba.layers.context import ForwardContext
from specmamba.models.base import BlockHead


class BlockDrafter(Drafter):
    """Drafts blocks on the roots; its keys and values lie at the target's positions in its part of the KV pool.

    At positions before a root they are made of the target's features there, when the target has run the token: of known
    tokens in ``extend``, of an accepted path in ``observe``. They depend on no state of the drafter, so nothing is
    pending between steps, and a request that continues from a cached prefix needs nothing but the prefix's KV. From the
    root on they are those of the newest block, which the next block or the accepted path overwrites.

    Where the head has links between tokens, drafts are grown node by node from the one pass: the distribution of a
    node's children is the block's at their depth, and what the node's own token adds.

    Where the head has a confidence, sizes that follow the load use it in place of the likeliest child's probability.

    Steps without drafts it may skip. It then keeps the target's features, as context vectors, and stores their keys and
    values when it returns; older ones never (``MissedSteps``).
    """

    is_capturable = True
    drafts_chains = True

    def __init__(
        self,
        head: BlockHead,
        plan: DraftPlan,
        kv_pool: KVPool,
        table: RequestTable,
        dtype: torch.dtype,
        own_kv: KVPool,
    ) -> None:
        """Make a drafter.

        Args:
            head: drafts.
            plan: shapes of drafts; no static trees.
            kv_pool: has the head's keys and values.
            table: of requests.
            dtype: of context vectors.
            own_kv: the part of ``kv_pool`` that is the head's alone.
        """
        self.max_nodes, self.max_steps = plan.max_nodes, plan.num_steps
        self.head = head
        self._plan, self._picker = plan, ChildPicker(plan.draws_drafts)
        self._kv_pool, self._own_kv, self._table = kv_pool, own_kv, table
        self._device = table.kv_slots.device
        shape, grows_trees = (plan.num_steps, plan.topk, plan.max_nodes), plan.topk > 1 and not plan.is_sized
        self._trees = marginal_trees(*shape, self._device) if grows_trees and head.links is None else None
        self._widths = exact_widths(plan.num_steps, plan.max_nodes) if grows_trees and head.links is not None else None
        self.num_distributions = 1 + (plan.num_steps if self._widths is None else num_expanded(plan.topk, self._widths))
        self._missed: MissedSteps | None = None
        if plan.is_sized:
            rows = table.num_rows + 1, plan.max_nodes, head.width
            self.stand_in = self._missed = MissedSteps(rows, dtype, self._device, head.combine)
        self._root = [0] * (table.num_rows + 1)  # positions of the roots, missed steps not counted

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        if self._missed is not None:
            self._missed.forget(row)
        self._root[row] = len(tokens) - 1

    def features(self, row: int, position: int) -> None:
        """Nothing; but others may share the row's KV from now on, so that all of it is made."""
        self._return_to([row])

    def begin_finish(self, rows: Sequence[int]) -> None:
        self._return_to(rows)

    def may_follow(self, batch_size: int) -> bool:
        """Nothing is pending; steps that were skipped have a size, which is decided on the host."""
        return True

    def extend(self, chunk: PrefillChunk, features: Tensor) -> None:
        """Make the keys and values of known tokens."""
        self._remember_chunk(chunk, self.head.combine(features))

    def prepare(self, rows: Sequence[int], batch_size: int, drafts: bool = True) -> HostPendingTokens | None:
        self._return_to(rows)
        return None

    def prepare_some(self, rows: Sequence[int], drafted: Sequence[bool]) -> HostPendingTokens | None:
        self._return_to(rows)
        return None

    def propose(self, batch: Batch) -> DraftTree:
        plan, trees = self._plan, self._trees
        if self._widths is not None:
            block = self._linked(batch, plan.num_steps)
            return grow_dynamic_tree(block, self._picker, plan, batch, block.start(batch), self._widths)
        if trees is None:
            return self.propose_chain(batch, min(plan.num_steps + 1, plan.max_nodes))
        children = self._picker.pick(self.marginals(batch, plan.num_steps), plan.topk, batch, 0)
        return trees.best(batch, children)

    def propose_nothing(self, batch: Batch) -> DraftTree:
        return root_tree(batch)

    def propose_chain(self, batch: Batch, num_nodes: int) -> DraftTree:
        if num_nodes == 1:
            return root_tree(batch)
        if self.head.links is None:
            return chain_of(batch, *self._picker.pick_one(self.marginals(batch, num_nodes - 1), batch, 0))
        block = self._linked(batch, num_nodes - 1)

        def descend(tokens: Tensor, hidden: Tensor, depth: int) -> Tensor:
            return block.descend(batch, tokens, hidden, depth, None, depth)

        return grow_chain(self._picker, batch, num_nodes, block.start(batch), block.logits, descend)

    def offer(self, batch: Batch, num_steps: int) -> Candidates:
        topk, hidden, confidence = self._plan.topk, self._run(batch, num_steps), self.head.confidence
        if self.head.links is not None:
            block = LinkedBlock(self.head.links, hidden, self.head.logits(hidden))
            found = offer_comb(block, self._picker, batch, block.start(batch), num_steps, topk)
        else:
            children = self._picker.pick(self.head.logits(hidden), topk, batch, 0)
            found = comb_of(children.tokens, children.place_logp, children.probs)
        if confidence is None:
            return found
        chain = found.tokens.view(batch.size, num_steps, topk)[:, :-1, 0]
        return judged(found, confidence(torch.cat([batch.root_tokens[:, None], chain], 1), hidden), topk)

    def marginals(self, batch: Batch, num_steps: int) -> Tensor:
        """Logits [B, num_steps, V] of the tokens at the first depths below the roots."""
        return self.head.logits(self._run(batch, num_steps))

    def _linked(self, batch: Batch, num_steps: int) -> LinkedBlock:
        assert self.head.links is not None
        hidden = self._run(batch, num_steps)
        return LinkedBlock(self.head.links, hidden, self.head.logits(hidden))

    def _run(self, batch: Batch, num_steps: int) -> Tensor:
        """Hidden states [B, num_steps, H] of blocks on the roots."""
        length = num_steps if self.head.drafts_at_root else num_steps + 1
        positions = batch.root_positions[:, None] + torch.arange(length, device=self._device)
        slots = self._table.slots_at(batch.row_index, positions).view(-1)
        keys = (keys_of_block(view, self._table, batch, length) for view in self.head.views)
        contexts = [ForwardContext(PagedKV(self._kv_pool, slots, seen), None, positions) for seen in keys]
        return self.head.forward(batch.root_tokens, contexts)

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        """Make the keys and values of the accepted paths."""
        vectors = self.head.combine(verdict.on_path(features))
        offsets = torch.arange(vectors.shape[1], device=self._device)
        positions = batch.root_positions[:, None] + offsets
        slots = self._table.slots_at(batch.row_index, positions) * (offsets <= verdict.num_accepted[:, None])
        self._remember(vectors, batch.row_index, positions, slots)

    def advance(self, rows: Sequence[int], decided: Sequence[Sequence[int]]) -> None:
        for row, tokens in zip(rows, decided, strict=True):
            self._root[row] += len(tokens)

    def _return_to(self, rows: Sequence[int]) -> None:
        """Go on after skipped steps: make the keys and values of their tokens, up to the roots."""
        if self._missed is None:
            return
        for row, number in self._missed.among(rows, self._root):
            begin = self._root[row]
            missed = self._missed.take(row, begin, number)
            first = begin + missed.num_lost
            self._root[row] = first + len(missed.tokens)
            if missed.num_lost:  # what is not known becomes zeros, not those of other requests
                positions = torch.arange(begin, first, device=self._device)[None]
                self._own_kv.clear(self._table.slots_at(torch.tensor([row], device=self._device), positions).flatten())
            chunk = prefill_chunk([row], [first], [missed.tokens], self._device)
            self._remember_chunk(chunk, missed.states[None])  # the vector of each is that of the token before it

    def _remember_chunk(self, chunk: PrefillChunk, vectors: Tensor) -> None:
        self._remember(vectors, chunk.row_index, chunk.positions, self._table.slots_of(chunk))

    def _remember(self, vectors: Tensor, rows: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Store keys and values of context vectors [B, L, H] in slots [B, L] of rows [B]; slot 0 is padding."""
        # queries are not used: they see the first position alone, which costs least
        keys = paged_attention.AttentionMetadata(self._table.kv_slots, rows, torch.zeros_like(positions), 1)
        kv = PagedKV(self._kv_pool, slots.reshape(-1), keys)
        self.head.remember(vectors, ForwardContext(kv, None, positions))
