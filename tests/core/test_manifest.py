import contextlib
import json
import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.canonical import canonical
from ckptsync.errors import BadManifest, Corrupt, InvalidName, UnsupportedFormat
from ckptsync.manifest import (
    FileEntry,
    Parent,
    check_basename,
    combined_content,
    content_digest,
    decode,
    schema_digest,
    seal,
)
from ckptsync.testing.strategies import manifests
from ckptsync.version import VersionId

from .manifests import manifest, tensor, track

DATA = os.path.join(os.path.dirname(__file__), "..", "data")


def sealed_bytes(**fields):
    return canonical(msgspec.to_builtins(manifest(**fields)))


def edited(**changes):
    """A manifest whose fields were edited and whose own digest was made right again: what an attacker can do."""
    from ckptsync.digest import sha256

    raw = json.loads(sealed_bytes())
    raw.pop("manifest_digest")
    raw.update(changes)
    raw["manifest_digest"] = sha256(canonical(raw))
    return canonical(raw)


def test_what_was_sealed_is_read_back_the_same():
    before = manifest(step=7, metadata={"reward": 0.5, "tags": ["a", "b"]})
    after = decode(canonical(msgspec.to_builtins(before)), expect=VersionId(1, 1))
    assert after == before


def test_the_bytes_are_canonical():
    data = sealed_bytes(metadata={"b": 1, "a": 2})
    assert data == json.dumps(json.loads(data), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.99])
def test_case_13_a_torn_manifest_is_told_by_itself(share):
    data = sealed_bytes()
    with pytest.raises(BadManifest):
        decode(data[: int(len(data) * share)])


def test_an_edited_manifest_is_told_by_its_own_digest():
    with pytest.raises(BadManifest, match=r"^the manifest's own digest does not match its content: torn or edited$"):
        decode(sealed_bytes().replace(b'"run"', b'"RUN"'))


def test_a_manifest_under_another_name_is_refused():
    with pytest.raises(BadManifest, match="named e0001-v00000002"):
        decode(sealed_bytes(), expect=VersionId(1, 2))


@pytest.mark.parametrize("found", [3, 0, "1", None, True])
def test_a_manifest_of_another_format_says_so(found):
    with pytest.raises(UnsupportedFormat, match="another release"):
        decode(edited(format=found))


def test_fields_of_a_later_release_are_accepted_and_covered_by_the_digest():
    data = edited(colour="blue")
    assert decode(data).id == VersionId(1, 1)
    with pytest.raises(BadManifest, match="torn or edited"):
        decode(data.replace(b"blue", b"grey"))


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/x", "a/b", "a\\b", "a\0b", "C:x", "", ".", "..", "a\nb", "a\x1f", "\ud800", chr(0xDFFF), "x" * 256],
)
def test_case_84_file_names_must_be_plain_basenames(name):
    with pytest.raises(InvalidName, match=r"^track name .* is (empty, too long or not a name|not a plain basename)$"):
        check_basename(name, "track")
    if not "\ud800" <= name <= "\udfff":
        evil = msgspec.to_builtins(track(tensor(file=name or "?")))
        evil["files"][0]["name"] = name
        with pytest.raises(BadManifest):
            decode(edited(tracks={"model": evil}))


@pytest.mark.parametrize("name", ["x" * 255, "a b", "X", "\x7f", "\ud7ff", "\ue000"])
def test_any_other_name_is_one(name):
    assert check_basename(name) == name
    with pytest.raises(InvalidName, match=r"^file name '' is empty"):
        check_basename("")


@pytest.mark.parametrize("what", ["nonce", "track"])
def test_a_nonce_or_a_track_is_a_basename_too_and_the_error_says_which(what):
    evil = {"nonce": "../x"} if what == "nonce" else {"tracks": {"../x": msgspec.to_builtins(track(tensor()))}}
    with pytest.raises(BadManifest, match=f"^{what} name '../x' is not a plain basename$"):
        decode(edited(**evil))


@pytest.mark.parametrize("fields", [{"epoch": 0}, {"number": -1}, {"tracks": {}}])
def test_an_identity_that_cannot_be_is_refused(fields):
    with pytest.raises(BadManifest, match=r"^epoch, number or tracks are out of range$"):
        decode(edited(**fields))


def test_the_base_model_has_number_0():
    assert manifest(number=0).id == VersionId(1, 0)


def test_the_digest_is_over_sorted_keys_whatever_their_order_in_the_file():
    turned = dict(reversed(json.loads(sealed_bytes()).items()))
    assert decode(json.dumps(turned).encode()).id == VersionId(1, 1)


def test_what_was_read_is_written_again_byte_for_byte():
    data = edited(colour="blue")
    assert decode(data).encoded == data
    assert not decode(data).signed
    assert decode(canonical({**json.loads(data), "signature": "anybody's"})).signed


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[]", "^the manifest is not a JSON object$"),
        (b"{", r"^the manifest is not complete JSON \(1 bytes\)"),
        (edited(tracks=7), "^the manifest does not have the right fields"),
    ],
    ids=["list", "torn", "fields"],
)
def test_what_is_no_manifest_says_what_it_is(data, reason):
    with pytest.raises(BadManifest, match=reason):
        decode(data)


def test_an_empty_file_and_a_file_full_of_its_tensors_are_right():
    both = msgspec.to_builtins(track(tensor(), size=8))
    both["files"] = [*both["files"], {"name": "empty", "size": 0, "digest": "0" * 32}]
    assert decode(edited(tracks={"model": both})).nbytes == 8
    both["files"][1]["size"] = -1
    with pytest.raises(BadManifest, match="empty: negative size"):
        decode(edited(tracks={"model": both}))


def test_the_tensors_of_one_file_are_summed_up():
    with pytest.raises(BadManifest, match="tensors of 16 bytes in a file of 15"):
        manifest(tracks={"model": track(tensor("a"), tensor("b"), size=15)})


BASE = {"epoch": 1, "number": 1, "content_digest": "0" * 64}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kind": "delta"}, "^a delta without a parent$"),
        ({"parent": {**BASE, "number": 2}}, "^a delta against e1-v2, which cannot be its base$"),
        ({"parent": {**BASE, "files": {"draft": []}}}, "^a delta against e1-v1, which cannot be its base$"),
        ({"parent": {**BASE, "skips": [{**BASE, "number": 3}]}}, "^a delta against e1-v3, which cannot be its base$"),
        ({"parent": {**BASE, "files": {"model": [{"name": "a/b", "size": 1, "digest": ""}]}}}, "not a plain basename"),
        ({"parent": {**BASE, "stored": ["nothing"]}}, "^a file is stored that is in no track$"),
    ],
)
def test_a_delta_that_cannot_be_is_refused(fields, reason):
    with pytest.raises(BadManifest, match=reason):
        decode(edited(number=2, **fields))


def test_a_delta_may_have_all_its_files_stored_and_changes_of_all_its_tracks():
    parent = {**BASE, "files": {"model": []}, "stored": ["model.safetensors"]}
    assert decode(edited(number=2, kind="delta", parent=parent)).parent.id == VersionId(1, 1)


def small(name):
    return FileEntry(name=name, size=1, digest="0" * 32)


def test_a_delta_lists_what_lies_in_its_folder_and_is_told_as_the_full_version_that_it_stands_for():
    main = msgspec.structs.replace(track(tensor()), files=(*track(tensor()).files, small("config.json")))
    tracks = {"model": main, "draft": track(tensor("d", file="draft.safetensors"))}
    changes = {"model": (small("x"),), "draft": (small("y"),)}
    parent = Parent(**BASE, files=changes, stored=("config.json",))
    delta = manifest(number=2, kind="delta", parent=parent, tracks=tracks)
    whole = ["draft/draft.safetensors", "model.safetensors", "config.json"]
    deltas = ["delta/e0001-v00000001/draft/y", "delta/e0001-v00000001/x"]
    assert [path for path, _ in delta.files()] == whole
    assert [path for path, _ in delta.stored_files()] == ["config.json", *deltas]
    besides = manifest(number=2, parent=parent, tracks=tracks)
    assert [path for path, _ in besides.stored_files()] == whole + deltas
    full = delta.full_form()
    assert (full.kind, full.parent, full.id, full.tracks) == ("full", None, delta.id, delta.tracks)
    assert full.full_form() is full


def test_a_version_of_several_tracks_has_a_digest_over_them_by_name():
    one, two = track(tensor("a", b"1")), track(tensor("b", b"2"))
    assert combined_content({"model": one}) == content_digest(one.tensors)
    digests = {combined_content(each) for each in ({"model": one, "draft": two}, {"model": two, "draft": one})}
    assert len(digests) == 2
    assert combined_content({"draft": two, "model": one}) in digests


def test_versions_that_one_engine_can_take_in_turn_have_one_schema_digest():
    assert schema_digest([tensor("a", b"1"), tensor("b")]) == schema_digest([tensor("b"), tensor("a", b"2")])
    assert schema_digest([tensor("a", b"1")]) != schema_digest([tensor("a", b"12")])


def test_a_manifest_that_is_too_large_is_refused_before_it_is_read(monkeypatch):
    data = sealed_bytes()
    monkeypatch.setattr("ckptsync.manifest.MAX_BYTES", len(data))
    assert decode(data)
    with pytest.raises(BadManifest, match=f"^the manifest has {len(data) + 1} bytes, more than {len(data)}$"):
        decode(data + b" ")


def test_a_manifest_without_its_own_digest_is_torn_or_edited():
    raw = json.loads(sealed_bytes())
    del raw["manifest_digest"]
    with pytest.raises(BadManifest, match="torn or edited"):
        decode(canonical(raw))


ORIGIN = {"epoch": 1, "number": 0, "nonce": "first"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"format": 1, "data_of": ORIGIN}, "^format 1 and data_of .* do not go together$"),
        ({"format": 2}, "^format 2 and data_of None do not go together$"),
        ({"format": 2, "data_of": {**ORIGIN, "number": 2}}, "^its data cannot be those of e1-v2$"),
        ({"format": 2, "data_of": {**ORIGIN, "number": -1}}, "^its data cannot be those of "),
        ({"format": 2, "data_of": {**ORIGIN, "nonce": "../x"}}, "^nonce name '../x' is not a plain basename$"),
    ],
)
def test_data_of_another_version_are_those_of_an_earlier_one(fields, reason):
    assert decode(edited(number=2, format=2, data_of=ORIGIN)).folder == "data/e0001-v00000000-first"
    with pytest.raises(BadManifest, match=reason):
        decode(edited(number=2, **fields))


def test_a_file_or_tensor_listed_twice_is_refused():
    with pytest.raises(BadManifest, match=r"^a tensor is listed twice$"):
        manifest(tracks={"model": track(tensor(), tensor())})
    twice = msgspec.to_builtins(track(tensor()))
    twice["files"] *= 2
    with pytest.raises(BadManifest, match=r"^a file is listed twice$"):
        decode(edited(tracks={"model": twice}))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "PICKLE"}, "unknown dtype"),
        ({"shape": (1 << 62, 0)}, "impossible shape"),
        ({"shape": (1,) * 65}, "impossible shape"),
        ({"shape": (-1,)}, "impossible shape"),
        ({"shape": (1 << 40,)}, "in a file of"),
        ({"file": ""}, "^tensor 'w' is in no file$"),
        ({"alias_of": "nobody"}, "not there"),
        ({"alias_of": "w"}, "not there"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(fields, reason):
    with pytest.raises(BadManifest, match=reason):
        manifest(tracks={"model": track(tensor(**fields))})


@pytest.mark.parametrize("shape", [(), (0,), (1,) * 64, ((1 << 62) - 1, 0)])
def test_a_tensor_may_be_a_scalar_empty_or_of_many_dimensions(shape):
    assert manifest(tracks={"model": track(tensor(shape=shape))}).tracks["model"].tensors[0].shape == shape


def test_a_tensor_in_a_file_that_is_not_listed_is_refused():
    lost = msgspec.to_builtins(track(tensor()))
    lost["files"][0]["name"] = "other"
    with pytest.raises(BadManifest, match=r"^tensor 'w' is in 'model.safetensors', which is not listed$"):
        decode(edited(tracks={"model": lost}))


def test_a_tied_tensor_needs_no_file_of_its_own():
    tied = tensor("lm_head", file="", alias_of="w")
    assert manifest(tracks={"model": track(tensor(), tied)}).tracks["model"].tensors[1] == tied


def test_the_content_digest_knows_neither_order_nor_files():
    a, b = tensor("a", b"1", file="x"), tensor("b", b"2", file="x")
    resharded = [tensor("b", b"2", file="y"), tensor("a", b"1", file="z")]
    assert content_digest([a, b]) == content_digest(resharded)
    assert content_digest([a, b]) != content_digest([a, tensor("b", b"3")])
    assert content_digest([a]) != content_digest([tensor("a", b"1", dtype="I8")])


def test_a_content_digest_that_does_not_follow_is_refused():
    with pytest.raises(BadManifest, match=r"^the content digest does not follow from the tensors listed$"):
        decode(edited(content_digest="0" * 64))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_cannot_hold_are_refused_before_writing(value):
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        manifest(metadata={"loss": [{"value": value}]})


@given(manifests())
def test_any_manifest_reads_back_as_it_was_written(made):
    assert decode(made.encoded, expect=made.id) == made


@given(st.binary(max_size=300))
def test_random_bytes_are_corrupt_and_nothing_else(data):
    with pytest.raises(Corrupt):
        decode(data)


@given(st.data())
def test_a_manifest_with_any_field_replaced_is_read_or_corrupt(data):
    json_values = st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=8,
    )
    field = data.draw(st.sampled_from(sorted(json.loads(sealed_bytes()))))
    try:
        raw = edited(**{field: data.draw(json_values)})
    except (ValueError, UnicodeEncodeError, OverflowError, msgspec.ValidationError):
        return  # not representable in JSON
    with contextlib.suppress(Corrupt):
        assert seal(decode(raw))


def test_manifests_of_every_past_release_stay_readable():
    old = sorted(name for name in os.listdir(DATA) if name.startswith("manifest-"))
    assert old, "tests/data must hold at least the manifest of this release"
    for name in old:
        with open(os.path.join(DATA, name), "rb") as file:
            found = decode(file.read())
        assert found.tracks["model"].tensors, name
        assert found.metadata == {"note": "kept for ever"}
