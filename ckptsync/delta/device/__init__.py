"""The encoder where the tensors are: compares with a baseline on the same device, and brings to the host only what is
written.

    baseline = DeviceBaseline(tensors)             # a copy, on their device
    changes = baseline.encode(tensors, pool=pool)  # name -> the blob that `codec.encode` would make, to the byte
    baseline.move(changes)                         # once they are committed

Plain torch operations on a CPU, which is what the kernels are tested against that do the loops on CUDA.
"""

from .baseline import Changes, DeviceBaseline

__all__ = ["Changes", "DeviceBaseline"]
