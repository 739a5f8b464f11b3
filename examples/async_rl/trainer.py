"""The trainer group: FSDP2 ranks as Ray actors. A step is a GRPO update, and a sync of the weights to the engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.actor import ActorHandle
from rollout import Sample
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

import ckptsync
from ckptsync.errors import TransportUnavailable
from ckptsync.transports import Bucket, Checkpoint, Delivery, Gloo, Patience, Sending, SyncEngine, Transport, VllmGloo
from watchers.engines.embedded import EmbeddedEngine
from watchers.engines.vllm_transfer import VllmTransferEngine
from watchers.ray import ask, meet_at

ENGINES = {"vllm": (VllmTransferEngine, VllmGloo), "embedded": (EmbeddedEngine, Gloo)}
"""Kind -> the adapter to an engine, and the fast path to it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: str
    model: str
    kind: str
    engines: Mapping[str, str]
    """Name -> url."""

    lr: float = 2e-5
    clip: float = 0.2
    persist_every: int = 4
    """So many versions by the fast path, then one is also written to the channel: what a lost trainer resumes from."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """One sync; equal on every rank."""

    step: int
    version: str
    transport: str
    served: dict[str, str]
    """Engine -> what it computes with."""

    failures: list[str]
    seconds: float


@ray.remote(num_cpus=1, resources={"trainer": 1})
class Rank:
    def begin(self, place: str, rank: int, ranks: int, settings: Settings) -> str:
        """The label of the version that training goes on from; empty on an empty channel."""
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks)
        self.settings = settings
        self.model = sharded(settings.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.lr, weight_decay=0.0)
        state = self.state()
        point = ckptsync.resume(
            settings.root, self.model, trainer_state=state, allow_cast=True, allow_empty=True
        )  # fmt: skip
        if point is not None:
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.step = (point.step or 0) if point else 0
        adapter, fast = ENGINES[settings.kind]
        self.engines = {adapter(url).name: name for name, url in settings.engines.items()}
        self.cable = Cable(fast())
        self.weights = ckptsync.WeightSync(
            [self.cable, Checkpoint(wait=300)], channel=settings.root,
            engines=[adapter(url) for url in settings.engines.values()], persist_every=settings.persist_every,
            bucket_bytes=64 << 20, patience=Patience(tries=1), dtype=torch.bfloat16,
            resumed_from=point.version if point else None,
        )  # fmt: skip
        return point.version.label if point else ""

    def update(self, samples: Sequence[Sample]) -> Report:
        """One optimizer step on all ranks' samples, of which this rank computes its share."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        tokens = sum(len(sample.tokens) for sample in samples)
        loss = grpo_loss(self.model, samples[rank::ranks], self.settings.clip) * ranks / tokens
        loss.backward()
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return self.sync()

    def sync(self) -> Report:
        """Bring the weights to the engines, as the next version."""
        done = self.weights.sync(
            self.model, step=self.step, assets=self.settings.model, trainer_state=self.state()
        )  # fmt: skip
        served = {self.engines[name]: done.version.label for name in done.confirmed}
        served |= {self.engines[name]: says for name, says in done.behind.items()}
        return Report(
            step=self.step, version=done.version.label, transport=done.transport, served=served,
            failures=[str(failure) for failure in done.failures], seconds=done.seconds,
        )  # fmt: skip

    def cut(self) -> None:
        """The fast path breaks off in the middle of the next sync."""
        self.cable.cut = True

    def state(self) -> dict[str, Any]:
        return {"optimizer": get_optimizer_state_dict(self.model, self.optimizer)}


class Trainers:
    """The group, for the driver. PartialFailure if a rank dies."""

    def __init__(self, settings: Settings, ranks: int = 2) -> None:
        self.ranks: dict[str, ActorHandle] = {f"rank {rank}": Rank.remote() for rank in range(ranks)}
        place = meet_at(self.ranks["rank 0"])
        begun = [each.begin.remote(place.url, rank, ranks, settings) for rank, each in enumerate(self.ranks.values())]
        self.resumed_from: str = ray.get(begun)[0]

    def update(self, samples: Sequence[Sample]) -> Report:
        return self._all("update", samples)

    def sync(self) -> Report:
        return self._all("sync")

    def cut(self) -> None:
        self._all("cut")

    def kill(self) -> None:
        for each in self.ranks.values():
            ray.kill(each)

    def _all(self, method: str, *args: Any) -> Any:
        return ask(self.ranks, method, *args, deadline=1200).all()["rank 0"]


def sharded(folder: str) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def grpo_loss(model: torch.nn.Module, samples: Sequence[Sample], clip: float) -> torch.Tensor:
    """The clipped surrogate, summed over the tokens of the answers. The policy that sampled them may be some versions
    older than the model: the ratio of probabilities accounts for that, by what the engine said of its own."""
    ids = _padded([sample.prompt + sample.tokens for sample in samples])
    old = _padded([[0.0] * len(sample.prompt) + sample.logprobs for sample in samples])[:, 1:]
    answer = _padded([[0.0] * len(sample.prompt) + [1.0] * len(sample.tokens) for sample in samples])[:, 1:]
    attended = _padded([[1] * (len(sample.prompt) + len(sample.tokens)) for sample in samples])
    gain = torch.tensor([[sample.advantage] for sample in samples])
    logits = model(input_ids=ids, attention_mask=attended).logits[:, :-1].float()
    new = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    ratio = (new - old).mul(answer).exp()
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
    return -(surrogate * answer).sum()


def _padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


class Cable:
    """A transport over a cable that can be cut: the send under way breaks off after its first bucket, and there is no
    link from then on."""

    def __init__(self, transport: Transport) -> None:
        self.transport, self.name, self.pauses = transport, transport.name, transport.pauses
        self.cut = self.gone = False

    def probe(self, engines: Sequence[SyncEngine]) -> str | None:
        return "the cable is cut" if self.gone else self.transport.probe(engines)

    def send(self, sending: Sending) -> None:
        if self.gone:
            raise TransportUnavailable("the cable is cut")
        if self.cut:
            self.gone = True
            sending.delivery = BreaksOff(
                **{each.name: getattr(sending.delivery, each.name) for each in fields(Delivery)}
            )
        self.transport.send(sending)

    def close(self) -> None:
        self.transport.close()


class BreaksOff(Delivery):
    def buckets(self, *, everywhere: bool = False) -> Iterator[Bucket]:
        yield next(super().buckets(everywhere=everywhere))
        raise ConnectionError("the cable was cut")
