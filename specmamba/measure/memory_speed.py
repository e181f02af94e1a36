"""How fast weights are read, which bounds the time of a step with few rows."""

from __future__ import annotations

import time

import torch

from specmamba.kernels import linear

_ROUNDS = 7
BEYOND_CACHES = 12  # weights, several times the size of caches


def weight_speed(num_weights: int = 1) -> float:
    """Gigabytes of bf16 weights that a product of one row reads in a second, which bounds plain decoding.

    Args:
        num_weights: of 34 MB each, read one after the other; with as many as no cache holds it is the memory's speed.
    """
    weight, x = torch.zeros(4096, 4096, dtype=torch.bfloat16), torch.ones(1, 4096, dtype=torch.bfloat16)
    products = [linear.pack(weight.clone()) for _ in range(num_weights)]
    taken = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for product in products:
            product(x)
        taken.append(time.perf_counter() - began)
    return num_weights * weight.nbytes / min(taken) / 1e9
