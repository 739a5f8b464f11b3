"""The manifests in examples/k8s: what the API takes, what they promise, and that they call ckptsync as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ckptsync.cli import load_command, load_commands
from ckptsync.cli.settings import options
from tests.watcher.sidecars import StandIn, serving
from watchers.health import Health

FOLDER = Path(__file__).parents[2] / "examples" / "k8s"
ENGINES = ["vllm", "sglang"]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def pod(engine: str) -> dict[str, Any]:
    return documents(f"{engine}.yaml")[0]["spec"]["template"]["spec"]


def containers(engine: str) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in pod(engine)["containers"]}


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.yaml")))
def test_every_document_is_what_the_api_takes(name, version):
    for document in documents(name):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_check_against_the_schemas_finds_a_misspelt_field():
    deployment = documents("vllm.yaml")[0]
    deployment["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, "1.37", strict=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_runs_as_root_or_writes_to_its_image(engine):
    assert pod(engine)["securityContext"]["runAsNonRoot"]
    assert pod(engine)["securityContext"]["runAsUser"] == 10001, "as in the Dockerfile"
    for container in containers(engine).values():
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"requests", "limits"} == container["resources"].keys()


@pytest.mark.parametrize("engine", ENGINES)
def test_both_containers_share_a_stage_in_memory(engine):
    (shm,) = [volume for volume in pod(engine)["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    for container in containers(engine).values():
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_watcher_is_called_as_it_is_and_for_the_port_that_the_engine_has(engine):
    sidecar, server = containers(engine)["ckptsync"], containers(engine)["engine"]
    command, *args = sidecar["args"]
    parsed = load_command(command).make_context(command, args).params
    port = server["ports"][0]["containerPort"]
    assert (parsed["engine"], parsed["url"]) == (engine, [f"http://127.0.0.1:{port}"])
    assert str(port) in server["args"]
    assert parsed["stage"].startswith("/dev/shm/")
    assert parsed["address"] == f"0.0.0.0:{sidecar['ports'][0]['containerPort']}"


@pytest.mark.parametrize("engine", ENGINES)
def test_secrets_are_named_and_every_variable_of_ours_is_one(engine):
    known = {option.variable for command in load_commands().values() for option in options(command)}
    held = {document["metadata"]["name"]: document["stringData"] for document in documents("secrets.example.yaml")}
    for container in containers(engine).values():
        for variable in container["env"]:
            if variable["name"].startswith("CKPTSYNC_"):
                assert variable["name"] in known
            if "secretKeyRef" in variable.get("valueFrom", {}):
                secret = variable["valueFrom"]["secretKeyRef"]
                assert secret["key"] in held[secret["name"]]
    assert "CKPTSYNC_SIDECAR_TOKEN" in {variable["name"] for variable in containers(engine)["ckptsync"]["env"]}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_readiness_command_asks_readyz_with_the_token(engine):
    _, code, script = containers(engine)["ckptsync"]["readinessProbe"]["exec"]["command"]
    watched = StandIn(health=Health(ready=False, version="", state="idle", reason="no version yet"))
    with serving(watched, token="secret") as client:
        script = re.sub(r"http://127\.0\.0\.1:8080", str(client.base_url).rstrip("/"), script)

        def ready(token: str) -> bool:
            env = {**os.environ, "CKPTSYNC_SIDECAR_TOKEN": token, "no_proxy": "*"}
            return subprocess.run([sys.executable, code, script], env=env, capture_output=True).returncode == 0

        assert not ready("secret"), "nothing is proven yet"
        watched.health = Health(ready=True, version="e1-v1", state="serving", reason="")
        assert ready("secret")
        assert not ready("another")


@pytest.mark.parametrize("engine", ENGINES)
def test_liveness_is_the_watchers_own(engine):
    probe = containers(engine)["ckptsync"]["livenessProbe"]["httpGet"]
    assert probe == {"path": "/healthz", "port": "sidecar"}
    assert containers(engine)["engine"]["livenessProbe"]["httpGet"]["path"] == "/health"
