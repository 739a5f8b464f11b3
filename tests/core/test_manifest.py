import contextlib
import json
import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import BadManifest, Corrupt, InvalidName, UnsupportedFormat
from ckptsync.manifest import canonical, check_basename, content_digest, decode, seal
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
    with pytest.raises(BadManifest, match="torn or edited"):
        decode(sealed_bytes().replace(b'"run"', b'"RUN"'))


def test_a_manifest_under_another_name_is_refused():
    with pytest.raises(BadManifest, match="named e0001-v00000002"):
        decode(sealed_bytes(), expect=VersionId(1, 2))


@pytest.mark.parametrize("found", [2, 0, "1", None, True])
def test_a_manifest_of_another_format_says_so(found):
    with pytest.raises(UnsupportedFormat, match="another release"):
        decode(edited(format=found))


def test_fields_of_a_later_release_are_accepted_and_covered_by_the_digest():
    data = edited(colour="blue")
    assert decode(data).id == VersionId(1, 1)
    with pytest.raises(BadManifest, match="torn or edited"):
        decode(data.replace(b"blue", b"grey"))


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/b", "a\\b", "a\0b", "C:x", "", ".", "..", "a\nb", "\ud800", "x" * 256]
)
def test_case_84_file_names_must_be_plain_basenames(name):
    with pytest.raises(InvalidName):
        check_basename(name)
    if "\ud800" not in name:
        evil = msgspec.to_builtins(track(tensor(file=name or "?")))
        evil["files"][0]["name"] = name
        with pytest.raises(BadManifest):
            decode(edited(tracks={"model": evil}))


def test_a_file_or_tensor_listed_twice_is_refused():
    with pytest.raises(BadManifest, match="tensor is listed twice"):
        manifest(tracks={"model": track(tensor(), tensor())})
    twice = msgspec.to_builtins(track(tensor()))
    twice["files"] *= 2
    with pytest.raises(BadManifest, match="file is listed twice"):
        decode(edited(tracks={"model": twice}))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "PICKLE"}, "unknown dtype"),
        ({"shape": (1 << 63, 2)}, "impossible shape"),
        ({"shape": (1 << 40,)}, "in a file of"),
        ({"file": ""}, "in no file"),
        ({"alias_of": "nobody"}, "not there"),
        ({"alias_of": "w"}, "not there"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(fields, reason):
    with pytest.raises(BadManifest, match=reason):
        manifest(tracks={"model": track(tensor(**fields))})


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
    with pytest.raises(BadManifest, match="content digest"):
        decode(edited(content_digest="0" * 64))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_cannot_hold_are_refused_before_writing(value):
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        manifest(metadata={"loss": [{"value": value}]})


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
