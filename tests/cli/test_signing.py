from __future__ import annotations

import os

import pytest
import torch

from ckptsync import PublisherConfig, resume
from ckptsync.errors import Untrusted
from tests.cli.conftest import Ran


@pytest.fixture
def keys(ckptsync, tmp_path):
    """A private key's path, as `keygen` makes it."""
    path = str(tmp_path / "run1.pem")
    made: Ran = ckptsync("keygen", path, "--json")
    assert (made.code, made.json["public"]) == (0, path + ".pub")
    assert ckptsync("keygen", path).code == 2
    return path


def test_a_signed_channel_from_the_command_line(ckptsync, root, hf_folder, keys, tmp_path, monkeypatch):
    public = ["--require-signature", keys + ".pub"]
    assert ckptsync("publish", root, "--from", hf_folder(1), "--sign-key", keys).code == 0
    assert "signed by" in ckptsync("show", root).out
    assert ckptsync("verify", root, *public).code == 0
    unsigned = ckptsync("publish", root, "--from", hf_folder(2))
    assert (unsigned.code, "--sign-key" in unsigned.err) == (2, True)
    monkeypatch.setenv("CKPTSYNC_SIGN_KEY", keys)
    assert ckptsync("publish", root, "--from", hf_folder(3), "--kind", "delta").code == 0
    assert ckptsync("compact", root).code == 0
    assert ckptsync("rollback", root, "1").code == 0
    monkeypatch.delenv("CKPTSYNC_SIGN_KEY")
    assert ckptsync("rollback", root, "2").code == 2
    monkeypatch.setenv("CKPTSYNC_REQUIRE_SIGNATURE", keys + ".pub")
    assert ckptsync("verify", root).code == 0
    assert ckptsync("mirror", root, str(tmp_path / "mirror")).code == 0
    assert ckptsync("export", str(tmp_path / "mirror"), "latest", str(tmp_path / "out")).code == 0


def test_without_a_trusted_signature_nothing_is_exported_or_mirrored_and_verify_says_why(
    ckptsync, root, hf_folder, keys, tmp_path
):
    ckptsync("publish", root, "--from", hf_folder(1))
    public = ["--require-signature", keys + ".pub"]
    folder = str(tmp_path / "out")
    assert "none of them is complete" in ckptsync("export", root, "latest", folder, *public).err
    assert "untrusted" in ckptsync("export", root, "1", folder, *public).err
    assert not os.path.exists(folder)
    assert ckptsync("verify", root, *public).out.startswith("e1-v1  untrusted\n")
    verified = ckptsync("verify", root, "--json", *public)
    assert verified.json["versions"][0]["problems"][0]["kind"] == "untrusted"
    done = ckptsync("mirror", root, str(tmp_path / "mirror"), "--json", *public)
    assert (done.code, list(done.json["skipped"])) == (1, ["e1-v1"])
    assert ckptsync("verify", root, "--require-signature", keys).code == 2


def test_a_signing_key_in_the_environment_signs_and_is_not_shown(ckptsync, root, hf_folder, keys, monkeypatch):
    with open(keys) as file:
        pem = file.read()
    monkeypatch.setenv("CKPTSYNC_SIGN_KEY", pem)
    monkeypatch.setenv("CKPTSYNC_PUBLISHER_SIGN_KEY", pem)
    assert PublisherConfig.load().digest == "blake3"
    assert ckptsync("publish", root, "--from", hf_folder(1)).code == 0
    assert ckptsync("show", root, "--json").json["signed_by"]
    shown = [ckptsync("config", *options) for options in ([], ["publish"], ["--json"])]
    assert [ran.code for ran in shown] == [0, 0, 0]
    assert all("(secret)" in ran.out and "PRIVATE" not in ran.out + ran.err for ran in shown)


@pytest.mark.parametrize("command", ["verify", "export", "gc", "watch", "load"])
def test_an_empty_key_is_no_leave_to_read_without_one(command, ckptsync, root, hf_folder, tmp_path, monkeypatch):
    ckptsync("publish", root, "--from", hf_folder(1))
    rest = {
        "verify": [],
        "export": ["latest", str(tmp_path / "out")],
        "gc": ["--keep-last", "2"],
        "watch": ["--engine", "module", "--url", "http://127.0.0.1:9"],
        "load": ["1", "--engine", "module", "--url", "http://127.0.0.1:9"],
    }[command]
    ran = ckptsync(command, root, *rest, "--require-signature", "")
    assert (ran.code, "the key is empty" in ran.err) == (2, True)
    monkeypatch.setenv("CKPTSYNC_REQUIRE_SIGNATURE", "")
    ran = ckptsync(command, root, *rest)
    assert (ran.code, "CKPTSYNC_REQUIRE_SIGNATURE is set and empty" in ran.err) == (2, True)


def test_a_key_that_lost_its_pem_lines_is_never_printed(ckptsync, hf_folder, tmp_path):
    secret = "MC4CAQAwBQYDK2VwBCIEISECRETSECRETSECRETSECRETSECRET"
    ran = ckptsync("publish", str(tmp_path / "root"), "--from", hf_folder(1), "--sign-key", secret)
    assert (ran.code, "without its PEM lines" in ran.err, secret in ran.err) == (2, True, False)


def test_whoever_looks_with_trusted_keys_sees_what_they_did_not_sign_as_incomplete(
    ckptsync, root, hf_folder, keys, tmp_path, monkeypatch
):
    ckptsync("publish", root, "--from", hf_folder(1))
    assert ckptsync("ls", root, "--json").json["versions"][0]["complete"]
    monkeypatch.setenv("CKPTSYNC_REQUIRE_SIGNATURE", keys + ".pub")
    listed = ckptsync("ls", root, "--json").json["versions"][0]
    assert (listed["complete"], "not signed" in listed["problem"]) == (False, True)
    seen = ckptsync("status", root, "--json").json["versions"][0]
    assert "not signed" in seen["problem"]
    for command in (["show", root, "1"], ["diff", root, "1", "1"], ["pin", root, "1", "--why", "x"]):
        ran = ckptsync(*command)
        assert (ran.code, "not signed" in ran.err) == (1, True), command
    page = str(tmp_path / "page.html")
    assert ckptsync("dashboard", root, "-o", page).code == 0
    with open(page) as file:
        assert "is not signed" in file.read()


@pytest.mark.parametrize(
    ("option", "remedy"), [("--sign-key", "ckptsync keygen"), ("--require-signature", ".pub file")]
)
@pytest.mark.parametrize("content", [None, "hello", "-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----\n"])
def test_a_key_that_is_absent_or_malformed_is_refused_with_its_name_and_a_remedy(
    ckptsync, root, hf_folder, tmp_path, option, remedy, content
):
    path = tmp_path / "key.pem"
    if content is not None:
        path.write_text(content)
    assert ckptsync("publish", root, "--from", hf_folder()).code == 0
    command = ["compact", root] if option == "--sign-key" else ["verify", root]
    ran = ckptsync(*command, option, path)
    assert ran.code == 2
    assert remedy in ran.err
    assert str(path) in ran.err or "private key was given" in ran.err


def test_a_key_that_signed_nothing_here_is_untrusted_to_every_command_and_to_resume(
    ckptsync, root, hf_folder, keys, tmp_path, monkeypatch
):
    ckptsync("publish", root, "--from", hf_folder(1), "--sign-key", keys)
    other = str(tmp_path / "other.pem")
    ckptsync("keygen", other)
    monkeypatch.setenv("CKPTSYNC_REQUIRE_SIGNATURE", other + ".pub")
    engine = ["--engine", "module", "--url", "http://127.0.0.1:9", "--stage", tmp_path / "stage"]
    for name, *rest in (
        ["show"], ["diff", "latest", "latest"], ["export", "latest", tmp_path / "out"], ["verify", "latest"],
        ["pin", "latest", "--why", "x"], ["rollback", "latest"], ["compact"],
        ["load", "latest", *engine], ["selfcheck", "latest", *engine],
    ):  # fmt: skip
        ran = ckptsync(name, root, *rest, "--json")
        assert (ran.code, ran.json["error"]["kind"]) == (1, "untrusted"), name
        assert "is it the right one?" in ran.err
    with pytest.raises(Untrusted, match="not trusted here"):
        resume(root, {"w": torch.zeros(1)}, require_signature=other + ".pub")
