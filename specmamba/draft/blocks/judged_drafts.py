"""Candidates whose probabilities a head's confidence says, not its distributions.

DSpark's confidence (``models/dflash/confidence_head.py``) is the probability c that the token drafted below a node is
accepted. It takes the place of the distribution's own q of the first child. The other children are there for when that
one is refused: they share the rest, 1 - c, as they share 1 - q in the distribution. None counts as likelier than the
first one, which acceptance tries before them.

c depends on the tokens above a draft and never on the draft itself, so drawn drafts stay draws (``Candidates.logp``).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specmamba.draft.candidates import Candidates
from specmamba.kernels import rowwise
from specmamba.kernels import sampling as sampling_ops


def judged(found: Candidates, confidence: Tensor, topk: int) -> Candidates:
    """Give candidates other probabilities.

    Args:
        found: a chain's nodes and their siblings (``comb_of``).
        confidence: [B, D] float32, logits that the chain's nodes are accepted.
        topk: children of each node.
    """
    said = found.logp.view(*confidence.shape, topk)
    accepted, refused = (sampling_ops.log(rowwise.sigmoid(x))[..., None] for x in (confidence, -confidence))
    rest = sampling_ops.log((1 - said[..., :1].exp()).clamp(min=torch.finfo(torch.float32).tiny))
    others = torch.minimum(said[..., 1:] - rest + refused, accepted)
    first = accepted.where(said[..., :1] > -torch.inf, -torch.inf)
    return replace(found, logp=torch.cat([first, others], -1).flatten(1))
