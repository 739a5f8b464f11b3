"""What a run has to show for itself: each check by name, with what is wrong, or with the numbers if nothing is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from ckptsync import collector_claim
from ckptsync.channel import Channel
from ckptsync.fsck import fsck
from ckptsync.status import ChannelStatus
from ckptsync.verify import verify_version
from ckptsync.version import VersionId

from ..load import slope
from .cast import PINNED, Part, Stage

GROWTH_KIB = 4096
"""Above the noise of an allocator. Over the 2 h run that is half a kilobyte for each version."""

WARM_SECONDS = 1500.0
"""What a process remembers on purpose is full then: the fingerprints of 1024 versions, for one."""

LEAST_SAMPLES = 8
ENOUGH = 2 * LEAST_SAMPLES
"""Samples that a run takes, however slow its machine is: for who was there all the time the last two thirds count."""

READERS_ALIVE = 30
"""Versions that may be held by somebody: 20 readers, leases of readers and holders, pins, the mirror."""

CHAIN = 5
"""A version that stays keeps as many at most, itself included: each fifth is full."""

FILES_PER_VERSION = 7
"""Its manifest and the copy of that, a shard and an index, two deltas, and a note when it goes."""

SETTLED = 600.0
"""Seconds of a run whose last two thirds are not all growth."""

Sample = dict[str, Any]


class Check(NamedTuple):
    name: str
    ok: bool
    message: str


class Life(NamedTuple):
    """One process from a start to its end, after it has warmed up."""

    name: str
    samples: list[tuple[float, dict[str, float]]]

    @property
    def growth(self) -> float:
        """KiB from the first to the last, along the least squares line."""
        return slope([weight["kib"] for _, weight in self.samples]) * (len(self.samples) - 1)


def lives(samples: Sequence[Sample]) -> list[Life]:
    """Those that were long enough for something to be said."""
    found: dict[tuple[str, int], list[tuple[float, dict[str, float]]]] = defaultdict(list)
    for sample in samples:
        for name, weight in sample["processes"].items():
            if "kib" in weight and name != "director":  # which keeps the samples
                found[name, weight["life"]].append((sample["at"], weight))
    warm = min(WARM_SECONDS, samples[-1]["at"] / 3)
    grown = [Life(name, [each for each in life if each[0] > life[0][0] + warm]) for (name, _), life in found.items()]
    return [life for life in grown if len(life.samples) >= LEAST_SAMPLES]


def memory_is_flat(samples: Sequence[Sample]) -> Check:
    found = sorted(lives(samples), key=lambda life: -life.growth)
    named = [f"{life.name} {life.growth:+.0f} KiB in {_span(life):.0f} s" for life in found]
    bad = [text for text, life in zip(named, found, strict=True) if life.growth > GROWTH_KIB]
    return Check("memory is flat", bool(found) and not bad, "; ".join(bad or named[:3]) or "nobody lived long enough")


def files_stay_closed(samples: Sequence[Sample]) -> Check:
    """By the median: while a version is staged a few more are open."""
    bad, most = [], 0.0
    for life in lives(samples):
        opened = [weight["fds"] for _, weight in life.samples]
        before, after = (median(half) for half in (opened[: len(opened) // 2], opened[len(opened) // 2 :]))
        most = max(most, after)
        if after > before + 2:
            bad.append(f"{life.name}: {before:.0f}, later {after:.0f}")
    return Check("no open files are left behind", not bad, "; ".join(bad) or f"{most:.0f} in a process at most")


def objects_are_bounded(samples: Sequence[Sample], stage: Stage) -> list[Check]:
    """Of all folders but `epochs`: a claim is never deleted, and there is one for each start of the trainer."""
    checks = []
    for name, policy in (("source", stage.retention), ("target", stage.mirror_retention)):
        looks = [sample["channels"][name] for sample in samples]
        counted = [sum(n for folder, n in look["files"].items() if folder != "epochs") for look in looks]
        slack = stage.margin + policy.grace + 20.0  # until the next run of a collector, and the machine is busy
        claimed = collector_claim.SECONDS + stage.margin  # by a trainer that was killed while it collected
        kept = policy.keep_last + ((policy.max_age or 0) + slack) / stage.every + READERS_ALIVE
        versions, waiting = max(look["versions"] for look in looks), max(look["waiting"] for look in looks)
        most = kept * CHAIN + slack + claimed
        limit = (most + slack + claimed) * FILES_PER_VERSION + 200
        second, third, pace = _thirds(counted, [_numbers(look["newest"] or "e0-v0")[1] for look in looks])
        steady = stage.seconds < SETTLED or third <= 1.3 * pace * second
        checks.append(
            Check(
                f"objects at the {name} are bounded",
                versions <= most and max(counted) <= limit and steady,
                f"{max(counted)} objects at most, of {limit:.0f} by the policy (medians of the last two thirds "
                f"{second:.0f} and {third:.0f}, pace {pace:.2f}); {versions} versions of {most:.0f}, "
                f"{waiting} waiting for their grace time",
            )
        )
    return checks


def _thirds(counted: Sequence[int], numbers: Sequence[int]) -> tuple[float, float, float]:
    """Medians of the second and the last third of a run (the first is growth), and how many times as many versions were
    published in the last one, if it is more: a machine that others leave alone keeps more of them for as long."""
    one, two = len(counted) // 3, 2 * len(counted) // 3
    published = numbers[two] - numbers[one], numbers[-1] - numbers[two]
    return median(counted[one:two]), median(counted[two:]), max(1.0, published[1] / max(1, published[0]))


def retention_was_on(samples: Sequence[Sample]) -> Check:
    """Else nothing above says much."""
    looks = samples[-1]["channels"]
    gone = {name: (_numbers(look["newest"])[1], look["versions"]) for name, look in looks.items() if look["newest"]}
    ok = len(gone) == 2 and all(versions < newest for newest, versions in gone.values())
    return Check("retention was on", ok, "; ".join(f"{n}: newest v{v[0]}, {v[1]} versions" for n, v in gone.items()))


def expected(part: Part, live: Sequence[VersionId]) -> str:
    """The label that the reader is to serve in the end."""
    follow = str(part.options["follow"])
    if follow == PINNED:
        return PINNED
    every = int(follow.partition(":")[2] or 1) if follow.startswith("every") else 1
    return next((version.label for version in reversed(live) if version.number % every == 0), "")


def behind(parts: Sequence[Part], looks: dict[str, ChannelStatus]) -> list[str]:
    """Every reader that is not where it should be, and why."""
    wrong = []
    for part in parts:
        if part.kind != "watcher":
            continue
        look = looks[part.root]
        live = sorted(VersionId(*_numbers(v.version)) for v in look.versions if v.live and not v.problem)
        reader = next((each for each in look.readers if each.reader == part.name), None)
        serves, due = reader.serves if reader else "nothing yet", expected(part, live)
        if serves != due:
            wrong.append(f"{part.name} serves {serves}, not {due}{f': {reader.error}' if reader else ''}")
    return wrong


def mirror_is_equal(stage: Stage) -> Check:
    source, target = Channel.open(stage.source), Channel.open(stage.target)
    both = sorted(set(source.committed()) & set(target.committed()))
    wrong = [str(v) for v in both if source.manifest(v).encoded != target.manifest(v).encoded]
    newest = source.latest().id, target.latest().id
    ok = not wrong and newest[0] == newest[1] and source.channel_id == target.channel_id
    return Check(
        "the mirror is equal", ok, f"newest {newest[0]} and {newest[1]}; {len(both)} versions at both, differ: {wrong}"
    )


def channel_is_sound(name: str, root: str) -> list[Check]:
    channel = Channel.open(root)
    findings = fsck(channel)
    reports = [verify_version(channel, version) for version in channel.committed()]
    damaged = [f"{each.version}: {each.problems[0].message}" for each in reports if not each.ok]
    return [
        Check(f"fsck of the {name} is clean", not findings, "; ".join(each.message for each in findings) or "it is"),
        Check(
            f"every byte at the {name} is right", not damaged, "; ".join(damaged) or f"in all {len(reports)} versions"
        ),
    ]


def _numbers(label: str) -> tuple[int, int]:
    epoch, _, number = label.removeprefix("e").partition("-v")
    return int(epoch), int(number)


def _span(life: Life) -> float:
    return life.samples[-1][0] - life.samples[0][0]
