"""Held-out figures of a demo model, teacher-forced along real text: no sampling, so nothing can loop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from specmamba.bench.demo.model import MTP_STEPS, DemoModel
from specmamba.bench.demo.operators import fast_operators
from specmamba.bench.demo.tokens import TokenData, spaced_windows

TOP = 4  # tokens of the head among which the target's choice is looked for
_EVAL_BATCH = 8  # windows


class HeldOutFigures(BaseModel):
    """Per-token means. Lists run over the MTP depths 1 to 3."""

    model_config = ConfigDict(frozen=True)

    num_windows: int
    seq: int
    target_loss: float  # nats per token
    target_loss_late: float  # over the second half of each window, where there is more context
    target_loss_per_byte: float  # nats per byte of text: comparable between tokenizers
    mtp_loss: list[float]  # nats per token, against the real text
    mtp_agreement: list[float]  # the head's first choice is the target's first choice
    mtp_agreement_top4: list[float]  # the target's first choice is among the head's first four

    def describe(self) -> str:
        depths = range(1, len(self.mtp_loss) + 1)
        summary = (
            f"held-out loss {self.target_loss:.3f} nats/token ({self.target_loss_per_byte:.3f} nats/byte) over "
            f"{self.num_windows} windows of {self.seq} tokens; {self.target_loss_late:.3f} in their second half"
        )
        lines = [summary]
        for depth, loss, first, four in zip(
            depths, self.mtp_loss, self.mtp_agreement, self.mtp_agreement_top4, strict=True
        ):
            lines.append(f"MTP depth {depth}: loss {loss:.3f}, agrees with the target {first:.3f}, top 4 {four:.3f}")
        return "\n".join(lines)


def evaluate(model: DemoModel, data: TokenData, seq: int, num_windows: int) -> HeldOutFigures:
    """Figures over evenly spaced windows of the held-out text, in the type that the weights have."""
    windows = spaced_windows(data.held_out, seq, num_windows)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    with torch.inference_mode(), fast_operators():
        sums = torch.stack([_batch_sums(model, batch.to(device)) for batch in windows.split(_EVAL_BATCH)]).sum(0)
    model.train(was_training)
    loss, first, four = (sums[:, :3] / sums[:, 3:4]).T.tolist()
    late = float(sums[0, 4] / sums[0, 5])
    return HeldOutFigures(
        num_windows=len(windows),
        seq=seq,
        target_loss=loss[0],
        target_loss_late=late,
        target_loss_per_byte=loss[0] * len(data.held_out) / data.held_out_bytes,
        mtp_loss=loss[1:],
        mtp_agreement=first[1:],
        mtp_agreement_top4=four[1:],
    )


def _batch_sums(model: DemoModel, tokens: Tensor) -> Tensor:
    """Sums over a batch of tokens ``[B, T]``, by depth: fp64 ``[depths, 6]``.

    The columns are loss, agreement, top-4 agreement and their count, then loss and count of the second half of the
    windows.
    """
    choices: Tensor | None = None
    rows = []
    for depth, hidden in enumerate(model.hidden_states(tokens, MTP_STEPS)):
        logits = model.logits(hidden[:, :-1])  # row t predicts token t + depth + 1
        targets = tokens[:, depth + 1 :]
        if choices is None:
            choices = logits.argmax(-1)  # [B, T-1], the target's
        losses = F.cross_entropy(logits.mT, targets, reduction="none").double()
        hits = logits.topk(TOP).indices == choices[:, depth:, None]  # [B, T-1-depth, 4], best first
        late = losses[:, tokens.shape[1] // 2 :]
        sums = [float(values.sum()) for values in (losses, hits[..., 0], hits)]
        rows.append(torch.tensor([*sums, losses.numel(), float(late.sum()), late.numel()], dtype=torch.float64))
    return torch.stack(rows)
