"""Start a real vLLM or SGLang server on this machine's CPU.

    python tests/envs/serve.py vllm|sglang MODEL_DIR --port P [--served-model-name m] [engine arguments...]

Replaces itself with the server, on 127.0.0.1; engine arguments come last and win. The environment is built
first if it is not there (see make.py). `command` and `environment` are the same recipe for callers that
start a child.

Either is up after 12 s of one core, of which 9 are imports, and takes 2 GB. Its processes are forks of the first: see
fork_shim.
"""

from __future__ import annotations

import argparse
import os
import sys

import make

FORK_SHIM = os.path.join(make.HERE, "fork_shim")
SHIMS = {"vllm": [FORK_SHIM], "sglang": [os.path.join(make.HERE, "sglang_shim"), FORK_SHIM]}

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}

ENVIRONMENT = {
    # Dev mode opens the routes that update weights; /collective_rpc is one of them: never on a public
    # address.
    # Without a core that its compute threads leave alone, vLLM 0.32's API server hears of a pause when the generation
    # that it is to stop is over: they spin, and on two cores took 6 s.
    "vllm": {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) - 1)),
    },
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1"},
}

# `vllm serve` looks up the distribution "vllm" and does not find vllm-cpu; the module behind it does not
# look.
MODULE = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}

ARGUMENTS = {
    "vllm": ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8"],
    # Without --sleep-on-idle an idle scheduler takes half a core.
    "sglang": [
        *("--device", "cpu", "--dtype", "float32"),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--disable-overlap-schedule", "--sleep-on-idle", "--skip-server-warmup"),
        *("--max-total-tokens", "4096", "--mem-fraction-static", "0.1"),
    ],
}

MODEL_FLAG = {"vllm": "--model", "sglang": "--model-path"}


def command(
    engine: str, model_dir: str, port: int, extra: list[str] | None = None, served_model_name: str = "m"
) -> list[str]:
    """The server's command line. Builds the engine's environment if it is not there."""
    return [
        *(make.ensure(engine), "-m", MODULE[engine], MODEL_FLAG[engine], model_dir),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", served_model_name),
        *ARGUMENTS[engine],
        *(extra or []),
    ]


def environment(engine: str, base: dict[str, str] | None = None) -> dict[str, str]:
    """The server's environment variables: what the caller set wins over the recipe. CKPTSYNC_TEST_SPAWN lets it start
    its processes in its own way."""
    env = {**OFFLINE, **ENVIRONMENT[engine], **(dict(os.environ) if base is None else base)}
    env.pop("PYTHONHOME", None)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [*SHIMS[engine], env.get("PYTHONPATH")]))
    return env


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Start a real vLLM or SGLang server on this machine's CPU.", allow_abbrev=False
    )
    parser.add_argument("engine", choices=make.SERVERS)
    parser.add_argument("model_dir")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", default="m")
    known, extra = parser.parse_known_args()
    argv = command(known.engine, os.path.abspath(known.model_dir), known.port, extra, known.served_model_name)
    sys.stderr.flush()
    os.execve(argv[0], argv, environment(known.engine))


if __name__ == "__main__":
    main()
