"""Full weights in stock engines, proven as far as the engines' own checksums go.

An engine sums tensors as its kernels hold them: fused, sliced, packed. A trainer cannot compute that, so one engine's
sums say nothing by themselves. After the end of a send, before an engine has its label, they are held against others:

    replicas    engines with the same tensors on the same ranks have the same sums: those of the majority
    before      the same weights give the sums that they gave before, and other weights others

So an update that one replica took in part is found, and one that was answered 200 and dropped. Not found is what all
replicas leave out alike, while they take the rest. Taken for dropped is a change of which an engine can hold nothing:
all of it in tensors that it does not have, or lost in its rounding (send in its own dtype).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

from .. import logs
from ..errors import ProofFailed
from .base import Sending
from .receivers import Receiver, at_once, partial_label

log = logs.get(__name__)

CHANGED = "changed with the weights"

Sums = Mapping[str, str]
"""Rank and tensor -> the engine's sum of it; empty where it takes none."""


class Verdict(NamedTuple):
    """Of one engine after one send."""

    holds: bool
    """False: it may hold a mix."""

    says: str
    """What its sums prove, and what they do not; or what is wrong with them."""

    gap: bool = False
    """Too little is proven to go by: of an engine alone, unless its sums changed; or with tensors without a sum."""


class _Before(NamedTuple):
    content: str
    sums: Sums


class Verification:
    """Of one transport, over its sends."""

    def __init__(self) -> None:
        self.verdicts: Mapping[str, Verdict] = {}
        """Engine -> of the last send; the same on every rank."""

        self._before: dict[frozenset[str], _Before] = {}

    def finish(self, sending: Sending, receivers: Mapping[str, Receiver]) -> None:
        """Collective. End the update at `receivers`, those that this rank speaks to; compare the sums of all engines;
        label those that hold the version. ProofFailed if others are left, whose label names no version: so who holds it
        computes on, and the next transport sends to the others."""
        label, nbytes = sending.delivery.label, sending.delivery.nbytes
        at_once([partial(each.finish, partial_label(label)) for each in receivers.values()])
        answers = at_once([partial(each.sums, nbytes) for each in receivers.values()])
        every = sending.ranks.gather(dict(zip(receivers, answers, strict=True)))
        said = {name: sums for each in every for name, sums in each.items()}
        content = sending.delivery.walked.content
        self.verdicts = sending.ranks.broadcast(self.judge(content, said) if sending.is_sender else {})
        at_once([partial(each.set_label, label) for name, each in receivers.items() if self.verdicts[name].holds])
        sending.ranks.agree()
        self._conclude(sending)

    def judge(self, content: str, said: Mapping[str, Sums]) -> dict[str, Verdict]:
        """Engine -> verdict. `content` stands for the weights that were sent."""
        found: dict[str, Verdict] = {}
        for tensors in {frozenset(sums) for sums in said.values()}:
            alike = {name: sums for name, sums in said.items() if sums.keys() == tensors}
            found |= self._judge_alike(content, alike)
        return found

    # -- inside --------------------------------------------------------------------------------------------------------

    def _judge_alike(self, content: str, alike: Mapping[str, Sums]) -> dict[str, Verdict]:
        usual = next((sums for sums in alike.values() if 2 * _count(alike, sums) > len(alike)), None)
        if usual is None:
            return {name: Verdict(False, _differs(name, alike)) for name in alike}
        verdict = self._of_usual(content, usual, _count(alike, usual) - 1)
        return {
            name: verdict if sums == usual else Verdict(False, _differs(name, alike)) for name, sums in alike.items()
        }

    def _of_usual(self, content: str, usual: Sums, others: int) -> Verdict:
        """Of the majority, or of the one that is alone."""
        missing, before = sum(not each for each in usual.values()), self._before.get(frozenset(usual))
        same_content, same_sums = before and before.content == content, before and before.sums == usual
        if same_content and not same_sums:
            return Verdict(False, "has other sums than when the same weights were sent before")
        if before and same_sums and not same_content and not missing:
            return Verdict(False, "has the sums of the weights before, though others were sent")
        self._before[frozenset(usual)] = _Before(content, usual)
        facts = [
            f"has the sums of {others} more" if others else "no engine like it to compare with",
            "nothing was sent before" if not before else "unchanged since the last send" if same_sums else CHANGED,
            *([f"no sum of {missing} of {len(usual)} tensors"] if missing else []),
        ]
        return Verdict(True, "; ".join(facts), gap=bool(missing) or not (others or CHANGED in facts))

    def _conclude(self, sending: Sending) -> None:
        delivery = sending.delivery
        for name, verdict in self.verdicts.items() if sending.is_sender else ():
            more = logs.about(delivery.version, event="sums-compared", engine=name)
            tell = log.info if verdict.holds and not verdict.gap else log.warning
            tell("%s after %s: %s", name, delivery.label, verdict.says, extra=more)
        doubted = {name: verdict.says for name, verdict in self.verdicts.items() if not verdict.holds}
        if doubted:
            raise ProofFailed(
                f"checksums after {delivery.label}: {'; '.join(f'{name}: {says}' for name, says in doubted.items())}. "
                "Engines of different dtypes, quantization or GPUs cannot be compared: give each kind a WeightSync of "
                "its own, or leave verify off"
            )


def finish(sending: Sending, receivers: Mapping[str, Receiver], verification: Verification | None) -> None:
    """Collective. End the update at those that this rank speaks to: with the label, or verified before that."""
    sending.enter("finish")
    if verification is not None:
        verification.finish(sending, receivers)
    else:
        at_once([partial(each.finish, sending.delivery.label) for each in receivers.values()])


def why_none(receivers: Iterable[Receiver], *, sums: bool) -> str | None:
    """Why one of them cannot be sent to; with `sums`, or not be verified."""
    return next((why for each in receivers if (why := each.why_not() or (each.why_no_sums() if sums else None))), None)


def _count(alike: Mapping[str, Sums], sums: Sums) -> int:
    return sum(each == sums for each in alike.values())


def _differs(name: str, alike: Mapping[str, Sums]) -> str:
    """From the engine that most agree with, or the first other one."""
    own = alike[name]
    other = max((each for each in alike if alike[each] != own), key=lambda each: _count(alike, alike[each]))
    tensors = sorted(tensor for tensor, value in own.items() if alike[other][tensor] != value)
    return f"differs from {other} in {len(tensors)} of {len(own)} tensors ({', '.join(tensors[:3])})"
