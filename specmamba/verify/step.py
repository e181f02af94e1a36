"""The step: draft, verify, accept, commit. Plain decoding is a step whose trees have only their roots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specmamba.core import Batch, DraftTree, Verdict
from specmamba.layers.context import without_padding
from specmamba.models.base import Target
from specmamba.verify.acceptance import AcceptPolicy, accept
from specmamba.verify.pools import Pools
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
    """Trees that were drafted before the step."""

    tree: DraftTree
    drafter: Drafts | None = None  # observes the verdict in the step; None: after it

    def propose(self, batch: Batch) -> DraftTree:
        """Return the given trees."""
        return self.tree

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        """Pass the verdict to the drafter."""
        if self.drafter is not None:
            self.drafter.observe(batch, verdict, features)


def step(
    batch: Batch,
    drafts: Drafts,
    target: Target,
    pools: Pools,
    policy: AcceptPolicy,
    probe: StepProbe,
    slots: VerifySlots | None = None,
) -> StepOutput:
    """Draft a tree for every request, verify all nodes in one forward, accept a path of each, commit the paths.

    With ``slots`` no operation here reads a device value on the host or depends on host values of the batch, so that a
    graph can capture the call.

    Args:
        batch: the requests, with a root each.
        drafts: proposes the trees.
        target: computes the logits of all nodes.
        pools: the memory of requests; KV and states of the accepted paths are written there.
        policy: how drafts are accepted.
        probe: times the phases and shows the logits, where a tool asks for it.
        slots: where recurrent states are read and written, in a captured step; None: the host places them now.

    Returns:
        The decided tokens, on the device. The host calls ``advance`` of pools and drafter after it has read them.
    """
    tree = drafts.propose(batch)
    probe.lap("draft")
    placement = pools.place(batch, tree, slots)
    packing = tree.shape.packing
    with without_padding(packing):
        hidden, features = target.forward(tree.tokens, pools.context(batch, tree, placement))
        logits = target.logits(hidden)
    if packing is not None:
        logits = packing.unpack(logits, batch.size)
    probe.show(logits)
    verdict = accept(tree, logits, batch, pools.history(batch), *policy)
    probe.lap("verify")
    pools.commit(batch, placement, verdict)
    drafts.observe(batch, verdict, features)
    return StepOutput.of(tree, verdict, logits, features, batch.num_logprobs)
