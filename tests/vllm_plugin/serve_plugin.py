"""Start a real vLLM with ckptsync's plugin on this machine's CPU, as if ckptsync were installed beside it.

    python tests/vllm_plugin/serve_plugin.py MODEL_DIR --port P [engine arguments...]

Weights come by files and by `VllmGloo`; answers tell which version sampled which token (`/inference/v1/generate`).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile

import overlay

import make  # isort: skip - found through overlay
import serve  # isort: skip

ARGUMENTS = ["--weight-transfer-config", '{"backend": "ckptsync"}', "--enable-scale-out", "--generation-config", "vllm"]


def plugin_path() -> str:
    """Kept, since the server needs it as long as it runs, and nobody is left then to remove it."""
    folder = os.path.join(make.cache_dir(), "envs", "vllm-plugin-entry-points")
    with make.locked(folder + ".lock"), tempfile.TemporaryDirectory() as made:
        path = overlay.python_path(made)
        shutil.copytree(made, folder, dirs_exist_ok=True)
    return path.replace(made, folder)


def main() -> None:
    model, *more = sys.argv[1:]
    os.environ["PYTHONPATH"] = plugin_path()
    sys.argv = ["serve.py", "vllm", os.path.abspath(model), *more, *ARGUMENTS]
    serve.main()


if __name__ == "__main__":
    main()
