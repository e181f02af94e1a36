"""The loop that every training run shares: limits, learning rate, progress, and a state to resume from.

The state of an unfinished run is on disk: tensors in safetensors, the rest in JSON, nothing that can run code.
``state.json`` names the tensor file and its checksum and is replaced last, so a run killed while saving leaves the
state before it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specmamba.errors import CheckpointError, ConfigError

FINAL_LR_SHARE = 0.05
SIGNALS = (signal.SIGINT, signal.SIGTERM)
StepCallback = Callable[[int, list[float]], None]  # number of the step, and its values


@dataclass
class RunProgress:
    """The progress of a run; owned by its loop."""

    step: int = 0  # optimizer steps done
    elapsed: float = 0.0  # seconds spent in them, over all runs
    smoothed: list[float] | None = None  # moving averages of the steps' values
    curve: list[dict[str, float]] = field(default_factory=list)  # what was measured at steps of the run


@dataclass(frozen=True)
class RunState:
    """What a run is resumed from: its tensors, and where they are saved."""

    folder: Path
    identity: dict[str, Any]  # what a resumed run must have in common with this one (recipe, digests), as JSON values
    model: nn.Module
    optimizer: torch.optim.Optimizer
    generator: torch.Generator

    def save(self, progress: RunProgress) -> None:
        """Write the state, and remove the one before it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        for index, slots in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{slot}": value for slot, value in slots.items()}
        tensors["rng.sampler"] = self.generator.get_state()
        file = self.folder / f"step-{progress.step:08d}.safetensors"
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, file)
        state = {"tensors": file.name, "sha256": _sha256(file), "progress": asdict(progress), "identity": self.identity}
        partial = self.folder / "state.json.partial"
        partial.write_text(json.dumps(state, indent=2) + "\n", "utf8")
        os.replace(partial, self.folder / "state.json")
        for old in self.folder.glob("step-*.safetensors"):
            if old != file:
                old.unlink()

    def load(self) -> RunProgress | None:
        """Restore everything in place; None where no state was saved.

        Raises:
            CheckpointError: the state is damaged.
            ConfigError: it belongs to a run with other settings or another corpus.
        """
        if not (self.folder / "state.json").exists():
            return None
        try:
            state = json.loads((self.folder / "state.json").read_text("utf8"))
            file, progress = self.folder / state["tensors"], RunProgress(**state["progress"])
            _check_identity(self.folder, state["identity"], self.identity)
            if _sha256(file) != state["sha256"]:
                raise ValueError(f"the checksum of {file.name} is wrong")
            _restore(load_file(file), self.model, self.optimizer, self.generator)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(
                f"the state in {self.folder} is damaged ({error}): delete that folder to train from the start"
            ) from None
        return progress


def _check_identity(folder: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    changed = [
        f"{name} was {saved.get(name)!r} and is {value!r}"
        for name, value in current.items()
        if saved.get(name) != value
    ]
    if changed:
        raise ConfigError(
            f"the run in {folder} cannot be resumed with other settings: {'; '.join(changed)}. "
            "Set them back, or train into another --out"
        )


def _restore(
    tensors: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator
) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            saved = tensors[f"model.{name}"]
            if saved.shape != parameter.shape:
                raise ValueError(f"{name} has the shape {tuple(saved.shape)}, not {tuple(parameter.shape)}")
            parameter.copy_(saved)
    slots: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, slot = name.split(".")
            slots.setdefault(int(index), {})[slot] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": slots})
    generator.set_state(tensors["rng.sampler"])


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class LoopOptions(Protocol):
    """The flags that a loop reads."""

    @property
    def max_steps(self) -> int | None: ...

    @property
    def limit_seconds(self) -> float | None: ...

    @property
    def warmup_steps(self) -> int: ...

    @property
    def save_every(self) -> int: ...


class TrainingLoop(ABC):
    """Optimizer steps under a linear warm-up and a cosine, resumable after any step.

    Raises:
        CheckpointError: the state to resume from is damaged.
        ConfigError: it belongs to a run with other settings or another corpus.
    """

    smoothing: float  # of the values that are shown: share of the former average in the new one
    seconds_between_lines: float  # where there is no terminal for a bar

    def __init__(self, options: LoopOptions, peak_lr: float, state: RunState) -> None:
        self._options, self._peak_lr, self._state = options, peak_lr, state
        self._stop = threading.Event()
        self.progress = state.load() or RunProgress()

    @abstractmethod
    def update(self) -> list[float]:
        """Do one optimizer step; return its values, the loss first. Raises SpecmambaError when one is not finite."""

    @abstractmethod
    def describe(self) -> str:
        """Name the step and the averages of the values."""

    def line(self) -> str:
        """Describe the run where there is no terminal."""
        return f"{self.describe()}  {self.share_done:.0%}"

    def request_stop(self) -> None:
        """End the run after the step in progress, with its state saved. Safe from signal handlers and callbacks."""
        self._stop.set()

    @property
    def share_done(self) -> float:
        """0 at the start; 1 when the first of the limits is reached."""
        steps, seconds = self._options.max_steps, self._options.limit_seconds
        by_steps = self.progress.step / steps if steps else 0.0
        return min(1.0, max(by_steps, self.progress.elapsed / seconds if seconds else 0.0))

    def run(self, console: Console, on_step: StepCallback | None = None) -> bool:
        """Train to the end; False when stopped before it."""
        last_line = time.perf_counter()
        with self.bar(console) as bar:
            task = bar.add_task("starting", total=1.0)
            while self.share_done < 1.0 and not self._stop.is_set():
                values = self.step()
                if on_step is not None:
                    on_step(self.progress.step, values)
                if self.progress.step % self._options.save_every == 0:
                    self.save()
                bar.update(task, completed=self.share_done, description=self.describe())
                if not console.is_terminal and time.perf_counter() - last_line > self.seconds_between_lines:
                    last_line = time.perf_counter()
                    console.print(self.line(), highlight=False, soft_wrap=True)
        self.save()
        return self.share_done >= 1.0

    def bar(self, console: Console) -> Progress:
        """Make the bar that a terminal shows."""
        columns = BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        return Progress(*columns, console=console, disable=not console.is_terminal)

    def save(self) -> None:
        """Write the state that a later run goes on from."""
        self._state.save(self.progress)

    def step(self) -> list[float]:
        """Do one step and count it; return its values."""
        began = time.perf_counter()
        for group in self._state.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        values = self.update()
        self.progress.step += 1
        self.progress.elapsed += time.perf_counter() - began
        before, share = self.progress.smoothed or values, self.smoothing
        self.progress.smoothed = [share * a + (1 - share) * b for a, b in zip(before, values, strict=True)]
        return values

    def _learning_rate(self) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * self.share_done))
        warm_up = min(1.0, (self.progress.step + 1) / max(1, self._options.warmup_steps))
        return self._peak_lr * warm_up * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine)


@contextmanager
def stopping_on_signals(loop: TrainingLoop) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the run after its step, never inside one."""
    before = {number: signal.signal(number, lambda *_: loop.request_stop()) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
