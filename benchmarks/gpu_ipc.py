"""Syncs by CUDA IPC between a trainer and a real vLLM on one GPU, a trainer killed in mid-send, and files after it.

    python -m benchmarks.gpu_ipc [--shape 4b|tiny] [--syncs 5] [--work /dev/shm/gpu-ipc] [--json FILE] [--dry]

In one run, through `WeightSync([VllmIpc(), Checkpoint()])`:

- limits    the model's bytes from pinned memory to the GPU, and from one place on it to another
- syncs     each with the version equal on both sides after it, and every parameter's sum
- a kill    SIGKILL in the middle of a bucket: the engine is paused, names no version, and serves nothing
- recovery  a successor publishes to files, a watcher loads them: seconds from the kill to the first answer

Needs vLLM >= 0.26 with its dependencies, and blake3, msgspec, xxhash and tenacity, as `gpu_pause` does; `ray` and
`requests`, which 0.26 imports, are stood in for. About three minutes. `--dry` runs it all without a GPU, with files for
GPU memory.
"""

from __future__ import annotations

import sys

from benchmarks.gpu_fast import main

if __name__ == "__main__":
    sys.exit(main("ipc", "Syncs by CUDA IPC, and what follows a kill.", syncs=5, engine_gpu="0"))
