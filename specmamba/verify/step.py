"""The step: draft, verify, accept, commit. Plain decoding is a step whose trees have only their roots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specmamba.core import Batch, DraftTree, Verdict
from specmamba.layers.context import without_padding
from specmamba.models.base import Target
from specmamba.verify.acceptance import AcceptPolicy, accept
from specmamba.verify.pools import Placement, Pools
from specmamba.verify.probe import StepProbe
from specmamba.verify.result import StepOutput
from specmamba.verify.state_buffers import VerifySlots


class Drafts(Protocol):
    """The two calls of a drafter in a step."""

    def propose(self, batch: Batch) -> DraftTree:
        """Return a draft tree on the root of every request of the batch."""

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        """Keep the input of the next draft: the target's ``features`` [B, N, F] on the accepted paths."""


@dataclass(frozen=True, slots=True)
class GivenDrafts:
    """Trees that were drafted before the step; their drafter observes after it."""

    tree: DraftTree

    def propose(self, batch: Batch) -> DraftTree:
        """Return the given trees."""
        return self.tree

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Trees that the target has seen, before anything is decided about them."""

    tree: DraftTree
    placement: Placement
    logits: Tensor  # [B, N, V], the target's
    features: Tensor  # [B, N, F], the target's, for the drafter


@dataclass(frozen=True, slots=True)
class Verifier:
    """The step on one target and its pools, whole or in two parts."""

    target: Target  # computes the logits of all nodes
    pools: Pools  # the memory of requests; KV and states of the accepted paths are written there
    policy: AcceptPolicy  # how drafts are accepted
    probe: StepProbe  # times the phases and shows the logits, where a tool asks for it

    def step(self, batch: Batch, drafts: Drafts, slots: VerifySlots | None = None) -> StepOutput:
        """Draft a tree for every request, verify all nodes in one forward, accept a path of each, commit the paths.

        With ``slots`` no operation here reads a device value on the host or depends on host values of the batch, so
        that a graph can capture the call, or either part of it.

        Args:
            batch: the requests, with a root each.
            drafts: proposes the trees.
            slots: where recurrent states are read and written, in a captured step; None: the host places them now.

        Returns:
            The decided tokens, on the device. The host calls ``advance`` of pools and drafter after it has read them.
        """
        scored = self.score(batch, drafts, slots)
        output = self.decide(batch, scored)
        drafts.observe(batch, output.verdict, output.features)
        return output

    def score(self, batch: Batch, drafts: Drafts, slots: VerifySlots | None = None) -> Scored:
        """Draft a tree for every request, and run all nodes through the target; arguments as for ``step``."""
        tree = drafts.propose(batch)
        self.probe.lap("draft")
        placement = self.pools.place(batch, tree, slots)
        packing = tree.shape.packing
        with without_padding(packing):
            hidden, features = self.target.forward(tree.tokens, self.pools.context(batch, tree, placement))
            logits = self.target.logits(hidden)
        if packing is not None:
            logits = packing.unpack(logits, batch.size)
        self.probe.show(logits)
        return Scored(tree, placement, logits, features)

    def same(self, drafts: Drafts) -> Drafts:
        """Drafts whose trees all ranks of the model agree on, for steps that they are given to."""
        return drafts

    def decide(self, batch: Batch, scored: Scored) -> StepOutput:
        """Accept a path of every tree and commit the paths; the drafter's ``observe`` is to be called then."""
        tree, logits = scored.tree, scored.logits
        verdict = self.accept(batch, scored)
        self.probe.lap("verify")
        self.pools.commit(batch, scored.placement, verdict)
        return StepOutput.of(tree, verdict, logits, scored.features, batch.num_logprobs)

    def accept(self, batch: Batch, scored: Scored) -> Verdict:
        """Accept a path of every tree."""
        return accept(scored.tree, scored.logits, batch, self.pools.history(batch), *self.policy)
