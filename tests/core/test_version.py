import pytest

from ckptsync.errors import InvalidName
from ckptsync.layout import epoch_of, manifest_path, version_of
from ckptsync.version import VersionId, VersionQuery, parse_query, parse_stem


def test_a_version_is_written_one_way_on_storage_and_another_for_people():
    version = VersionId(1, 42)
    assert version.stem == "e0001-v00000042"
    assert version.label == "e1-v42" == str(version)
    assert parse_stem(version.stem) == version


def test_versions_are_ordered_as_numbers_also_past_the_padding():
    assert VersionId(1, 99_999_999) < VersionId(1, 100_000_000) < VersionId(2, 0)
    assert parse_stem(VersionId(10_000, 100_000_000).stem) == (10_000, 100_000_000)


@pytest.mark.parametrize(
    "name",
    ["v00000007.tmp", "v7-copy", ".nfs000", "lost+found", "e0001-v00000042.json.tmp", "e1-v42", "step_5.tmp",
     "e0001-v00000042-copy", "e00001-v00000042", "e0001-v000000042", "e0001-v0000004٢", ""],
)  # fmt: skip
def test_case_52_any_other_name_is_no_version(name):
    assert parse_stem(name) is None
    assert version_of(f"manifests/{name}") is None


def test_a_manifest_path_names_its_version():
    assert version_of(manifest_path(VersionId(3, 7))) == VersionId(3, 7)
    assert epoch_of("epochs/e0003.json") == 3
    assert epoch_of("epochs/e0003.json.tmp") is None


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("latest", (None, None)),
        ("42", (None, 42)),
        ("v42", (None, 42)),
        ("e2-v42", (2, 42)),
        ("e0002-v00000042", (2, 42)),
    ],
)
def test_people_may_write_a_version_in_several_ways(text, query):
    assert parse_query(text) == VersionQuery(*query)


@pytest.mark.parametrize("text", ["", "newest", "-1", "e2", "1.5", "e2-v42 ", "../e1-v1"])
def test_anything_else_is_refused_with_the_remedy(text):
    with pytest.raises(InvalidName, match="use latest, 42 or e2-v42"):
        parse_query(text)
