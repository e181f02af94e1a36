"""The training loop: AdamW under a warm-up and a cosine, resumable after any step."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from specmamba.bench.demo.model import MTP_LOSS_WEIGHT, new_model
from specmamba.bench.demo.operators import fast_operators
from specmamba.bench.demo.settings import TrainSettings
from specmamba.bench.demo.tokens import TokenData, WindowSampler
from specmamba.errors import ConfigError, SpecmambaError
from specmamba.train import resume

WEIGHT_DECAY = 0.1  # of matrices and convolutions; norms, biases and time constants have none
BETAS = (0.9, 0.95)
MAX_GRADIENT_NORM = 1.0
FINAL_LR_SHARE = 0.05
_SMOOTHING = 0.98  # of the losses that are shown
_SHOWN_EVERY_SECONDS = 60.0  # lines where there is no terminal for a bar

StepCallback = Callable[[int, list[float]], None]


def choose_device(name: str) -> torch.device:
    """The device of this name; "auto" takes a GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


class Trainer:
    """One run, from its random start or from the state saved under ``folder``."""

    def __init__(self, settings: TrainSettings, data: TokenData, folder: Path) -> None:
        self._settings, self._state_folder = settings, folder / "resume"
        self.device = choose_device(settings.device)
        torch.manual_seed(settings.seed)
        self.model = new_model(settings.architecture).to(self.device).train()
        self._optimizer = self._new_optimizer()
        self._sampler = WindowSampler(data.train, settings.seq, settings.batch, settings.seed)
        self._identity = {**settings.recipe(), "corpus": data.digest}
        saved = resume.load_state(
            self._state_folder, self._identity, self.model, self._optimizer, self._sampler.generator
        )
        self.progress = saved or resume.Progress()
        self._stop = threading.Event()

    def request_stop(self) -> None:
        """End the run after the step in progress, with its state saved. Safe from signal handlers and callbacks."""
        self._stop.set()

    @property
    def tokens_seen(self) -> int:
        return self.progress.step * self._settings.batch * self._settings.seq

    @property
    def share_done(self) -> float:
        """0 at the start; 1 when the first of the limits is reached."""
        by_steps = self.progress.step / self._settings.max_steps if self._settings.max_steps else 0.0
        limit = self._settings.limit_seconds
        return min(1.0, max(by_steps, self.progress.elapsed / limit if limit else 0.0))

    def run(self, console: Console, on_step: StepCallback | None = None) -> bool:
        """Train to the end; False when stopped before it. ``on_step`` gets each step's number and losses."""
        with fast_operators(), _ProgressView(console) as view:
            while self.share_done < 1.0 and not self._stop.is_set():
                losses = self._step()
                if on_step is not None:
                    on_step(self.progress.step, losses)
                if self.progress.step % self._settings.save_every == 0:
                    self.save_state()
                view.show(self)
        self.save_state()
        return self.share_done >= 1.0

    def save_state(self) -> None:
        resume.save_state(
            self._state_folder,
            self.progress,
            self._identity,
            self.model,
            self._optimizer,
            self._sampler.generator,
        )

    def _step(self) -> list[float]:
        """One optimizer step; returns its losses: the target's and those of the head's depths, nats per token."""
        started = time.perf_counter()
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate()
        losses = self._losses(self._sampler.next().to(self.device))
        loss = losses[0] + MTP_LOSS_WEIGHT * losses[1:].mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        self._optimizer.step()
        values: list[float] = losses.tolist()
        self._note(values, time.perf_counter() - started)
        return values

    def _losses(self, tokens: Tensor) -> Tensor:
        enabled = self._settings.dtype == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled):
            return torch.stack(self.model.losses(tokens))

    def _note(self, losses: list[float], seconds: float) -> None:
        self.progress.step += 1
        self.progress.elapsed += seconds
        if not all(math.isfinite(value) for value in losses):
            raise SpecmambaError(f"the loss at step {self.progress.step} is {losses[0]}: lower --lr")
        before = self.progress.smoothed or losses
        self.progress.smoothed = [
            _SMOOTHING * old + (1 - _SMOOTHING) * new for old, new in zip(before, losses, strict=True)
        ]

    def _learning_rate(self) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * self.share_done))
        warm_up = min(1.0, (self.progress.step + 1) / max(1, self._settings.warmup_steps))
        return self._settings.lr * warm_up * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine)

    def _new_optimizer(self) -> torch.optim.AdamW:
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self._settings.lr, betas=BETAS, fused=self.device.type == "cuda")


class _ProgressView:
    """A bar on a terminal; elsewhere a line a minute."""

    def __init__(self, console: Console) -> None:
        self._console, self._last_line = console, time.perf_counter()
        self._bar = Progress(
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=1.0)

    def __enter__(self) -> _ProgressView:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, trainer: Trainer) -> None:
        progress, now = trainer.progress, time.perf_counter()
        target, *mtp = progress.smoothed or [math.nan]
        rate = trainer.tokens_seen / max(progress.elapsed, 1e-9)
        losses = f"loss {target:.3f}, MTP " + " ".join(f"{value:.3f}" for value in mtp)
        text = f"step {progress.step}  {losses}  {rate:,.0f} tokens/s"
        self._bar.update(self._task, completed=trainer.share_done, description=text)
        if not self._console.is_terminal and now - self._last_line >= _SHOWN_EVERY_SECONDS:
            self._last_line = now
            left = progress.elapsed * (1 / trainer.share_done - 1)
            self._console.print(
                f"{text}  {trainer.share_done:.0%}, {left / 60:.0f} min left", highlight=False, soft_wrap=True
            )
