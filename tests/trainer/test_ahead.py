"""A snapshot that begins before the ranks have agreed: right guesses copy once, wrong ones change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckptsync.errors import InvalidInput
from ckptsync.export.ahead import Ahead
from ckptsync.publish import Publisher
from tests.trainer.models import TinyModel, reference, same
from tests.trainer.test_sources import loaded


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which tensors were copied when the plan was known, that is, were not copied ahead."""
    seen: list[str] = []
    original = Ahead.into

    def into(self, name, layout, mine, local):
        if self._begun.get(local.data_ptr()) is None or not torch.equal(local, mine.to(local.dtype)):
            seen.append(name)
        original(self, name, layout, mine, local)

    monkeypatch.setattr(Ahead, "into", into)
    return seen


def test_what_lies_as_before_is_copied_ahead_and_is_the_state_at_the_call(root: str, copies: list[str]) -> None:
    model = TinyModel()
    with Publisher(root) as publisher:
        for step in range(3):
            copies.clear()
            done = publisher.publish(model, step=step, background=True).result()
            assert bool(copies) == (step == 0)
            same(loaded(root, done.manifest), reference(model))
            with torch.no_grad():
                for tensor in model.state_dict().values():
                    tensor.add_(1.0)


def test_another_model_another_dtype_and_swapped_names_are_copied_as_they_are(root: str) -> None:
    first = {"a": torch.full((300,), 1.0), "b": torch.full((300,), 2.0), "c": torch.full((7,), 3.0)}
    swapped = {"a": first["b"], "b": first["a"], "c": first["c"]}
    fewer = {"b": torch.full((300,), 4.0), "c": torch.full((7,), 5.0)}
    wider = {"a": torch.full((300,), 6.0, dtype=torch.float64), "b": first["b"], "c": torch.full((9,), 7.0)}
    larger = {"a": torch.full((9000,), 8.0), **fewer}
    transposed = {"a": torch.arange(12.0).view(3, 4).T, "c": first["c"]}
    straight = {"a": torch.arange(12.0).view(4, 3), "c": first["c"]}
    with Publisher(root) as publisher:
        for state in (first, swapped, first, fewer, wider, larger, first, transposed, straight, transposed):
            same(loaded(root, publisher.publish(state, background=True).result().manifest), state)


def test_two_tracks_with_the_same_names_are_told_apart(root: str) -> None:
    models = {"actor": nn.Linear(8, 8), "draft": nn.Linear(8, 8)}
    with Publisher(root) as publisher:
        for _ in range(3):
            manifest = publisher.publish(tracks=models, background=True).result().manifest
            for track, model in models.items():
                same(loaded(root, manifest, track), reference(model))
                with torch.no_grad():
                    model.weight += 1


def test_a_publish_that_is_refused_leaves_the_next_one_right(root: str) -> None:
    model = TinyModel()
    with Publisher(root, require_change=True) as publisher:
        publisher.publish(model, background=True).result()
        with pytest.raises(InvalidInput, match="must be JSON"):
            publisher.publish(model, metadata={"x": object()}, background=True)
        with torch.no_grad():
            model.embed.weight += 1
        done = publisher.publish(model, background=True).result()
        same(loaded(root, done.manifest), reference(model))


def test_what_was_copied_ahead_is_copied_again_if_the_memory_grew_though_it_begins_at_the_same_address(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = torch.empty(1 << 20, dtype=torch.uint8)
    monkeypatch.setattr("ckptsync.export.snapshot._host_memory", lambda nbytes: memory[:nbytes].zero_())
    first = {"a": torch.full((300,), 1.0)}
    grown = {**first, "z": torch.full((9000,), 2.0)}
    with Publisher(root) as publisher:
        for state in (first, grown, grown):
            same(loaded(root, publisher.publish(state, background=True).result().manifest), state)
