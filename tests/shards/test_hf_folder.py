from __future__ import annotations

import json
import logging

import pytest
import torch

from ckptsync.errors import BadShard, NotFound
from ckptsync.shards.hf_folder import scan_checkpoint
from ckptsync.shards.index import INDEX_NAME, index_bytes
from ckptsync.shards.plan import ShardPlan
from ckptsync.shards.tensors import checkpoint_tensors

from .files import spec, write_plan

PLANS = [
    ShardPlan("model-00001-of-00002.safetensors", (spec("a.w", 2), spec("b.w", 3))),
    ShardPlan("model-00002-of-00002.safetensors", (spec("c.w", 4),)),
]
TENSORS = {each.name: torch.ones(each.shape, dtype=torch.bfloat16) for plan in PLANS for each in plan.tensors}


@pytest.fixture
def folder(tmp_path):
    for plan in PLANS:
        write_plan(str(tmp_path), plan, TENSORS)
    (tmp_path / INDEX_NAME).write_bytes(index_bytes(PLANS))
    return tmp_path


def test_a_folder_with_an_index_is_its_files_and_their_tensors(folder):
    files, tensors, ignored = scan_checkpoint(str(folder))
    assert files == [plan.file for plan in PLANS]
    assert list(tensors.values()) == [each for plan in PLANS for each in plan.tensors]
    assert ignored == []


def test_a_single_file_needs_no_index(tmp_path):
    write_plan(str(tmp_path), ShardPlan("model.safetensors", (spec("a.w", 2),)), TENSORS)
    assert scan_checkpoint(str(tmp_path)).files == ["model.safetensors"]


def test_case_78_a_missing_shard_is_named(folder):
    (folder / PLANS[1].file).unlink()
    with pytest.raises(BadShard, match="model-00002-of-00002"):
        scan_checkpoint(str(folder))


def test_case_81_a_stale_shard_beside_the_index_is_ignored_and_reported(folder, caplog):
    write_plan(str(folder), ShardPlan("model-00003-of-00003.safetensors", (spec("a.w", 2),)), TENSORS)
    write_plan(str(folder), ShardPlan("model.safetensors", (spec("c.w", 4),)), TENSORS)
    with caplog.at_level(logging.WARNING):
        found = scan_checkpoint(str(folder))
    assert found.ignored == ["model-00003-of-00003.safetensors", "model.safetensors"]
    assert found.files == [plan.file for plan in PLANS]
    assert "'model-00003-of-00003.safetensors'" in caplog.text


def test_case_82_one_name_in_two_shards_is_refused_naming_both(folder):
    (folder / PLANS[1].file).unlink()
    write_plan(str(folder), ShardPlan(PLANS[1].file, (spec("c.w", 4), spec("a.w", 2))), TENSORS)
    with pytest.raises(BadShard, match=r"'a\.w' is in 'model-00001-of-00002.*model-00002-of-00002"):
        scan_checkpoint(str(folder))


def test_case_84_an_index_that_leads_outside_is_refused_before_any_open(folder):
    (folder.parent / "x.safetensors").write_bytes(b"secret")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a.w": "../x.safetensors"}}))
    with pytest.raises(BadShard, match="plain basename"):
        scan_checkpoint(str(folder))


def test_a_tensor_that_its_shard_lacks_is_named(folder):
    moved = {"a.w": PLANS[0].file, "b.w": PLANS[1].file, "c.w": PLANS[1].file}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(BadShard, match=r"00002-of-00002.safetensors lacks 'b\.w'"):
        scan_checkpoint(str(folder))


def test_an_index_of_nothing_is_a_checkpoint_of_nothing(folder):
    (folder / INDEX_NAME).write_text('{"weight_map": {}}')
    found = scan_checkpoint(str(folder))
    assert (found.files, found.tensors) == ([], {})
    assert found.ignored == [plan.file for plan in PLANS]


def test_a_folder_without_a_checkpoint_is_not_found(tmp_path):
    with pytest.raises(NotFound, match="neither"):
        scan_checkpoint(str(tmp_path))
    with pytest.raises(NotFound, match="neither"):
        scan_checkpoint(str(tmp_path / "gone"))


def test_the_links_of_the_hugging_face_cache_are_followed(folder, tmp_path_factory):
    snapshot = tmp_path_factory.mktemp("snapshot")
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert scan_checkpoint(str(snapshot)).files == [plan.file for plan in PLANS]
    assert [name for name, _ in checkpoint_tensors(str(snapshot))] == ["a.w", "b.w", "c.w"]


def test_the_tensors_of_a_folder_come_in_file_order(folder):
    found = dict(checkpoint_tensors(str(folder)))
    assert list(found) == ["a.w", "b.w", "c.w"]
    assert all(torch.equal(found[name], TENSORS[name]) for name in found)
