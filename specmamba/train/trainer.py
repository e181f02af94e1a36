"""The training loop of a draft head: AdamW under a warm-up and a cosine, resumable after any step."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from torch import Tensor

from specmamba.errors import SpecmambaError
from specmamba.train import resume
from specmamba.train.folder import writing
from specmamba.train.head import Eagle3Head
from specmamba.train.loss import Judgement, judge
from specmamba.train.settings import TrainDraftConfig
from specmamba.train.windows import Windows

# matrix by matrix: all at once would take the memory of a second head on a GPU
ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.0, "foreach": False}
# Adam's best rate falls with the width of what it trains (arXiv 2203.03466): one that suits 256 channels suits all.
LARGEST_LR, WIDTH_TIMES_LR = 3e-3, 0.77
MAX_GRADIENT_NORM = 1.0
FINAL_LR_SHARE = 0.05
SMOOTHING = 0.95  # of the figures that are shown
SHOWN_EVERY_SECONDS = 30.0  # lines where there is no terminal for a bar

StepCallback = Callable[[int, list[float]], None]


@dataclass(frozen=True)
class Lesson:
    """What a head is trained on. Matrices are the target's, [V, H] float32."""

    windows: Windows
    embedding: Tensor
    output: Tensor
    identity: dict[str, str]  # digests of texts and target, which a resumed run must have in common


class DraftTrainer:
    """One run, from a random start or from the state saved under ``config.out``.

    Raises:
        CheckpointError: that state is damaged.
        ConfigError: it belongs to a run with other settings, another text or another target.
    """

    def __init__(self, config: TrainDraftConfig, lesson: Lesson, head: Eagle3Head, device: torch.device) -> None:
        self.head, self._config, self._windows, self._device = head.to(device).train(), config, lesson.windows, device
        self._embedding, self._output = lesson.embedding.to(device), lesson.output.to(device)
        self._target_ids = None if head.target_ids is None else head.target_ids.to(device)
        self._state_folder = config.out / "resume"
        self._peak_lr = config.lr or min(LARGEST_LR, WIDTH_TIMES_LR / head.shape.hidden_size)
        self._optimizer = torch.optim.AdamW(head.parameters(), lr=self._peak_lr, **ADAM)
        self._order = torch.Generator().manual_seed(config.seed)
        self._identity = {**config.recipe(), "head": asdict(head.shape), **lesson.identity}
        self._stop = threading.Event()
        saved = resume.load_state(self._state_folder, self._identity, head, self._optimizer, self._order)
        self.progress = saved or resume.Progress()

    def request_stop(self) -> None:
        """End the run after the step in progress, with its state saved. Safe from signal handlers and callbacks."""
        self._stop.set()

    @property
    def share_done(self) -> float:
        """0 at the start; 1 when the first of the limits is reached."""
        steps, seconds = self._config.max_steps, self._config.limit_seconds
        by_steps = self.progress.step / steps if steps else 0.0
        return min(1.0, max(by_steps, self.progress.elapsed / seconds if seconds else 0.0))

    @property
    def figures(self) -> dict[str, float | list[float]]:
        """Moving averages: the loss in nats, and the acceptance of each draft in a row.

        Acceptance is the share of drafts that are the target's likeliest token, on text as it stands.
        """
        loss, *agreement = self.progress.smoothed or [math.nan]
        return {"loss": loss, "agreement": agreement}

    def run(self, console: Console, on_step: StepCallback | None = None) -> bool:
        """Train to the end; False when stopped before it. ``on_step`` gets each step's number, loss and agreements."""
        last_line = time.perf_counter()
        columns = BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("starting", total=1.0)
            while self.share_done < 1.0 and not self._stop.is_set():
                values = self.step()
                if on_step is not None:
                    on_step(self.progress.step, values)
                if self.progress.step % self._config.save_every == 0:
                    self.save()
                bar.update(task, completed=self.share_done, description=self.describe())
                if not console.is_terminal and time.perf_counter() - last_line > SHOWN_EVERY_SECONDS:
                    last_line = time.perf_counter()
                    console.print(f"{self.describe()}  {self.share_done:.0%}", highlight=False, soft_wrap=True)
        self.save()
        return self.share_done >= 1.0

    def describe(self) -> str:
        """Where the run is."""
        loss, *agreement = self.progress.smoothed or [math.nan]
        shares = " ".join(f"{share:.2f}" for share in agreement)
        return f"step {self.progress.step}  loss {loss:.3f}  agreement {shares}"

    def save(self) -> None:
        """Write the state that a later run goes on from."""
        with writing(self._config.out):
            resume.save_state(
                self._state_folder, self.progress, self._identity, self.head, self._optimizer, self._order
            )

    def step(self) -> list[float]:
        """One optimizer step; its loss and agreements."""
        began = time.perf_counter()
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate()
        chosen = torch.randint(len(self._windows), (self._config.batch,), generator=self._order)
        self._optimizer.zero_grad(set_to_none=True)
        states, judgement = self._judge(chosen)
        values: list[float] = torch.cat([judgement.loss[None], judgement.agreements]).tolist()
        if not math.isfinite(values[0]):
            raise SpecmambaError(
                f"the loss at step {self.progress.step + 1} is {values[0]}: train with a lower --lr into another --out"
            )
        torch.autograd.backward(states, judgement.gradients)
        del states, judgement
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), MAX_GRADIENT_NORM)
        self._optimizer.step()
        self._note(values, time.perf_counter() - began)
        return values

    def _judge(self, chosen: Tensor) -> tuple[list[Tensor], Judgement]:
        """The head's states of some windows, and how far its drafts are from what the target says there."""
        tokens, features, hidden = (
            x[chosen].to(self._device) for x in (self._windows.tokens, self._windows.features, self._windows.hidden)
        )
        embeddings = F.embedding(tokens[:, 1:], self._embedding)
        states = self.head.states(embeddings, features[:, :-1].float(), self._config.steps_deep)
        weight = self.head.lm_head.weight
        return states, judge(states, hidden[:, 1:].float(), weight, self._output, self._target_ids)

    def _note(self, values: list[float], seconds: float) -> None:
        self.progress.step += 1
        self.progress.elapsed += seconds
        before = self.progress.smoothed or values
        self.progress.smoothed = [SMOOTHING * a + (1 - SMOOTHING) * b for a, b in zip(before, values, strict=True)]

    def _learning_rate(self) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * self.share_done))
        warm_up = min(1.0, (self.progress.step + 1) / max(1, self._config.warmup_steps))
        return self._peak_lr * warm_up * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine)
