import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from ckptsync.channel import Channel
from watchers.claims import claimed


def shards(root, label):
    channel = Channel.open(root)
    manifest = channel.resolve(label)
    folder = os.path.join(root, manifest.folder)
    return [os.path.join(folder, f.name) for f in manifest.tracks["model"].files if f.name.endswith(".safetensors")]


def all_tensors(folder):
    found = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            found.update(load_file(os.path.join(folder, name)))
    return found


def same_tensors(one, other):
    return one.keys() == other.keys() and all(bool((one[k] == other[k]).all()) for k in one)


def test_a_folder_is_published_listed_shown_and_verified(ckptsync, hf_folder, root):
    published = ckptsync("publish", root, "--from", hf_folder(), "--step", 7, "--meta", "reward=0.5")
    assert published.code == 0, published.err
    assert "published e1-v1" in published.out

    listed = ckptsync("ls", root, "--json").json
    (row,) = listed["versions"]
    assert row["version"] == "e1-v1"
    assert (row["step"], row["live"], row["complete"]) == (7, True, True)
    assert row["metadata"] == {"reward": "0.5"}

    shown = ckptsync("show", root, "latest", "--json").json
    names = {file["name"] for file in shown["tracks"]["model"]["files"]}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= names

    verified = ckptsync("verify", root)
    assert verified.code == 0
    assert "e1-v1  ok" in verified.out


def test_every_command_explains_itself(ckptsync):
    helped = ckptsync("--help")
    assert helped.code == 0
    commands = "demo publish ls show verify diff export fsck compact import watch load doctor gc pin unpin rollback"
    commands += " status config"
    for command in commands.split():
        assert command in helped.out
        assert ckptsync(command, "--help").code == 0


def test_a_second_publish_is_a_new_version_also_when_nothing_changed(ckptsync, hf_folder, root):
    source = hf_folder()
    first = ckptsync("publish", root, "--from", source, "--json").json
    second = ckptsync("publish", root, "--from", source, "--json").json
    assert (first["version"], first["changed"]) == ("e1-v1", True)
    assert (second["version"], second["changed"]) == ("e2-v2", False)
    assert first["content_digest"] == second["content_digest"]


def test_an_exported_version_is_the_checkpoint_that_was_published(ckptsync, hf_folder, root, tmp_path):
    source, copy = hf_folder(), str(tmp_path / "copy")
    ckptsync("publish", root, "--from", source)
    assert ckptsync("export", root, "1", copy).code == 0
    assert same_tensors(all_tensors(copy), load_file(os.path.join(source, "model.safetensors")))
    assert os.path.exists(os.path.join(copy, "config.json"))


def test_export_never_writes_into_a_folder_that_holds_something(ckptsync, hf_folder, root):
    source = hf_folder()
    ckptsync("publish", root, "--from", source)
    refused = ckptsync("export", root, "1", source)
    assert refused.code == 2
    assert "not empty" in refused.err


def test_an_exported_folder_comes_back_under_another_root_with_its_content(ckptsync, hf_folder, root, tmp_path):
    copy, other = str(tmp_path / "copy"), str(tmp_path / "other")
    published = ckptsync("publish", root, "--from", hf_folder(), "--step", 3, "--json").json
    ckptsync("export", root, "1", copy)
    imported = ckptsync("import", other, copy, "--json").json
    assert imported["content_digest"] == published["content_digest"]
    assert ckptsync("verify", other).code == 0
    row = ckptsync("ls", other, "--json").json["versions"][0]
    assert row["step"] == 3
    assert row["metadata"]["imported_from"]["version"] == "e1-v1"
    again = ckptsync("import", other, copy)
    assert "as e2-v2" in again.out
    assert "a trainer that still runs is fenced by it" in again.out
    os.unlink(f"{copy}/config.json")
    instead = ckptsync("publish", root, "--from", copy)
    assert (instead.code, f"`ckptsync import {root} {copy}`" in instead.err) == (2, True)


def test_import_refuses_a_folder_with_a_changed_byte_and_commits_nothing(ckptsync, hf_folder, root, tmp_path):
    copy, other = str(tmp_path / "copy"), str(tmp_path / "other")
    ckptsync("publish", root, "--from", hf_folder())
    ckptsync("export", root, "1", copy)
    with open(os.path.join(copy, "config.json"), "r+b") as file:
        file.write(b"?")
    refused = ckptsync("import", other, copy, "--json")
    assert refused.code == 1
    assert refused.json["error"]["kind"] == "bad-shard"
    assert not os.path.exists(other), "not even the channel is made"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: os.truncate(path, os.path.getsize(path) - 1), "bytes on the store"),
        (lambda path: append(path), "bytes on the store"),
        (lambda path: flip(path, -1), "not those that were published"),
        (lambda path: zero_tail(path), "not those that were published"),
        (os.remove, "model-00001"),
    ],
    ids=["truncated", "trailing byte (case 80)", "one bit", "zeroed tail", "missing (case 78)"],
)
def test_verify_names_the_file_that_is_damaged_and_why(ckptsync, hf_folder, root, damage, reason):
    ckptsync("publish", root, "--from", hf_folder(0))
    ckptsync("publish", root, "--from", hf_folder(1))
    (shard,) = shards(root, "1")
    damage(shard)
    bad = ckptsync("verify", root, "--json")
    assert bad.code == 1
    first, second = bad.json["versions"]
    assert (first["ok"], second["ok"]) == (False, True)
    assert first["problems"][0]["file"] == os.path.basename(shard)
    assert reason in first["problems"][0]["message"]
    assert ckptsync("verify", root, "2").code == 0


def append(path):
    with open(path, "ab") as file:
        file.write(b"x")


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(at, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def zero_tail(path):
    with open(path, "r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(bytes(64))


def test_case_85_a_shard_that_became_a_symlink_is_not_followed(ckptsync, hf_folder, root, tmp_path):
    ckptsync("publish", root, "--from", hf_folder())
    (shard,) = shards(root, "1")
    os.rename(shard, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", shard)
    bad = ckptsync("verify", root, "--json")
    assert bad.code == 1
    assert os.path.basename(shard) in bad.out
    assert "symbolic link" in bad.out


def test_case_81_an_extra_shard_is_reported_and_is_no_part_of_the_version(ckptsync, hf_folder, root):
    ckptsync("publish", root, "--from", hf_folder())
    (shard,) = shards(root, "1")
    with open(os.path.join(os.path.dirname(shard), "model-00009-of-00009.safetensors"), "wb") as file:
        file.write(b"stale")
    checked = ckptsync("verify", root, "--json")
    assert checked.code == 0
    assert "model-00009-of-00009.safetensors" in checked.json["versions"][0]["notes"][0]


def test_case_13_a_torn_manifest_is_listed_as_incomplete_and_the_version_before_is_latest(ckptsync, hf_folder, root):
    ckptsync("publish", root, "--from", hf_folder(0))
    ckptsync("publish", root, "--from", hf_folder(1))
    path = os.path.join(root, "manifests", "e0002-v00000002.json")
    os.truncate(path, os.path.getsize(path) // 2)
    rows = ckptsync("ls", root, "--json").json["versions"]
    assert [row["complete"] for row in rows] == [True, False]
    assert ckptsync("show", root, "latest", "--json").json["version"] == "e1-v1"
    assert ckptsync("verify", root).code == 1
    published = ckptsync("publish", root, "--from", hf_folder(2), "--json").json
    assert published["version"] == "e3-v3", "a broken version's number is not used again"


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("ls",), 2, "ROOT"),
        (("show", "{root}", "newest"), 2, "use latest, 42 or e2-v42"),
        (("show", "{root}", "99"), 1, "no complete version 99"),
        (("verify", "{empty}"), 1, "no version"),
        (("verify", "{absent}"), 2, "no such folder"),
        (("publish", "{root}", "--from", "/does/not/exist"), 2, "/does/not/exist"),
        (("publish", "{root}", "--from", "{hf}", "--meta", "reward"), 2, "key=value"),
        (("publish", "{root}", "--from", "{hf}", "--kind", "quantum"), 2, "quantum"),
        (("nonsense",), 2, "nonsense"),
        (("load", "{root}", "1", "--engine", "vllm"), 2, "--url"),
        (("watch", "{root}", "--engine", "tgi", "--url", "http://127.0.0.1:1"), 2, "tgi"),
    ],
)
def test_exit_codes_tell_a_wrong_call_from_a_bad_thing(ckptsync, hf_folder, root, tmp_path, args, code, words):
    ckptsync("publish", root, "--from", hf_folder())
    (tmp_path / "empty").mkdir()
    places = {"root": root, "empty": tmp_path / "empty", "absent": tmp_path / "absent", "hf": tmp_path / "hf0"}
    ran = ckptsync(*(arg.format(**places) for arg in args))
    assert ran.code == code, ran.err
    assert words in ran.err


def test_with_json_an_error_is_a_document_too(ckptsync, root):
    os.mkdir(root)
    ran = ckptsync("show", root, "--json")
    assert ran.code == 1
    assert ran.json["error"]["kind"] == "channel-empty"


def files_below(folder):
    return sorted(os.path.join(where, name) for where, _, names in os.walk(folder) for name in names)


def test_doctor_tries_the_root_and_leaves_no_file_behind(ckptsync, hf_folder, root):
    ckptsync("publish", root, "--from", hf_folder())
    before = files_below(root)
    examined = ckptsync("doctor", root, "--json")
    assert examined.code == 0
    statuses = {check["name"]: check["status"] for check in examined.json["checks"]}
    assert statuses["create-if-absent"] == "ok"
    assert statuses["versions"] == "ok"
    assert files_below(root) == before


def test_doctor_finds_debris_and_broken_versions(ckptsync, hf_folder, root):
    ckptsync("publish", root, "--from", hf_folder())
    os.makedirs(os.path.join(root, "data", "e0001-v00000002-deadbeef"))
    with open(os.path.join(root, "data", "e0001-v00000002-deadbeef", "model-00001-of-00001.safetensors"), "wb") as file:
        file.write(bytes(1000))
    with open(os.path.join(root, "manifests", "e0001-v00000003.json"), "wb") as file:
        file.write(b"{")
    examined = ckptsync("doctor", root, "--json")
    assert examined.code == 1
    statuses = {check["name"]: check["status"] for check in examined.json["checks"]}
    assert statuses["debris"] == "warn"
    assert statuses["versions"] == "bad"


@pytest.mark.slow
def test_the_command_is_installed_and_prints_only_json_on_stdout(hf_folder, root):
    command = os.path.join(os.path.dirname(sys.executable), "ckptsync")
    done = subprocess.run([command, "publish", root, "--from", hf_folder(), "--json"], capture_output=True, check=True)
    assert json.loads(done.stdout)["version"] == "e1-v1"


def test_watch_wants_engines_a_rollout_and_a_quorum_that_it_knows(ckptsync, root):
    nobody = ckptsync("watch", root, "--engine", "vllm")
    assert (nobody.code, "which engines?" in nobody.err) == (2, True), nobody.err
    for options in (("--rollout", "some"), ("--quorum", "0%"), ("--dns", "engines.svc")):
        refused = ckptsync("watch", root, "--engine", "vllm", "--url", "http://127.0.0.1:9", *options)
        assert refused.code == 2, refused.err


def test_watch_and_load_refuse_an_engine_that_another_watcher_of_this_host_has(ckptsync, hf_folder, root, tmp_path):
    ckptsync("publish", root, "--from", hf_folder())
    stage, url = str(tmp_path / "stage"), "http://127.0.0.1:9"
    with claimed(stage, url, "/nfs/other"):
        for command in (("watch", root), ("load", root, "1")):
            refused = ckptsync(*command, "--engine", "vllm", "--url", url, "--stage", stage)
            assert refused.code == 1
            assert "/nfs/other" in refused.err.replace("\n", "")
