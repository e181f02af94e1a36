"""Many variants compiled side by side, each in a process that may die of it."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from specmamba.kernels.aot.compile import ENVIRONMENT, compile_variant
from specmamba.kernels.aot.resources import Resources
from specmamba.kernels.aot.targets import Target
from specmamba.kernels.gpu import Variant


@dataclass(frozen=True)
class Job:
    """A variant by names: kernels themselves cannot be sent to another process."""

    operator: str
    module: str  # has variants()
    variant: str


@dataclass(frozen=True)
class Outcome:
    """What became of a job: its resources, or why there are none."""

    job: Job
    resources: Resources | None
    error: str = ""
    seconds: float = 0.0


def find_operators() -> dict[str, str]:
    """Every operator with a ``tiles.py``, and the name of that module."""
    files = sorted(Path(__file__).parents[1].glob("*/tiles.py"))
    return {file.parent.name: f"specmamba.kernels.{file.parent.name}.tiles" for file in files}


def list_jobs(modules: Mapping[str, str]) -> tuple[list[Job], list[Outcome]]:
    """All variants of operators, given as by ``find_operators``; and of operators that cannot list theirs, why not."""
    jobs, failures = [], []
    for operator, module in modules.items():
        try:
            jobs += [Job(operator, module, name) for name in _variants(module)]
        except Exception as error:  # noqa: BLE001 -- one broken operator shall not hide what is wrong with others
            failures.append(Outcome(Job(operator, module, "variants()"), None, _describe(error)))
    return jobs, failures


def compile_jobs(
    jobs: Sequence[Job], target: Target, num_processes: int, told: Callable[[Outcome], None]
) -> list[Outcome]:
    """Compile in so many processes; ``told`` of each outcome as it comes. Outcomes are in the order of the jobs."""
    outcomes = {}
    with TemporaryDirectory(prefix="specmamba-aot-") as folder:
        for outcome in _run(jobs, target, num_processes, folder):
            told(outcome)
            outcomes[outcome.job] = outcome
    return [outcomes[job] for job in jobs]


def _run(jobs: Sequence[Job], target: Target, num_processes: int, folder: str) -> Iterator[Outcome]:
    """A process that dies takes all that wait with it; those are tried once more, each alone."""
    orphans = []
    with _processes(min(num_processes, len(jobs)) or 1, folder) as pool:
        futures = {pool.submit(_compile, job, target): job for job in jobs}
        for future in as_completed(futures):
            try:
                yield future.result()
            except BrokenProcessPool:
                orphans.append(futures[future])
    for job in orphans:
        with _processes(1, folder) as pool:
            try:
                yield pool.submit(_compile, job, target).result()
            except BrokenProcessPool:
                yield Outcome(job, None, "the compiler died of it")


def _processes(number: int, folder: str) -> ProcessPoolExecutor:
    # Forked: they need not import torch and Triton again, which takes longer than a kernel. Nothing has been compiled
    # in this process, so no thread of a compiler runs in it.
    fork = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(number, mp_context=fork, initializer=_settle, initargs=(folder,))


def _settle(folder: str) -> None:
    os.environ.update(ENVIRONMENT, TRITON_CACHE_DIR=folder)


def _compile(job: Job, target: Target) -> Outcome:
    start = time.perf_counter()
    try:
        resources = compile_variant(_variants(job.module)[job.variant], target)
    except Exception as error:  # noqa: BLE001 -- Triton's passes raise anything; the run goes on and tells it
        return Outcome(job, None, _describe(error))
    return Outcome(job, resources, seconds=time.perf_counter() - start)


def _describe(error: Exception) -> str:
    """In a line: Triton puts what is wrong below the source that has it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[-4:])}"


def _variants(module: str) -> Mapping[str, Variant]:
    variants = list(import_module(module).variants())
    by_name = {variant.name: variant for variant in variants}
    if len(by_name) < len(variants):
        raise ValueError(f"two variants have the same name: {sorted(variant.name for variant in variants)}")
    return by_name
