"""What Triton kernels of all operators have in common: whether they can be launched, and what is compiled of them."""

from specmamba.kernels.gpu.launch import can_launch, is_interpreted, next_power_of_2, runs_on
from specmamba.kernels.gpu.variant import Variant

__all__ = ["Variant", "can_launch", "is_interpreted", "next_power_of_2", "runs_on"]
