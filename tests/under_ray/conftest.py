"""One Ray cluster for all tests here: two nodes of this machine, no dashboard, nothing in the user's home."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.envs import measured
from tests.vllm_plugin.overlay import REPO

SETTINGS = {
    # A token in ~/.ray otherwise.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}
STARTS = 4
NODE: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 80 << 20, "include_dashboard": False}


def started() -> Cluster:
    """Two nodes. Ray gives each 30 s to start (a constant of `ray._private.node`), which a busy machine may not."""
    for attempt in range(STARTS):
        cluster = Cluster()
        try:
            for _ in range(2):
                cluster.add_node(**NODE)
        except Exception:
            cluster.shutdown()
            if attempt == STARTS - 1:
                raise
        else:
            break
    return cluster


@pytest.fixture(scope="session")
def nodes() -> Iterator[list[str]]:
    """The ids of the cluster's nodes; this process is its driver."""
    temp = tempfile.mkdtemp(prefix="ray-")  # not pytest's: sockets want a short path
    with pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context() as of_workers:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        patch.setenv("RAY_TMPDIR", temp)
        path = os.pathsep.join([REPO, measured.on_path(temp)])  # actors import the tests' classes
        of_workers.setenv("PYTHONPATH", path, prepend=os.pathsep)
        cluster = started()
        try:
            of_workers.undo()
            ray.init(cluster.address, namespace="tests", log_to_driver=False)
            yield [node.node_id for node in cluster.list_all_nodes()]
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(temp, ignore_errors=True)
