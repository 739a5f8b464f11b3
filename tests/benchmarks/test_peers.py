"""The peers' table: what its figures mean, and the delta layout that stands for slime's."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.peers import report, slime
from benchmarks.peers.__main__ import available, fits_of, main
from benchmarks.peers.clock import Taken, row, turns

ROOT = Path(__file__).parents[2]


def taken(*walls: float) -> list[Taken]:
    return [Taken(wall, wall, 0, {"pause": wall}) for wall in walls]


def test_a_ratio_is_the_median_of_the_rounds_own_ratios_and_above_one_where_ours_is_faster() -> None:
    found = row("publish", "disk", "other", "no digest", 1.0, taken(2.0, 30.0, 8.0), taken(1.0, 10.0, 2.0))
    assert (found.wall_ratio, found.cpu_ratio, found.part_ratios) == (3.0, 3.0, {"pause": 3.0})
    assert found.wall == 8.0


def test_every_round_has_each_way_once_and_begins_with_another() -> None:
    assert list(turns(["a", "b"], 3)) == ["a", "b", "b", "a", "a", "b"]


def test_the_peak_of_a_call_is_what_it_held_and_not_what_was_there_before() -> None:
    # In a process of its own: what else this one holds comes and goes.
    code = """
from benchmarks.peers.clock import take
before = b"x" * (64 << 20)
print(take(lambda: {"bytes": len(b"x" * (32 << 20))}).peak)
"""
    peak = int(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT))
    assert 28 << 20 < peak < 40 << 20


def test_a_peer_that_is_ahead_in_time_or_cpu_or_pause_is_named_with_why() -> None:
    rows = [
        found("ckptsync", 1.0),
        found("torch.save", 0.5, cpu=0.9),
        found("save_file, load_file", 1.5, pause=0.4),
        found("save_pretrained", 0.7),
        found("DCP save", 1.2),
    ]
    pickle, live = report.ahead(rows)
    assert pickle.startswith("torch.save (time 0.50, CPU 0.90): it digests nothing")
    assert live.startswith("save_file, load_file (pause 0.40); save_pretrained (time 0.70): one call in one process")
    assert not report.ahead(rows[4:])


def found(way: str, wall: float, cpu: float | None = 1.0, **parts: float) -> dict[str, object]:
    return {"way": way, "wall_ratio": wall, "cpu_ratio": cpu, "part_ratios": parts}


def part(path: Path, *, size: float = 8, task: str = "publish", place: str = "disk") -> str:
    """What `--json` prints of one task."""
    run = {"command": f"peers --only {path.name}", "before": "load 1", "after": "load 2"}
    rows = [row(task, place, way, "", 1.0, taken(1.0), taken(1.0)).to_json() for way in ("torch.save", "ckptsync")]
    found = {"size": size, "rounds": 2, "runs": [run], "absent": {path.name: "why"}, "rows": rows}
    path.write_text(json.dumps(found))
    return str(path)


def test_parts_of_a_table_that_ran_by_themselves_are_one_page_with_the_command_of_each(tmp_path: Path) -> None:
    staged = part(tmp_path / "stage", task="stage + verify")
    joined = report.joined([staged, part(tmp_path / "publish")])
    text = report.page(joined, "plot.png")
    publish, stage = text.index("## Publish, disk, 1 GB"), text.index("## Stage + verify, disk, 1 GB")
    assert publish < text.index("Made by `peers --only publish` (load 1 before, load 2 after).") < stage
    assert "- stage: why" in text
    assert not report.whole(joined)


def test_a_table_is_whole_with_every_task_and_each_place_of_those_of_one_process(tmp_path: Path) -> None:
    pairs = [(task, place) for task in report.EVERYWHERE for place in report.PLACES]
    pairs += [(task, "disk") for task in report.TASKS[len(report.EVERYWHERE) :]]
    paths = [part(tmp_path / str(n), task=task, place=place) for n, (task, place) in enumerate(pairs)]
    assert report.whole(report.joined(paths))
    assert not report.whole(report.joined(paths[1:]))


def test_parts_of_different_tables_are_refused_and_so_is_what_no_run_printed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("{}")
    for paths, said in (
        ([part(tmp_path / "a"), part(tmp_path / "b", size=2)], "their sizes or rounds differ"),
        ([str(other)], "other is not what `--json` prints: it has no absent"),
        ([str(tmp_path / "absent")], "absent is not what `--json` prints: .*No such file"),
        ([__file__], "test_peers.py is not what `--json` prints"),
    ):
        with pytest.raises(ValueError, match=said):
            report.joined(paths)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--size", "0"], "--size is in GB and above 0"),
        (["--size", "nan"], "--size is in GB"),
        (["--rounds", "0"], "--rounds is 1 at least"),
        (["--root", "/nowhere"], "--root /nowhere is not a folder"),
        (["--root", "/dev/shm"], "in memory"),
        (["--page", "/nowhere"], "/nowhere is not what `--json` prints"),
    ],
)
def test_what_nothing_can_be_measured_with_is_a_usage_error(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_what_ran_on_a_gpu_is_beside_the_others_and_not_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = tmp_path / "gpu.json"
    rows = [{"task": "into vLLM", "place": "H200", "way": "checkpoint-engine, pinned", "wall_ratio": 3.0}]
    gpu.write_text(json.dumps({"runs": [{"command": "gpu_peers"}], "absent": {"runai": "no boto3"}, "rows": rows}))
    monkeypatch.setattr(report, "GPU", str(gpu))
    found = report.with_gpu({"runs": [], "absent": {"DCP": "left out"}, "rows": []})
    assert found["rows"] == [{"made": "`gpu_peers`", **rows[0]}]
    assert found["absent"] == {"DCP": "left out", "runai": "no boto3"}
    assert report._without_gpu({"checkpoint-engine": "no device", "DCP": "left out"}) == {"DCP": "left out"}


def test_a_slime_delta_brings_a_local_file_to_the_new_state_in_place(tmp_path: Path) -> None:
    old, new = states()
    local, folder = str(tmp_path / "local.safetensors"), tmp_path / "weight_v000002"
    folder.mkdir()
    save_file(old, local)
    held = {name: array.copy() for name, array in old.items()}
    slime.publish(held, new, str(folder))
    assert all(np.array_equal(held[name], new[name]) for name in new)
    slime.apply(local, str(folder))
    found = load_file(local)
    assert all(np.array_equal(found[name], new[name]) for name in new)


def test_a_slime_delta_on_another_base_is_noticed_after_the_file_was_changed(tmp_path: Path) -> None:
    old, new = states()
    local, folder = str(tmp_path / "local.safetensors"), tmp_path / "weight_v000002"
    folder.mkdir()
    save_file(new, local)
    slime.publish({name: array.copy() for name, array in old.items()}, new, str(folder))
    with pytest.raises(ValueError, match="has been changed in place"):
        slime.apply(local, str(folder))
    assert any(not np.array_equal(array, new[name]) for name, array in load_file(local).items())


def states() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    old = {name: rng.integers(0, 256, 10_000, dtype=np.uint8) for name in "ab"}
    new = {name: array.copy() for name, array in old.items()}
    for array in new.values():
        array[::100] ^= 1
    return old, new


def test_the_page_and_the_readme_have_each_peer_beside_ours_and_say_who_is_ahead() -> None:
    ways = {"ckptsync": 1.0, "bare write + fsync": 0.8, "torch.save + fsync": 2.0, "torch.save": 0.5}
    rows = [row("publish", "disk", way, "", 1.0, taken(wall), taken(1.0)).to_json() for way, wall in ways.items()]
    run = {"command": "peers --size 8 --without 'a way'", "before": "idle", "after": "idle"}
    found = {"size": 8, "rounds": 1, "runs": [run], "rows": rows, "absent": {"other": "no GPU"}}
    page, lines = report.page(found, "images/peers.png"), report.summary(found)
    assert "| torch.save + fsync | 2.000 | 2.00 |" in page
    assert "- Ahead of ours: bare write + fsync (time 0.80, CPU 0.80, pause 0.80): the limit" in page
    assert "- other: no GPU" in page
    assert "`peers --size 8 --without 'a way'` (idle before, idle after)" in page
    assert (
        "bare write + fsync 0.80 · torch.save + fsync 2.00 · torch.save 0.50 | torch.save (time 0.50, pause" in lines[2]
    )


def test_what_memory_does_not_allow_is_left_out_and_named() -> None:
    left: dict[str, str] = {}
    fits = partial(fits_of, 8.0, 22.0, left)
    tasks = [("publish", "disk"), ("publish", "/dev/shm"), ("publish", "S3"), ("live", "disk")]
    assert [task for task in tasks if fits(*task)] == [("publish", "disk"), ("publish", "S3")]
    assert left["live, disk"] == "it takes 32 GB of memory at once, and 22 GB were available"
    assert available() > 0
