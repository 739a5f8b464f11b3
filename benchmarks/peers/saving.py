"""Saving one process's weights: ours, and what people use instead."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from transformers import PreTrainedModel

from benchmarks.peers.clock import OURS, Row
from benchmarks.peers.ways import Place, Way, compare, sync
from benchmarks.peers.weights import nbytes, step
from ckptsync.publish import Publisher
from ckptsync.store import direct

CHUNK = 16 << 20
BARE = "no digest, no commit"
UNSAFE = "no digest, no fsync, no commit"
STAGED = "/dev/shm"
"""Where a save goes first that has to be uploaded after."""

State = Mapping[str, torch.Tensor]


def run(model: PreTrainedModel, place: Place, rounds: int) -> list[Row]:
    state = model.state_dict()
    with ours(model, place) as publish:
        own = f"{place.root}/channel/data"
        ways = [Way(OURS, lambda _: publish(), keeps=own)]
        ways += remote_ways(model, state, place) if place.remote else local_ways(model, state)
        return compare("publish", place, nbytes(model) / 1e9, rounds, ways, lambda: step(model))


@contextmanager
def ours(model: torch.nn.Module, place: Place) -> Iterator[Callable[[], None]]:
    """A publisher that has published before, as in the middle of a training."""
    logging.disable(logging.WARNING)
    with Publisher(f"{place.url}/channel") as publisher:
        publisher.publish({"warm": torch.zeros(8)})

        def publish() -> None:
            publisher.publish(model)

        yield publish
    logging.disable(logging.NOTSET)


def local_ways(model: PreTrainedModel, state: State) -> list[Way]:
    source = direct.aligned(CHUNK)
    source[:] = os.urandom(CHUNK)
    return [
        Way("bare write + fsync", lambda out: write_bare(out, source, nbytes(model)), BARE),
        *both("torch.save", lambda out: torch.save(state, f"{out}/model.pt"), "a pickle"),
        *both("safetensors save_file", lambda out: save_file(state, f"{out}/model.safetensors")),
        *both("transformers save_pretrained", model.save_pretrained),
        Way("DCP save", lambda out: dcp.save(dict(state), checkpoint_id=out, no_dist=True), BARE + ", a pickle"),
        Way("DCP save, HF writer", lambda out: save_hf(state, out), BARE),
    ]


def both(name: str, save: Callable[[str], object], more: str = "") -> list[Way]:
    """As it is, and with the fsync that ours has."""

    def durable(out: str) -> None:
        save(out)
        sync(out)

    def plain(out: str) -> None:
        save(out)

    tail = f", {more}" if more else ""
    return [Way(name, plain, UNSAFE + tail), Way(f"{name} + fsync", durable, BARE + tail)]


def remote_ways(model: PreTrainedModel, state: State, place: Place) -> list[Way]:
    """Those that know S3 write to it; the others' files are uploaded after, by s3fs."""

    def after(save: Callable[[str], object]) -> Callable[[str], None]:
        def call(out: str) -> None:
            with tempfile.TemporaryDirectory(dir=STAGED) as folder:
                save(folder)
                place.fs.put(f"{folder}/", f"{out}/", recursive=True)

        return call

    def pickled(out: str) -> None:
        with place.fs.open(f"{out}/model.pt", "wb") as file:
            torch.save(state, file)

    def distributed(out: str) -> None:
        dcp.save(dict(state), storage_writer=FsspecWriter(f"s3://{out}", **place.options), no_dist=True)

    return [
        Way("bare obstore put", lambda out: put_bare(out, place, nbytes(model)), BARE),
        Way("torch.save into s3fs", pickled, BARE + ", a pickle"),
        Way("save_file, then s3fs put", after(lambda out: save_file(state, f"{out}/model.safetensors")), BARE),
        Way("save_pretrained, then s3fs put", after(model.save_pretrained), BARE),
        Way("DCP save, fsspec writer", distributed, BARE + ", a pickle"),
    ]


def save_hf(state: State, out: str) -> None:
    dcp.save(dict(state), storage_writer=HuggingFaceStorageWriter(out), no_dist=True)


def write_bare(out: str, source: memoryview, size: int) -> None:
    """The least that makes so many bytes durable: from memory that is aligned, without a copy."""
    fd = os.open(f"{out}/bare", os.O_WRONLY | os.O_CREAT, 0o644)
    direct.switch(fd, True)
    for start in range(0, size, CHUNK):
        direct.write_all(fd, source[: min(CHUNK, -(-(size - start) // direct.BLOCK) * direct.BLOCK)], start)
    os.fsync(fd)
    os.close(fd)


def put_bare(out: str, place: Place, size: int) -> None:
    """The same bytes through obstore alone, from a file in memory."""
    import obstore

    with tempfile.NamedTemporaryFile(dir=STAGED) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        obstore.put(client(place), f"{out.partition('/')[2]}/bare", file, chunk_size=CHUNK, max_concurrency=4)


def client(place: Place) -> object:
    from obstore.store import S3Store

    return S3Store(
        place.root.partition("/")[0], endpoint=place.options["endpoint_url"], access_key_id=place.options["key"],
        secret_access_key=place.options["secret"], region="us-east-1", client_options={"allow_http": True},
        virtual_hosted_style_request=False,
    )  # fmt: skip
