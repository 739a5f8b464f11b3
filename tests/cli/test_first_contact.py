"""What somebody meets who types a root wrong, waits for the first version, or reads the log in a file."""

from __future__ import annotations

import errno
import logging
import os
import runpy
import signal
import subprocess
import sys
from typing import IO

import pytest

import ckptsync as package
from ckptsync.channel import Channel
from ckptsync.cli.output import LogHandler, Once
from ckptsync.cli.roots import existing
from ckptsync.cli.watch import hide_what_receipts_say, say_begun
from ckptsync.doctor import examine
from ckptsync.errors import InvalidInput, StoreDenied, StoreFull
from ckptsync.manifest import FileEntry
from ckptsync.store import LocalStore, open_store
from ckptsync.testing.hooks import Failing, HookedStore, matching
from tests.mirror.channels import Trainer
from tests.watcher.publish import TestPublisher
from watchers.health import IN_RECEIPT

AWAY = "http://127.0.0.1:9"
"""Nobody listens there."""

READERS = [
    ("ls",),
    ("show",),
    ("verify",),
    ("doctor",),
    ("export", "latest", "{copy}"),
    ("load", "latest", "--engine", "module", "--url", AWAY),
]


def command(*args: str, stdout: IO[str] | int = subprocess.PIPE, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ckptsync.cli", *args],
        stdout=stdout, stderr=subprocess.PIPE, text=True, env={**os.environ, **env},
    )  # fmt: skip


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader[0])
def test_a_mistyped_root_is_a_wrong_call_and_is_not_made(ckptsync, root, tmp_path, reader):
    name, *rest = reader
    ran = ckptsync(name, root, *(arg.format(copy=tmp_path / "copy") for arg in rest))
    assert ran.code == 2
    assert f"{root}: there is no such folder" in ran.err
    assert os.listdir(tmp_path) == []


def test_a_root_that_is_a_file_is_a_wrong_call(ckptsync, root):
    with open(root, "w") as file:
        file.write("not a channel")
    ran = ckptsync("ls", root)
    assert (ran.code, ran.err.strip().endswith("is not a folder")) == (2, True)


@pytest.mark.parametrize("url", ["s3:/bucket/run", "s3//bucket/run", "S3://bucket/run", "gs:bucket", "File:///tmp/x"])
@pytest.mark.parametrize("reader", ["ls", "doctor"])
def test_a_url_with_a_slip_is_not_taken_for_a_folder(ckptsync, tmp_path, monkeypatch, reader, url):
    monkeypatch.chdir(tmp_path)
    ran = ckptsync(reader, url)
    assert ran.code == 2
    scheme = url[:2].lower() if url[0] != "F" else "file"
    assert f"write {scheme}://" in ran.err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", ["./s3:/bucket", "s3/run", "runs//s3", "/nfs/gs:1"])
def test_folders_that_only_resemble_a_url_stay_folders(path):
    assert isinstance(open_store(path), LocalStore)


def test_publish_refuses_a_url_with_a_slip_too(ckptsync, hf_folder, tmp_path, monkeypatch):
    source = hf_folder()
    monkeypatch.chdir(tmp_path)
    assert ckptsync("publish", "s3:/bucket/run", "--from", source).code == 2
    with pytest.raises(InvalidInput, match="s3://bucket/run"):
        package.Publisher("s3:/bucket/run")
    assert os.listdir(tmp_path) == ["hf0"]


def test_doctor_is_content_with_a_new_folder_and_measures_the_size_that_it_announces(ckptsync, root):
    os.mkdir(root)
    examined = ckptsync("doctor", root, "--json")
    assert examined.code == 0
    checks = {check["name"]: check for check in examined.json["checks"]}
    assert "one 32 MB file" in checks["throughput"]["detail"]
    assert "32 MB sample" in ckptsync("doctor", "--help").out
    assert checks["versions"]["status"] == "warn"


def test_doctor_says_of_a_read_only_root_what_could_not_be_written(root):
    os.mkdir(root)
    read_only = Failing(
        lambda: StoreDenied(f"read-only: {os.strerror(errno.EROFS)}"), matching("write", "create", "append")
    )
    no_delete = Failing(lambda: StoreDenied("delete: that is not the question"), matching("delete"))

    def refuse(operation: str, path: str) -> None:
        read_only(operation, path)
        no_delete(operation, path)

    checks = list(examine(Channel(HookedStore(LocalStore(root), refuse)), root))
    (writing,) = [check for check in checks if check.name == "writing"]
    assert writing.detail.startswith("read-only: ")
    assert not any("delete" in check.detail for check in checks)


def test_watch_says_what_it_waits_for_and_log_lines_are_not_wrapped(root, tmp_path):
    os.mkdir(root)
    watch = command(
        "watch", root, "--engine", "module", "--url", AWAY, "--poll", "0.05", "--stage", str(tmp_path / "stage")
    )
    assert watch.stderr.readline() == f"waiting for a version in {root}\n"
    warning = watch.stderr.readline()
    assert warning.startswith("warning: ")
    assert warning.endswith("; trying again\n"), "one line, however long"
    watch.send_signal(signal.SIGTERM)
    out, _ = watch.communicate(timeout=30)
    assert (watch.returncode, out) == (0, "")


def test_watch_may_start_before_its_trainer_and_says_that_the_folder_is_not_there_yet(root, tmp_path):
    stage = str(tmp_path / "stage")
    watch = command("watch", root, "--engine", "module", "--url", AWAY, "--stage", stage)
    assert watch.stderr.readline() == f"waiting for a version in {root}, which does not exist yet\n"
    watch.send_signal(signal.SIGTERM)
    watch.communicate(timeout=30)
    assert watch.returncode == 0
    assert not os.path.exists(root)


def test_with_json_watch_says_nothing_but_receipts_and_warnings(root, tmp_path):
    os.mkdir(root)
    watch = command("watch", root, "--engine", "module", "--url", AWAY, "--json", "--stage", str(tmp_path / "stage"))
    assert watch.stderr.readline().startswith("warning: ")
    watch.send_signal(signal.SIGTERM)
    out, rest = watch.communicate(timeout=30)
    assert (watch.returncode, out, rest) == (0, "", "")


def test_a_log_line_that_a_receipt_repeats_can_be_left_out(capsys, monkeypatch):
    handler = LogHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    log = logging.getLogger("watchers.test")
    log.warning("once", extra=IN_RECEIPT)
    hide_what_receipts_say()
    log.warning("twice", extra=IN_RECEIPT)
    log.error("[other] news")
    assert capsys.readouterr().err == "warning: once\nerror: [other] news\n"


def test_one_damage_is_warned_of_once_however_many_versions_need_the_file(capsys):
    handler = LogHandler()
    handler.addFilter(Once())
    log = logging.Logger("test")
    log.addHandler(handler)
    for version in ("e1-v1", "e1-v2", "e1-v1"):
        log.warning("the delta of %s is passed over", version)
    said = capsys.readouterr().err.splitlines()
    assert said == [f"warning: the delta of {version} is passed over" for version in ("e1-v1", "e1-v2")]


def test_a_narrow_terminal_does_not_squeeze_the_columns_of_ls(ckptsync, hf_folder, root):
    ckptsync("publish", root, "--from", hf_folder(), "--step", 7)
    listed = command("ls", root, COLUMNS="30")
    out, _ = listed.communicate(timeout=60)
    heading, row = out.splitlines()
    assert heading.split() == ["branch", "version", "kind", "step", "size", "age", "content", "state"]
    assert row.split()[-1] == "latest"


def test_ls_says_below_the_table_why_a_version_is_incomplete(ckptsync, hf_folder, root):
    ckptsync("publish", root, "--from", hf_folder())
    os.truncate(os.path.join(root, "manifests", "e0001-v00000001.json"), 100)
    *_, row, reason = ckptsync("ls", root).out.splitlines()
    assert row.split()[-1] == "incomplete"
    assert reason.startswith("e1-v1: manifests/e0001-v00000001.json: ")


def test_case_13_show_and_verify_name_the_torn_manifest_once(ckptsync, hf_folder, root):
    ckptsync("publish", root, "--from", hf_folder())
    name = "manifests/e0001-v00000001.json"
    os.truncate(os.path.join(root, name), 100)
    shown, verified = ckptsync("show", root, "1"), ckptsync("verify", root)
    assert (shown.code, verified.code) == (1, 1)
    assert f"{name}: the manifest is not complete JSON" in shown.err
    assert verified.out.count(name) == 1


def test_verify_names_a_damaged_file_once(ckptsync, hf_folder, root):
    done = ckptsync("publish", root, "--from", hf_folder(), "--json")
    assert done.code == 0
    manifest = Channel.open(root).latest()
    os.truncate(os.path.join(root, manifest.folder, "config.json"), 1)
    assert ckptsync("verify", root).out.count("config.json") == 1


def test_the_version_of_ckptsync_is_printed(ckptsync):
    ran = ckptsync("--version")
    assert (ran.code, ran.out) == (0, f"ckptsync {package.__version__}\n")


def test_what_publish_returns_fits_into_a_log_line(root):
    import torch

    with package.Publisher(root) as publisher:
        done = publisher.publish({f"layers.{i}.weight": torch.zeros(2) for i in range(100)})
    assert len(repr(done)) < 400
    assert (done.kind, done.stored_bytes) == ("full", done.manifest.stored_bytes)
    assert "layers" not in repr(done)


@pytest.mark.parametrize("verb", [("watch",), ("load", "latest")], ids=lambda verb: verb[0])
def test_an_engine_url_without_a_scheme_is_a_wrong_call(ckptsync, root, verb):
    os.mkdir(root)
    name, *rest = verb
    ran = ckptsync(name, root, *rest, "--engine", "module", "--url", "127.0.0.1:18101")
    assert ran.code == 2
    assert "http://host:port" in ran.err


def test_a_quorum_that_can_never_be_reached_is_a_wrong_call(ckptsync, root):
    ran = ckptsync("watch", root, "--engine", "module", "--url", AWAY, "--url", "http://127.0.0.1:8", "--quorum", "3")
    assert ran.code == 2
    assert "--quorum 3 can never be reached by 2 engines" in ran.err


def test_doctor_does_not_call_a_store_readable_that_cannot_be_read(root):
    os.mkdir(root)
    refuse = Failing(lambda: StoreDenied("list: no credentials"), matching("list"))
    (check,) = examine(Channel(HookedStore(LocalStore(root), refuse)), root)
    assert (check.name, check.status) == ("store", "bad")


def test_doctor_says_of_a_full_disk_that_room_is_to_be_made(root):
    os.mkdir(root)
    full = Failing(lambda: StoreFull("no space left"), matching("write"))
    *_, last = examine(Channel(HookedStore(LocalStore(root), full)), root)
    assert (last.status, last.remedy.startswith("make room")) == ("bad", True)


def test_a_version_of_a_channel_that_has_none_is_said_to_be_the_first_to_come(ckptsync, root):
    os.mkdir(root)
    assert "no complete version 99: there are none yet" in ckptsync("verify", root, 99).err


def test_python_m_runs_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ckptsync", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("ckptsync", run_name="__main__")
    assert (ended.value.code, capsys.readouterr().out) == (0, f"ckptsync {package.__version__}\n")


def test_watch_says_which_version_it_found(root, capsys):
    TestPublisher(root).publish()
    begun = {"latest": "found e1-v1", "1": "found e1-v1", "every": "found e1-v1", "2": "waiting for 2"}
    for follow, said in begun.items():
        say_begun(follow, Channel.open(root))
        assert capsys.readouterr().err.startswith(f"{said} in {root}"), follow


def test_a_folder_to_import_that_is_not_there_is_a_wrong_call(ckptsync, root, tmp_path):
    ran = ckptsync("import", root, str(tmp_path / "nope"))
    assert ran.code == 2
    assert "there is no such folder" in ran.err


def test_doctor_says_that_the_channels_record_is_gone_and_not_that_nothing_was_published(ckptsync, root, hf_folder):
    ckptsync("publish", root, "--from", hf_folder(1))
    os.unlink(os.path.join(root, "channel.json"))
    done = ckptsync("doctor", root, "--json")
    (check,) = [check for check in done.json["checks"] if check["name"] == "channel"]
    assert (done.code, check["detail"]) == (1, "channel.json is gone; nothing can be published")


def test_a_warning_says_once_that_it_is_one(root):
    TestPublisher(root).publish()
    with open(os.path.join(root, "manifests", "e0001-v00000002.json"), "w") as file:
        file.write("{")
    command = [sys.executable, "-m", "ckptsync.cli", "show", root]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stderr.startswith("warning: e1-v2 is incomplete")


def test_fsck_says_who_reads_the_bytes(ckptsync, hf_folder, root):
    ckptsync("publish", root, "--from", hf_folder())
    assert "0 findings; the bytes of full versions were not read: `ckptsync verify`" in ckptsync("fsck", root).out


def test_doctor_full_of_a_root_that_may_not_be_written_still_shows_what_it_saw(ckptsync, root, monkeypatch):
    TestPublisher(root).publish()
    denied = Failing(lambda: StoreDenied("read-only"), matching("write", "create"))
    read_only = Channel.open(HookedStore(LocalStore(root), denied))
    monkeypatch.setattr("ckptsync.cli.doctor.existing", lambda _: read_only)
    checks = {check["name"]: check for check in ckptsync("doctor", root, "--full", "--json").json["checks"]}
    assert checks["versions"]["status"] == "ok"
    assert "nothing can be written" in checks["between two clients"]["detail"]


def test_one_finding_is_one_finding(ckptsync, root, tmp_path):
    TestPublisher(root).publish()
    file, *_ = tmp_path.glob("channel/data/*/*.safetensors")
    file.unlink()
    assert "1 finding; " in ckptsync("fsck", root).out


def test_show_says_whether_a_version_has_trainer_state(ckptsync, root):
    trainer = Trainer(root)
    trainer.publish(1)
    trainer.publish(2, trainer_state=(FileEntry(name="rank-0", size=1500, digest="0" * 32),))
    shown = [line.split() for number in (1, 2) for line in ckptsync("show", root, number).out.splitlines()]
    assert [line[2:] for line in shown if line[:2] == ["trainer", "state"]] == [["none"], ["1", "file,", "1.5", "KB"]]


def test_a_page_is_written_or_served_and_not_both(ckptsync, root, tmp_path, monkeypatch):
    TestPublisher(root).publish()
    page = tmp_path / "page.html"
    ran = ckptsync("dashboard", root, "-o", page, "--serve", ":0")
    assert (ran.code, "use one of the two" in ran.err, page.exists()) == (2, True, False)
    monkeypatch.setenv("CKPTSYNC_SERVE", ":0")  # of the watcher beside it, say
    assert (ckptsync("dashboard", root, "-o", page).code, page.exists()) == (0, True)


@pytest.mark.parametrize("reader", ["ls", "verify", "status"])
def test_a_checkpoint_or_an_export_that_is_taken_for_a_channel_has_its_remedy_named(
    ckptsync, hf_folder, root, tmp_path, reader
):
    source, copy = hf_folder(), str(tmp_path / "copy")
    ckptsync("publish", root, "--from", source)
    ckptsync("export", root, "1", copy)
    for folder, remedy in ((source, f"ckptsync publish ROOT --from {source}"), (copy, f"ckptsync import ROOT {copy}")):
        ran = ckptsync(reader, folder)
        assert (ran.code, remedy in ran.err) == (2, True)


def test_a_folder_of_other_things_is_said_to_be_no_channel_and_the_nearest_are_named(root, tmp_path, caplog):
    TestPublisher(root).publish()
    for folder in (tmp_path, tmp_path / "channel" / "manifests"):
        caplog.clear()
        existing(str(folder))
        assert caplog.messages == [
            f"{folder} holds no channel, but other things: is that the root?; there is one in {root}"
        ]
    caplog.clear()
    (tmp_path / "new").mkdir()
    existing(str(tmp_path / "new"))
    assert caplog.messages == [], "an empty folder waits for its trainer"


@pytest.mark.parametrize("words", [["ls"], ["nope"], ["ls", "x", "--depth", "3"], ["verify", "x", "--every"]])
def test_a_wrong_call_is_an_object_for_scripts_too(ckptsync, words):
    ran = ckptsync(*words, "--json")
    assert (ran.code, ran.json["error"]["kind"]) == (2, "invalid-input")
    assert ran.json["error"]["message"] in ran.err
    assert ckptsync(*words).out == ""


def test_output_that_cannot_be_written_is_one_line_and_none_for_who_stopped_reading(root):
    """Regression: tracebacks, and exit code 120 at the interpreter's end."""
    os.mkdir(root)
    reader, gone = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full:
        ends = [command("ls", root, stdout=full), command("ls", root, "--json", stdout=full),
                command("ls", root, "--json", stdout=gone)]  # fmt: skip
    os.close(gone)
    line = "store-full: writing the output: no space left (ENOSPC)\n"
    assert [ended.communicate()[1] for ended in ends] == [line, line, ""]
    assert [ended.returncode for ended in ends] == [1, 1, 1]


def test_a_file_that_the_system_does_not_give_is_one_line(ckptsync, monkeypatch, root):
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/secret")

    os.mkdir(root)
    monkeypatch.setattr("ckptsync.cli.ls._epochs", refuse)
    ran = ckptsync("ls", root, "--json")
    assert (ran.code, ran.json["error"]) == (
        1,
        {"kind": "store-denied", "message": "/secret: permission denied (EACCES)"},
    )
