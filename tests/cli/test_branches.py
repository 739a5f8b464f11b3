"""`ls` shows which attempt went on from where; `doctor` says what engines need for adapters."""

from __future__ import annotations

import torch

from ckptsync.publish import Publisher
from tests.lora.models import TinyLM, with_adapter


def test_ls_shows_the_branches_and_an_attempt_that_has_published_nothing_yet(ckptsync, root):
    with Publisher(root, run_id="first") as publisher:
        for value in (1.0, 2.0, 3.0):
            version = publisher.publish({"w": torch.full((2,), value)}).version
    fork = version._replace(number=1)
    with Publisher(root, run_id="second", resumed_from=fork) as publisher:
        publisher.publish({"w": torch.full((2,), 9.0)})
    Publisher(root, run_id="third").close()
    listed = ckptsync("ls", root, "--json").json
    assert [(epoch["epoch"], epoch["resumed_from"]) for epoch in listed["epochs"]] == [
        (1, None),
        (2, "e1-v1"),
        (3, "e2-v2"),
    ]
    assert {row["version"]: row["live"] for row in listed["versions"]} == {
        "e1-v1": True,
        "e1-v2": False,
        "e1-v3": False,
        "e2-v2": True,
    }
    text = ckptsync("ls", root).out
    assert "e2 from e1-v1" in text
    last = text.rstrip().splitlines()[-1]
    assert "e3 from e2-v2" in last
    assert "none yet" in last
    assert text.count("dead branch") == 2


def test_doctor_says_what_engines_need_to_follow_adapters(ckptsync, root):
    with Publisher(root) as publisher:
        publisher.publish(with_adapter(TinyLM(), 1, task_type=None), kind="adapter")
    checks = {check["name"]: check for check in ckptsync("doctor", root, "--json").json["checks"]}
    assert checks["adapters"]["detail"] == "e1-v1 is a LoRA adapter of rank 4 on q_proj, v_proj"
    assert "--max-loras (SGLang: --max-loaded-loras) >= the watcher's staleness + 2" in checks["adapters"]["remedy"]


def test_an_attempt_whose_versions_were_collected_is_not_said_to_have_none_yet(ckptsync, root):
    for run in ("first", "second", "third"):
        with Publisher(root, run_id=run) as publisher:
            if run != "second":
                publisher.publish({"w": torch.zeros(2)})
    for _ in range(2):
        with Publisher(root) as publisher:
            publisher.publish({"w": torch.ones(2)})
    Publisher(root).close()
    assert ckptsync("gc", root, "--keep-last", "2").code == 0
    rows = [line.strip() for line in ckptsync("ls", root).out.splitlines()]
    assert [row.split("  ")[-1].strip() for row in rows if row.startswith(("e1", "e2", "e3", "e6"))] == [
        "not kept", "none, or not kept", "not kept", "none yet",
    ]  # fmt: skip
    for command in ("ls", "status"):
        epochs = ckptsync(command, root, "--json").json["epochs"]
        assert [epoch["why_none"] or None for epoch in epochs] == [
            "not kept", "none, or not kept", "not kept", None, None, "none yet",
        ]  # fmt: skip
    assert "none, or not kept" in ckptsync("status", root).out
