"""LoRA adapters on engines: a new name and folder for each version, loaded beside the ones that still serve.

    engine = AdapterEngine([VllmEngine(url) for url in urls], name="policy", staleness=1)
    Watcher(root, engine, stage=Stage(folder, keep=engine.staleness + 2)).run(stop)
    # requests ask for the model "policy@e1-v12"

An engine keys its prefix cache by the adapter's name and path, so a version under a new name can never be answered
from another's KV, and no pause is needed. A version is loaded before an old one is unloaded; the `staleness` newest
before it stay, for requests that are under way. Start engines with room for all of them and one in the making:
`--max-loras` (SGLang: `--max-loaded-loras`) of staleness + 2 at least, else an engine drops one without a word.

Several replicas count as one engine: a version serves when all of them list it; when one fails, it is taken away
again from the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ckptsync import logs
from ckptsync.engine import Confirmation, EngineStatus, StagedVersion, Versioned
from ckptsync.errors import EngineError, EngineRefused, InvalidInput, InvalidName, ProofFailed
from ckptsync.manifest import TensorSpec, check_basename
from ckptsync.version import VersionId, parse_query

log = logs.get(__name__)


class AdapterHost(Protocol):
    """One replica: what `VllmEngine` and `SglangEngine` can do with adapters."""

    @property
    def name(self) -> str: ...

    def boot_id(self) -> str:
        """Differs after a restart, which loses every adapter."""
        ...

    def adapters(self) -> Mapping[str, str]:
        """Name -> folder of every adapter that the engine lists, in no order."""
        ...

    def load_adapter(self, name: str, folder: str) -> None:
        """Raises EngineRefused, with the old adapters untouched, if the engine does not take it."""
        ...

    def unload_adapter(self, name: str) -> None: ...

    def close(self) -> None: ...


class AdapterEngine(Versioned):
    """Adapter versions on one or several replicas, behind the engine contract. Full versions are refused.

    `name`: what requests put before the version, as in `policy@e1-v12`. `staleness`: how many older versions
    stay loaded. The stage must keep as many folders (`keep = staleness + 2`): vLLM reads an adapter again from
    its folder when it was pushed out of memory.
    """

    def __init__(self, replicas: Sequence[AdapterHost], *, name: str = "adapter", staleness: int = 1) -> None:
        if not replicas:
            raise InvalidInput("an adapter engine needs at least one replica")
        if isinstance(staleness, bool) or staleness < 0:
            raise InvalidInput(f"staleness={staleness!r}: must be 0 or more")
        # A colon parts base model and adapter in SGLang's model names, an @ the version from the name in ours.
        if "@" in check_basename(name, "adapter"):
            raise InvalidInput(f"adapter name {name!r} must not contain '@'")
        self._replicas, self._name, self.staleness = tuple(replicas), name, staleness

    @property
    def name(self) -> str:
        return " + ".join(replica.name for replica in self._replicas)

    @property
    def replicas(self) -> Sequence[AdapterHost]:
        return self._replicas

    def adapter_name(self, label: str) -> str:
        """What requests ask for: `policy@e1-v12`."""
        return f"{self._name}@{label}"

    def status(self) -> EngineStatus:
        """The newest version that every replica lists."""
        common = set.intersection(*(set(self._versions(replica)) for replica in self._replicas))
        boots = [replica.boot_id() for replica in self._replicas]
        return EngineStatus(label=max(common).label if common else "", boot_id="/".join(boots), paused=False)

    def schema(self) -> Mapping[str, TensorSpec] | None:
        return None

    def pause(self) -> None:
        """Nothing is paused: what serves stays as it is."""

    def start(self, version: StagedVersion) -> None:
        if version.manifest.kind != "adapter":
            raise EngineRefused(
                f"start: {version.label} is a {version.manifest.kind} version, and {self.name} is followed for "
                "adapters: use a channel of their own for each kind"
            )

    def update(self, version: StagedVersion) -> None:
        """Load on every replica, or on none."""
        name, done = self.adapter_name(version.label), list[AdapterHost]()
        try:
            for replica in self._replicas:
                if self._load(replica, name, version.folder):
                    done.append(replica)
        except EngineError as error:
            stuck = [replica.name for replica in done if not _unload(replica, name)]
            left = f"; it stays loaded, unused, on {', '.join(stuck)}" if stuck else ""
            # Refused in every case: the older adapters serve on, whatever became of this one.
            raise EngineRefused(f"{name} was not loaded on every replica: {error}{left}") from error

    def finish(self, version: StagedVersion) -> None:
        self.retire(version.manifest.id)

    def retire(self, version: VersionId) -> None:
        """Unload what lies before the staleness window of `version`. An engine that does not want to is only told again
        at the next version."""
        for replica in self._replicas:
            loaded = [each for each in sorted(self._versions(replica)) if each != version]
            for old in loaded[: len(loaded) - self.staleness] if len(loaded) > self.staleness else []:
                _unload(replica, self.adapter_name(old.label))

    def confirm(self, version: StagedVersion) -> Confirmation:
        name = self.adapter_name(version.label)
        for replica in self._replicas:
            folder = replica.adapters().get(name)
            if folder != version.folder:
                raise ProofFailed(f"confirm: {replica.name} lists {name} from {folder or 'nowhere'} after its load")
        return Confirmation(label=version.label)

    def resume(self) -> None:
        """Nothing was paused."""

    def close(self) -> None:
        for replica in self._replicas:
            replica.close()

    def _load(self, replica: AdapterHost, name: str, folder: str) -> bool:
        found = replica.adapters().get(name)
        if found == folder:
            return False
        if found is not None:  # another folder under this name: of a stage that is gone
            replica.unload_adapter(name)
        replica.load_adapter(name, folder)
        return True

    def _versions(self, replica: AdapterHost) -> list[VersionId]:
        found = (_version(name, self._name) for name in replica.adapters())
        return [version for version in found if version is not None]


def _version(adapter: str, name: str) -> VersionId | None:
    before, at, label = adapter.rpartition("@")
    if not at or before != name:
        return None
    try:
        epoch, number = parse_query(label)
    except InvalidName:
        return None
    return VersionId(epoch, number) if epoch is not None and number is not None else None


def _unload(replica: AdapterHost, name: str) -> bool:
    try:
        replica.unload_adapter(name)
    except EngineError as error:
        more = {"event": "adapter-stays", "engine": replica.name}
        log.warning("%s: %s stays loaded: %s", replica.name, name, error, extra=more)
        return False
    return True
