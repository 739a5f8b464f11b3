"""The file versions of a sync: when a fast path fails, and every so often behind one that works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import logs
from ..background import BackgroundPublish
from ..errors import CkptSyncError, Conflict, InvalidInput, RankTimeout
from ..opening import Content
from ..publish import Publisher
from ..published import Published
from ..release import Facts as Checked
from ..trainer_state import check_trainer_state
from ..version import VersionId
from .handover import sent_by

log = logs.get(__name__)

Facts = Mapping[str, Any]
"""The arguments of a publish that say nothing of the weights: step, metadata, assets, trainer_state."""


def check_facts(facts: Facts) -> None:
    """InvalidInput for what no version could carry: before an engine has the weights, and not first at the version
    that gets files. The assets are looked at once the tracks are known."""
    Checked.check(None, facts["step"], facts["metadata"], None, {})
    if facts["trainer_state"] is not None:
        check_trainer_state(facts["trainer_state"])


class FileVersions:
    """Publishes versions under the numbers of the sync. `every`: after so many without files, one gets them; None:
    never by itself. Every method is collective."""

    def __init__(self, publisher: Publisher, *, every: int | None) -> None:
        self._publisher, self._every = publisher, every
        self._without = 0
        self._pending: BackgroundPublish | None = None
        self.last: Published | None = None
        """What `publish` did last."""

    def publish(self, content: Content, facts: Facts, version: VersionId, transport: str) -> Published:
        """Now, as the way to the engines. A retry under the same identity is a no-op."""
        self._hear()
        self.last = self._publisher.publish(**_arguments(content, facts, version, transport))
        self._without = 0
        return self.last

    def persist(self, content: Content, facts: Facts, version: VersionId, transport: str) -> BackgroundPublish | None:
        """In the background, behind a transport that brought it, if it is time. The engines have the version already,
        so what goes wrong is told in the log and does not undo the sync; Fenced and its like are raised."""
        self._without += 1
        if self._every is None or self._without < self._every:
            return None
        self._hear()
        try:
            arguments = _arguments(content, facts, version, transport)
            self._pending = self._publisher.publish(**arguments, background=True)
        except (InvalidInput, Conflict, RankTimeout):
            raise
        except CkptSyncError as error:
            more = logs.about(version, event="no-files", kind=error.kind)
            log.error("%s reached the engines and has no files: %s", version, error, extra=more)
            return None
        self._without = 0
        return self._pending

    def _hear(self) -> None:
        """Of the one before, whose failure must not be taken for this one's."""
        if self._pending is None:
            return
        self._pending.wait()
        if self._pending.error is not None:
            self._pending.seen = True
            more = {"event": "no-files"}
            log.error("a file version that was written in the background failed: %s", self._pending.error, extra=more)
        self._pending = None


def _arguments(content: Content, facts: Facts, version: VersionId, transport: str) -> dict[str, Any]:
    metadata = {**(facts["metadata"] or {}), **sent_by(transport)}
    return {
        **facts, "metadata": metadata, "number": version.number, "tracks": dict(content.models), "kind": content.kind,
        "adapter": content.adapter, "merge_lora": content.merge_lora,
    }  # fmt: skip
