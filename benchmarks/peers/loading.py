"""From the store to host memory of the reading side: staged and verified, or loaded by others."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors.torch import load_file
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.peers import saving
from benchmarks.peers.clock import OURS, Row, Taken
from benchmarks.peers.elsewhere import Elsewhere
from benchmarks.peers.ways import Place, Way, compare, cool, empty
from benchmarks.peers.weights import nbytes
from ckptsync.channel import Channel
from ckptsync.shards.tensors import load_tensors
from ckptsync.store import direct
from watchers.stage import Stage

BARE = "not verified"
CHUNK = 16 << 20
THREADS = 4


def run(model: PreTrainedModel, place: Place, rounds: int) -> list[Row]:
    with ExitStack() as stack:
        guest = stack.enter_context(Elsewhere(_s3_environment(place)))
        stage = stack.enter_context(tempfile.TemporaryDirectory(dir=saving.STAGED, prefix="ckptsync-peers-"))
        written = _write_all(model, place)
        ways = [Way(OURS, lambda _: staged(place, stage))]
        ways += (_remote if place.remote else _local)(model.state_dict(), place, guest)

        def cold() -> None:
            empty(stage)
            if place.name == "disk":
                cool(place.root)

        rows = compare("stage + verify", place, nbytes(model) / 1e9, rounds, ways, cold)
        for folder in written:
            place.drop(folder)
    return rows


def staged(place: Place, stage: str) -> None:
    cache, channel = Stage(stage), Channel.open(f"{place.url}/channel")
    cache.stage(channel, channel.resolve("latest"))
    cache.close()


def _write_all(model: PreTrainedModel, place: Place) -> list[str]:
    """What each way reads, written once; everything that reads safetensors reads the same file."""
    state = model.state_dict()
    place.drop(f"{place.root}/channel")
    with saving.ours(model, place) as publish:
        publish()
    folders = [place.fresh(name) for name in ("hf", "pickle", "dcp")]
    if place.remote:
        by_name = {way.name: way for way in saving.remote_ways(model, state, place)}
        by_name["save_pretrained, then s3fs put"].call(folders[0])
        by_name["DCP save, fsspec writer"].call(folders[2])
    else:
        model.save_pretrained(folders[0])
        torch.save(state, f"{folders[1]}/model.pt")
        dcp.save(dict(state), checkpoint_id=folders[2], no_dist=True)
    return [*folders, f"{place.root}/channel"]


def _local(state: saving.State, place: Place, guest: Elsewhere) -> list[Way]:
    root = place.root
    path, folder = f"{root}/hf/model.safetensors", f"{root}/hf"
    return [
        Way("ckptsync load_tensors, verified", lambda _: verified_tensors(place)),
        Way("bare reads", lambda _: read_bare(path), BARE),
        Way("safetensors load_file", lambda _: touch(load_file(path).values()), BARE),
        Way("safetensors load_file + xxh3", lambda _: hashed(load_file(path).values()), "digest after the read"),
        Way("torch.load", lambda _: touch(torch.load(f"{root}/pickle/model.pt").values()), BARE + ", a pickle"),
        Way("transformers from_pretrained", lambda _: touch(reloaded(folder).values()), BARE),
        Way("DCP load", lambda _: load_dcp(state, checkpoint_id=f"{root}/dcp"), BARE + ", a pickle"),
        *_guests(guest, path),
    ]


def _remote(state: saving.State, place: Place, guest: Elsewhere) -> list[Way]:
    key = f"{place.root}/hf/model.safetensors"
    reader = FsspecReader(f"s3://{place.root}/dcp", **place.options)

    def downloaded() -> None:
        with tempfile.TemporaryDirectory(dir=saving.STAGED) as folder:
            place.fs.get(key, f"{folder}/model.safetensors")
            touch(load_file(f"{folder}/model.safetensors").values())

    return [
        Way("bare obstore get_range", lambda _: get_bare(place, key), BARE),
        Way("s3fs get, then load_file", lambda _: downloaded(), BARE),
        Way("DCP load, fsspec reader", lambda _: load_dcp(state, storage_reader=reader), BARE + ", a pickle"),
        *_guests(guest, f"s3://{key}", "runai"),
    ]


def _guests(guest: Elsewhere, path: str, *names: str) -> list[Way]:
    """Peers that live in an environment of their own; one that does not run here says why, and has no row."""
    title = {"fastsafetensors": "fastsafetensors", "runai": "runai-model-streamer"}

    def way(name: str) -> Way:
        def call(_: str) -> Taken:
            return guest.ask(name, paths=[path])

        return Way(title[name], call, BARE)

    return [way(name) for name in names or title if not guest.cannot(name, paths=[path])]


def _s3_environment(place: Place) -> dict[str, str]:
    """For the S3 client of runai-model-streamer, which otherwise looks for the bucket in the host's name."""
    return {"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"} if place.remote else {}


def verified_tensors(place: Place) -> None:
    """Straight into tensors, as `resume` reads, without a stage."""
    channel = Channel.open(f"{place.url}/channel")
    manifest = channel.resolve("latest")
    for track in manifest.tracks.values():
        touch([tensor for _, tensor in load_tensors(os.path.join(place.root, "channel", manifest.folder), track,
                                                    verify=True)])  # fmt: skip


def touch(tensors: Iterable[torch.Tensor]) -> None:
    """Every page, since some only map."""
    for tensor in tensors:
        tensor.reshape(-1).view(torch.uint8)[::4096].sum()


def hashed(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        xxhash.xxh3_128_digest(tensor.reshape(-1).view(torch.uint8).numpy())


def reloaded(folder: str) -> Mapping[str, torch.Tensor]:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()


def load_dcp(state: saving.State, **where: object) -> None:
    """Into tensors of its own, which DCP wants to be there."""
    dcp.load({name: torch.empty_like(tensor) for name, tensor in state.items()}, no_dist=True, **where)


def in_ranges(size: int, read: Callable[[int, memoryview], object]) -> None:
    """`size` bytes by four threads, each into one buffer over and over."""

    def worker(number: int) -> None:
        buffer = direct.aligned(CHUNK)
        for at in range(number * CHUNK, size, THREADS * CHUNK):
            read(at, buffer)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(worker, range(THREADS)))


def read_bare(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    direct.switch(fd, True)
    in_ranges(os.fstat(fd).st_size, lambda at, buffer: os.preadv(fd, [buffer], at))
    os.close(fd)


def get_bare(place: Place, key: str) -> None:
    import obstore

    store, size = saving.client(place), place.fs.size(key)
    path = key.partition("/")[2]
    in_ranges(size, lambda at, _: obstore.get_range(store, path, start=at, length=min(CHUNK, size - at)))
