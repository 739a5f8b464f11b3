"""What the engines' CPU builds do on this processor, and not on every one."""

from __future__ import annotations

import re

_PACKS = {"avx512f", "avx512vl", "avx512bw", "avx512dq"}
"""vLLM takes another library without these (vllm/platforms/cpu.py, import_kernels), and that one has no oneDNN: linear
layers then compute from their own parameters, instead of from packed copies beside empty ones (layers/utils.py)."""


def vllm_packs_linear_layers() -> bool:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        flags = re.search(r"^flags\s*:(.*)$", file.read(), re.MULTILINE)
    return flags is not None and set(flags[1].split()) >= _PACKS
