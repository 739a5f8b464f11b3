"""Any bytes in any small record of a channel: what reads it says a typed error or goes on, and nothing is lost.

A hundred in the suite; `CKPTSYNC_HYPOTHESIS=thorough` tries 3,000, `long` a million.
"""

from __future__ import annotations

import json
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from ckptsync.channel import Channel
from ckptsync.collect import Collector
from ckptsync.errors import CkptSyncError
from ckptsync.fsck import fsck
from ckptsync.layout import CHANNEL, HEAD, SENT
from ckptsync.retention import Retention
from ckptsync.status import Observer
from ckptsync.testing import MemoryStore
from ckptsync.version import VersionId
from tests.model.worlds import published

V2 = VersionId(1, 2)
RECORDS = [
    CHANNEL,
    HEAD,
    SENT,
    "epochs/e0001.json",
    "epochs/e0002.json",
    "manifests/e0001-v00000002.json",
    "manifests/e0001-v00000004.json",
    "leases/reader.json",
    "receipts/reader.json",
    "pins/e0001-v00000001.json",
    "collected/e0001-v00000001.json",
    "collector/claim.json",
]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def contents(draw: st.DrawFn, good: bytes) -> bytes:
    """Anything: bytes, JSON, and the good record with one field replaced or some bytes damaged."""
    match draw(st.sampled_from(["bytes", "json", "field", "damage"])):
        case "bytes":
            return draw(st.binary(max_size=64))
        case "json":
            return json.dumps(draw(json_values)).encode()
        case "field":
            record = json.loads(good)
            record[draw(st.sampled_from(sorted(record)))] = draw(json_values)
            return json.dumps(record).encode()
        case _:
            data = bytearray(good)
            data[draw(st.integers(0, len(good) - 1))] = draw(st.integers(0, 255))
            return bytes(data[: draw(st.integers(0, len(data)))])


GOOD = {
    SENT: {"epoch": 1, "number": 2},
    "epochs/e0002.json": {
        "number": 2,
        "nonce": "n",
        "run_id": "r",
        "host": "h",
        "created": 0.0,
        "resumed_from": [1, 2],
    },
    "leases/reader.json": {"reader": "reader", "epoch": 1, "number": 1, "since": 1e9, "seconds": 60.0},
    "receipts/reader.json": {"reader": "reader", "label": "e1-v1", "seen": 1e9},
    "pins/e0001-v00000001.json": {"epoch": 1, "number": 1, "why": "w", "by": "b", "created": 1e9},
    "collected/e0001-v00000001.json": {"folder": "", "needs": []},
    "collector/claim.json": {"nonce": "n", "host": "h", "created": 1e9},
}


def good(record: str, files: dict[str, bytes]) -> bytes:
    known = files.get(record) or files["manifests/e0001-v00000003.json"]
    return json.dumps(GOOD[record]).encode() if record in GOOD else known


@given(record=st.sampled_from(RECORDS), data=st.data())
def test_any_record_is_read_or_refused_by_name_and_no_data_go(record: str, data: st.DataObject) -> None:
    files = dict(published(1, 2, 3))
    files[record] = data.draw(contents(good(record, files)))
    store = MemoryStore(files)
    for act in (_read, _look, _check, _collect):
        with suppress(CkptSyncError):
            act(store)
    weights = {path for path in files if path.startswith(("data/e0001-v00000002", "data/e0001-v00000003"))}
    assert weights <= set(store.files), "nothing that keep_last=2 promises was deleted"
    with suppress(CkptSyncError):
        _publish(store)


def _read(store: MemoryStore) -> None:
    channel = Channel.open(store)
    channel.poll()
    channel.newest_sent()
    channel.receipt("reader")
    channel.resolve("latest")


def _publish(store: MemoryStore) -> None:
    Channel.create(store).claim_epoch("run", V2)


def _look(store: MemoryStore) -> None:
    Observer(Channel.open(store)).look()


def _collect(store: MemoryStore) -> None:
    Collector(Channel.open(store), Retention(keep_last=2, grace=0.0)).collect()


def _check(store: MemoryStore) -> None:
    fsck(Channel.open(store))
