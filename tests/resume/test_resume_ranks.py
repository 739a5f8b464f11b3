"""Resuming on real gloo ranks: any sharding, any world size, each rank reading its own bytes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ckptsync import resume
from ckptsync.errors import NotFound
from ckptsync.publish import Publisher
from ckptsync.store import open_store
from ckptsync.store.base import Reader
from ckptsync.testing.hooks import HookedStore
from tests.trainer.models import TinyModel, reference, same, shard
from tests.trainer.ranks_harness import catching, returned, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def random_model(seed: int, **shape: Any) -> TinyModel:
    model = TinyModel(**shape)
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.normal_()
    return model


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
        for name, tensor in model.state_dict().items()
    }


def tensor_parallel(model: TinyModel, mesh: Any) -> TinyModel:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def in_every_shape(count: int) -> dict[str, TinyModel]:
    shapes = {"dense": TinyModel(), "fsdp2": shard(TinyModel())}
    if count > 1:
        shapes["tp"] = tensor_parallel(TinyModel(tied=False), init_device_mesh("cpu", (count,)))
    if count == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        both = tensor_parallel(TinyModel(tied=False), mesh["tensor"])
        from torch.distributed.fsdp import fully_shard

        for layer in both.layers:
            fully_shard(layer, mesh=mesh["data"])
        shapes["fsdp2 over tp"] = fully_shard(both, mesh=mesh["data"])
    return shapes


def resume_in_every_shape(rank: int, root: str) -> list[str]:
    done = []
    for name, model in in_every_shape(dist.get_world_size()).items():
        point = resume(root, model)
        assert point is not None
        assert point.step == 5
        expected = reference(random_model(1))
        same(gathered(model), expected)
        done.append(name)
    return done


@pytest.mark.parametrize(("ranks", "shapes"), [(1, 2), (2, 3), (4, 4)])
def test_a_version_comes_back_bit_for_bit_in_every_sharding(tmp_path: Path, ranks: int, shapes: int) -> None:
    with Publisher(str(tmp_path), shard_bytes=2000) as publisher:
        publisher.publish(random_model(1), step=5)
    for done in returned(run_ranks(ranks, resume_in_every_shape, str(tmp_path))):
        assert len(done) == shapes


def resumed_weights_train_on(rank: int, root: str) -> tuple[float, float]:
    """FSDP2 keeps a padded copy of each shard of its own: what was loaded must be what it computes with."""
    model = shard(TinyModel())
    tokens = torch.arange(8)
    model(tokens)  # leaves the root gathered
    resume(root, model)
    plain = random_model(1)
    return model(tokens).sum().item(), plain(tokens).sum().item()


def test_a_forward_after_the_resume_computes_with_the_loaded_weights(tmp_path: Path) -> None:
    with Publisher(str(tmp_path)) as publisher:
        publisher.publish(random_model(1))
    for found, expected in returned(run_ranks(2, resumed_weights_train_on, str(tmp_path))):
        assert found == pytest.approx(expected, rel=1e-5)


# -- what is read --------------------------------------------------------------------------------------------


class CountingStore(HookedStore):
    """Counts the bytes read of shards, by whether the whole file was read in large parts or a piece of it."""

    def __init__(self, root: str) -> None:
        super().__init__(open_store(root), lambda *_: None)
        self.read: dict[str, list[tuple[int, int]]] = {}

    def open(self, path: str) -> Reader:
        return _Counting(super().open(path), self.read.setdefault(path, []) if path.endswith(".safetensors") else [])


class _Counting:
    def __init__(self, reader: Reader, reads: list[tuple[int, int]]) -> None:
        self._reader, self._reads, self.size = reader, reads, reader.size

    def readinto(self, offset: int, buffer: memoryview) -> None:
        self._reads.append((offset, buffer.nbytes))
        self._reader.readinto(offset, buffer)

    def close(self) -> None:
        self._reader.close()


ROWS, WIDTH = 64, 512


def count_bytes(rank: int, root: str, dim: int) -> tuple[int, int]:
    store = CountingStore(root)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    from torch.distributed.tensor import Shard

    state = {f"w{n}": distribute_tensor(torch.zeros(ROWS, WIDTH), mesh, [Shard(dim)]) for n in range(8)}
    resume(store, state)
    for number in range(8):
        assert torch.equal(state[f"w{number}"].full_tensor(), weights()[f"w{number}"])
    whole = part = 0
    for reads in store.read.values():
        total = sum(size for _, size in reads)
        verified = (ROWS * WIDTH * 4 + 4096) if any(size > ROWS * WIDTH * 4 for _, size in reads) else 0
        whole, part = whole + verified, part + total - verified
    return whole, part


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {f"w{n}": torch.randn(ROWS, WIDTH, generator=generator) for n in range(8)}


@pytest.mark.parametrize("dim", [0, 1])
def test_each_rank_verifies_a_share_of_the_files_and_then_reads_its_own_rows(tmp_path: Path, dim: int) -> None:
    nbytes = ROWS * WIDTH * 4
    with Publisher(str(tmp_path), shard_bytes=nbytes) as publisher:
        files = publisher.publish(weights()).manifest.tracks["model"].files
    assert sum(file.name.endswith(".safetensors") for file in files) == 8
    counts = returned(run_ranks(2, count_bytes, str(tmp_path), dim))
    headers = 8 * 4096
    for verified, own in counts:
        assert verified == 4 * (nbytes + 4096), "half of the files, whole"
        # Rows of 2 KiB are read whole and cut: cheaper than 512 small reads.
        expected = 8 * nbytes // 2 if dim == 0 else 8 * nbytes
        assert expected <= own <= expected + headers


# -- one decision for all ------------------------------------------------------------------------------------


class Late(HookedStore):
    """Says "absent" of everything for some seconds, as an NFS client with a negative cache does."""

    def __init__(self, root: str, seconds: float) -> None:
        super().__init__(open_store(root), lambda *_: None)
        self._from = time.monotonic() + seconds

    def open(self, path: str) -> Reader:
        if time.monotonic() < self._from:
            raise NotFound(f"{path} is not there")
        return super().open(path)

    def list(self, folder: str) -> Any:
        raise AssertionError("only rank 0 looks for versions")


def resume_late(rank: int, root: str) -> Any:
    model = shard(TinyModel())
    point = resume(Late(root, 3.0) if rank else root, model)
    same(gathered(model), reference(random_model(1)))
    return point


def test_case_26_rank_0_decides_and_a_rank_whose_file_system_is_late_waits(tmp_path: Path) -> None:
    with Publisher(str(tmp_path), shard_bytes=2000) as publisher:
        publisher.publish(random_model(1), step=3)
    points = returned(run_ranks(2, resume_late, str(tmp_path)))
    assert points[0] == points[1]
    assert points[0].step == 3


def refusals(rank: int, root: str, empty: str) -> dict[str, Any]:
    errors: dict[str, Any] = {}
    model = shard(TinyModel(blocks=2 + rank))
    with catching(errors, "other models"):
        resume(root, model)
    model = shard(TinyModel(blocks=2))
    with catching(errors, "misfit"):
        resume(root, model)
    with catching(errors, "empty"):
        resume(empty, model)
    with catching(errors, "not there"):
        resume(root, model, "77")
    assert resume(empty, model, allow_empty=True) is None
    model = shard(TinyModel())
    point = resume(root, model)
    assert point is not None
    same(gathered(model), reference(random_model(1)))
    return {"errors": errors, "point": point}


def test_every_rank_gets_the_same_answer_and_a_broken_newest_version_is_passed_over(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    with Publisher(root, shard_bytes=2000) as publisher:
        publisher.publish(random_model(1), step=1)
        broken = publisher.publish(random_model(2), step=2)
    last = sorted(Path(root, broken.manifest.folder).glob("model-*.safetensors"))[-1]
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    facts = returned(run_ranks(2, refusals, root, str(tmp_path / "empty")))
    for fact in facts:
        errors = fact["errors"]
        assert errors["other models"].kind == "RanksDisagree"
        assert errors["misfit"].kind == "InvalidInput"
        assert "unexpected" in errors["misfit"].message
        assert errors["empty"].kind == "ChannelEmpty"
        assert errors["not there"].kind == "VersionNotFound"
        assert last.name in fact["point"].passed_over[broken.version]
        assert fact["point"].step == 1


# -- trainer state -------------------------------------------------------------------------------------------


def sharded_training(steps: int) -> tuple[TinyModel, torch.optim.Optimizer]:
    model = shard(TinyModel())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(8)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))


def save_with_state(rank: int, root: str) -> Any:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer = sharded_training(3)
    torch.manual_seed(5)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer), "rng": torch.get_rng_state(), "step": 3}
    with Publisher(root) as publisher:
        done = publisher.publish(model, step=3, trainer_state=state)
        with pytest.raises(Exception, match="only a pickle"):
            publisher.publish(model, trainer_state={"bad": object() if rank else 1})
    full = full_state(model, optimizer)
    return [file.name for file in done.manifest.trainer_state], full if rank == 0 else None


def load_with_state(rank: int, root: str) -> Any:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model, optimizer = sharded_training(1)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer), "rng": torch.get_rng_state(), "step": 0}
    point = resume(root, model, trainer_state=state)
    assert point is not None
    assert point.has_trainer_state
    assert state["step"] == 3
    torch.set_rng_state(state["rng"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    numbers, full = torch.rand(2).tolist(), full_state(model, optimizer)
    return full if rank == 0 else None, numbers


def test_the_optimizer_comes_back_at_another_world_size(tmp_path: Path) -> None:
    root = str(tmp_path)
    saved = returned(run_ranks(4, save_with_state, root))
    assert sorted(saved[0][0]) == ["index.json", *(f"state-{rank:05d}.safetensors" for rank in range(4))]
    expected = saved[0][1]
    torch.manual_seed(5)
    numbers = torch.rand(2).tolist()
    for ranks in (2, 1):
        loaded = returned(run_ranks(ranks, load_with_state, root))
        assert all(drawn == numbers for _, drawn in loaded)
        found = loaded[0][0]
        assert found["param_groups"][0]["betas"] == expected["param_groups"][0]["betas"]
        assert found["state"].keys() == expected["state"].keys()
        for name, slots in expected["state"].items():
            for slot, tensor in slots.items():
                assert torch.equal(found["state"][name][slot], tensor), (name, slot)
