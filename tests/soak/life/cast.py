"""Who takes part: plain values, which are sent to the process that plays the part."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ckptsync.retention import Retention

PINNED, FROM_STEP = "e1-v3", 10


@dataclass(frozen=True)
class Stage:
    """Where it all happens, and for how long."""

    folder: str
    seconds: float
    margin: float
    """Of the store's clock; see `ckptsync.store.clock.MARGIN`."""

    @property
    def source(self) -> str:
        return os.path.join(self.folder, "source")

    @property
    def target(self) -> str:
        return os.path.join(self.folder, "target")

    def path(self, *names: str) -> str:
        return os.path.join(self.folder, *names)

    @property
    def every(self) -> int:
        """The interval of the readers that take every so manieth version, and of the history that is kept for them."""
        return 20 if self.seconds >= 600 else 5

    @property
    def retention(self) -> Retention:
        """Branches are dropped: a trainer that goes back now and then would keep more for ever."""
        age = min(120.0, self.seconds / 8)
        return Retention(keep_last=4, keep_every=self.every, max_age=age, keep_branches=False, grace=2.0)

    @property
    def mirror_retention(self) -> Retention:
        age = min(60.0, self.seconds / 10)
        return Retention(keep_last=6, keep_every=self.every, max_age=age, keep_branches=False, grace=2.0)


@dataclass(frozen=True)
class Part:
    """One process. `kind` is what it does (see `parts`); `root` is the channel that it looks at."""

    name: str
    kind: str
    root: str
    spared: bool = False
    """Never killed: its memory is looked at over the whole run."""

    options: dict[str, object] = field(default_factory=dict)


def cast(stage: Stage) -> list[Part]:
    source, target = stage.source, stage.target
    return [
        Part("publisher", "publisher", source),
        Part("mirror", "mirror", target),
        Part("collector", "collector", source, spared=True),
        Part("holder-1", "holder", source),
        Part("holder-2", "holder", target),
        *readers("s", source, 7, "latest", host="one"),
        *readers("t", target, 6, "latest", host="two"),
        *readers("every", source, 2, f"every:{stage.every}", host="one"),
        *readers("every-t", target, 1, f"every:{stage.every}", host="two"),
        *readers("exact", source, 2, PINNED, host="three"),
        *readers("from", source, 2, f"step>={FROM_STEP}", host="three"),
    ]


def readers(prefix: str, root: str, count: int, follow: str, *, host: str) -> list[Part]:
    """The first of each is spared and woken by events; the others poll."""
    return [
        Part(f"{prefix}-{n}", "watcher", root, spared=n == 1,
             options={"follow": follow, "host": host, "events": n == 1, "poll": 1.0 + n % 2})
        for n in range(1, count + 1)
    ]  # fmt: skip
