from __future__ import annotations

import gc
import os
import tempfile

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ckptsync.errors import BadShard, UnsupportedTensor
from ckptsync.manifest import FileEntry, TensorEntry, TensorSpec, Track
from ckptsync.shards.plan import ShardPlan
from ckptsync.shards.tensors import TORCH_DTYPES, load_tensors, map_tensors, spec_of, tensor_bytes

from .files import raw_shard, spec, write_plan, write_track

BOTH = pytest.mark.parametrize("load", [load_tensors, map_tensors])


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every bit pattern of one byte, as that dtype; 0 and 1 for bool."""
    size = max(1, torch.Size(shape).numel()) * torch.empty(0, dtype=dtype).element_size()
    raw = torch.arange(size) % (2 if dtype is torch.bool else 251)
    return raw.to(torch.uint8).view(dtype)[: torch.Size(shape).numel()].reshape(shape)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit: NaN patterns count, and float8 has no comparison."""
    return (left.dtype, left.shape) == (right.dtype, right.shape) and tensor_bytes(left) == tensor_bytes(right)


@BOTH
def test_every_dtype_comes_back_bit_for_bit(tmp_path, load):
    tensors = {f"t.{name}": values(dtype, 3, 4) for name, dtype in TORCH_DTYPES.items()}
    track = write_track(str(tmp_path), tensors)
    found = dict(load(str(tmp_path), track))
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensors[name]) for name in tensors)


def test_case_70_packed_fp4_counts_elements_not_bytes():
    packed = values(torch.float4_e2m1fn_x2, 3, 4)
    assert spec_of("w", packed) == TensorSpec("w", "F4", (3, 8))
    assert spec_of("w", packed).nbytes == len(tensor_bytes(packed)) == 12


def test_case_70_a_packed_fp4_scalar_is_refused_by_name():
    with pytest.raises(UnsupportedTensor, match="'w'"):
        spec_of("w", values(torch.float4_e2m1fn_x2, 1)[0])


def test_case_70_a_dtype_without_a_name_in_the_format_is_refused_by_name():
    with pytest.raises(UnsupportedTensor, match=r"'w'.*complex128"):
        spec_of("w", torch.zeros(2, dtype=torch.complex128))


@BOTH
def test_case_69_tensors_without_elements_keep_their_shapes(tmp_path, load):
    tensors = {"a": torch.empty(0), "b": torch.empty(3, 0, 2, dtype=torch.int8), "c": torch.ones(2)}
    found = dict(load(str(tmp_path), write_track(str(tmp_path), tensors)))
    assert all(same(found[name], tensors[name]) for name in tensors)


@BOTH
def test_scalars_stay_scalars(tmp_path, load):
    tensors = {"a": torch.tensor(3.5), "b": torch.tensor(True), "c": torch.tensor(7, dtype=torch.int64)}
    found = dict(load(str(tmp_path), write_track(str(tmp_path), tensors)))
    assert all(same(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_case_68_a_transposed_tensor_is_written_in_the_order_of_its_elements(name):
    tensor = values(TORCH_DTYPES[name], 3, 4)
    assert tensor_bytes(tensor.t()) == tensor_bytes(tensor.t().contiguous())
    assert tensor_bytes(tensor.t()) != tensor_bytes(tensor)


def test_one_element_of_a_strided_view_is_four_bytes():
    assert bytes(tensor_bytes(torch.arange(8.0)[6::4])) == bytes(tensor_bytes(torch.tensor([6.0])))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[::2],
        lambda t: t[:, 1:3],
        lambda t: t[0].expand(5, 4),
        lambda t: t.permute(1, 0),
        lambda t: t[2],
    ],
)
def test_case_68_strided_views_are_written_by_value(view):
    tensor = view(torch.randn(6, 4))
    assert bytes(tensor_bytes(tensor)) == tensor.clone(memory_format=torch.contiguous_format).numpy().tobytes()


def test_case_66_views_of_one_flat_buffer_are_tensors_of_their_own(tmp_path):
    flat = torch.randn(20)
    tensors = {"a": flat[:8].view(2, 4), "b": flat[8:], "whole": flat}
    found = dict(load_tensors(str(tmp_path), write_track(str(tmp_path), tensors)))
    assert all(same(found[name], tensors[name]) for name in tensors)


def test_contiguous_memory_is_not_copied():
    tensor = torch.zeros(4)
    data = tensor_bytes(tensor[1:3])
    tensor[1] = 1
    assert data.nbytes == 8
    assert bytes(data[:4]) == torch.ones(1).numpy().tobytes()


def test_a_parameter_that_requires_grad_is_written_as_its_values():
    parameter = torch.nn.Parameter(torch.ones(2))
    assert spec_of("w", parameter) == TensorSpec("w", "F32", (2,))
    assert tensor_bytes(parameter) == tensor_bytes(torch.ones(2))


def test_lazy_conjugation_and_negation_are_resolved():
    tensor = torch.tensor([1 + 2j], dtype=torch.complex64)
    assert tensor_bytes(tensor.conj()) == tensor_bytes(torch.tensor([1 - 2j], dtype=torch.complex64))
    assert tensor_bytes(tensor.conj().imag) == tensor_bytes(torch.tensor([-2.0]))


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(2)


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)


REFUSED = pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: torch.empty(2, device="meta"), "meta device"),
        (lambda: torch.eye(2).to_sparse(), "sparse_coo.*to_dense"),
        (_fake, "FakeTensor"),
        (_nested, "NestedTensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "quint8"),
    ],
)


@REFUSED
@pytest.mark.filterwarnings("ignore:.*")
def test_case_70_what_is_not_plain_memory_is_refused_by_name(make, match):
    with pytest.raises(UnsupportedTensor, match=f"'layer.w'.*{match}"):
        spec_of("layer.w", make())


@REFUSED
@pytest.mark.filterwarnings("ignore:.*")
def test_case_70_what_is_not_plain_memory_has_no_bytes(make, match):
    with pytest.raises(UnsupportedTensor, match=match):
        tensor_bytes(make())


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.distributed
def test_a_sharded_tensor_has_the_spec_of_the_whole_and_is_gathered_before_it_is_bytes(one_rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.randn(4, 3)
    sharded = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
    assert spec_of("w", sharded) == TensorSpec("w", "F32", (4, 3))
    with pytest.raises(UnsupportedTensor, match="full_tensor"):
        tensor_bytes(sharded)
    assert tensor_bytes(sharded.full_tensor()) == tensor_bytes(whole)


@pytest.fixture
def version(tmp_path):
    tensors = {f"layers.{i}.w": torch.randn(40, 10) for i in range(4)}
    return str(tmp_path), write_track(str(tmp_path), tensors, max_bytes=3500), tensors


@BOTH
def test_tensors_come_shard_by_shard_in_file_order(version, load):
    folder, track, tensors = version
    found = list(load(folder, track))
    assert len(track.files) == 2
    assert [name for name, _ in found] == list(tensors)
    assert all(same(tensor, tensors[name]) for name, tensor in found)


@BOTH
def test_case_34_a_tensor_outlives_its_neighbours_and_the_file(version, load):
    folder, track, tensors = version
    kept = dict(load(folder, track))["layers.1.w"]
    for file in track.files:
        os.unlink(os.path.join(folder, file.name))
    gc.collect()
    assert same(kept, tensors["layers.1.w"])


@BOTH
def test_a_write_into_a_tensor_does_not_reach_the_file(version, load):
    folder, track, tensors = version
    for _, tensor in load(folder, track):
        tensor.zero_()
    assert all(same(tensor, tensors[name]) for name, tensor in load(folder, track))


def _flip(folder: str, file: FileEntry) -> None:
    with open(os.path.join(folder, file.name), "r+b") as shard:
        shard.seek(-1, os.SEEK_END)
        byte = shard.read(1)[0]
        shard.seek(-1, os.SEEK_END)
        shard.write(bytes([byte ^ 1]))


def test_a_flipped_bit_is_found_before_the_first_tensor_of_its_file(version):
    folder, track, _ = version
    _flip(folder, track.files[1])
    found = load_tensors(folder, track, verify=True)
    assert [next(found)[0] for _ in range(2)] == ["layers.0.w", "layers.1.w"]
    with pytest.raises(BadShard, match=r"model-00002-of-00002.safetensors: xxh3-128 \w+, where the manifest says"):
        next(found)


def test_a_verified_load_of_a_good_folder_passes(version):
    folder, track, tensors = version
    assert [name for name, _ in load_tensors(folder, track, verify=True)] == list(tensors)


@BOTH
def test_case_78_a_missing_shard_is_named(version, load):
    folder, track, _ = version
    os.unlink(os.path.join(folder, track.files[1].name))
    with pytest.raises(BadShard, match="model-00002-of-00002"):
        list(load(folder, track))


@BOTH
def test_a_truncated_shard_is_named(version, load):
    folder, track, _ = version
    os.truncate(os.path.join(folder, track.files[0].name), track.files[0].size - 1)
    with pytest.raises(BadShard, match="model-00001-of-00002"):
        list(load(folder, track))


@BOTH
def test_case_85_a_shard_that_is_a_link_is_refused(version, load):
    folder, track, _ = version
    path = os.path.join(folder, track.files[0].name)
    os.rename(path, path + ".elsewhere")
    os.symlink(path + ".elsewhere", path)
    with pytest.raises(BadShard, match="symbolic link"):
        list(load(folder, track))


@BOTH
def test_files_without_tensors_are_not_opened(version, load):
    folder, track, tensors = version
    config = FileEntry(name="config.json", size=3, digest="")
    more = Track(files=(config, *track.files), tensors=track.tensors)
    assert [name for name, _ in load(folder, more)] == list(tensors)


def test_a_file_larger_than_one_read_comes_back_whole(tmp_path):
    tensors = {"a": torch.randint(0, 255, (40 << 20,), dtype=torch.uint8), "b": torch.ones(5)}
    track = write_track(str(tmp_path), tensors)
    assert all(same(tensor, tensors[name]) for name, tensor in load_tensors(str(tmp_path), track, verify=True))


def test_a_file_system_without_direct_io_is_read_through_the_page_cache(version, monkeypatch):
    folder, track, tensors = version
    monkeypatch.setattr("ckptsync.store.direct.switch", lambda fd, on: False)
    assert all(same(tensor, tensors[name]) for name, tensor in load_tensors(folder, track, verify=True))


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs here")
def test_a_version_staged_on_tmpfs_loads(tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        tensors = {"w": torch.randn(3000, 1000)}
        track = write_track(folder, tensors)
        for load in (load_tensors, map_tensors):
            assert all(same(tensor, tensors[name]) for name, tensor in load(folder, track))


@BOTH
def test_a_tie_is_the_same_tensor_right_after_its_target(tmp_path, load):
    tensors = {"embed.w": torch.randn(4, 2), "norm.w": torch.randn(4)}
    ties = [("lm_head.w", "embed.w"), ("draft.w", "lm_head.w")]
    found = list(load(str(tmp_path), write_track(str(tmp_path), tensors, ties=ties)))
    assert [name for name, _ in found] == ["embed.w", "lm_head.w", "draft.w", "norm.w"]
    assert found[0][1] is found[1][1] is found[2][1]


@BOTH
def test_a_tie_that_is_stored_twice_is_the_same_tensor_too(tmp_path, load):
    tensors = {"lm_head.w": torch.ones(4), "embed.w": torch.ones(4)}
    stored = write_track(str(tmp_path), tensors)
    entries = [_replace(e, alias_of="embed.w") if e.name == "lm_head.w" else e for e in stored.tensors]
    found = list(load(str(tmp_path), Track(files=stored.files, tensors=tuple(entries))))
    assert [name for name, _ in found] == ["embed.w", "lm_head.w"]
    assert found[0][1] is found[1][1]


def _replace(entry: TensorEntry, **changes: object) -> TensorEntry:
    fields = {name: getattr(entry, name) for name in entry.__struct_fields__}
    return TensorEntry(**(fields | changes))


@pytest.mark.parametrize(
    "changes",
    [{"a": {"alias_of": "b"}, "b": {"alias_of": "a"}}, {"a": {"alias_of": "c"}}],
    ids=["in a circle", "of another shape"],
)
def test_a_tie_that_leads_nowhere_is_refused(tmp_path, changes):
    stored = write_track(str(tmp_path), {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(3)})
    entries = tuple(_replace(entry, **changes.get(entry.name, {})) for entry in stored.tensors)
    with pytest.raises(BadShard, match="tied in a circle, or to"):
        list(load_tensors(str(tmp_path), Track(files=stored.files, tensors=entries)))


@BOTH
def test_a_tensor_at_an_odd_address_is_copied_out(tmp_path, load):
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    wanted = torch.tensor([1.5, -2.0])
    data = raw_shard(header, b"a" + bytes(tensor_bytes(wanted)))
    (tmp_path / "m.safetensors").write_bytes(data)
    file = FileEntry(name="m.safetensors", size=len(data), digest="")
    specs = [spec("a", 1, dtype="U8"), spec("b", 2, dtype="F32")]
    entries = [TensorEntry(name=s.name, dtype=s.dtype, shape=s.shape, digest="", file=file.name) for s in specs]
    found = dict(load(str(tmp_path), Track(files=(file,), tensors=tuple(entries))))
    assert torch.equal(found["b"], wanted)


@BOTH
@pytest.mark.parametrize(("dtype", "shape"), [("F6_E2M3", (4,)), ("F4", (2, 1))])
def test_what_torch_has_no_tensor_for_is_named(tmp_path, load, dtype, shape):
    plan = ShardPlan("m.safetensors", (TensorSpec("w", dtype, shape),))
    raw = {"w": torch.zeros(plan.nbytes, dtype=torch.uint8)}
    file, entries = write_plan(str(tmp_path), plan, raw)
    with pytest.raises(UnsupportedTensor, match="'w'"):
        list(load(str(tmp_path), Track(files=(file,), tensors=entries)))
