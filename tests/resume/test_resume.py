"""Resuming in one process: which version, what fits, what is refused before anything changes."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptsync import resume
from ckptsync.channel import Channel
from ckptsync.copies import export_version, import_version
from ckptsync.errors import (
    BadManifest,
    BadShard,
    ChannelEmpty,
    InvalidInput,
    InvalidName,
    StoreError,
    StoreUnavailable,
    VersionNotFound,
)
from ckptsync.layout import manifest_path
from ckptsync.manifest import Manifest
from ckptsync.publish import Publisher
from ckptsync.store import open_store
from ckptsync.testing.hooks import Failing, HookedStore
from ckptsync.verify import verify_version
from ckptsync.version import VersionId
from tests.trainer.models import TinyModel, reference, same


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "root")


def model(value: float | None = None, **shape: Any) -> TinyModel:
    made = TinyModel(blocks=2, **shape)
    if value is not None:
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.fill_(value)
    return made


def filled(value: float, root: str, **facts: Any) -> Manifest:
    with Publisher(root, shard_bytes=1500) as publisher:
        return publisher.publish(model(value), **facts).manifest


def three(root: str) -> list[Manifest]:
    """e1-v1 .. e1-v3, with weights 1, 2, 3."""
    with Publisher(root, shard_bytes=1500) as publisher:
        return [publisher.publish(model(float(n)), step=10 * n).manifest for n in (1, 2, 3)]


def weight(target: nn.Module) -> float:
    return target.five.weight[0, 0].item()


def shard_of(root: str, manifest: Manifest) -> str:
    """The path of one of the version's shards."""
    name = next(file.name for file in manifest.tracks["model"].files if file.name.endswith(".safetensors"))
    return os.path.join(root, manifest.folder, name)


def spoil(path: str) -> None:
    """Another bit in the last byte: only a digest can tell."""
    data = bytearray(Path(path).read_bytes())
    data[-1] ^= 1
    Path(path).write_bytes(data)


def test_the_newest_version_comes_back_bit_for_bit_with_its_step_and_metadata(root: str) -> None:
    trained = TinyModel(blocks=2)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.normal_()
    with Publisher(root) as publisher:
        publisher.publish(model(7.0))
        publisher.publish(trained, step=12, metadata={"loss": 0.25})
    fresh = model(0.0)
    point = resume(root, fresh)
    assert point is not None
    assert (point.version, point.step, point.metadata) == (VersionId(1, 2), 12, {"loss": 0.25})
    assert (point.passed_over, point.has_trainer_state) == ({}, False)
    same(reference(fresh), reference(trained))
    assert fresh.head.weight is fresh.embed.weight, "ties stay ties"


def test_a_version_can_be_asked_for_by_name(root: str) -> None:
    three(root)
    fresh = model(0.0)
    assert resume(root, fresh, "e1-v2").version == VersionId(1, 2)  # type: ignore[union-attr]
    assert weight(fresh) == 2.0
    with pytest.raises(VersionNotFound, match="e1-v9"):
        resume(root, fresh, "e1-v9")


def test_a_state_dict_is_filled_as_a_module_is(root: str) -> None:
    filled(4.0, root)
    state = model(0.0).state_dict()
    resume(root, state)
    assert state["five.weight"][0, 0] == 4.0


def test_the_resumed_trainer_goes_on_under_a_new_epoch_and_the_left_branch_is_dead(root: str) -> None:
    """Case 22: publish 1..3, resume at 1, publish 2'; nobody sees 2 and 3 as newer."""
    three(root)
    point = resume(root, model(0.0), "1")
    assert point is not None
    with Publisher(root, resumed_from=point.version) as publisher:
        assert publisher.publish(model(9.0)).version == VersionId(2, 2)
    channel = Channel.open(root)
    assert channel.versions() == [VersionId(1, 1), VersionId(2, 2)]
    assert VersionId(1, 3) in channel.committed(), "kept"
    fresh = model(0.0)
    assert resume(root, fresh).version == VersionId(2, 2)  # type: ignore[union-attr]
    assert weight(fresh) == 9.0


# -- broken versions -----------------------------------------------------------------------------------------


def test_case_1_a_broken_newest_version_is_passed_over_by_name_with_the_reason(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    versions = three(root)
    spoil(shard_of(root, versions[2]))
    os.truncate(os.path.join(root, manifest_path(versions[1].id)), 100)
    fresh = model(0.0)
    point = resume(root, fresh)
    assert point is not None
    assert point.version == VersionId(1, 1)
    assert weight(fresh) == 1.0
    assert "digest" in point.passed_over[VersionId(1, 3)] or "bytes" in point.passed_over[VersionId(1, 3)]
    assert "JSON" in point.passed_over[VersionId(1, 2)]
    assert "e1-v3 is passed over" in caplog.text


def test_a_missing_shard_passes_the_version_over_and_a_version_asked_for_by_name_is_refused(root: str) -> None:
    versions = three(root)
    os.remove(shard_of(root, versions[2]))
    fresh = model(0.0)
    assert resume(root, fresh).version == VersionId(1, 2)  # type: ignore[union-attr]
    with pytest.raises(BadShard, match=r"e1-v3.*is not there"):
        resume(root, fresh, "3")
    assert weight(fresh) == 2.0


def test_case_2_a_folder_without_a_manifest_is_ignored(root: str) -> None:
    manifest = filled(1.0, root)
    folder = Path(root, "data", "e0001-v00000009-deadbeef")
    folder.mkdir()
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"half a shard")
    assert resume(root, model(0.0)).version == manifest.id  # type: ignore[union-attr]


def test_case_12_versions_of_which_none_is_whole_are_an_error_and_never_a_fresh_start(root: str) -> None:
    for manifest in three(root):
        spoil(shard_of(root, manifest))
    fresh = model(0.0)
    with pytest.raises(BadManifest, match=r"e1-v3.*e1-v2.*e1-v1"):
        resume(root, fresh, allow_empty=True)
    assert weight(fresh) == 0.0


def test_case_12_the_head_is_only_a_hint_and_lost_manifests_are_an_error(root: str) -> None:
    manifest = filled(1.0, root)
    os.remove(os.path.join(root, "head.json"))
    assert resume(root, model(0.0)).version == manifest.id  # type: ignore[union-attr]
    os.remove(os.path.join(root, manifest_path(manifest.id)))
    with pytest.raises(BadManifest, match="was manifests/ lost"):
        resume(root, model(0.0), allow_empty=True)


def test_an_empty_root_is_an_explicit_answer(root: str) -> None:
    with pytest.raises(ChannelEmpty, match="nothing to resume from"):
        resume(root, model(0.0))
    assert resume(root, model(0.0), allow_empty=True) is None
    assert not os.path.exists(root), "nothing was written"
    Publisher(root).close()
    Path(root, "data", "e0001-v00000001-cafe").mkdir(parents=True)
    Path(root, "data", "e0001-v00000001-cafe", "model.safetensors").write_bytes(b"a first publish that was killed")
    assert resume(root, model(0.0), allow_empty=True) is None


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_case_14_a_store_that_cannot_be_looked_at_is_never_taken_for_an_empty_one(root: str, number: int) -> None:
    filled(1.0, root)
    broken = HookedStore(
        open_store(root), Failing(lambda: StoreError(f"errno {number}"), lambda operation, _: operation == "list")
    )
    with pytest.raises(StoreError):
        resume(broken, model(0.0), allow_empty=True)


def test_a_store_that_fails_in_the_middle_says_what_became_of_the_parameters(root: str) -> None:
    filled(1.0, root)
    opened: list[str] = []

    def second_time(operation: str, path: str) -> bool:
        if operation == "open" and path.endswith(".safetensors"):
            opened.append(path)
        return opened.count(path) > 1

    broken = HookedStore(open_store(root), Failing(lambda: StoreUnavailable("gone"), second_time))
    with pytest.raises(StoreUnavailable, match="partly overwritten"):
        resume(broken, model(0.0))


# -- what fits -----------------------------------------------------------------------------------------------


def test_names_shapes_and_dtypes_that_differ_are_refused_before_anything_changes(root: str) -> None:
    filled(1.0, root)
    other = TinyModel(blocks=3)
    other.five = nn.Linear(8, 6)
    del other.one
    before = reference(other)
    with pytest.raises(InvalidInput) as refused:
        resume(root, other)
    message = str(refused.value)
    assert "missing (layers.2." in message
    assert "1 unexpected (one.weight)" in message
    assert "five.weight [5, 8], in the model [6, 8]" in message
    same(reference(other), before)


def test_a_cast_has_to_be_asked_for(root: str) -> None:
    with Publisher(root, dtype=torch.bfloat16) as publisher:
        publisher.publish(model(0.1))
    fresh = model(0.0)
    with pytest.raises(InvalidInput, match=r"BF16, in the model F32 \(allow_cast=True casts\)"):
        resume(root, fresh)
    resume(root, fresh, allow_cast=True)
    assert weight(fresh) == float(torch.tensor(0.1, dtype=torch.bfloat16))
    assert fresh.five.weight.dtype == torch.float32


def test_ties_of_the_version_load_into_an_untied_model_and_the_other_way_only_if_equal(root: str) -> None:
    filled(3.0, root)
    untied = model(0.0, tied=False)
    resume(root, untied)
    assert untied.head.weight[0, 0].item() == untied.embed.weight[0, 0].item() == 3.0
    with Publisher(root) as publisher:
        publisher.publish(model(None, tied=False))
    with pytest.raises(InvalidInput, match=r"head.weight is tied to embed.weight in the model, and differs"):
        resume(root, model(0.0), "e2-v2")


def test_wrappers_do_not_matter_and_a_meta_model_is_refused_by_name(root: str) -> None:
    filled(5.0, root)
    compiled = torch.compile(model(0.0), backend="eager")
    resume(root, compiled)
    assert weight(compiled) == 5.0
    with torch.device("meta"):
        empty = TinyModel(blocks=2)
    with pytest.raises(InvalidInput, match=r"on the meta device: 17 tensors, such as 'embed.weight'"):
        resume(root, empty)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (None, "a module or a dict of its tensors, not NoneType"),
        ({"x": torch.zeros(4).expand(3, 4)}, r"'x' is expanded: .*, call contiguous\(\) first"),
    ],
    ids=["nothing", "expanded"],
)
def test_what_cannot_be_resumed_into_is_refused_by_name(target: Any, words: str, root: str) -> None:
    with Publisher(root) as publisher:
        publisher.publish({"x": torch.ones(3, 4)})
    with pytest.raises(InvalidInput, match=words):
        resume(root, target)


def test_a_version_can_be_asked_for_by_its_number_as_an_int(root: str) -> None:
    for value in (1.0, 2.0):
        filled(value, root)
    target = model(0.0)
    point = resume(root, target, 1)
    assert point is not None
    assert (point.version, weight(target)) == (VersionId(1, 1), 1.0)
    with pytest.raises(InvalidName, match="None is not a version"):
        resume(root, target, None)  # type: ignore[arg-type]


# -- trainer state -------------------------------------------------------------------------------------------


def trained(value: float) -> tuple[TinyModel, torch.optim.Optimizer]:
    net = model(value)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.125, betas=(0.5, 0.75))
    net(torch.arange(4)).sum().backward()
    optimizer.step()
    return net, optimizer


def state_of(optimizer: torch.optim.Optimizer, **extra: Any) -> dict[str, Any]:
    return {"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(), **extra}


def test_optimizer_rng_and_plain_data_come_back(root: str) -> None:
    net, optimizer = trained(1.0)
    plain = {"python": random.getstate(), "best": float("inf"), "names": ["a", None, True], "epoch": 3}
    saved = state_of(optimizer, extra=plain)
    expected = torch.rand(3)
    with Publisher(root) as publisher:
        done = publisher.publish(net, step=4, trainer_state=saved)

    torch.manual_seed(99)
    other, fresh = trained(0.0)
    state = state_of(fresh, extra={"python": None, "best": None, "names": [None, None, None], "epoch": None})
    point = resume(root, other, trainer_state=state)
    assert point is not None
    assert (point.version, point.has_trainer_state) == (done.version, True)
    fresh.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    random.setstate(state["extra"]["python"])
    assert torch.equal(torch.rand(3), expected)
    assert {key: state["extra"][key] for key in ("best", "names", "epoch", "python")} == plain
    was, now = optimizer.state_dict(), fresh.state_dict()
    assert now["param_groups"] == was["param_groups"]
    for number, slots in was["state"].items():
        for name, tensor in slots.items():
            assert torch.equal(now["state"][number][name], tensor), (number, name)


def test_no_pickle_is_written_and_what_only_a_pickle_could_store_is_refused_by_name(root: str) -> None:
    net, optimizer = trained(1.0)
    with Publisher(root) as publisher:
        with pytest.raises(InvalidInput, match=r"'extra.loader' is object, which only a pickle could store"):
            publisher.publish(net, trainer_state=state_of(optimizer, extra={"loader": object()}))
        done = publisher.publish(net, trainer_state=state_of(optimizer))
    names = sorted(os.listdir(os.path.join(root, done.manifest.folder, "trainer")))
    assert names == ["index.json", "state-00000.safetensors"]
    assert sorted(file.name for file in done.manifest.trainer_state) == names
    assert not any(path.startswith("trainer") for path, _ in done.manifest.files()), "no engine stages it"
    report = verify_version(Channel.open(root), done.version)
    assert (report.ok, report.notes) == (True, ())
    assert not os.path.exists(os.path.join(root, "data", "debris"))


def test_weights_and_trainer_state_come_from_one_version(root: str) -> None:
    _, optimizer = trained(1.0)
    with Publisher(root) as publisher:
        publisher.publish(model(1.0))
        publisher.publish(model(2.0), trainer_state=state_of(optimizer))
        publisher.publish(model(3.0))
    fresh, state = model(0.0), state_of(optimizer)
    point = resume(root, fresh, trainer_state=state)
    assert point is not None
    assert (point.version, point.has_trainer_state, weight(fresh)) == (VersionId(1, 2), True, 2.0)
    assert point.passed_over == {VersionId(1, 3): "it was published without trainer state"}

    point = resume(root, fresh)
    assert point is not None
    assert (point.version, point.has_trainer_state) == (VersionId(1, 3), False)
    point = resume(root, fresh, "e1-v1", trainer_state=state)
    assert point is not None
    assert (point.version, point.has_trainer_state) == (VersionId(1, 1), False)


def test_an_imported_copy_does_not_claim_the_trainer_state_that_it_has_not(root: str, tmp_path: Path) -> None:
    optimizer = torch.optim.Adam(model(0.0).parameters())
    with Publisher(root) as publisher:
        done = publisher.publish(model(2.0), trainer_state=state_of(optimizer))
    export_version(Channel.open(root), done.manifest, str(tmp_path / "copy"))
    elsewhere = Channel.create(str(tmp_path / "elsewhere"))
    copied = import_version(elsewhere, str(tmp_path / "copy"), "import")
    assert verify_version(elsewhere, copied.id).ok
    fresh = model(0.0)
    point = resume(str(tmp_path / "elsewhere"), fresh, trainer_state=state_of(optimizer))
    assert point is not None
    assert (point.version, point.has_trainer_state, weight(fresh)) == (copied.id, False, 2.0)


def test_a_broken_trainer_state_breaks_the_version_only_for_who_wants_it(root: str) -> None:
    _, optimizer = trained(1.0)
    with Publisher(root) as publisher:
        publisher.publish(model(1.0), trainer_state=state_of(optimizer))
        second = publisher.publish(model(2.0), trainer_state=state_of(optimizer))
    spoil(os.path.join(root, second.manifest.folder, "trainer", "state-00000.safetensors"))
    point = resume(root, model(0.0), trainer_state=state_of(optimizer))
    assert point is not None
    assert point.version == VersionId(1, 1)
    assert "trainer/state-00000" in point.passed_over[VersionId(1, 2)]
    assert resume(root, model(0.0)).version == VersionId(1, 2)  # type: ignore[union-attr]
    report = verify_version(Channel.open(root), second.version)
    assert [problem.file for problem in report.problems] == ["trainer/state-00000.safetensors"]


def test_a_trainer_state_that_lacks_a_name_is_an_error(root: str) -> None:
    _, optimizer = trained(1.0)
    with Publisher(root) as publisher:
        publisher.publish(model(1.0), trainer_state={"rng": torch.get_rng_state()})
    with pytest.raises(InvalidInput, match=r"trainer_state: Missing key.*optimizer"):
        resume(root, model(0.0), trainer_state=state_of(optimizer))


def test_a_background_publish_keeps_the_trainer_state_of_the_call(root: str) -> None:
    net, optimizer = trained(1.0)
    before = {name: slot.clone() for name, slot in optimizer.state_dict()["state"][0].items()}
    with Publisher(root) as publisher:
        pending = publisher.publish(net, trainer_state=state_of(optimizer), background=True)
        net(torch.arange(4)).sum().backward()
        optimizer.step()
        assert pending.result().manifest.trainer_state
    other, fresh = trained(0.0)
    state = state_of(fresh)
    resume(root, other, trainer_state=state)
    for name, slot in before.items():
        assert torch.equal(state["optimizer"]["state"][0][name], slot), name
    assert not torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], before["exp_avg"]), "else it proves nothing"
