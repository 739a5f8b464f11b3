"""Delta versions from the command line."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckptsync import Channel, Publisher
from tests.cli.test_cli import all_tensors, same_tensors


@pytest.fixture
def three(ckptsync, hf_folder, root):
    """A root with a full version and two deltas, published from folders; the last folder."""
    folder = hf_folder()
    path = os.path.join(folder, "model.safetensors")
    for number in range(3):
        if number:
            state = load_file(path)
            name = max(state, key=lambda each: state[each].numel())
            state[name].view(-1)[number::101] *= 1.5
            save_file(state, path, {"format": "pt"})
        assert ckptsync("publish", root, "--from", folder, "--kind", "delta").code == 0
    return folder


def test_publishing_a_folder_as_a_delta_stores_what_changed(ckptsync, root, three):
    rows = ckptsync("ls", root, "--json").json["versions"]
    assert [row["kind"] for row in rows] == ["full", "delta", "delta"]
    assert rows[1]["stored_bytes"] < rows[1]["bytes"] == rows[0]["bytes"]
    assert "e2-v2" in ckptsync("show", root).out
    assert ckptsync("verify", root).code == 0


def test_an_export_can_be_brought_forward_in_place(ckptsync, root, three, tmp_path):
    copy = str(tmp_path / "copy")
    ckptsync("export", root, "1", copy)
    assert ckptsync("export", root, "latest", copy, "--in-place").code == 0
    assert same_tensors(all_tensors(copy), load_file(os.path.join(three, "model.safetensors")))


def test_diff_counts_what_changed_and_by_how_much(ckptsync, root, three):
    found = ckptsync("diff", root, "1", "2", "--json").json
    (row,) = [row for row in found["rows"] if row["changed"]]
    assert row["fraction"] == pytest.approx(1 / 101, rel=0.3)
    assert row["max_ulp"] > 1
    assert 0 < row["relative"] < 1
    assert "elements changed" in ckptsync("diff", root, "1", "latest", "--layers").out
    assert ckptsync("diff", root, "1", "1", "--json").json["rows"][0]["changed"] == 0


def test_diff_draws_layers_over_versions(ckptsync, root, three, tmp_path):
    picture = tmp_path / "map.png"
    assert ckptsync("diff", root, "1", "3", "--png", picture).code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_single_nan_is_marked_in_the_picture_since_it_changes_no_colour(ckptsync, root, tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    marked, scatter = [], Axes.scatter
    monkeypatch.setattr(Axes, "scatter", lambda *args, **more: marked.append(args[1:]) or scatter(*args, **more))
    state = {f"layers.{layer}.w": torch.ones(100) for layer in (0, 1, 2)}
    with Publisher(root) as publisher:
        for value in (1.0, math.nan, 2.0, 3.0):
            state["layers.1.w"][7] = value
            publisher.publish(state)
    assert ckptsync("diff", root, "1", "4", "--png", tmp_path / "map.png").code == 0
    assert marked == [((0, 1), (1, 1))], "in e1-v2, and in e1-v3, which took it back; in the second layer"


def test_a_nan_is_counted_and_leaves_the_norms_of_the_other_elements(ckptsync, root):
    state = {"layers.1.a": torch.ones(100), "layers.1.b": torch.ones(100)}
    with Publisher(root) as publisher:
        publisher.publish(state)
        state["layers.1.a"][:3] = torch.tensor([math.nan, math.inf, 3.0])
        publisher.publish(state)
    found, _ = ckptsync("diff", root, "1", "2", "--json").json["rows"]
    assert (found["nonfinite"], found["norm"], found["base_norm"]) == (2, 2.0, pytest.approx(98**0.5))
    (layer,) = ckptsync("diff", root, "2", "1", "--layers", "--json").json["rows"]
    assert (layer["nonfinite"], layer["norm"]) == (2, 2.0), "on either side"
    header, row, *_ = ckptsync("diff", root, "1", "2").out.splitlines()
    assert (header.split()[-2:], row.split()[-1]) == (["not", "finite"], "2")


def test_without_a_nan_there_is_no_column_for_it(ckptsync, root, three):
    assert ckptsync("diff", root, "1", "2").out.splitlines()[0].split()[-2:] == ["max", "ULP"]


def test_diff_says_long_names_whole_where_stdout_is_no_terminal(ckptsync, root):
    name = f"model.{'deeply_nested.' * 8}weight"
    with Publisher(root) as publisher:
        for value in (1.0, 2.0):
            publisher.publish({name: torch.full((4,), value)})
    assert name in ckptsync("diff", root, "1", "2").out


def test_ulps_are_counted_over_zero_and_for_every_kind_of_number():
    from ckptsync.compare import _distance, _integers

    def between(old: torch.Tensor, new: torch.Tensor) -> int:
        bits = [_integers(memoryview(each.view(torch.uint8).numpy()), each.element_size()) for each in (old, new)]
        return _distance(*bits, old.dtype)

    smallest = torch.tensor([1], dtype=torch.int16).view(torch.bfloat16)
    assert between(smallest, -smallest) == 2
    assert between(torch.tensor([1.0]), torch.tensor([1.0]).nextafter(torch.tensor([2.0]))) == 1
    assert between(torch.tensor([-3], dtype=torch.int8), torch.tensor([4], dtype=torch.int8)) == 7
    assert between(torch.tensor([3], dtype=torch.uint8), torch.tensor([200], dtype=torch.uint8)) == 197


def test_the_xor_profile_is_read_by_a_reader_of_that_layout(ckptsync, root, three, tmp_path):
    """Index, then each entry's frame over the old bytes, then the digest of what comes out."""
    out, before = str(tmp_path / "out"), str(tmp_path / "before")
    ckptsync("export", root, "1", before)
    assert ckptsync("export", root, "2", out, "--since", "1", "--profile", "xor").code == 0
    folder = os.path.join(out, "weight_v000002")
    with open(os.path.join(folder, "model.safetensors.index.json")) as file:
        index = json.load(file)
    assert index["metadata"] == {
        "version": "000002", "base_version": "000001", "delta_encoding": "xor", "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }  # fmt: skip
    state = all_tensors(before)
    for name, shard in index["weight_map"].items():
        with safe_open(os.path.join(folder, shard), "np") as file:
            frame, digest = file.get_tensor(name).tobytes(), file.metadata()[name]
        image = state[name].contiguous().view(-1).view(torch.uint8).numpy()
        image ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), dtype=np.uint8)
        assert xxhash.xxh3_128_hexdigest(image) == digest
    ckptsync("export", root, "2", str(tmp_path / "after"))
    assert same_tensors(state, all_tensors(str(tmp_path / "after")))


def test_the_open_profile_needs_nothing_but_safetensors(ckptsync, root, three, tmp_path):
    out, before = str(tmp_path / "out"), str(tmp_path / "before")
    ckptsync("export", root, "1", before)
    assert ckptsync("export", root, "latest", out, "--since", "1", "--profile", "open").code == 0
    state, delta = all_tensors(before), load_file(os.path.join(out, "delta.safetensors"))
    for name in {key.rpartition(".")[0] for key in delta}:
        state[name].view(-1)[delta[f"{name}.indices"].long()] = delta[f"{name}.values"]
    assert same_tensors(state, load_file(os.path.join(three, "model.safetensors")))
    assert ckptsync("export", root, "latest", str(tmp_path / "x"), "--since", "1", "--profile", "zip").code == 2


def test_a_compacted_version_does_not_claim_changes_that_it_has_not(ckptsync, root, three):
    ckptsync("compact", root)
    assert "changes since" not in ckptsync("show", root).out
    assert "changes since" in ckptsync("show", root, "3").out


def test_compacting_an_old_version_takes_readers_back_only_if_that_is_said(ckptsync, root, three):
    refused = ckptsync("compact", root, "2")
    assert refused.code == 2
    assert "1 newer version (e3-v3) would be left behind" in refused.err
    assert f"ckptsync export {root} e2-v2 DIR" in refused.err
    assert list(Channel.open(root).claims()) == [1, 2, 3], "no trainer is fenced"
    done = ckptsync("compact", root, "2", "--as-newest")
    assert "e4-v3 is e2-v2 as a full version" in done.out
    assert "latest go from e3-v3 to the weights of e2-v2; 1 newer version (e3-v3) is left behind" in done.out
    assert ckptsync("compact", root, "e3-v3").code == 2, "from another branch too"
    back = ckptsync("compact", root, "e3-v3", "--as-newest", "--json").json
    assert {**back, "bytes": 0} == {
        "version": "e5-v4", "from": "e3-v3", "bytes": 0, "newest_before": "e4-v3", "left_behind": ["e4-v3"],
    }  # fmt: skip


def test_compacting_the_newest_version_says_that_readers_go_to_it_and_nothing_is_left_behind(ckptsync, root, three):
    assert "latest go to it, with the same weights" in ckptsync("compact", root).out
    again = ckptsync("compact", root, "--json").json
    assert (again["version"], again["left_behind"]) == ("e4-v4", []), "full already"
    assert ckptsync("compact", root, "1").code == 0, "it is full: nothing is made"


def test_a_repair_says_what_it_leaves_behind(ckptsync, root, three, tmp_path):
    (last,) = tmp_path.glob("channel/data/e0003-*/delta/*/*")
    last.unlink()
    sick = ckptsync("fsck", root)
    assert (sick.code, f"`ckptsync fsck {root} --repair`" in sick.out) == (1, True)
    done = ckptsync("fsck", root, "--repair")
    assert (done.code, done.out.startswith("repaired: e4-v3 now holds the weights of e2-v2\n")) == (0, True)
    assert "go from e3-v3 to the weights of e4-v3; 1 newer version (e3-v3) is left behind" in done.out
    assert not [word for word in (root, "--repair`") if word in done.out], "no long paths, and no advice to do it"
    later = ckptsync("fsck", root)
    assert (later.code, "left behind: nobody who follows latest goes there" in later.out) == (0, True)


@pytest.mark.parametrize("lost", ["e0001-*/model-*.safetensors", "e0003-*/delta/*/*.safetensors"])
def test_what_a_delta_version_is_made_from_is_a_broken_chain_for_export_and_no_good_for_doctor(
    ckptsync, root, three, tmp_path, lost
):
    assert "files" not in {check["name"] for check in ckptsync("doctor", root, "--json").json["checks"]}
    (path,) = tmp_path.glob(f"channel/data/{lost}")
    path.unlink()
    ran = ckptsync("export", root, "latest", tmp_path / "out", "--json")
    assert (ran.code, ran.json["error"]["kind"]) == (1, "broken-chain")
    done = ckptsync("doctor", root, "--json")
    (check,) = [check for check in done.json["checks"] if check["name"] == "files"]
    assert (done.code, check["status"]) == (1, "bad")
    assert f"{path.name} is not there" in check["detail"]
    assert f"`ckptsync fsck {root} --repair`" in check["remedy"]


def test_a_repair_that_nothing_is_left_for_says_where_help_is(ckptsync, root, three, tmp_path):
    next(tmp_path.rglob("channel/data/e0001-*/model*.safetensors")).unlink()
    ran = ckptsync("fsck", root, "--repair", "--json")
    assert (ran.code, ran.json["error"]["kind"]) == (1, "unrepairable")
    assert "ckptsync import" in ran.json["error"]["message"]
    gone = ckptsync("export", root, "1", tmp_path / "out", "--json")
    assert gone.json["error"]["kind"] == "bad-shard", "it is there, and not whole"


def test_a_picture_that_cannot_be_written_is_a_wrong_call(ckptsync, root, three, tmp_path):
    ran = ckptsync("diff", root, "1", "3", "--png", tmp_path / "nope" / "map.png", "--json")
    assert (ran.code, ran.json["error"]["kind"]) == (2, "invalid-input")
    assert "map.png cannot be written: No such file or directory" in ran.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--since", "1", "--in-place"], "give one of the two"),
        (["--since", "2"], "--since e2-v2 is the version itself: nothing changed since"),
        (["--since", "3"], "go from one number to the next"),
        (["--profile", "open"], "say with --since what they are against"),
    ],
)
def test_options_of_export_that_cannot_be_meant_together_are_refused_and_nothing_is_written(
    options, said, ckptsync, root, three, tmp_path
):
    copy = tmp_path / "copy"
    ran = ckptsync("export", root, "2", copy, *options)
    assert ran.code == 2
    assert said in " ".join(ran.err.split())
    assert not copy.exists()
