"""A `vllm.LLM` of this process as an engine: for a script, or an actor, that generates and is brought forward between.

    engine = LlmEngine(vllm.LLM(model, weight_transfer_config={"backend": "ckptsync"}))
    with engine.gate:
        outputs = llm.generate(...)

For an AsyncLLM there is ClientEngine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from ckptsync.errors import EngineError, EngineRefused, EngineUnavailable
from watchers.engines.module import PAUSE_SECONDS, Gate

from .client_engine import CALL_SECONDS, ClientEngine

T = TypeVar("T")


class OneAtATime(Gate):
    """An LLM is not made for two threads."""

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._shut and not self._inside)
            self._inside += 1


class LlmEngine(ClientEngine):
    """The adapter. Who computes does so inside `with engine.gate`: a load waits for it, `pause_seconds` at most, and
    what comes meanwhile waits for the load.

    Whoever lets the LLM sleep at level 2 makes a new LlmEngine after waking it up: its weights are gone, and its label
    is not.
    """

    def __init__(
        self, llm: Any, *, name: str = "vllm", cache: str = "flush", pause_seconds: float = PAUSE_SECONDS
    ) -> None:
        self.llm, self.gate, self._name = llm, OneAtATime(), name
        # No loop: an LLM is called in the watcher's own thread.
        super().__init__(_Client(llm, self.gate, pause_seconds), None, cache=cache)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        return self._name

    async def _last(self, token_ids: Sequence[int], params: Any) -> Any:
        with self.gate:
            return self.llm.generate([{"prompt_token_ids": list(token_ids)}], params, use_tqdm=False)[0]

    def _ask(
        self,
        step: str,
        work: Awaitable[T],
        seconds: float = CALL_SECONDS,  # noqa: ARG002 - in this thread: nothing can be left behind
        kind: type[EngineError] = EngineRefused,
    ) -> T:
        try:
            return _run(work)
        except EngineError:
            raise
        except Exception as error:
            raise kind(f"{step}: {type(error).__name__}: {error}") from error


class _Client:
    """An LLM with the methods of vLLM's EngineClient: coroutines that never wait."""

    def __init__(self, llm: Any, gate: Gate, pause_seconds: float) -> None:
        self._llm, self._gate, self._pause_seconds = llm, gate, pause_seconds
        self.vllm_config = llm.llm_engine.vllm_config

    async def is_paused(self) -> bool:
        return self._gate.is_shut

    async def pause_generation(self, **_: Any) -> None:
        if not self._gate.shut(self._pause_seconds):
            raise EngineUnavailable(f"pause: still computing after {self._pause_seconds:g} s")

    async def resume_generation(self) -> None:
        self._gate.open()

    async def reset_encoder_cache(self) -> None:
        self._llm.llm_engine.reset_encoder_cache()

    async def compute_weight_checksums(self) -> list[dict[str, str]]:
        return self._llm.collective_rpc("compute_weight_checksums")  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._llm, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        return call


def _run(work: Awaitable[T]) -> T:
    """Here and now, also where an event loop runs."""
    try:
        work.__await__().send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise RuntimeError("an LLM's methods do not wait")
