"""What somebody who may write to the bucket, and has no key, can make a reader take that requires signatures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from ckptsync import Channel, Mirror, Retention
from ckptsync.canonical import canonical
from ckptsync.collect import Collector
from ckptsync.delta.plan import cheapest
from ckptsync.digest import digest
from ckptsync.epochs import Epoch
from ckptsync.errors import BadShard, BrokenChain, Corrupt, Untrusted
from ckptsync.layout import HEAD, claim_path, manifest_path
from ckptsync.manifest import FileEntry, Manifest, Origin, Parent, decode, seal
from ckptsync.signing import Signer, Trust
from ckptsync.store import LocalStore
from ckptsync.store.base import put_bytes, read_bytes
from ckptsync.store.clock import StoreClock
from ckptsync.version import VersionId
from tests.core.manifests import manifest
from tests.mirror.channels import SHARD, Trainer, bytes_of
from watchers.discover import Latest
from watchers.stage import Stage

TRUE = VersionId(1, 3)
"""The newest version that the trainer signed."""


class Attacker:
    """May read and write everything below the root."""

    def __init__(self, store: LocalStore, key: Signer, folder: str) -> None:
        self.store, self.channel, self.own_key = store, Channel.open(store), key
        self._folder = folder

    def signed(self, number: int) -> Manifest:
        return self.channel.manifest(VersionId(1, number))

    def put(self, version: VersionId, data: bytes) -> None:
        put_bytes(self.store, manifest_path(version), data)

    def other_channel(self, key: Signer | None) -> LocalStore:
        """Another run of the same trainer, further on."""
        store = LocalStore(self._folder)
        Trainer(store, sign_key=key).publish(1, 2, 3, 4)
        return store


@pytest.fixture
def attacker(store, trainer, keys, tmp_path) -> Attacker:
    return Attacker(store, Signer.load(keys[1]), str(tmp_path / "elsewhere"))


def forge_a_newer_version(a: Attacker) -> None:
    a.put(VersionId(1, 9), manifest(1, 9, channel_id=a.channel.channel_id, digest="blake3").encoded)


def sign_it_with_another_key(a: Attacker) -> None:
    forged = manifest(1, 9, channel_id=a.channel.channel_id, digest="blake3")
    a.put(VersionId(1, 9), a.own_key.sign_manifest(forged)[1])


def claim_the_trusted_key_for_another_ones_signature(a: Attacker) -> None:
    forged = manifest(1, 9, channel_id=a.channel.channel_id, digest="blake3")
    raw = json.loads(a.own_key.sign_manifest(forged)[1])
    raw["signature"]["key_id"] = json.loads(a.signed(3).encoded)["signature"]["key_id"]
    a.put(VersionId(1, 9), canonical(raw))


def reuse_a_signature_for_other_content(a: Attacker) -> None:
    altered, _ = seal(msgspec.structs.replace(a.signed(3), number=9, metadata={"reward": 1}))
    signature = json.loads(a.signed(3).encoded)["signature"]
    a.put(VersionId(1, 9), canonical({**json.loads(altered.encoded), "signature": signature}))


def replay_an_old_manifest_under_a_newer_name(a: Attacker) -> None:
    a.put(VersionId(1, 9), a.signed(1).encoded)


def replay_it_in_a_newer_epoch(a: Attacker) -> None:
    a.put(VersionId(2, 4), a.signed(1).encoded)


def point_the_head_back(a: Attacker) -> None:
    head = {"epoch": 1, "number": 1, "manifest_digest": a.signed(1).manifest_digest, "length": 9, "claimed": 7}
    put_bytes(a.store, HEAD, json.dumps(head).encode())


def tear_the_head(a: Attacker) -> None:
    put_bytes(a.store, HEAD, b"\0garbage")


def claim_an_epoch_that_leaves_the_newest_behind(a: Attacker) -> None:
    claim = json.loads(read_bytes(a.store, claim_path(1), 9999))
    del claim["signature"]
    put_bytes(a.store, claim_path(2), json.dumps({**claim, "number": 2, "resumed_from": [1, 1]}).encode())


def take_the_claim_of_another_channel(a: Attacker) -> None:
    store = LocalStore(a._folder)
    trainer = Trainer(store, sign_key=a.trainers_key)
    trainer.publish(1)
    Trainer(store, VersionId(1, 1), a.trainers_key)
    put_bytes(a.store, claim_path(2), read_bytes(store, claim_path(2), 9999))


def take_a_newer_manifest_of_another_channel(a: Attacker) -> None:
    store = a.other_channel(a.trainers_key)
    a.put(VersionId(1, 4), read_bytes(store, manifest_path(VersionId(1, 4)), 1 << 20))


def share_data_by_an_unsigned_rollback(a: Attacker) -> None:
    origin = Origin(epoch=1, number=1, nonce=a.signed(1).nonce)
    a.put(VersionId(1, 9), seal(msgspec.structs.replace(a.signed(1), number=9, format=2, data_of=origin))[1])


ATTACKS: list[Callable[[Attacker], None]] = [
    forge_a_newer_version, sign_it_with_another_key, claim_the_trusted_key_for_another_ones_signature,
    reuse_a_signature_for_other_content, replay_an_old_manifest_under_a_newer_name, replay_it_in_a_newer_epoch,
    point_the_head_back, tear_the_head, claim_an_epoch_that_leaves_the_newest_behind,
    take_the_claim_of_another_channel, take_a_newer_manifest_of_another_channel, share_data_by_an_unsigned_rollback,
]  # fmt: skip

FOOL_WHO_ASKS_FOR_NO_SIGNATURE = {
    forge_a_newer_version, sign_it_with_another_key, claim_the_trusted_key_for_another_ones_signature,
    reuse_a_signature_for_other_content, claim_an_epoch_that_leaves_the_newest_behind,
    take_the_claim_of_another_channel, take_a_newer_manifest_of_another_channel, share_data_by_an_unsigned_rollback,
}  # fmt: skip


def next_for(channel: Channel, current: VersionId | None) -> VersionId | None:
    found = Latest().next(channel, current, lambda _: "try")
    return found.id if found else None


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_nothing_but_the_newest_signed_version_is_loaded(store, attacker, key, trust, attack):
    attacker.trainers_key = key
    attack(attacker)
    assert next_for(Channel.open(store, require_signature=trust), None) == TRUE
    assert next_for(Channel.open(store, require_signature=trust), TRUE) is None
    fooled = next_for(Channel.open(store), None) != TRUE or next_for(Channel.open(store), TRUE) is not None
    assert fooled == (attack in FOOL_WHO_ASKS_FOR_NO_SIGNATURE)


def test_a_version_that_is_asked_for_by_name_is_refused_with_the_reason(store, attacker, trust):
    forge_a_newer_version(attacker)
    with pytest.raises(Untrusted, match=r"v00000009\.json: e1-v9 is not signed"):
        Channel.open(store, require_signature=trust).resolve("9")


def test_files_cannot_be_exchanged_below_a_signed_manifest(store, attacker, trust, tmp_path):
    channel = Channel.open(store, require_signature=trust)
    path = f"{channel.latest().folder}/{SHARD}"
    put_bytes(store, path, read_bytes(store, path, 1 << 20)[::-1])
    with pytest.raises(BadShard):
        Stage(str(tmp_path / "stage")).stage(channel, channel.latest())


def test_digests_that_can_be_forged_are_refused_though_signed(trainer, key, trust):
    weak = manifest(1, 9, channel_id=trainer.channel.channel_id)
    with pytest.raises(Exception, match="publish it anew"):
        key.sign_manifest(weak)
    raw = json.loads(weak.encoded)
    body = {name: value for name, value in raw.items() if name != "manifest_digest"}
    data = canonical({**raw, "signature": key._sign(b"ckptsync manifest\n", body)})
    put_bytes(trainer.channel.store, manifest_path(VersionId(1, 9)), data)
    with pytest.raises(Untrusted, match="can be forged"):
        Channel.open(trainer.channel.store, require_signature=trust).resolve("9")


def test_a_delta_is_not_made_from_a_base_that_was_exchanged(store, trainer, trust):
    base = trainer.channel.manifest(VersionId(1, 3))
    small = FileEntry(name="delta-00001-of-00001.safetensors", size=8, digest=digest(bytes(8), "blake3"))
    parent = Parent(
        epoch=1, number=3, content_digest=base.content_digest, files={"model": (small,)}, stored=()
    )  # fmt: skip
    trainer.publish(4, kind="delta", parent=parent)
    forged, _ = seal(msgspec.structs.replace(base, nonce="mine"))
    put_bytes(store, manifest_path(base.id), forged.encoded)
    channel = Channel.open(store, require_signature=trust)
    assert cheapest(Channel.open(store), channel.latest()).start.nonce == "mine"
    with pytest.raises(BrokenChain, match="not signed"):
        cheapest(channel, channel.latest())


def test_the_whole_bucket_of_another_run_passes_only_for_keys_that_are_not_bound_to_a_channel(
    store, attacker, key, keys, trust
):
    """What a signature cannot say is which root a reader wanted: a key for each run, or a `channel:` line, says it."""
    wanted, other = attacker.channel.channel_id, attacker.other_channel(key)
    with open(keys[0] + ".pub") as file:
        bound = Trust.load(f"channel: {wanted}\n{file.read()}")
    assert Channel.open(store, require_signature=bound).poll() == TRUE
    running = Channel.open(store, require_signature=trust)
    assert running.poll() == TRUE
    for path, data in bytes_of(other).items():
        put_bytes(store, path, data)
    assert Channel.open(store, require_signature=trust).poll() == VersionId(1, 4)
    assert Channel.open(store, require_signature=bound).poll() is None
    with pytest.raises(Untrusted, match="of channel"):
        running.manifest(VersionId(1, 4))


def test_withholding_is_what_is_left_and_takes_no_running_reader_back(store, attacker, trust):
    running, fresh = (Channel.open(store, require_signature=trust) for _ in range(2))
    assert next_for(running, None) == TRUE
    for number in (2, 3):
        os.unlink(os.path.join(store.url, manifest_path(VersionId(1, number))))
    os.unlink(os.path.join(store.url, HEAD))
    assert next_for(running, TRUE) is None
    assert next_for(fresh, None) == VersionId(1, 1)


def test_a_mirror_that_requires_signatures_carries_nothing_else_on(store, attacker, trust, tmp_path, caplog):
    forge_a_newer_version(attacker)
    claim_an_epoch_that_leaves_the_newest_behind(attacker)
    target = LocalStore(str(tmp_path / "mirror"))
    done = Mirror(store, target, require_signature=trust).run()
    assert list(done.skipped) == [VersionId(1, 9)]
    assert Channel.open(target).poll() == TRUE
    assert not [entry.path for entry in target.list("epochs") if entry.path == claim_path(2)]
    assert Channel.open(target, require_signature=trust).latest().id == TRUE
    with pytest.raises(Corrupt):
        Channel.open(store, require_signature=trust).resolve("9")


def test_forged_versions_do_not_count_when_retention_keeps_the_newest(store, trainer, trust):
    """Else who may write and not delete would have the trainer delete its own versions."""
    for number in (7, 8, 9):
        forged = manifest(1, number, channel_id=trainer.channel.channel_id, digest="blake3")
        put_bytes(store, manifest_path(forged.id), forged.encoded)
    policy = Retention(keep_last=2, grace=0.0)
    fooled = Collector(Channel.open(store), policy).by_policy(StoreClock.guess())
    assert [version.number for version in fooled.keep] == [8, 9]
    plan = Collector(Channel.open(store, require_signature=trust), policy).by_policy(StoreClock.guess())
    assert [version.number for version in plan.go] == [1]


@given(at=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), what=st.sampled_from(["manifest", "claim"]))
def test_no_byte_of_a_signed_record_can_be_changed_unnoticed(at, byte, what):
    data = SIGNED[what]
    altered = bytearray(data)
    altered[int(at * len(data))] = byte
    with suppress(Corrupt):
        if what == "manifest":
            found = decode(bytes(altered))
            SIGNED_TRUST.check_manifest(found, "c" * 32)
            assert found == decode(data)
        else:
            with suppress(msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
                found = msgspec.json.decode(bytes(altered), type=Epoch)
                SIGNED_TRUST.check_claim(bytes(altered), "c" * 32, "the claim")
                assert found == msgspec.json.decode(data, type=Epoch)


_KEY = Signer(Ed25519PrivateKey.generate())
SIGNED_TRUST = _KEY.trust
SIGNED = {
    "manifest": _KEY.sign_manifest(manifest(1, 2, digest="blake3"))[1],
    "claim": _KEY.sign_claim(
        b'{"number":2,"nonce":"n","run_id":"r","host":"h","created":1.5,"resumed_from":[1,2]}', "c" * 32
    ),
}
