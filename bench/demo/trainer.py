"""The training of the demo, and its held-out figures.

The figures are teacher-forced along real text: nothing is sampled, so no text can loop.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from specmamba.bench.demo.checkpoint import TokenData, WindowSampler, read_checkpoint, spaced_windows
from specmamba.bench.demo.model import MTP_LOSS_WEIGHT, MTP_STEPS, DemoModel, fast_operators, new_model
from specmamba.bench.demo.options import TrainSettings
from specmamba.bench.demo.talks.tokens import MixedSampler, chat_tokens
from specmamba.errors import CheckpointError, ConfigError, SpecmambaError
from specmamba.train.loop import RunState, StepCallback, TrainingLoop

WEIGHT_DECAY = 0.1  # of matrices and convolutions; norms, biases and time constants have none
BETAS = (0.9, 0.95)
MAX_GRADIENT_NORM = 1.0
TOP = 4  # likeliest tokens of the head that count as agreement within the top 4
_EVAL_BATCH = 8  # windows in a batch of the evaluation


def choose_device(name: str) -> torch.device:
    """The device of this name; "auto" takes a GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def start_of(settings: TrainSettings) -> str:
    """What identifies the weights that a run begins with: "random", or the checksum of its checkpoint's."""
    if settings.continue_from is None:
        return "random"
    file = settings.continue_from / "model.safetensors"
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise CheckpointError(f"--continue-from: {file} cannot be read: {error}") from None


class Trainer(TrainingLoop):
    """One run, from its random start or from the state saved under ``folder``.

    Raises:
        CheckpointError: that state is damaged.
        ConfigError: it belongs to a run with other settings or another corpus.
    """

    smoothing = 0.98
    seconds_between_lines = 60.0

    def __init__(self, settings: TrainSettings, data: TokenData, folder: Path) -> None:
        self._settings = settings
        self.device = choose_device(settings.device)
        torch.manual_seed(settings.seed)
        self.model = self._first_model().to(self.device).train()
        self._optimizer = self._new_optimizer()
        self._sampler = WindowSampler(data.train, settings.seq, settings.batch, settings.seed)
        self._mixed: MixedSampler | None = None
        identity = {**settings.recipe(), "corpus": data.digest, "start": start_of(settings)}
        if settings.chat_share:
            chat = chat_tokens(data.tokenizer, settings.conversations, settings.seed)
            self._mixed = MixedSampler(self._sampler, chat, settings.chat_share)
            identity["chat"] = chat.digest
        state = RunState(folder / "resume", identity, self.model, self._optimizer, self._sampler.generator)
        super().__init__(settings, settings.lr, state)

    @property
    def tokens_seen(self) -> int:
        """Tokens of all steps so far."""
        return self.progress.step * self._settings.batch * self._settings.seq

    def run(self, console: Console, on_step: StepCallback | None = None) -> bool:
        """Train to the end; False when stopped before it. A step's values are the target's loss and the head's."""
        with fast_operators():
            return super().run(console, on_step)

    def update(self) -> list[float]:
        """Do one optimizer step; return the losses of the target and of the head's depths, in nats per token."""
        tokens, learned = (self._sampler.next(), None) if self._mixed is None else self._mixed.next()
        losses = self._losses(tokens.to(self.device), learned, self._head_rows())
        values: list[float] = losses.tolist()
        if not all(math.isfinite(value) for value in values):
            raise SpecmambaError(f"the loss at step {self.progress.step + 1} is {values[0]}: lower --lr")
        loss = losses[0] + MTP_LOSS_WEIGHT * losses[1:].mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        self._optimizer.step()
        return values

    def describe(self) -> str:
        """Name the step, the averages of the losses, and the speed."""
        target, *mtp = self.progress.smoothed or [math.nan]
        rate = self.tokens_seen / max(self.progress.elapsed, 1e-9)
        losses = f"loss {target:.3f}, MTP " + " ".join(f"{value:.3f}" for value in mtp)
        return f"step {self.progress.step}  {losses}  {rate:,.0f} tokens/s"

    def line(self) -> str:
        """Describe the run where there is no terminal."""
        left = self.progress.elapsed * (1 / self.share_done - 1)
        return f"{super().line()}, {left / 60:.0f} min left"

    def bar(self, console: Console) -> Progress:
        """Make the bar that a terminal shows; it also says how much time is left."""
        columns = BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        left = TextColumn("left"), TimeRemainingColumn()
        return Progress(*columns, *left, console=console, disable=not console.is_terminal)

    def _first_model(self) -> DemoModel:
        start = self._settings.continue_from
        return new_model(self._settings.architecture) if start is None else read_checkpoint(start)

    def _head_rows(self) -> Tensor | None:
        """The sequences of this step that train the head; None: all."""
        count = max(1, round(self._settings.mtp_share * self._settings.batch))
        if count == self._settings.batch:
            return None
        return torch.randperm(self._settings.batch, generator=self._sampler.generator)[:count].to(self.device)

    def _losses(self, tokens: Tensor, learned: Tensor | None, head_rows: Tensor | None) -> Tensor:
        counted = None if learned is None else learned.to(self.device)
        follow_target = self._settings.mtp_targets == "target"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._settings.dtype == "bfloat16"):
            losses = self.model.losses(tokens, counted, head_rows=head_rows, follow_target=follow_target)
        return torch.stack(losses)

    def _new_optimizer(self) -> torch.optim.AdamW:
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self._settings.lr, betas=BETAS, fused=self.device.type == "cuda")


class HeldOutFigures(BaseModel):
    """Means over tokens. Lists have an item for each MTP depth, 1 to 3."""

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
    """Compute figures over evenly spaced windows of the held-out text, in the type that the weights have."""
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
    """Compute sums over a batch of tokens ``[B, T]``, by depth: fp64 ``[depths, 6]``.

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
