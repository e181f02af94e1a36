"""From which length on a run is attended to by PyTorch over gathered keys: both forms are timed on the engine's GPU."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from specmamba.kernels import gpu
from specmamba.kernels.paged_attention import tiles, torch_ops
from specmamba.kernels.paged_attention.operands import AttentionConfig, AttentionMetadata, LayerKV

logger = logging.getLogger("specmamba")

SIZES = (512, 1024, 2048, 4096, 8192)  # queries of a run, at the start of a text
ROUNDS = 5  # in which the forms take turns, behind one that is not timed
MAX_SECONDS = 0.01  # of one call; a larger size than one that takes longer is not timed
WORTH = 0.95  # of the time of the kernel: PyTorch's form takes memory besides
TRIED = 8, 128  # keys in front of the run, and its queries, for which both forms have to agree
MAX_DIFFERENCE = 2**-5  # of results of the order of 0.1: one key more or less makes a larger one

Form = Callable[[Tensor, LayerKV, AttentionMetadata, float, Tensor | None], Tensor]
Timer = Callable[[Callable[[], object]], float]  # seconds of a call


class Heads(NamedTuple):
    """What times of a layer depend on."""

    query_heads: int
    key_heads: int
    head_dim: int
    has_gate: bool
    dtype: torch.dtype
    device: torch.device


class Seconds(NamedTuple):
    """Of one call."""

    num_queries: int
    in_kernels: float
    gathered: float


# Fewest queries of a run for which keys are gathered, None: never; and the most of one call that were to be timed. One
# GPU answers once for all engines of a process, but for an engine with longer calls.
_least: dict[Heads, int | None] = {}
_most: dict[Heads, int] = {}


def is_gathered(q: Tensor, kv: LayerKV, metadata: AttentionMetadata, has_gate: bool) -> bool:
    """Whether ``torch_ops.attend_spans`` takes a call; arguments as there.

    Rows count with the mean of their lengths, since each is a call of PyTorch's. Keys are at least as many as queries,
    so that a longer run shares what gathering takes among more of them than one of the sizes that were timed.
    """
    spans = metadata.spans
    if spans is None or kv.k_scales is not None or q.shape[1] <= tiles.MAX_SPLIT_QUERIES:
        return False
    least = _least.get(Heads(q.shape[2], kv.k_pool.shape[1], q.shape[3], has_gate, q.dtype, q.device))
    if least is None or any(begin < metadata.first for begin, _ in spans):
        return False
    longest = max(end for _, end in spans)
    if torch_ops.gathered_bytes(kv, longest) > torch_ops.GATHERED_BYTES:
        return False
    return sum(end - begin for begin, end in spans) >= least * len(spans)


def heads_of(config: AttentionConfig, dtype: torch.dtype, device: torch.device) -> Heads | None:
    """What a layer is timed as; None: it never gathers.

    FlashAttention takes numbers of 16 bits, in heads that are narrower than latents. What PyTorch has for float32 is
    not as exact as the kernels, whose products are IEEE. Of a window it would read keys that no query sees.
    """
    if config.latent_dim is not None or config.window or dtype not in (torch.bfloat16, torch.float16):
        return None
    device = torch.empty(0, device=device).device  # with its index, as tensors have it
    return Heads(config.num_query_heads, config.num_key_heads, config.head_dim, config.has_gate, dtype, device)


def can_measure(device: torch.device) -> bool:
    """Whether there is a choice: Triton's kernels run on this GPU, and the environment does not ask for them alone."""
    return device.type == "cuda" and gpu.runs_on(device, "paged_attention") and not gpu.choice().is_always


def measure(heads: Heads, most_queries: int, in_kernels: Form) -> int | None:
    """Time both forms on the device of the heads, unless that was done before; ``is_gathered`` then knows the result.

    It takes tenths of a second, beside the compilation of a kernel that the first prefill would wait for.

    Args:
        heads: of a layer.
        most_queries: of one call; longer runs are not timed.
        in_kernels: ``triton_ops.attend_in_kernels``.

    Returns:
        The fewest queries for which keys are gathered; None: they never are.
    """
    if _most.get(heads, 0) < most_queries:
        forms = in_kernels, torch_ops.attend_spans
        is_possible = _has_flash(heads) and _agree_or_warn(heads, *forms)
        _least[heads] = least_faster(timed(heads, most_queries, *forms, _gpu_seconds)) if is_possible else None
        _most[heads] = most_queries
    return _least[heads]


def _agree_or_warn(heads: Heads, in_kernels: Form, gathered: Form) -> bool:
    if agree(heads, in_kernels, gathered):
        return True
    logger.warning(
        "attention of %d heads over %d of %d: Triton's kernel and PyTorch's FlashAttention give different results on "
        "this GPU; the kernel is used, and SPECMAMBA_TRITON=-paged_attention does without it",
        *heads[:3],
    )
    return False


def least_faster(times: Sequence[Seconds]) -> int | None:
    """Return the least size from which on gathering is faster for all larger ones too; None: not even for the largest.

    ``times``: by ascending size.
    """
    least = None
    for size in reversed(times):
        if size.gathered > WORTH * size.in_kernels:
            break
        least = size.num_queries
    return least


def timed(heads: Heads, most_queries: int, in_kernels: Form, gathered: Form, seconds: Timer) -> list[Seconds]:
    """Median times of both forms by ascending size, up to one that takes long."""
    found: list[Seconds] = []
    for size in (size for size in SIZES if size <= most_queries):
        operands = _operands(heads, 0, size)
        calls = [partial(form, *operands) for form in (in_kernels, gathered)]
        rounds = [[seconds(call) for call in calls] for _ in range(1 + ROUNDS)]
        medians = [statistics.median(of_form) for of_form in zip(*rounds[1:], strict=True)]
        found.append(Seconds(size, *medians))
        if max(medians) > MAX_SECONDS:
            break
    return found


def agree(heads: Heads, first: Form, second: Form) -> bool:
    """Whether both forms give the same for a run behind other keys, but for rounding."""
    operands = _operands(heads, *TRIED)
    difference = (first(*operands).float() - second(*operands).float()).abs().max()
    return bool(difference <= MAX_DIFFERENCE)


def _has_flash(heads: Heads) -> bool:
    """Whether PyTorch has FlashAttention for these heads."""
    q, kv, *_ = _operands(heads, *TRIED)
    own, k, v = (x.transpose(0, 1)[None] for x in (q[0], kv.k_pool, kv.v_pool))
    # not as causal: PyTorch means upper left by that, and refuses it for fewer queries than keys
    return can_use_flash_attention(SDPAParams(own, k, v, None, 0.0, False, True))


def _operands(
    heads: Heads, num_before: int, num_queries: int
) -> tuple[Tensor, LayerKV, AttentionMetadata, float, Tensor | None]:
    """Arguments of a form for one run behind so many keys."""
    num_keys, device = num_before + num_queries, heads.device
    random = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=heads.dtype, device=device)

    q = numbers(1, num_queries, heads.query_heads, heads.head_dim)
    k_pool, v_pool = (numbers(1 + num_keys, heads.key_heads, heads.head_dim) for _ in range(2))
    gate = numbers(1, num_queries, heads.query_heads * heads.head_dim) if heads.has_gate else None
    slots = torch.arange(1, 1 + num_keys, device=device)
    metadata = AttentionMetadata(
        torch.stack([torch.zeros_like(slots), slots]),
        torch.ones(1, dtype=torch.int64, device=device),
        num_before + torch.arange(num_queries, device=device)[None],
        num_keys,
        spans=((num_before, num_keys),),
    )
    return q, LayerKV(k_pool, v_pool, slots), metadata, heads.head_dim**-0.5, gate


def _gpu_seconds(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
