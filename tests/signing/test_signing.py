"""Signed channels in use: who signs, who wants signatures, and how keys are exchanged."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys

import msgspec
import pytest
import torch

from ckptsync import Channel, DeltaPolicy, Mirror, Publisher, resume
from ckptsync.base import publish_base
from ckptsync.copies import compact, export_version, import_version
from ckptsync.errors import InvalidInput, Untrusted
from ckptsync.fsck import repair
from ckptsync.layout import claim_path, manifest_path
from ckptsync.manifest import decode, seal
from ckptsync.rollback import roll_back
from ckptsync.signing import Signer, Trust, generate
from ckptsync.store import LocalStore
from ckptsync.store.base import put_bytes, read_bytes
from ckptsync.verify import verify_version
from ckptsync.version import VersionId
from tests.delta.test_versions import model, step
from tests.mirror.channels import Trainer, publish_all_kinds
from watchers.engines.module import ModuleEngine
from watchers.watcher import Watcher


def text(path: str) -> str:
    with open(path) as file:
        return file.read()


def test_every_kind_of_version_is_signed_and_verified_also_through_a_mirror(tmp_path, keys):
    root, target = str(tmp_path / "root"), str(tmp_path / "mirror")
    publish_all_kinds(root, sign_key=keys[0])
    assert len(Mirror(root, target, require_signature=keys[0] + ".pub").run().copied) == 7
    channel = Channel.open(target, require_signature=keys[0] + ".pub")
    assert [report for v in channel.committed() if not (report := verify_version(channel, v)).ok] == []
    assert all(channel.claims().values())
    state = {name: torch.zeros_like(tensor) for name, tensor in model().items()}
    assert resume(target, state, require_signature=keys[0] + ".pub").version == VersionId(3, 7)
    assert any(tensor.count_nonzero() for tensor in state.values())
    with pytest.raises(Untrusted, match="not trusted here"):
        resume(target, state, require_signature=keys[1] + ".pub")


def test_a_watcher_loads_what_is_signed_and_stays_on_it_when_something_unsigned_comes(tmp_path, keys, caplog):
    root, linear = str(tmp_path / "root"), torch.nn.Linear(3, 2)
    with Publisher(root, sign_key=keys[0]) as publisher:
        publisher.publish(linear.state_dict())
    watcher = Watcher(root, ModuleEngine(linear), stage=str(tmp_path / "stage"), require_signature=keys[0] + ".pub")
    watcher.step()
    forged, data = seal(msgspec.structs.replace(Channel.open(root).latest(), number=2))
    put_bytes(LocalStore(root), manifest_path(forged.id), data)
    assert Channel.open(root).poll() == forged.id
    watcher.step()
    assert (watcher.health.version, watcher.health.newest) == ("e1-v1", "e1-v1")
    with pytest.raises(Untrusted):
        watcher.load_version("2")
    assert watcher.health.version == "e1-v1"
    watcher.close()


def test_signing_may_begin_in_the_middle_of_a_run_and_the_first_signed_version_needs_no_other(tmp_path, keys):
    root, state = str(tmp_path / "root"), model()
    for settings in ({}, {"sign_key": keys[0], "resumed_from": VersionId(1, 2)}):
        with Publisher(root, delta=DeltaPolicy(), **settings) as publisher:
            for _ in range(2):
                step(state, seed=1)
                publisher.publish(state)
    assert [Channel.open(root).manifest(v).kind for v in Channel.open(root).committed()] == [
        "full", "delta", "full", "delta",
    ]  # fmt: skip
    channel = Channel.open(root, require_signature=keys[0] + ".pub")
    assert verify_version(channel, channel.latest().id).ok
    assert not verify_version(channel, VersionId(1, 2)).ok


def test_nobody_goes_on_without_a_key_on_a_signed_channel(store, trainer, tmp_path):
    channel = Channel.open(store)
    for publish in (
        lambda: Publisher(store),
        lambda: roll_back(channel, channel.resolve("1")),
        lambda: Trainer(store),
    ):
        with pytest.raises(InvalidInput, match="sign_key"):
            publish()
    assert list(channel.claims()) == [1]


def test_a_rollback_signs_only_weights_that_were_signed(store, trainer, key, keys):
    Trainer(store, sign_key=key).publish(4, 5)
    forged = Channel.open(store).manifest(VersionId(2, 4)).full_form()
    raw = decode(Signer.load(keys[1]).sign_manifest(forged)[1])
    put_bytes(store, "manifests/e0002-v00000004.json", raw.encoded)
    channel = Channel.open(store, sign_key=key)
    with pytest.raises(Untrusted):
        roll_back(channel, channel.resolve("4"))
    assert roll_back(channel, channel.resolve("2")).signed


def test_compact_and_repair_sign_what_they_make(tmp_path, keys):
    root, state = str(tmp_path / "root"), model()
    with Publisher(root, delta=DeltaPolicy(), sign_key=keys[0]) as publisher:
        for seed in range(3):
            publisher.publish(state)
            step(state, seed=seed)
    with pytest.raises(InvalidInput, match="sign_key"):
        compact(Channel.open(root), Channel.open(root).latest())
    channel = Channel.open(root, require_signature=keys[0] + ".pub", sign_key=keys[0])
    assert (compact(channel, channel.latest()).kind, channel.latest().signed) == ("full", True)
    newest = channel.latest()
    for name, _ in newest.stored_files():
        os.unlink(os.path.join(root, newest.folder, name))
    made = repair(channel)
    assert made is not None
    assert (made.kind, made.signed, made.number) == ("full", True, 4)
    assert verify_version(channel, made.id).ok


def test_an_exported_folder_is_signed_anew_when_it_is_imported(store, trainer, key, tmp_path):
    folder = str(tmp_path / "folder")
    channel = Channel.open(store, sign_key=key)
    export_version(channel, channel.latest(), folder)
    assert import_version(channel, folder, "import").signed


def test_a_base_model_is_signed_as_well(tmp_path, keys):
    from safetensors.torch import save_file

    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"w": torch.ones(4)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    root = str(tmp_path / "root")
    publish_base(root, str(folder), sign_key=keys[0])
    assert publish_base(root, str(folder)) == VersionId(1, 0)
    assert Channel.open(root, require_signature=keys[0] + ".pub").latest().number == 0


def test_keys_are_exchanged_while_both_are_trusted(store, trainer, keys):
    both = text(keys[0] + ".pub") + text(keys[1] + ".pub")
    Trainer(store, sign_key=Signer.load(keys[1]), require_signature=both).publish(4)
    assert Channel.open(store, require_signature=both).latest().id == VersionId(2, 4)
    assert [v.number for v in Channel.open(store, require_signature=both).versions()] == [1, 2, 3, 4]
    channel = Channel.open(store, require_signature=keys[1] + ".pub")
    assert channel.latest().id == VersionId(2, 4)
    with pytest.raises(Untrusted, match="which is not trusted here"):
        channel.manifest(VersionId(1, 3))


def test_a_signed_manifest_is_read_by_who_asks_for_no_signature_and_any_reader_of_format_1(store, trainer):
    found = Channel.open(store).latest()
    assert (found.format, found.digest, found.signed) == (1, "blake3", True)
    assert read_bytes(store, f"{found.folder}/ckptsync.json", 1 << 20) == found.encoded


def test_a_key_is_a_file_that_only_its_owner_reads_and_is_never_overwritten(tmp_path):
    path = str(tmp_path / "key")
    key_id = generate(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert Signer.load(path).key_id == key_id == Signer.load(text(path)).key_id
    assert Trust.load(text(path + ".pub")).key_ids == (key_id,)
    with pytest.raises(InvalidInput, match="cannot be made"):
        generate(path)
    with pytest.raises(TypeError, match="not sent"):
        pickle.dumps(Signer.load(path))


def test_what_is_no_key_is_refused_before_anything_is_read(tmp_path, keys, store):
    private, public = text(keys[0]), text(keys[0] + ".pub")
    for settings in ({"require_signature": ""}, {"sign_key": ""}):
        with pytest.raises(InvalidInput):
            Channel.open(store, **settings)
    for wrong in ("", str(tmp_path / "none"), private, "channel: abc\n\n" + public, public[:60]):
        with pytest.raises(InvalidInput):
            Trust.load(wrong)
    for wrong in (str(tmp_path / "none"), public, "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----"):
        with pytest.raises(InvalidInput):
            Signer.load(wrong)


def test_a_key_never_shows_in_the_settings(keys):
    from ckptsync import PublisherConfig

    config = PublisherConfig(sign_key=text(keys[0]))
    assert "PRIVATE" not in repr(config)
    assert config.digest == "blake3"


def test_signatures_are_made_by_openssl_keys_and_checked_by_openssl(tmp_path, store):
    """Plain PEM and plain Ed25519: nothing of ours is needed to check a version ten years from now."""
    key = str(tmp_path / "key.pem")
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", key + ".pub"], check=True)
    Trainer(store, sign_key=Signer.load(key)).publish(1)
    assert Channel.open(store, require_signature=key + ".pub").latest().signed
    check = f"""
import base64, json, sys
raw = json.load(open({os.path.join(store.url, "manifests/e0001-v00000001.json")!r}))
signature = raw.pop("signature"); raw.pop("manifest_digest")
body = json.dumps(raw, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
open({str(tmp_path / "message")!r}, "wb").write(b"ckptsync manifest\\n" + body)
open({str(tmp_path / "signature")!r}, "wb").write(base64.b64decode(signature["ed25519"]))
"""
    subprocess.run([sys.executable, "-c", check], check=True)
    verify = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", key + ".pub", "-rawin"]
    files = ["-in", str(tmp_path / "message"), "-sigfile", str(tmp_path / "signature")]
    assert b"Success" in subprocess.run([*verify, *files], check=True, capture_output=True).stdout


def test_an_unsigned_claim_of_before_signing_is_said_once_and_ends_no_branch(tmp_path, key, trust, caplog):
    store = LocalStore(str(tmp_path / "root"))
    Trainer(store).publish(1)
    with Publisher(store, sign_key=key, resumed_from=VersionId(1, 1)) as publisher:
        publisher.publish({"w": torch.ones(2)})
    channel = Channel.open(store, require_signature=trust)
    for _ in range(3):
        assert channel.poll() == VersionId(2, 2)
        channel.versions()
    assert caplog.text.count(f"{claim_path(1)} is not signed") == 1


def test_a_publisher_that_signs_goes_on_only_from_what_it_trusts_or_from_what_it_is_told(store, key, keys):
    """A forged claim would have it sign that readers go back."""
    Trainer(store).publish(1)
    with pytest.raises(InvalidInput, match="resumed_from"):
        Publisher(store, sign_key=key)
    Publisher(store, sign_key=key, resumed_from=VersionId(1, 1)).publish({"w": torch.ones(2)})
    put_bytes(store, claim_path(3), b'{"number":3,"nonce":"x","run_id":"","host":"","created":1,"resumed_from":[1,1]}')
    forged = Trainer(store)  # an epoch of the attacker's, and a version in it
    forged.publish(8)
    with Publisher(store, sign_key=key) as publisher:
        done = publisher.publish({"w": torch.zeros(2)})
    assert Channel.open(store).claims()[done.version.epoch].resumed_from == VersionId(2, 2)
    with pytest.raises(InvalidInput, match="no version that is signed"):
        Publisher(store, sign_key=keys[1])
    both = text(keys[0] + ".pub") + text(keys[1] + ".pub")
    with Publisher(store, sign_key=keys[1], require_signature=both) as publisher:
        publisher.publish({"w": torch.ones(2)})
    assert Channel.open(store, require_signature=keys[1] + ".pub").latest().run_id
