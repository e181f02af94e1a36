"""Write packed.safetensors: small matrices packed, and dequantized again, by the libraries of GPTQ, AWQ and auto-round.

Run once with gptqmodel 7.7.0, autoawq 0.2.9, auto-round 0.16.1 and torch 2.13.0; tests read the file, and need none of
these. A matrix is quantized by random scales and zero points of ours; each library packs it with its own module, and
computes its product with the identity, which is what it makes of the packed words, in float16. The parts of a case are
called CASE.qweight and so on, its weights [N, K] float16 CASE.expected; the config of each case is in the file's
metadata.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

OUTPUTS, WIDTH, GROUP = 32, 64, 32
PARTS = ("qweight", "qzeros", "scales", "g_idx")
Case = tuple[str, dict[str, Any], Any, Tensor]  # name, quantization_config, the library's layer, weights [N, K]


def matrix(bits: int, groups: Tensor | None = None, lowest: int = 0) -> tuple[Any, Tensor, Tensor]:
    """A linear layer whose weights are codes of so many bits, their scales [N, groups], and their zero points."""
    torch.manual_seed(bits)
    groups = torch.arange(WIDTH) // GROUP if groups is None else groups
    shape = OUTPUTS, WIDTH // GROUP
    scale = (torch.rand(shape) * 0.02 + 0.01).half().float()
    zeros = torch.randint(lowest, 1 << bits, shape)
    zeros[5] = lowest
    codes = torch.randint(0, 1 << bits, (OUTPUTS, WIDTH))
    linear = nn.Linear(WIDTH, OUTPUTS, bias=False)
    linear.weight.data = (codes - zeros[:, groups]) * scale[:, groups]
    return linear, scale, zeros


def product(layer: Any) -> Tensor:
    """The weights [N, K] by which a layer multiplies float16."""
    return layer(torch.eye(WIDTH, dtype=torch.float16)).reshape(WIDTH, OUTPUTS).t()


def gptqmodel() -> Iterator[Case]:
    """Version 2 as packed; version 1, whose zero points are less by one, as it is converted for saving."""
    kind = import_module("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    to_v1 = import_module("gptqmodel.utils.model").convert_gptq_v2_to_v1_format_module
    for bits in (4, 8):
        for version, shuffled in (("gptq", False), ("gptq_v2", False), ("gptq", True)):
            groups = torch.arange(WIDTH) // GROUP
            groups = groups[torch.randperm(WIDTH)] if shuffled else groups
            linear, scale, zeros = matrix(bits, groups)
            layer = kind(bits, GROUP, False, shuffled, WIDTH, OUTPUTS)
            layer.pack(linear, scale.t().contiguous().t(), zeros.float(), groups.int())
            layer.post_init()
            layer.eval()
            weights = layer.dequantize_weight().t()
            if version == "gptq":
                to_v1(layer, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
            config = {"quant_method": "gptq", "bits": bits, "checkpoint_format": version, "sym": False}
            yield f"gptqmodel {bits} {version}{' act order' * shuffled}", config, layer, weights


def auto_round() -> Iterator[Case]:
    """Zero points as they are or less by one, as the name of the packing says."""
    kinds = {
        "auto_round:exllamav2": import_module("auto_round_extension.torch.qlinear_torch").QuantLinear,
        "auto_round:gptqmodel": import_module("auto_round_extension.torch.qlinear_torch").QuantLinear,
        "auto_round:auto_gptq": import_module("auto_round_extension.torch.qlinear_torch_zp").QuantLinear,
    }
    for packing, kind in kinds.items():
        for bits in (4, 8) if packing != "auto_round:gptqmodel" else (4,):
            linear, scale, zeros = matrix(bits, lowest=1)
            layer = kind(bits, GROUP, WIDTH, OUTPUTS, False, g_idx="gptqmodel" in packing)
            layer.device = torch.device("cpu")  # as the library's export sets it
            layer.pack(linear, scale, zeros, None, device="cpu")
            layer.post_init()
            config = {"quant_method": "auto-round", "bits": bits, "packing_format": packing, "sym": False}
            yield f"{packing} {bits}", config, layer, product(layer)
    linear, scale, zeros = matrix(4)
    awq = import_module("auto_round.export.export_to_awq.utils").WQLinear_GEMM
    layer = awq.from_linear(linear, 4, GROUP, scales=scale.t().contiguous(), zeros=zeros.t().contiguous())
    config = {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq", "sym": False}
    yield "auto_round:auto_awq 4", config, layer, product(layer)


def autoawq(folder: str) -> Iterator[Case]:
    """Of the source distribution in this folder: its package cannot be imported whole beside a present transformers."""
    for name in ("awq", "awq.modules", "awq.modules.linear", "awq.utils"):
        package = ModuleType(name)
        package.__path__ = [f"{folder}/{name.replace('.', '/')}"]
        sys.modules[name] = package
    linear, scale, zeros = matrix(4)
    kind = import_module("awq.modules.linear.gemm").WQLinear_GEMM
    layer = kind.from_linear(linear, 4, GROUP, scales=scale.t().contiguous(), zeros=zeros.t().contiguous())
    dequantize = import_module("awq.utils.packing_utils").dequantize_gemm
    weights = dequantize(layer.qweight, layer.qzeros, layer.scales, 4, GROUP).t()
    yield "autoawq 4", {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}, layer, weights


def main() -> None:
    """Argument: the folder of autoawq's source distribution."""
    tensors: dict[str, Tensor] = {}
    configs: dict[str, str] = {}
    for name, config, layer, weights in (*gptqmodel(), *auto_round(), *autoawq(sys.argv[1])):
        stored = layer.state_dict()
        tensors |= {f"{name}.{part}": stored[part].contiguous().clone() for part in PARTS if part in stored}
        assert weights.dtype is torch.float16
        tensors[f"{name}.expected"] = weights.contiguous().clone()
        configs[name] = json.dumps(config | {"group_size": GROUP})
    save_file(tensors, Path(__file__).parent / "packed.safetensors", configs)


if __name__ == "__main__":
    main()
