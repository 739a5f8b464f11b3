"""Delta versions from publisher to reader: published as changes, read as the full versions that they stand for."""

from __future__ import annotations

import errno
import itertools
import os
import signal

import pytest
import torch

from ckptsync import Channel, DeltaPolicy, Publisher, resume
from ckptsync.copies import export_version, import_version
from ckptsync.delta.plan import cheapest
from ckptsync.errors import BrokenChain, InvalidInput, StoreFull
from ckptsync.layout import manifest_path
from ckptsync.manifest import Manifest, delta_path
from ckptsync.rollback import roll_back
from ckptsync.shards.tensors import load_tensors
from ckptsync.verify import verify_version
from ckptsync.version import VersionId
from watchers.stage import Stage


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.weight": torch.randn(64, 48, generator=generator).to(torch.bfloat16),
        "layers.1.weight": torch.randn(64, 48, generator=generator).to(torch.bfloat16),
        "layers.1.scale": torch.rand(7, generator=generator),
        "norm.weight": torch.ones(48, dtype=torch.bfloat16),
    }


def step(state: dict[str, torch.Tensor], seed: int, share: float = 0.02) -> None:
    """Change a few elements of the matrices by a few ULPs, in place."""
    generator = torch.Generator().manual_seed(seed)
    for name in ("layers.0.weight", "layers.1.weight"):
        bits = state[name].view(torch.int16)
        hit = torch.rand(bits.shape, generator=generator) < share
        bits += hit * torch.randint(-3, 4, bits.shape, generator=generator, dtype=torch.int16)


class Trainer:
    """Publishes a state under a policy, and remembers what every version held."""

    def __init__(self, root: str, **policy) -> None:
        self.root, self.state, self.held = root, model(), {}
        # What each delta costs besides its changes is a good part of so small a version.
        self.publisher = Publisher(root, delta=DeltaPolicy(**{"max_chain": 100, **policy}))

    def publish(self, steps: int = 1, share: float = 0.02, **options) -> Manifest:
        for _ in range(steps):
            step(self.state, seed=len(self.held) + 1, share=share)
            done = self.publisher.publish(self.state, **options)
            self.held[done.version] = {name: tensor.clone() for name, tensor in self.state.items()}
        return done.manifest

    def restart(self, **policy) -> None:
        self.publisher = Publisher(self.root, delta=DeltaPolicy(**policy))


def staged(stage: Stage, root: str, version: VersionId) -> dict[str, torch.Tensor]:
    channel = Channel.open(root)
    found = stage.stage(channel, channel.manifest(version))
    track = found.manifest.tracks["model"]
    tensors = {name: tensor.clone() for name, tensor in load_tensors(found.folder, track, verify=True)}
    stage.release(found)
    return tensors


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name].view(torch.uint8), wanted[name].view(torch.uint8)) for name in wanted
    )


def damage(root: str, path: str) -> None:
    with open(os.path.join(root, path), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def delta_file(manifest: Manifest, base: int = 0) -> str:
    chosen = manifest.deltas[base]
    return f"{manifest.folder}/{delta_path(chosen.id, 'model', chosen.files['model'][0].name)}"


def test_the_first_version_is_full_and_those_after_it_hold_only_what_changed(trainer):
    first, second = trainer.publish(), trainer.publish()
    assert (first.kind, second.kind) == ("full", "delta")
    assert second.parent.id == first.id
    assert second.stored_bytes < 0.5 * first.stored_bytes
    folder = os.path.join(trainer.root, second.folder)
    assert not [name for name in os.listdir(folder) if name.startswith("model")]


def test_a_chain_of_a_hundred_deltas_has_the_content_digest_of_the_full_publish(tmp_path, trainer, stage):
    trainer.publisher.close()
    trainer = Trainer(str(tmp_path / "chain"), anchor_every=1000, skip=())
    last = trainer.publish(101)
    whole = Publisher(str(tmp_path / "full")).publish(trainer.state).manifest
    chain = cheapest(Channel.open(trainer.root), last)
    assert len(chain.links) == 100
    assert last.content_digest == whole.content_digest
    assert last.full_form().tracks == whole.tracks, "the same files, byte for byte"
    assert same(staged(stage, trainer.root, last.id), trainer.state)


def test_any_version_can_be_staged_forwards_and_backwards(trainer, stage):
    trainer.publish(12)
    for version in [*trainer.held, *reversed(trainer.held)]:
        assert same(staged(stage, trainer.root, version), trainer.held[version])


def test_a_disk_that_runs_full_while_changes_are_copied_is_store_full(trainer, stage, monkeypatch):
    trainer.publish(2)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ckptsync.delta.links.mmap.mmap", full)
    with pytest.raises(StoreFull, match=r"copy .*delta.* to this host: no space left"):
        staged(stage, trainer.root, VersionId(1, 2))


def test_what_the_stage_holds_is_not_fetched_again(trainer, stage):
    trainer.publish(5)
    channel = Channel.open(trainer.root)
    versions = [channel.manifest(version) for version in trainer.held]
    for before, after in itertools.pairwise(versions):
        here = stage.stage(channel, before)
        os.rename(f"{trainer.root}/{versions[0].folder}", f"{trainer.root}/away")
        stage.release(stage.stage(channel, after))
        os.rename(f"{trainer.root}/away", f"{trainer.root}/{versions[0].folder}")
        stage.release(here)


def test_a_restart_goes_on_with_deltas_from_the_committed_chain(trainer, stage):
    trainer.publish(3)
    trainer.restart()
    last = trainer.publish()
    assert last.kind == "delta"
    assert last.parent.id == VersionId(1, 3)
    assert same(staged(stage, trainer.root, last.id), trainer.state)


def test_a_restart_that_finds_other_bytes_than_were_published_starts_anew(trainer):
    """Also in a tensor that no delta of the chain touches, so that no block of it is proven on the way."""
    first, last = trainer.publish(), trainer.publish()
    (shard,) = (name for name, _ in first.files() if name.endswith(".safetensors"))
    path = f"{trainer.root}/{first.folder}/{shard}"
    with open(path, "r+b") as file:
        untouched = trainer.state["norm.weight"].view(torch.uint8).numpy().tobytes()
        file.seek(file.read().index(untouched))
        file.write(b"rot")
    trainer.restart()
    after = trainer.publish()
    assert (last.kind, after.kind, after.parent) == ("delta", "full", None)


def test_a_retry_of_a_delta_version_is_a_no_op_and_deltas_go_on(trainer, stage):
    last = trainer.publish(3)
    again = trainer.publisher.publish(trainer.state, number=3)
    assert (again.version, again.manifest.nonce) == (last.id, last.nonce)
    after = trainer.publish()
    assert (after.kind, after.parent.id) == ("delta", last.id)
    assert same(staged(stage, trainer.root, after.id), trainer.state)


def test_another_model_is_a_full_version(trainer):
    trainer.publish()
    trainer.state["extra"] = torch.zeros(3)
    assert trainer.publish().kind == "full"


def test_the_baseline_stays_where_it_is_when_the_commit_fails(trainer, stage, monkeypatch):
    trainer.publish(2)
    with monkeypatch.context() as patched:
        patched.setattr(Channel, "commit", lambda *_: (_ for _ in ()).throw(InvalidInput("no")))
        step(trainer.state, seed=77)
        with pytest.raises(InvalidInput):
            trainer.publisher.publish(trainer.state)
    last = trainer.publish()
    assert (last.kind, last.number) == ("delta", 3)
    assert same(staged(stage, trainer.root, last.id), trainer.state)


def test_unchanged_weights_make_a_delta_of_nothing(trainer, stage):
    first = trainer.publish()
    done = trainer.publisher.publish(trainer.state)
    assert not done.changed
    assert done.manifest.kind == "delta"
    assert done.manifest.parent.nbytes == 0
    assert same(staged(stage, trainer.root, done.version), trainer.state)
    assert done.content_digest == first.content_digest


def test_export_gives_the_folder_of_a_full_publish(tmp_path, trainer):
    trainer.publish(3, assets=None)
    channel = Channel.open(trainer.root)
    export_version(channel, channel.latest(), str(tmp_path / "out"))
    whole = Publisher(str(tmp_path / "full")).publish(trainer.state).manifest
    for name, _ in whole.files():
        with open(tmp_path / "out" / name, "rb") as ours, open(tmp_path / "full" / whole.folder / name, "rb") as theirs:
            assert ours.read() == theirs.read()
    again = import_version(Channel.create(str(tmp_path / "copy")), str(tmp_path / "out"), "run")
    assert again.content_digest == whole.content_digest


def test_files_beside_the_weights_are_written_when_they_change(tmp_path, trainer, stage):
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "config.json").write_text('{"model_type": "toy"}')
    trainer.publish(2, assets=str(assets))
    (assets / "config.json").write_text('{"model_type": "toy", "new": 1}')
    changed = trainer.publish(1, assets=str(assets))
    last = trainer.publish(1, assets=str(assets))
    assert changed.parent.stored == ("config.json",)
    assert last.parent.stored == ()
    channel = Channel.open(trainer.root)
    with open(os.path.join(stage.stage(channel, last).folder, "config.json")) as file:
        assert "new" in file.read()


def test_resume_reads_a_delta_version(trainer):
    trainer.publish(4)
    target = {name: torch.zeros_like(tensor) for name, tensor in trainer.state.items()}
    assert resume(trainer.root, target).version == VersionId(1, 4)
    assert same(target, trainer.state)


def test_resume_passes_over_a_delta_whose_chain_is_broken(trainer):
    trainer.publish(4)
    damage(trainer.root, delta_file(Channel.open(trainer.root).latest()))
    target = {name: torch.zeros_like(tensor) for name, tensor in trainer.state.items()}
    point = resume(trainer.root, target)
    assert point.version == VersionId(1, 3)
    assert same(target, trainer.held[point.version])


def test_verify_rebuilds_a_delta_version_and_names_what_is_wrong(trainer):
    trainer.publish(4)
    channel = Channel.open(trainer.root)
    assert all(verify_version(channel, version).ok for version in trainer.held)
    damage(trainer.root, delta_file(channel.manifest(VersionId(1, 2))))
    reports = {version.number: verify_version(channel, version) for version in trainer.held}
    assert [number for number, report in reports.items() if not report.ok] == [2, 3, 4]
    assert reports[4].problems[0].kind == "broken-chain"


def test_a_damaged_delta_is_gone_round_over_another_way(tmp_path, stage):
    trainer = Trainer(str(tmp_path / "root"), skip=(2, 4))
    trainer.publish(5)
    channel = Channel.open(trainer.root)
    last = channel.latest()
    damage(trainer.root, delta_file(last, base=2))
    assert same(staged(stage, trainer.root, last.id), trainer.state)


def test_a_damaged_delta_of_an_anchor_falls_back_to_the_anchor(tmp_path, stage):
    trainer = Trainer(str(tmp_path / "root"), anchor_every=2, skip=())
    trainer.publish(3)
    channel = Channel.open(trainer.root)
    stage.stage(channel, channel.manifest(VersionId(1, 2)))
    anchor = channel.latest()
    assert anchor.kind == "full"
    damage(trainer.root, delta_file(anchor))
    assert same(staged(stage, trainer.root, anchor.id), trainer.state)


def test_case_57_a_pruned_chain_is_a_clear_error(trainer, stage):
    trainer.publish(4)
    os.remove(f"{trainer.root}/{manifest_path(VersionId(1, 2))}")
    with pytest.raises(BrokenChain, match=r"e1-v3 is a delta against e1-v2"):
        staged(stage, trainer.root, VersionId(1, 4))


def test_two_readers_of_one_stage_get_the_same_version(tmp_path, trainer, stage):
    from concurrent.futures import ThreadPoolExecutor

    trainer.publish(6)
    other = Stage(stage.folder, keep=3)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda each: staged(each, trainer.root, VersionId(1, 6)), [stage, other]))
    other.close()
    assert all(same(each, trainer.state) for each in found)


def dies_at(point: int):
    """A progress callback that ends the process by SIGKILL when it is called for the `point`-th time."""
    calls = itertools.count(1)
    return lambda _: os.kill(os.getpid(), signal.SIGKILL) if next(calls) == point else None


def test_a_stage_killed_at_any_file_of_a_rebuild_ends_whole(tmp_path, trainer):
    last = trainer.publish(6)
    channel = Channel.open(trainer.root)
    warm = Stage(str(tmp_path / "warm"))
    staged(warm, trainer.root, last.id)  # compiles the kernels before the forks
    warm.close()
    for point in range(1, 20):
        folder = str(tmp_path / f"stage-{point}")
        pid = os.fork()
        if pid == 0:
            Stage(folder).stage(channel, last, dies_at(point))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        stage = Stage(folder)
        assert same(staged(stage, trainer.root, last.id), trainer.state)
        stage.close()
        if not os.WIFSIGNALED(status):
            return
    raise AssertionError("the child never came to its end")


def test_what_is_held_and_rotten_is_not_believed(trainer, tmp_path):
    """The base on this host is proven block by block before a change is applied to it."""
    trainer.publish(2)
    channel = Channel.open(trainer.root)
    stage = Stage(str(tmp_path / "stage"))
    first = stage.stage(channel, channel.manifest(VersionId(1, 1)))
    shard = next(name for name in os.listdir(first.folder) if name.endswith(".safetensors"))
    path = os.path.join(first.folder, shard)
    times = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(5000)
        file.write(b"rot")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert same(staged(stage, trainer.root, VersionId(1, 2)), trainer.state)
    stage.close()


def test_a_rollback_to_a_delta_version_is_that_version_and_deltas_go_on_from_it(trainer, stage):
    trainer.publish(5)
    channel = Channel.open(trainer.root)
    target = channel.resolve("3")
    assert target.kind == "delta"
    back = roll_back(channel, target, why="reward collapse")
    assert same(staged(stage, trainer.root, back.id), trainer.held[target.id])
    assert verify_version(channel, back.id).ok
    trainer.state = {name: tensor.clone() for name, tensor in trainer.held[target.id].items()}
    trainer.restart()
    after = trainer.publish()
    assert after.parent is not None
    assert after.parent.id == back.id
    assert same(staged(stage, trainer.root, after.id), trainer.held[after.id])
