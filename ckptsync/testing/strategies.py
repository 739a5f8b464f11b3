"""Hypothesis strategies for what goes through a channel: versions, schemas, bytes and tensors of any dtype and any bit
patterns, shardings, changes, manifests. Needs `ckptsync[testing]`; `tensor_of` and `state_dicts` need torch as well.

Drawn bytes are any bits: NaNs with payloads, -0.0, subnormals. Compare bytes, not values.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any, NamedTuple

from ..manifest import (
    FileEntry,
    Kind,
    Manifest,
    Parent,
    TensorEntry,
    TensorSpec,
    Track,
    combined_content,
    seal,
)
from ..safetensors_format import DTYPE_BITS
from ..version import VersionId
from .extra import needed

with needed("hypothesis"):
    from hypothesis import strategies as st

if TYPE_CHECKING:
    import torch

WHOLE_BYTES = sorted(dtype for dtype, bits in DTYPE_BITS.items() if bits % 8 == 0)
"""The dtypes whose elements are whole bytes."""


def versions(*, epochs: int = 5, numbers: int = 30) -> st.SearchStrategy[VersionId]:
    """Identities up to these numbers, both from 1."""
    return st.builds(VersionId, st.integers(1, epochs), st.integers(1, numbers))


def shapes(*, dims: int = 3, side: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Of scalars, empty tensors and others, up to so many dimensions."""
    return st.lists(st.integers(0, side), max_size=dims).map(tuple)


def names() -> st.SearchStrategy[str]:
    """Of tensors: what a header may hold, most of them of the usual form."""
    usual = st.builds("layers.{}.{}.weight".format, st.integers(0, 3), st.sampled_from(["q_proj", "mlp", "norm"]))
    return usual | st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda n: n != "__metadata__")


@st.composite
def schemas(draw: st.DrawFn, *, least: int = 1, most: int = 6, dtypes: list[str] = WHOLE_BYTES) -> list[TensorSpec]:
    """Specs with different names."""
    found = draw(st.sets(names(), min_size=least, max_size=most))
    return [TensorSpec(name, draw(st.sampled_from(dtypes)), draw(shapes())) for name in sorted(found)]


def data_of(spec: TensorSpec) -> st.SearchStrategy[bytes]:
    """Any bits, as many as the tensor has."""
    if spec.nbytes <= 64:
        return st.binary(min_size=spec.nbytes, max_size=spec.nbytes)
    # Byte for byte they would use up what hypothesis is willing to draw for one example.
    return st.integers(0, 2**32 - 1).map(lambda seed: random.Random(seed).randbytes(spec.nbytes))  # noqa: S311


def tensor_of(spec: TensorSpec) -> st.SearchStrategy[torch.Tensor]:
    """A torch tensor of any bits. KeyError for a dtype that this torch does not have."""
    import torch

    from ..shards.tensors import TORCH_DTYPES

    dtype = TORCH_DTYPES[spec.dtype]

    def made(data: bytes) -> torch.Tensor:
        if dtype == torch.bool:  # other bits than 0 and 1 are no bool
            data = bytes(byte & 1 for byte in data)
        flat = torch.empty(spec.nbytes, dtype=torch.uint8)
        flat[:] = torch.tensor(list(data), dtype=torch.uint8)
        return flat.view(dtype).view(spec.shape)

    return data_of(spec).map(made)


@st.composite
def state_dicts(draw: st.DrawFn, *, most: int = 6) -> dict[str, torch.Tensor]:
    """Tensors by name, of every dtype that this torch has and whose elements are whole bytes."""
    from ..shards.tensors import TORCH_DTYPES

    known = [dtype for dtype in WHOLE_BYTES if dtype in TORCH_DTYPES]
    specs = draw(schemas(most=most, dtypes=known))
    return {spec.name: draw(tensor_of(spec)) for spec in specs}


class Block(NamedTuple):
    """A part of a tensor: where it begins, and its sizes, by dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


@st.composite
def shardings(draw: st.DrawFn, *, dims: int = 3, side: int = 40) -> tuple[tuple[int, ...], list[Block]]:
    """A shape, cut along each of its dimensions at any places, uneven ones too: Shard(0), Shard(1), meshes of both.
    The blocks fill it and do not overlap."""
    shape = tuple(draw(st.lists(st.integers(1, side), min_size=1, max_size=dims)))
    lines = []
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=2))) if size > 1 else []
        lines.append(list(itertools.pairwise([0, *cuts, size])))
    return shape, [
        Block(tuple(start for start, _ in place), tuple(stop - start for start, stop in place))
        for place in itertools.product(*lines)
    ]


@st.composite
def changes(draw: st.DrawFn, *, most: int = 3000) -> tuple[int, bytes, bytes]:
    """Bytes per element, old bytes and new bytes of a tensor before and after an update: any bit patterns, any
    fraction of the elements changed, by any amount."""
    import numpy as np

    kinds: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
    size = draw(st.sampled_from(sorted(kinds)))
    kind, full = kinds[size], (1 << 8 * size) - 1
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, most))
    before = rng.integers(0, full, count, dtype=np.uint64, endpoint=True).astype(kind)
    match draw(st.sampled_from(["noise", "narrow", "same"])):
        case "narrow":
            before = before >> kind(draw(st.integers(0, 8 * size - 1)))
        case "same":
            before[:] = draw(st.integers(0, full))
    span = draw(st.sampled_from([1, 2, 5, 300, 1 << (8 * size - 1), full]))
    amounts = rng.integers(1, max(2, min(span + 1, full + 1)), count, dtype=np.uint64).astype(kind)
    amounts = np.where(rng.random(count) < 0.5, amounts, (~amounts + kind(1)).astype(kind))
    touched = rng.random(count) < draw(st.sampled_from([0.0, 0.003, 0.02, 0.2, 0.5, 0.7, 1.0]))
    after = before + np.where(touched, amounts, 0).astype(kind)
    return size, before.tobytes(), after.astype(kind).tobytes()


@st.composite
def manifests(draw: st.DrawFn, *, kinds: tuple[Kind, ...] = ("full", "delta", "adapter")) -> Manifest:
    """Sealed ones, as a reader might find them: `decode(manifest.encoded)` reads each."""
    version, kind = draw(versions()), draw(st.sampled_from(kinds))
    tracks = {name: draw(_tracks()) for name in ["model", *draw(st.sets(st.sampled_from(["draft", "reward"])))]}
    parent = None
    if kind == "delta":
        base = VersionId(version.epoch, draw(st.integers(0, version.number - 1)))
        parent = Parent(epoch=base.epoch, number=base.number, content_digest=draw(_digests))
    made = Manifest(
        channel_id=draw(_digests),
        epoch=version.epoch,
        number=version.number,
        nonce=draw(_digests),
        run_id=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=8)),
        kind=kind,
        parent=parent,
        created=draw(st.floats(0, 2e9)),
        step=draw(st.none() | st.integers(0, 1 << 40)),
        metadata=draw(st.dictionaries(st.sampled_from(["loss", "note"]), st.integers(-5, 5) | st.booleans())),
        digest="xxh3-128",
        content_digest=combined_content(tracks),
        tracks=tracks,
    )
    return seal(made)[0]


_digests = st.integers(0, 2**128 - 1).map("{:032x}".format)


@st.composite
def _tracks(draw: st.DrawFn) -> Track:
    specs = draw(schemas(most=4))
    names = [f"model-{n}.safetensors" for n in range(draw(st.integers(1, 3)))]
    entries = [
        TensorEntry(
            name=spec.name, dtype=spec.dtype, shape=spec.shape, file=draw(st.sampled_from(names)),
            digest=draw(_digests),
        )
        for spec in specs
    ]  # fmt: skip
    sizes = {name: sum(entry.spec.nbytes for entry in entries if entry.file == name) for name in names}
    more = draw(st.integers(8, 200))  # the header
    files = tuple(FileEntry(name=name, size=size + more, digest=draw(_digests)) for name, size in sizes.items())
    return Track(files=files, tensors=tuple(entries))
