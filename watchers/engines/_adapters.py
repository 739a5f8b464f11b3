"""The adapter routes that vLLM and SGLang have in common: both list adapters as models with a parent."""

from __future__ import annotations

from collections.abc import Mapping

from ckptsync.engine_http import Call, EngineHttp


class AdapterRoutes:
    """For an adapter with an `http` side: LoRA adapters beside the model, which is not touched."""

    http: EngineHttp

    def _boot_id(self) -> str:
        raise NotImplementedError

    def boot_id(self) -> str:
        """Differs after a restart, which loses every adapter."""
        return self._boot_id()

    def adapters(self) -> Mapping[str, str]:
        """Name -> folder of every adapter that the engine lists."""
        call = Call(step="adapters", method="GET", path="/v1/models")
        models = self.http.json_object(call).get("data")
        if not isinstance(models, list):
            raise self.http.failure(call, "answered without a list of models")
        return {str(m["id"]): str(m.get("root")) for m in models if isinstance(m, dict) and m.get("parent")}

    def _adapter_call(self, step: str, path: str, body: Mapping[str, object], remedy: str) -> Call:
        """Not a call that touches weights: an adapter that fails to load leaves the others as they were."""
        return Call(
            step=f"{step} adapter",
            method="POST",
            path=path,
            json=body,
            timeout=self.http.options.pause_timeout,  # an unload may wait for requests that use it
            admin=True,
            remedy=remedy,
        )
