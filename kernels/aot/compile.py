"""From a variant to machine code, on a machine without a GPU."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from specmamba.kernels.aot.resources import Resources, read_amdgcn, read_ptxas_log
from specmamba.kernels.aot.targets import Target
from specmamba.kernels.gpu import Variant

# Of a process that compiles. Without the second, a kernel from the cache comes without ptxas's words.
ENVIRONMENT = {"TRITON_DUMP_PTXAS_LOG": "1", "TRITON_ALWAYS_COMPILE": "1"}


def compile_variant(variant: Variant, target: Target) -> Resources:
    """Compile as a launch would, and read what the code needs. The environment must have ``ENVIRONMENT``.

    Raises:
        ValueError: the variant does not fit its kernel, or a figure cannot be read.
        Exception: whatever Triton raises for a kernel that it cannot compile.
    """
    ptxas_log = io.StringIO()
    with redirect_stdout(ptxas_log):
        compiled = triton.compile(
            _source(variant),
            target=GPUTarget(target.backend, target.arch, target.warp_size),
            options={
                "num_warps": variant.num_warps,
                "num_stages": variant.num_stages,
                "enable_fp_fusion": True,  # a launch's default up to 3.9, which warns where nobody says so
            },
        )
    if target.backend == "cuda":
        return read_ptxas_log(ptxas_log.getvalue(), compiled.metadata.shared)
    return read_amdgcn(compiled.asm["amdgcn"], compiled.metadata.shared)


def compiler_versions(target: Target) -> dict[str, str]:
    """Of Triton, and of ptxas where the target has it."""
    versions = {"triton": str(triton.__version__)}
    if target.backend == "cuda":
        told = get_ptxas_version(target.arch)
        found = re.search(r"\bV(\d+(?:\.\d+)+)", told)
        versions["ptxas"] = found.group(1) if found else told.strip()
    return versions


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
