"""An engine's processes are forks of its first one, which has imported all they need: each import costs 10 s of a core.

vLLM 0.32 on a CPU spawns an engine core, and that a worker; SGLang 0.5.23 spawns a scheduler for each rank and a
detokenizer. They do so for CUDA and for the settings of OpenMP, and need neither here: no thread of OpenMP was started
in a process that has not computed yet. What the plugins did to the first process holds in the others.
"""

import multiprocessing.context as context
import os


def instead_of_spawning() -> None:
    if not os.environ.get("CKPTSYNC_TEST_SPAWN"):
        context._concrete_contexts["spawn"] = context._concrete_contexts["fork"]
