"""Syncs by CUDA IPC from an FSDP2 trainer on two GPUs to a real vLLM, tensor parallel on the same two; a kill; files.

    python -m benchmarks.gpu_colocated [--shape 4b|tiny] [--syncs 5] [--work DIR] [--json FILE] [--dry]

As `gpu_ipc`. The trainer sees the GPUs in the other order than the engine, so that a handle routed by device number
and not by UUID would come to the wrong one. Limits: to gather every tensor on every rank, and to copy a rank's share
on its GPU and from pinned memory, both at once.
"""

from __future__ import annotations

import sys

from benchmarks.gpu_fast import main

if __name__ == "__main__":
    what = "Syncs by CUDA IPC from two ranks to an engine of two, and what follows a kill."
    sys.exit(main("ipc", what, syncs=5, trainer_gpu="1,0", engine_gpu="0,1", ranks=2, tp=2, name="colocated"))
