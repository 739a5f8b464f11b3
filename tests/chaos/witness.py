"""What a client sees of an engine: its label, its greedy tokens, and so which of the known models it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx

from tests.waiting import within

from .record import Answer

PROMPT, TOKENS = [1, 2, 3, 4, 5], 12


class Said(NamedTuple):
    label: str
    words: str
    """Its tokens."""


class Replica:
    """An engine's URL, and which channel it is kept on. `voices`: model -> its words as this engine says them."""

    def __init__(self, name: str, url: str, engine: str, channel: str) -> None:
        self.name, self.url, self.engine, self.channel = name, url, engine, channel
        self.voices: dict[str, str] = {}

    def answer(self) -> Said | None:
        """None if it does not answer now, or with tokens of more than one version, of which it says so."""
        try:
            answer = httpx.post(self.url + "/generate", json=self._request(), timeout=30, trust_env=False)
            return self._read(answer.raise_for_status().json())
        except (httpx.HTTPError, ValueError):
            return None

    def learn(self, model: str, label: str, seconds: float) -> bool:
        """Its voice, once it serves the version. False if it does not within so long."""

        def serves() -> bool:
            said = self.answer()
            if said is not None and said.label == label:
                self.voices[model] = said.words
            return model in self.voices

        return within(seconds, serves)

    def serves(self, label: str) -> bool:
        said = self.answer()
        return said is not None and said.label == label

    def _request(self) -> dict[str, Any]:
        if self.engine == "module":
            return {"token_ids": PROMPT, "max_new_tokens": TOKENS}
        return {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
        }

    def _read(self, answer: Mapping[str, Any]) -> Said | None:
        if self.engine == "module":
            return Said(answer["version"], str(answer["token_ids"]))
        meta = answer["meta_info"]
        if len(meta.get("weight_versions") or [None]) > 1:
            return None
        label = meta["weight_version"]
        return Said("" if label == "default" else label, str(answer["output_ids"]))


class Witness:
    """Asks a replica all the time: `with Witness(...) as witness`."""

    def __init__(self, replica: Replica, began: float, every: float = 0.3) -> None:
        self.answers: list[Answer] = []
        self._replica, self._began, self._every = replica, began, every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _look(self) -> None:
        while not self._stop.wait(self._every):
            said = self._replica.answer()
            at = round(time.time() - self._began, 2)
            if said is None:
                self.answers.append(Answer(at, self._replica.name, None))
            else:
                self.answers.append(Answer(at, self._replica.name, said.label, said.words))
