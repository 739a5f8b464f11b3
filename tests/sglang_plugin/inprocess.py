"""Run in SGLang's environment: an `sglang.Engine` of this process, watched between two prompts.

    python inprocess.py '{"model": …, "root": …, "stage": …, "prompts": […]}'

One JSON line on stdout for each step: what was loaded, how, and what the engine answers then.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.envs import measured

measured.start()  # before what is to be measured is imported

from watchers.engines.sglang import SglangEngine  # noqa: E402
from watchers.engines.sglang_inprocess import InProcess  # noqa: E402
from watchers.engines.sglang_transfer import SglangTransferEngine  # noqa: E402
from watchers.watcher import Watcher  # noqa: E402


def main(options: dict[str, Any], answers: Any) -> None:
    import sglang

    engine = sglang.Engine(
        model_path=options["model"], device="cpu", dtype="float32", attention_backend="torch_native",
        sampling_backend="pytorch", mem_fraction_static=0.1, max_total_tokens=4096, disable_overlap_schedule=True,
        log_level="warning",
    )  # fmt: skip

    def say(step: str, **more: Any) -> None:
        sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
        outputs = engine.generate(input_ids=options["prompts"], sampling_params=sampling)
        answer = {"step": step, "tokens": [output["output_ids"] for output in outputs], **more}
        print(json.dumps(answer), file=answers, flush=True)

    def watched(adapter: SglangEngine) -> Watcher:
        return Watcher(options["root"], adapter, stage=options["stage"], reader="r")

    say("base")
    transport = InProcess(engine)
    watcher = watched(SglangTransferEngine("http://in-process", transport=transport))
    for label in ("2", "1", "2"):
        receipt = watcher.load_version(label)
        say("plugin", label=receipt.label, state=receipt.state, warnings=receipt.warnings)
    watcher.close()
    watcher = watched(SglangEngine("http://in-process", transport=transport))
    receipt = watcher.load_version("1")
    say("disk", label=receipt.label, state=receipt.state, warnings=receipt.warnings, fingerprint=receipt.fingerprint)
    watcher.close()
    engine.shutdown()


if __name__ == "__main__":
    # SGLang writes to stdout: keep it for the answers.
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)
        main(json.loads(sys.argv[1]), stdout)
