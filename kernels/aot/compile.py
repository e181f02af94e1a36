"""Variants compiled to machine code, on a machine without a GPU: many side by side, in processes that may crash."""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from specmamba.kernels.aot.addresses import wrong_addresses
from specmamba.kernels.aot.instructions import count_instructions, disassemble
from specmamba.kernels.aot.table import Resources, Target, read_amdgcn, read_ptxas_log
from specmamba.kernels.gpu import Variant

HOPPER = 90  # has products that are given addresses of operands

# Of a process that compiles. Without the second, a kernel from the cache has no log of ptxas.
ENVIRONMENT = {"TRITON_DUMP_PTXAS_LOG": "1", "TRITON_ALWAYS_COMPILE": "1"}


@dataclass(frozen=True)
class Job:
    """A variant by names: kernels themselves cannot be sent to another process."""

    operator: str
    module: str  # has variants()
    variant: str


@dataclass(frozen=True)
class Outcome:
    """The result of a job: its resources, or why there are none."""

    job: Job
    resources: Resources | None
    error: str = ""
    seconds: float = 0.0


def find_operators() -> dict[str, str]:
    """Every operator that has kernels, and its module with ``variants()``: ``tiles`` where there is one."""
    folders = [file.parent for file in sorted(Path(__file__).parents[1].glob("*/triton_kernels.py"))]
    modules = {folder.name: "tiles" if (folder / "tiles.py").exists() else "triton_ops" for folder in folders}
    return {name: f"specmamba.kernels.{name}.{module}" for name, module in modules.items()}


def list_jobs(modules: Mapping[str, str]) -> tuple[list[Job], list[Outcome]]:
    """All variants of operators, given as by ``find_operators``; and of operators that cannot list theirs, why not."""
    jobs, failures = [], []
    for operator, module in modules.items():
        try:
            jobs += [Job(operator, module, name) for name in _variants(module)]
        except Exception as error:  # noqa: BLE001 -- one broken operator must not hide errors of others
            failures.append(Outcome(Job(operator, module, "variants()"), None, _describe(error)))
    return jobs, failures


def compile_jobs(
    jobs: Sequence[Job], target: Target, num_processes: int, report: Callable[[Outcome], None]
) -> list[Outcome]:
    """Compile in so many processes; ``report`` is called with each outcome. Outcomes are in the order of the jobs."""
    outcomes = {}
    with TemporaryDirectory(prefix="specmamba-aot-") as folder:
        for outcome in _run(jobs, target, num_processes, folder):
            report(outcome)
            outcomes[outcome.job] = outcome
    return [outcomes[job] for job in jobs]


def compile_variant(variant: Variant, target: Target) -> Resources:
    """Compile as a launch would, and read what the code needs. ``ENVIRONMENT`` must be set.

    Raises:
        ValueError: the variant does not fit its kernel, a figure cannot be read, or products read what is no operand.
        Exception: any that Triton raises for a kernel that it cannot compile.
    """
    ptxas_log, limit = io.StringIO(), variant.registers if target.backend == "cuda" else None
    with redirect_stdout(ptxas_log):
        compiled = triton.compile(
            _source(variant),
            target=GPUTarget(target.backend, target.arch, target.warp_size),
            options={
                "num_warps": variant.num_warps,
                "num_stages": variant.num_stages,
                "enable_fp_fusion": variant.may_fuse,  # a launch's default is True
                **({} if limit is None else limit.options(int(target.arch) // 10)),
            },
        )
    if target.backend == "cuda":
        needed, cubin = read_ptxas_log(ptxas_log.getvalue(), compiled.metadata.shared), compiled.asm["cubin"]
        assembly = disassemble(cubin) if target.arch == HOPPER or (target.is_counted and variant.work) else ""
        if target.arch == HOPPER and (wrong := wrong_addresses(assembly, needed.shared)):
            raise ValueError(f"wrong machine code: {wrong[0]} ({len(wrong)} of that kind)")
        return replace(needed, instructions=_instructions(variant, assembly) if target.is_counted else 0)
    return read_amdgcn(compiled.asm["amdgcn"], compiled.metadata.shared)


def _instructions(variant: Variant, assembly: str) -> int:
    """What the warps of one head of one row issue; 0 where the variant does not say how often its code runs."""
    if variant.work is None:
        return 0
    sizes = {name: value for name, value in variant.constexprs.items() if isinstance(value, int)}
    of_warp = count_instructions(assembly, {**sizes, **variant.work.sizes})
    return of_warp * variant.num_warps * variant.work.programs


def compiler_versions(target: Target) -> dict[str, str]:
    """The versions of Triton, and of ptxas where the target has it."""
    versions = {"triton": str(triton.__version__)}
    if target.backend == "cuda":
        text = get_ptxas_version(target.arch)
        found = re.search(r"\bV(\d+(?:\.\d+)+)", text)
        versions["ptxas"] = found.group(1) if found else text.strip()
    return versions


def _run(jobs: Sequence[Job], target: Target, num_processes: int, folder: str) -> Iterator[Outcome]:
    """Outcomes as they come. A process that dies ends the pool: what was waiting is tried once more, each alone."""
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
    except Exception as error:  # noqa: BLE001 -- Triton's passes raise anything; the run goes on and reports it
        return Outcome(job, None, _describe(error))
    return Outcome(job, resources, seconds=time.perf_counter() - start)


def _describe(error: Exception) -> str:
    """One line: Triton prints the error below the source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[-4:])}"


def _variants(module: str) -> Mapping[str, Variant]:
    variants = list(import_module(module).variants())
    by_name = {variant.name: variant for variant in variants}
    if len(by_name) < len(variants):
        raise ValueError(f"two variants have the same name: {sorted(variant.name for variant in variants)}")
    return by_name


def _source(variant: Variant) -> ASTSource:
    kernel = variant.kernel
    if not isinstance(kernel, JITFunction):
        raise ValueError("the kernel is no triton.jit function (under TRITON_INTERPRET=1 none is)")
    if list(variant.signature) != list(kernel.arg_names):
        raise ValueError(f"the signature has {list(variant.signature)}, the kernel takes {list(kernel.arg_names)}")
    constexprs = {name for name, kind in variant.signature.items() if kind == "constexpr"}
    if constexprs != set(variant.constexprs):
        raise ValueError(f"constexpr are {sorted(constexprs)}, there are values for {sorted(variant.constexprs)}")
    return ASTSource(
        fn=kernel,
        signature=dict(variant.signature),
        constexprs=dict(variant.constexprs),
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, parameter in enumerate(kernel.params)
            if variant.is_aligned(parameter.name)
            and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        },
    )
