"""Syncs by NCCL from a trainer on one GPU to a real vLLM on another, a trainer killed in mid-bucket, then files.

    python -m benchmarks.gpu_nccl [--shape 4b|tiny] [--syncs 20] [--work /dev/shm/gpu-nccl] [--json FILE] [--dry]

As `gpu_ipc`, through `WeightSync([VllmNccl(), Checkpoint()])`; the limit is a broadcast of the same bytes by the same
group. An engine whose other end was killed may hang in NCCL for good: it is given `--hang` seconds, then started again
on the files, and both times are told.
"""

from __future__ import annotations

import sys

from benchmarks.gpu_fast import main

if __name__ == "__main__":
    sys.exit(main("nccl", "Syncs by NCCL, and what follows a kill.", syncs=20, engine_gpu="1"))
